"""What carries messages between the ranks of a mesh: gloo between hosts, Unix sockets on one host.

A transport does one thing: every rank hands every peer at most one message whose size both know. It comes in two
halves, `begin` and `finish`, so that a rank can compute while messages are under way.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor


class MeshError(RuntimeError):
    """Ranks lost each other: a peer died, closed its mesh, or did not answer within the timeout."""


class Transport(Protocol):
    """`begin` and `finish` alternate. Tensors stay as they are, and are not read, between the two."""

    name: str

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        """Send what can be sent without waiting; returns at once."""

    def finish(self) -> None:
        """Wait until everything begun has been sent and received."""

    def close(self) -> None: ...


class NoTransport:
    """Of a mesh of one: there is nobody to talk to."""

    name = "none"

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class GlooTransport:
    """torch's gloo process group, built on the given store without touching torch's global groups."""

    name = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self.rank, self.timeout = rank, timedelta(seconds=timeout)
        self.pending: list[Any] = []
        store.set_timeout(self.timeout)
        try:
            self.group: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, self.timeout)
        except RuntimeError as error:  # gloo raises nothing more specific
            raise MeshError(
                f"rank {rank} of {size} could not form a gloo group within {timeout:g} s: {error}"
            ) from error

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        try:
            self.pending = [self.group.recv([t], p, 0) for p, t in enumerate(into) if t is not None and t.numel()]
            self.pending += [self.group.send([t], p, 0) for p, t in enumerate(out) if t is not None and t.numel()]
        except RuntimeError as error:
            raise MeshError(f"rank {self.rank} lost a peer in an exchange: {error}") from error

    def finish(self) -> None:
        pending, self.pending = self.pending, []
        try:
            for work in pending:
                work.wait(self.timeout)
        except RuntimeError as error:
            raise MeshError(f"rank {self.rank} lost a peer in an exchange: {error}") from error

    def close(self) -> None:
        if self.group is not None:
            with contextlib.suppress(RuntimeError):  # peers that are gone already
                self.group.abort()
            self.group = None


def same_host(store: Any, rank: int, size: int, timeout: float) -> bool:
    """Whether all ranks run under one kernel and share its network namespace; they meet at the store to find out."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    mine = f"{socket.gethostname()} {boot} {namespace}" if boot and namespace else f"alone {rank}"
    store.set(f"host/{rank}", mine)
    hosts = {_get(store, f"host/{p}", timeout, rank).decode() for p in range(size)}
    return len(hosts) == 1


def _get(store: Any, key: str, timeout: float, rank: int) -> bytes:
    try:
        store.wait([key], timedelta(seconds=timeout))
        return store.get(key)
    except RuntimeError as error:  # DistStoreError and DistNetworkError are RuntimeErrors
        raise MeshError(f"rank {rank} waited {timeout:g} s for its peers at the store ({key}): {error}") from error


class LocalTransport:
    """Unix sockets in the kernel's abstract namespace, one per pair of ranks of one host.

    A peer that dies is seen at once (end of file). Messages go straight from and into the tensors' memory.
    """

    name = "local"

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.sockets: dict[int, socket.socket] = {}
        self.sending: dict[int, memoryview] = {}
        self.receiving: dict[int, memoryview] = {}
        # A random name in the abstract namespace: no file to leave behind. The token keeps strangers out.
        name, token = os.urandom(16).hex(), os.urandom(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0mattermill-{name}")
            listener.listen(size)
            store.set(f"socket/{rank}", name.encode() + b" " + token.hex().encode())
            self._connect(store, rank)
            self._accept(listener, token, rank, size)
        except OSError as error:
            self.close()
            raise MeshError(f"rank {rank} of {size} could not connect to its peers: {error}") from error
        finally:
            listener.close()
        for connection in self.sockets.values():
            connection.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, 1 << 22)

    def _connect(self, store: Any, rank: int) -> None:
        for peer in range(rank):
            name, token = _get(store, f"socket/{peer}", self.timeout, rank).split()
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self.timeout)
            connection.connect(f"\0mattermill-{name.decode()}")
            connection.sendall(bytes.fromhex(token.decode()) + rank.to_bytes(4, "little"))
            self.sockets[peer] = connection

    def _accept(self, listener: socket.socket, token: bytes, rank: int, size: int) -> None:
        deadline = time.monotonic() + self.timeout
        while len(self.sockets) < size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            connection, _ = listener.accept()
            connection.settimeout(self.timeout)
            hello = b""
            while len(hello) < 20 and (piece := connection.recv(20 - len(hello))):
                hello += piece
            peer = int.from_bytes(hello[16:], "little")
            if hello[:16] != token or not rank < peer < size or peer in self.sockets:
                connection.close()
                continue
            self.sockets[peer] = connection

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        self.sending = {p: _bytes(t) for p, t in enumerate(out) if t is not None and t.numel()}
        self.receiving = {p: _bytes(t) for p, t in enumerate(into) if t is not None and t.numel()}
        self._move()

    def finish(self) -> None:
        deadline = time.monotonic() + self.timeout
        while self.sending or self.receiving:
            if not self._move() and (self.sending or self.receiving):
                self._wait(deadline)

    def _move(self) -> bool:
        """Send and receive what goes without waiting; whether anything did."""
        try:
            return self._send() | self._receive()
        except OSError as error:
            raise MeshError(f"rank {self.rank} lost a peer in an exchange: {error}") from error

    def _send(self) -> bool:
        moved = False
        for peer, left in list(self.sending.items()):
            with contextlib.suppress(BlockingIOError):
                self.sending[peer] = left[self.sockets[peer].send(left) :]
                moved = True
            if not self.sending[peer]:
                del self.sending[peer]
        return moved

    def _receive(self) -> bool:
        moved = False
        for peer, left in list(self.receiving.items()):
            with contextlib.suppress(BlockingIOError):
                got = self.sockets[peer].recv_into(left)
                if not got:
                    raise MeshError(f"rank {self.rank} lost rank {peer}: it closed its connection")
                self.receiving[peer] = left[got:]
                moved = True
            if not self.receiving[peer]:
                del self.receiving[peer]
        return moved

    def _wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            late = sorted({*self.sending, *self.receiving})
            raise MeshError(f"rank {self.rank} waited {self.timeout:g} s for ranks {late}")
        # Not select(), which refuses descriptors of 1024 and above. A peer that is gone ends the wait, too: what is
        # sent or received next then says so.
        poller = select.poll()
        for peer in {**self.sending, **self.receiving}:
            events = (select.POLLOUT if peer in self.sending else 0) | (select.POLLIN if peer in self.receiving else 0)
            poller.register(self.sockets[peer], events)
        poller.poll(math.ceil(1000.0 * left))

    def close(self) -> None:
        for connection in self.sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.sockets, self.sending, self.receiving = {}, {}, {}


def _bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    array: Any = tensor.detach().reshape(-1).numpy()
    return memoryview(array).cast("B")


__all__ = ["GlooTransport", "LocalTransport", "MeshError", "NoTransport", "Transport", "same_host"]
