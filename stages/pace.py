"""When a segment ends: the lead's clock decides, and all ranks learn of it in the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..domain.mesh import Mesh

#: Seconds between two questions to the lead, and the most steps.
ASK_SECONDS, ASK_STEPS = 0.1, 1000


class Pace:
    """Asks the lead whether to stop, every so many steps that it costs next to nothing.

    On a mesh of several a question is a collective; how many steps pass until the next one is part of the answer.
    """

    def __init__(self, mesh: Mesh, seconds: float | None, should_stop: Callable[[], bool] | None) -> None:
        self.mesh, self.seconds, self.should_stop = mesh, seconds, should_stop
        self._started = self._asked = time.perf_counter()
        self._step = self._next = 0
        self._since = 1
        self._open_end = mesh.size == 1 and seconds is None and should_stop is None

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def is_over(self) -> bool:
        """Collective, once after each step."""
        if self._open_end:
            return False
        self._step += 1
        if self._step < self._next:
            return False
        answer = None
        if self.mesh.is_lead:
            answer = torch.tensor([int(self._decide()), self._interval()], dtype=torch.int64)
        stop, interval = self.mesh.broadcast(answer).tolist()
        self._since = interval
        self._next = self._step + interval
        return bool(stop)

    def _decide(self) -> bool:
        if self.seconds is not None and self.elapsed >= self.seconds:
            return True
        return self.should_stop is not None and bool(self.should_stop())

    def _interval(self) -> int:
        """Steps in about ASK_SECONDS, by the rate since the last question."""
        now = time.perf_counter()
        rate = self._since / max(now - self._asked, 1e-6)
        self._asked = now
        # At most twice as many as last time: the first steps of a segment are not typical.
        return max(1, min(int(rate * ASK_SECONDS), 2 * self._since, ASK_STEPS))


__all__ = ["Pace"]
