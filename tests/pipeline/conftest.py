"""What tests of the pipeline share: processes that a test kills, without a second of imports for each kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest


class Forked:
    """Runs `work(say)` in a fork; `say` is a file descriptor whose bytes the test reads."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self._hear, say = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._hear)
                work(say)
            finally:
                os._exit(1)  # never back into pytest
        os.close(say)

    def wait_for_word(self) -> bytes:
        """The first byte that the process says."""
        word = os.read(self._hear, 1)
        assert word, "the process died before it began"
        return word

    def kill(self) -> bytes:
        """SIGKILL; what it has said since."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        said = b""
        while piece := os.read(self._hear, 1 << 16):
            said += piece
        os.close(self._hear)
        return said


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[int], None]], Forked]]:
    """Starts `Forked` processes and ends those that a failing test left."""
    started: list[Forked] = []

    def start(work: Callable[[int], None]) -> Forked:
        started.append(Forked(work))
        return started[-1]

    yield start
    for process in started:
        if process.pid:
            process.kill()
