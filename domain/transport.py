"""What carries messages between the ranks of a mesh: gloo between hosts; on one host see `local.py`.

A transport does one thing: every rank hands every peer at most one message whose size both know. It comes in two
halves, `begin` and `finish`, so that a rank can compute while messages are under way. A rank that fails leaves last
words with its peers, which outlive it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from .faults import Fault, MeshError


class Transport(Protocol):
    """`begin` and `finish` alternate, and all ranks call them equally often. Between the two, what is sent must not
    change and what is received is not to be read."""

    name: str

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        """Send what can be sent without waiting; returns at once."""

    def finish(self) -> None:
        """Wait until everything begun has been sent and received, at most the timeout."""

    def tell(self, fault: Fault) -> None:
        """Leave last words with every peer. Waits next to nothing, and raises nothing."""

    def told(self) -> Fault | None:
        """A peer's last words, if there are any."""

    def close(self) -> None:
        """Leave; whatever is pending is abandoned."""


class NoTransport:
    """Of a mesh of one: there is nobody to talk to."""

    name = "none"

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        pass

    def finish(self) -> None:
        pass

    def tell(self, fault: Fault) -> None:
        pass

    def told(self) -> Fault | None:
        return None

    def close(self) -> None:
        pass


#: The tag of last words, and their size: gloo needs to know it before.
_LAST_TAG, _LAST_BYTES = 2**31 - 1, 2048

#: Seconds that last words may take, to be sent and to be found.
_LAST_SECONDS = 1.0


class GlooTransport:
    """torch's gloo process group, built on the given store without touching torch's global groups.

    A receive for each peer's last words stands from the beginning: they come over the same connection as its end.
    """

    name = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self.rank, self.timeout = rank, timeout
        self.group: Any = None
        self.number = 0
        self.pending: list[tuple[int, Any]] = []
        limit = timedelta(seconds=timeout)
        store.set_timeout(limit)
        try:
            self.group = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        except RuntimeError as error:  # gloo raises nothing more specific
            raise MeshError(
                f"rank {rank} of {size} could not form a gloo group within {timeout:g} s: {error}"
            ) from error
        boards = {p: torch.zeros(_LAST_BYTES, dtype=torch.uint8) for p in range(size) if p != rank}
        self.last = {p: self.group.recv([board], p, _LAST_TAG) for p, board in boards.items()}
        self.boards: dict[int, Any] = {p: board.numpy() for p, board in boards.items()}

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        self.number += 1
        self.pending = []
        for peer, tensor in enumerate(into):
            if tensor is not None and tensor.numel():
                self._post(peer, tensor, "recv")
        for peer, tensor in enumerate(out):
            if tensor is not None and tensor.numel():
                self._post(peer, tensor, "send")

    def _post(self, peer: int, tensor: Tensor, way: str) -> None:
        try:
            self.pending.append((peer, getattr(self.group, way)([tensor], peer, self._tag(tensor))))
        except RuntimeError as error:
            raise self._lost(peer, "lost", error) from error

    def _tag(self, tensor: Tensor) -> int:
        """Of the exchange's number and the size: ranks out of step wait for each other in vain, as gloo would end the
        process if a message were larger than expected, and say nothing if it were smaller."""
        return (self.number % 2047) << 20 | (tensor.numel() * tensor.element_size()) % 1048573

    def finish(self) -> None:
        deadline = time.monotonic() + self.timeout
        while self.pending:
            self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        peer, work = self.pending.pop(0)
        try:
            # Zero would mean no limit.
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            # Who keeps this error keeps this frame, and a piece of work keeps gloo's connections open.
            del work
            what = f"waited {self.timeout:g} s for" if time.monotonic() >= deadline else "lost"
            raise self._lost(peer, what, error) from error

    def _lost(self, peer: int, what: str, error: RuntimeError) -> MeshError:
        # Its last words have come before its end, but may still be in gloo's hands.
        with contextlib.suppress(RuntimeError):
            self.last[peer].wait(timedelta(seconds=_LAST_SECONDS))
        return MeshError(f"rank {self.rank} {what} rank {peer} in an exchange: {error}")

    def tell(self, fault: Fault) -> None:
        if self.group is None:
            return
        words = fault.pack()[: _LAST_BYTES - 1]
        # Its last byte says that all of it is there.
        message = torch.zeros(_LAST_BYTES, dtype=torch.uint8)
        message[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        message[-1] = 1
        works = []
        for peer in self.boards:
            with contextlib.suppress(RuntimeError):  # it may be the one that is lost
                works.append(self.group.send([message], peer, _LAST_TAG))
        deadline = time.monotonic() + _LAST_SECONDS
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    def told(self) -> Fault | None:
        for board in self.boards.values():
            if board[-1]:
                return Fault.unpack(board[:-1].tobytes().rstrip(b"\0"))
        return None

    def close(self) -> None:
        if self.group is not None:
            with contextlib.suppress(RuntimeError):  # peers that are gone already
                self.group.abort()
            # Its connections end with the last reference.
            self.group, self.pending, self.last = None, [], {}


def same_host(store: Any, rank: int, size: int, timeout: float) -> bool:
    """Whether all ranks run under one kernel and share its network namespace; they meet at the store to find out."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    able = hasattr(os, "memfd_create") and hasattr(os, "eventfd")
    mine = f"{socket.gethostname()} {boot} {namespace}" if boot and namespace and able else f"alone {rank}"
    store.set(f"host/{rank}", mine)
    hosts = {wait_at(store, f"host/{p}", timeout, rank).decode() for p in range(size)}
    return len(hosts) == 1


def wait_at(store: Any, key: str, timeout: float, rank: int) -> bytes:
    """What a peer has put, or will put, at the store.

    Raises:
        MeshError: nobody did within the timeout, or the store is gone.
    """
    try:
        store.wait([key], timedelta(seconds=timeout))
        return store.get(key)
    except RuntimeError as error:  # DistStoreError and DistNetworkError are RuntimeErrors
        raise MeshError(f"rank {rank} waited {timeout:g} s for its peers at the store ({key}): {error}") from error


__all__ = ["GlooTransport", "NoTransport", "Transport", "same_host", "wait_at"]
