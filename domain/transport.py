"""What carries messages between the ranks of a mesh: gloo between hosts, Unix sockets on one host.

A transport does one thing, `swap`: every rank hands every peer at most one message whose size both know.
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
    name: str

    def swap(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None: ...

    def close(self) -> None: ...


class NoTransport:
    """Of a mesh of one: there is nobody to talk to."""

    name = "none"

    def swap(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        pass

    def close(self) -> None:
        pass


class GlooTransport:
    """torch's gloo process group, built on the given store without touching torch's global groups."""

    name = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo

        self.rank, self.timeout = rank, timedelta(seconds=timeout)
        store.set_timeout(self.timeout)
        try:
            self.group: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, self.timeout)
        except RuntimeError as error:  # gloo raises nothing more specific
            raise MeshError(
                f"rank {rank} of {size} could not form a gloo group within {timeout:g} s: {error}"
            ) from error

    def swap(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        try:
            pending = [self.group.recv([t], p, 0) for p, t in enumerate(into) if t is not None and t.numel()]
            pending += [self.group.send([t], p, 0) for p, t in enumerate(out) if t is not None and t.numel()]
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

    def swap(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        sending = {p: _bytes(t) for p, t in enumerate(out) if t is not None and t.numel()}
        receiving = {p: _bytes(t) for p, t in enumerate(into) if t is not None and t.numel()}
        deadline = time.monotonic() + self.timeout
        try:
            while sending or receiving:
                moved = self._send(sending) | self._receive(receiving)
                if not moved and (sending or receiving):
                    self._wait(sending, receiving, deadline)
        except OSError as error:
            raise MeshError(f"rank {self.rank} lost a peer in an exchange: {error}") from error

    def _send(self, sending: dict[int, memoryview]) -> bool:
        moved = False
        for peer in list(sending):
            with contextlib.suppress(BlockingIOError):
                sent = self.sockets[peer].send(sending[peer])
                sending[peer] = sending[peer][sent:]
                moved = True
            if not sending[peer]:
                del sending[peer]
        return moved

    def _receive(self, receiving: dict[int, memoryview]) -> bool:
        moved = False
        for peer in list(receiving):
            with contextlib.suppress(BlockingIOError):
                got = self.sockets[peer].recv_into(receiving[peer])
                if not got:
                    raise MeshError(f"rank {self.rank} lost rank {peer}: it closed its connection")
                receiving[peer] = receiving[peer][got:]
                moved = True
            if not receiving[peer]:
                del receiving[peer]
        return moved

    def _wait(self, sending: dict[int, memoryview], receiving: dict[int, memoryview], deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            late = sorted({*sending, *receiving})
            raise MeshError(f"rank {self.rank} waited {self.timeout:g} s for ranks {late}")
        # Not select(), which refuses descriptors of 1024 and above. A peer that is gone ends the wait, too: what is
        # sent or received next then says so.
        poller = select.poll()
        for peer in {**sending, **receiving}:
            events = (select.POLLOUT if peer in sending else 0) | (select.POLLIN if peer in receiving else 0)
            poller.register(self.sockets[peer], events)
        poller.poll(math.ceil(1000.0 * left))

    def close(self) -> None:
        for connection in self.sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.sockets = {}


def _bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    array: Any = tensor.detach().reshape(-1).numpy()
    return memoryview(array).cast("B")


__all__ = ["GlooTransport", "LocalTransport", "MeshError", "NoTransport", "Transport", "same_host"]
