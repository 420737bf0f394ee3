"""A ring of bytes in memory that two processes share: one puts in, the other takes out, nobody waits in the kernel.

The memory has no name and no file (`memfd_create`): it goes when the last process that holds it does, however it ends.
Before the ring lie the counters, each side's on a cache line of its own, and a board for last words.
"""

from __future__ import annotations

import mmap
import os
import platform

#: Bytes before the ring: 32 words of 8 bytes, then the board.
_PAGE, _BOARD = 4096, 256

#: Words, by index: bytes ever put in, bytes ever taken out, length of what is on the board.
_PUT, _TAKEN, _TOLD = 0, 8, 16

#: x86 shows its stores to other cores in the order in which they were made, and that is all a ring needs. Elsewhere a
#: trip through the scheduler, which has a full memory barrier, keeps the counters behind the bytes they count.
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")


def _fence() -> None:
    if not _ORDERED:
        os.sched_yield()


class Ring:
    """One direction of a pair of ranks. One process only calls `put` and `tell`, the other only `take` and `told`.

    Args:
        descriptor: of the memory, from `create` here or in the other process; not needed any more afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        whole = memoryview(mmap.mmap(descriptor, size))
        self._words = whole[:_BOARD].cast("q")
        self._board, self._data = whole[_BOARD:_PAGE], whole[_PAGE:]
        self.capacity = size - _PAGE
        self._put = self._taken = 0

    @staticmethod
    def create(capacity: int) -> int:
        """A descriptor of memory for a ring of so many bytes. Pages are there once they are used."""
        descriptor = os.memfd_create("mattermill", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _PAGE + capacity)
        return descriptor

    def put(self, data: bytes | memoryview) -> int:
        """Put in as much of `data` as there is room for; returns how much. `publish` shows it to the other side."""
        room = self.capacity - (self._put - self._words[_TAKEN])
        n = min(len(data), room)
        if n:
            _fence()
            at = self._put % self.capacity
            first = min(n, self.capacity - at)
            self._data[at : at + first] = data[:first]
            if n > first:
                self._data[: n - first] = data[first:n]
            self._put += n
        return n

    def publish(self) -> None:
        _fence()
        self._words[_PUT] = self._put

    @property
    def ready(self) -> int:
        """Bytes that can be taken."""
        return self._words[_PUT] - self._taken

    def take(self, into: memoryview) -> int:
        """Take out as much as there is and fits; returns how much."""
        n = min(len(into), self.ready)
        if n:
            _fence()
            at = self._taken % self.capacity
            first = min(n, self.capacity - at)
            into[:first] = self._data[at : at + first]
            if n > first:
                into[first:n] = self._data[: n - first]
            self._taken += n
            _fence()
            self._words[_TAKEN] = self._taken
        return n

    def tell(self, text: bytes) -> None:
        """Last words, cut to what the board holds. They can be read however this process ends."""
        text = text[: len(self._board)]
        self._board[: len(text)] = text
        _fence()
        self._words[_TOLD] = len(text)

    def told(self) -> bytes:
        """The other side's last words, or nothing."""
        n = self._words[_TOLD]
        if not n:
            return b""
        _fence()
        return bytes(self._board[:n])


__all__ = ["Ring"]
