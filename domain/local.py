"""The wire between ranks of one host: shared memory, bells to wake each other, sockets to miss each other by."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .faults import Fault, MeshError
from .ring import Ring
from .transport import wait_at

#: Seconds that a rank looks again and again for what it waits for, letting others run in between, before it sleeps.
#: To be woken takes longer than most waits, and ranks that compute should stay on the cores they are on.
EAGER = 0.002

#: Before each message: the exchange's number, bytes.
_HEADER = struct.Struct("<qq")


@dataclass
class _Incoming:
    """A message on its way: where what is left of it goes, and whether its header has come."""

    left: memoryview
    headed: bool = False


class LocalTransport:
    """A `Ring` in each direction of each pair of ranks.

    A message that a ring has room for is under way when `begin` returns, whatever the peer does. A bell (an eventfd)
    tells a rank that sleeps that a peer has put something in or taken something out: sockets would do that as well,
    but the kernel moves who is woken by a socket to the waker's core, where the two ranks then take turns (measured:
    twice the time per step). The socket between two ranks carries nothing after they have met: it ends when a peer
    does, and that is seen at once.
    """

    name = "local"

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.sockets: dict[int, socket.socket] = {}
        self.bells: dict[int, int] = {}
        self.rings_out: dict[int, Ring] = {}
        self.rings_in: dict[int, Ring] = {}
        self.sending: dict[int, list[bytes | memoryview]] = {}
        self.receiving: dict[int, _Incoming] = {}
        self.number = 0
        self._small = memoryview(bytearray(_HEADER.size))
        try:
            self.bells[rank] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._meet(store, rank, size)
        except OSError as error:
            self.close()
            raise MeshError(f"rank {rank} of {size} could not connect to its peers: {error}") from error
        except MeshError:
            self.close()
            raise

    # --- meeting -----------------------------------------------------------------------------------------------

    def _meet(self, store: Any, rank: int, size: int) -> None:
        # A random name in the abstract namespace: no file to leave behind. The token keeps strangers out.
        name, token = os.urandom(16).hex(), os.urandom(16)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0mattermill-{name}")
            listener.listen(size)
            store.set(f"socket/{rank}", name.encode() + b" " + token.hex().encode())
            for peer in range(rank):
                self._connect(store, peer, size)
            self._accept(listener, token, size)
        for peer in range(rank):
            _, descriptors = self._hear(self.sockets[peer], 1)
            if not self._take_in(peer, descriptors):
                raise MeshError(f"rank {rank} lost rank {peer} while they met")
        for connection in self.sockets.values():
            connection.setblocking(False)

    def _connect(self, store: Any, peer: int, size: int) -> None:
        name, token = wait_at(store, f"socket/{peer}", self.timeout, self.rank).split()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sockets[peer] = connection
        connection.settimeout(self.timeout)
        connection.connect(f"\0mattermill-{name.decode()}")
        self._hand_over(peer, bytes.fromhex(token.decode()) + self.rank.to_bytes(4, "little"), size)

    def _accept(self, listener: socket.socket, token: bytes, size: int) -> None:
        deadline = time.monotonic() + self.timeout
        while len(self.sockets) < size - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            connection, _ = listener.accept()
            connection.settimeout(self.timeout)
            hello, descriptors = self._hear(connection, 20)
            peer = int.from_bytes(hello[16:], "little")
            known = hello[:16] == token and self.rank < peer < size and peer not in self.sockets
            if not known or not self._take_in(peer, descriptors):
                _close(descriptors)
                connection.close()
                continue
            self.sockets[peer] = connection
            self._hand_over(peer, b"!", size)

    def _hand_over(self, peer: int, text: bytes, size: int) -> None:
        """Give a peer the memory of our messages to it, and our bell."""
        # About 8 MiB for all peers together: what is larger than its ring passes through it in pieces.
        capacity = max(1 << 18, min(1 << 22, 1 << (24 - size.bit_length())))
        descriptor = Ring.create(capacity)
        try:
            self.rings_out[peer] = Ring(descriptor)
            socket.send_fds(self.sockets[peer], [text], [descriptor, self.bells[self.rank]])
        finally:
            os.close(descriptor)

    def _hear(self, connection: socket.socket, size: int) -> tuple[bytes, list[int]]:
        text, descriptors, _, _ = socket.recv_fds(connection, size, 2, socket.MSG_CMSG_CLOEXEC)
        return text, descriptors

    def _take_in(self, peer: int, descriptors: list[int]) -> bool:
        """What `_hand_over` gave; False if that was not it."""
        if len(descriptors) != 2:
            return False
        self.rings_in[peer], self.bells[peer] = Ring(descriptors[0]), descriptors[1]
        os.close(descriptors[0])
        return True

    # --- exchanging --------------------------------------------------------------------------------------------

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        self.number += 1
        self.receiving = {p: _Incoming(_bytes(t)) for p, t in enumerate(into) if t is not None and t.numel()}
        self.sending = {}
        for peer, tensor in enumerate(out):
            if tensor is not None and tensor.numel():
                content = _bytes(tensor)
                self.sending[peer] = [_HEADER.pack(self.number, len(content)), content]
        self._send()

    def finish(self) -> None:
        started = time.monotonic()
        eager = started + EAGER
        while self.sending or self.receiving:
            if self._send() | self._receive():
                continue
            now = time.monotonic()
            if now < eager:
                os.sched_yield()
            else:
                self._sleep(started + self.timeout - now)

    def _send(self) -> bool:
        """Put in what fits; whether anything did."""
        moved = False
        for peer in list(self.sending):
            pieces, ring = self.sending[peer], self.rings_out[peer]
            before = len(pieces), len(pieces[0])
            while pieces:
                n = ring.put(pieces[0])
                if n < len(pieces[0]):
                    pieces[0] = pieces[0][n:]
                    break
                del pieces[0]
            if not pieces:
                del self.sending[peer]
            if not pieces or before != (len(pieces), len(pieces[0])):
                ring.publish()
                self._ring_bell(peer)
                moved = True
        return moved

    def _receive(self) -> bool:
        """Take out what is there; whether anything was."""
        moved = False
        for peer in list(self.receiving):
            ring, message = self.rings_in[peer], self.receiving[peer]
            if not message.headed:
                if ring.ready < _HEADER.size:
                    continue
                ring.take(self._small)
                self._check(peer, len(message.left))
                message.headed = moved = True
            n = ring.take(message.left)
            if n == len(message.left):
                del self.receiving[peer]
            elif n:
                message.left = message.left[n:]
                # It may wait for room.
                self._ring_bell(peer)
            moved |= n > 0
        return moved

    def _check(self, peer: int, expected: int) -> None:
        number, size = _HEADER.unpack(self._small)
        if (number, size) != (self.number, expected):
            raise MeshError(
                f"ranks are out of step: rank {self.rank} expects {expected} bytes from rank {peer} in exchange "
                f"{self.number}, and got {size} bytes of its exchange {number}; all ranks must make the same calls"
            )

    def _ring_bell(self, peer: int) -> None:
        # Full only if nobody has listened for 2^64 - 2 rings.
        os.eventfd_write(self.bells[peer], 1)

    # --- waiting -----------------------------------------------------------------------------------------------

    def _sleep(self, left: float) -> None:
        """Until a bell or the end of a peer that is waited for."""
        waits_for = sorted({*self.sending, *self.receiving})
        if left <= 0:
            raise MeshError(f"rank {self.rank} waited {self.timeout:g} s for ranks {waits_for}")
        # Not select(), which refuses descriptors of 1024 and above.
        poller = select.poll()
        poller.register(self.bells[self.rank], select.POLLIN)
        ends = {self.sockets[p].fileno(): p for p in waits_for}
        for descriptor in ends:
            poller.register(descriptor, select.POLLIN)
        events = poller.poll(math.ceil(1000.0 * left))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bells[self.rank])
        if self.told():
            raise MeshError(f"rank {self.rank} was told of a failure")
        gone = [ends[descriptor] for descriptor, _ in events if descriptor in ends]
        if gone:
            # What it put in before it left counts.
            self._receive()
            for peer in gone:
                if peer in self.receiving or peer in self.sending:
                    raise MeshError(f"rank {self.rank} lost rank {peer}: it closed its connection")

    # --- ending ------------------------------------------------------------------------------------------------

    def tell(self, fault: Fault) -> None:
        for peer, ring in self.rings_out.items():
            ring.tell(fault.pack())
            if peer in self.bells:
                self._ring_bell(peer)

    def told(self) -> Fault | None:
        for ring in self.rings_in.values():
            words = ring.told()
            if words:
                return Fault.unpack(words)
        return None

    def close(self) -> None:
        for connection in self.sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        _close(self.bells.values())
        self.sockets, self.bells, self.sending, self.receiving = {}, {}, {}, {}
        self.rings_in, self.rings_out = {}, {}


def _close(descriptors: Any) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    assert tensor.is_cpu
    # As bytes before numpy sees it, which has no bfloat16; a tensor without axes cannot be seen as bytes.
    flat = (tensor.detach() if tensor.requires_grad else tensor).reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


__all__ = ["LocalTransport"]
