"""A rank's view of its sub-mesh: rank, size, device, and the collectives that the rest of the project needs.

Every collective is made of one primitive, `swap`, which a transport carries (`transport.py`, `local.py`): each rank
hands each peer at most one message. Sums are taken in rank order after everybody has everybody's part, so that all
ranks hold the same bits. A mesh of one is the same object with identities: no caller asks whether it is distributed.
"""

from __future__ import annotations

import itertools
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from .faults import Fault, Guard, MeshError, RankFailed, Thrown, mark_common, text_of
from .local import LocalTransport
from .transport import GlooTransport, NoTransport, Transport, same_host

Wire = Literal["auto", "gloo", "local"]

_names = (f"{os.getpid()}.{n}" for n in itertools.count())


class Mesh:
    """Some ranks that compute together. Build one with `Mesh.single`, `Mesh.join` or `Mesh.from_env`.

    All methods that communicate are collective: every rank of the mesh calls them, in the same order. Whatever goes
    wrong between ranks (a peer died, did not answer within the timeout, or closed its mesh) surfaces as `MeshError`;
    after that the mesh is of no more use and every further call raises at once. What goes wrong on one rank reaches
    the others through `guard` (or `fail`, or ``with mesh:``), and surfaces there as `RankFailed`, a MeshError with the
    original text.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device | str,
        transport: Transport,
        store: Any = None,
        timeout: float = 60.0,
    ) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device(device)
        self._transport = transport
        self._store = store
        self.timeout = timeout
        self.name = next(_names)
        self._guard = Guard(self)
        self._children = 0
        self._subs: weakref.WeakSet[Mesh] = weakref.WeakSet()
        self._broken: MeshError | None = None
        self._closed = False
        self._pending = False
        self.messages = 0
        self.bytes_sent = 0
        self.collectives = 0

    # --- building ----------------------------------------------------------------------------------------------

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Mesh:
        """A mesh of one rank."""
        return cls(0, 1, device, NoTransport())

    @classmethod
    def join(
        cls,
        store: Any,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        timeout: float = 60.0,
        *,
        wire: Wire = "auto",
    ) -> Mesh:
        """Meet the other ranks at a torch store (a TCPStore or a PrefixStore on one; prefix it with claim and epoch).

        Nothing global is touched: any number of meshes can live in a process, one after another or side by side.

        Args:
            store: a `torch.distributed` store that all ranks reach, unused by others under its prefix.
            rank, size: this rank and how many there are.
            device: where this rank's tensors live.
            timeout: seconds that a peer may take to answer, here and in every later collective.
            wire: ``local`` (one host: Unix sockets and shared memory), ``gloo`` (any host), or ``auto``: local where
                all ranks are on one host.

        Raises:
            ValueError: a rank that is not below size.
            MeshError: the others did not come within the timeout.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1}, is {rank}")
        if wire not in ("auto", "gloo", "local"):
            raise ValueError(f"wire must be auto, gloo or local, is {wire!r}")
        if size == 1:
            return cls(0, 1, device, NoTransport(), store, timeout)
        if wire == "auto":
            wire = "local" if same_host(store, rank, size, timeout) else "gloo"
        transport: Transport = (LocalTransport if wire == "local" else GlooTransport)(store, rank, size, timeout)
        mesh = cls(rank, size, device, transport, store, timeout)
        mesh.barrier()
        return mesh

    @classmethod
    def from_env(cls, device: torch.device | str | None = None, timeout: float = 60.0, *, wire: Wire = "auto") -> Mesh:
        """The mesh that torchrun started; a mesh of one outside torchrun."""
        from torch.distributed import PrefixStore, TCPStore

        size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if device is None:
            local = int(os.environ.get("LOCAL_RANK", 0))
            device = f"cuda:{local}" if torch.cuda.is_available() and local < torch.cuda.device_count() else "cpu"
        if size == 1:
            return cls.single(device)
        # torchrun's agent keeps the store itself unless told otherwise.
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, size, is_master=rank == 0 and not hosted, timeout=timedelta(seconds=timeout))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls.join(PrefixStore(f"mattermill/{attempt}", store), rank, size, device, timeout, wire=wire)

    def sub(self, ranks: Sequence[int], timeout: float | None = None, *, wire: Wire = "auto") -> Mesh | None:
        """A mesh of some of these ranks, in this order; None on the others.

        Collective over the whole mesh: ranks that will be in one sub-mesh name the same ranks; groups without a rank
        in common can be formed in one call, each naming its own. A sub-mesh outlives the mesh that it came from.

        Args:
            ranks: of this mesh, in any order: the first leads.
            timeout: as for `join`; None is this mesh's own.
        """
        ranks = [int(r) for r in ranks]
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < self.size for r in ranks):
            raise ValueError(f"ranks of a sub-mesh must be distinct and in 0..{self.size - 1}, are {ranks}")
        self._check()
        self._children += 1
        if self.rank not in ranks:
            return None
        timeout = self.timeout if timeout is None else timeout
        if len(ranks) == 1:
            return Mesh(0, 1, self.device, NoTransport(), timeout=timeout)
        from torch.distributed import PrefixStore

        store = PrefixStore(f"sub/{self._children}/{'-'.join(map(str, ranks))}", self._store)
        sub = Mesh.join(store, ranks.index(self.rank), len(ranks), self.device, timeout, wire=wire)
        self._subs.add(sub)
        return sub

    # --- being -------------------------------------------------------------------------------------------------

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    @property
    def wire(self) -> str:
        """What carries the messages: none, gloo or local."""
        return self._transport.name

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank} of {self.size}, {self.device}, {self.wire})"

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.guard().__exit__(kind, error, trace)
        self.close()

    def close(self) -> None:
        """Leave the mesh; twice is fine. Peers that still wait for this rank get a `MeshError`."""
        if not self._closed:
            self._closed = True
            self._transport.close()

    # --- failing -----------------------------------------------------------------------------------------------

    def guard(self) -> Guard:
        """``with mesh.guard():`` what fails here on one rank reaches all.

        An error that leaves the block is told to the peers (see `fail`) and goes on. One that all ranks raise together
        (from `broadcast_object`) just goes on, and leaves the mesh whole. Costs next to nothing; can be nested.
        """
        return self._guard

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on: tell the peers why, and close.

        Their pending or next call raises `RankFailed` with "rank r failed: Type: text", also if this process ends right
        afterwards. If it was a peer that was lost or failed, that is what is passed on. Sub-meshes fail along with it.
        """
        if self._closed:
            return
        cause = (self._broken or error) if isinstance(error, MeshError) else error
        if isinstance(cause, MeshError):
            fault = Fault(str(cause), own=isinstance(cause, RankFailed))
        else:
            fault = Fault(f"rank {self.rank} failed: {text_of(cause)}", own=True)
        self._broken = fault.error()
        self._transport.tell(fault)
        self.close()
        for sub in list(self._subs):
            sub.fail(error)

    def _heed(self, error: MeshError | None = None) -> None:
        """Raise what a peer has told, if any did; what the transport raised is its consequence. The mesh is broken."""
        fault = self._transport.told()
        self._broken = error if fault is None else fault.error()
        if fault is not None:
            raise fault.error() from error

    # --- the primitive -----------------------------------------------------------------------------------------

    def begin(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        """First half of `swap`: sends what goes without waiting and returns, so that the caller can compute meanwhile.

        Until `finish`, the tensors are the mesh's: `out` must not change and `into` is not to be read.

        Raises:
            MeshError: something else is pending: only one is, and no other collective runs between the two halves.
        """
        if self.size == 1:
            return
        self._check()
        self._heed()
        self._pending = True
        try:
            self._transport.begin(out, into)
        except MeshError as error:
            self._heed(error)
            raise
        self.collectives += 1
        for message in out:
            if message is not None and message.numel():
                self.messages += 1
                self.bytes_sent += message.numel() * message.element_size()

    def finish(self) -> None:
        """Second half of `swap`: returns when all that was begun has come and gone, within the timeout."""
        if self.size == 1:
            return
        assert self._pending or self._broken, "finish without begin"
        self._pending = False
        self._check()
        try:
            self._transport.finish()
        except MeshError as error:
            self._heed(error)
            raise

    def swap(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        """Send `out[p]` to each peer p and receive `into[p]` from it; sizes are known to both sides.

        Both lists have one entry per rank; None (or an empty tensor) means no message, and the peer knows. Tensors
        are contiguous and on the CPU.
        """
        self.begin(out, into)
        self.finish()

    def _check(self) -> None:
        if self._broken:
            raise type(self._broken)(f"this mesh broke before: {self._broken}")
        if self._closed:
            raise MeshError("this mesh is closed: join a new one, or keep it open until the last call that needs it")
        if self._pending:
            raise MeshError(f"rank {self.rank} has begun an exchange: finish it before any other collective")

    def _peers(self, make: Callable[[int], Tensor | None]) -> list[Tensor | None]:
        return [None if p == self.rank else make(p) for p in range(self.size)]

    def _gather_equal(self, value: Tensor) -> list[Tensor]:
        """Everybody's tensor, all of one shape and dtype, in rank order."""
        mine = value.detach().to("cpu").contiguous()
        into = self._peers(lambda _: torch.empty_like(mine))
        self.swap(self._peers(lambda _: mine), into)
        return [mine if part is None else part for part in into]

    # --- collectives -------------------------------------------------------------------------------------------

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks, added in rank order: the same bits on every rank. Any shape."""
        if self.size == 1:
            return value
        parts = self._gather_equal(value)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(value.device)

    def max(self, value: Tensor) -> Tensor:
        """Element-wise maximum over ranks; NaN wins."""
        if self.size == 1:
            return value
        parts = self._gather_equal(value)
        most = parts[0]
        for part in parts[1:]:
            most = torch.maximum(most, part)
        return most.to(value.device)

    def all(self, flag: bool) -> bool:
        """Whether the flag is set on every rank."""
        return all(bool(f) for f in self._flags(flag))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        return any(bool(f) for f in self._flags(flag))

    def _flags(self, flag: bool) -> list[Tensor]:
        return self._gather_equal(torch.tensor([bool(flag)], dtype=torch.uint8))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._flags(True)

    def all_gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Everybody's rows, in rank order; leading dimensions may differ, the rest may not."""
        if self.size == 1:
            return [rows]
        counts = self._gather_equal(torch.tensor([rows.shape[0]], dtype=torch.int64))
        return self.gather_known_rows(rows, [int(c) for c in counts])

    def gather_known_rows(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """As `all_gather_rows`, where every rank already knows how many rows each one has."""
        if self.size == 1:
            return [rows]
        mine = rows.detach().to("cpu").contiguous()
        into = self._peers(lambda p: mine.new_empty((counts[p], *mine.shape[1:])))
        self.swap(self._peers(lambda _: mine), into)
        return [rows if part is None else part.to(rows.device) for part in into]

    def gather_rows(self, rows: Tensor, counts: Sequence[int], dst: int = 0) -> list[Tensor] | None:
        """Everybody's rows on rank `dst` (None elsewhere); every rank knows how many rows each one has."""
        mine = rows.detach().to("cpu").contiguous()
        if self.rank != dst:
            self.swap(self._peers(lambda p: mine if p == dst else None), self._peers(lambda _: None))
            return None
        into = self._peers(lambda p: mine.new_empty((counts[p], *mine.shape[1:])))
        self.swap(self._peers(lambda _: None), into)
        return [mine if part is None else part for part in into]

    def broadcast(self, value: Tensor | None, src: int = 0) -> Tensor:
        """Rank `src`'s tensor on every rank; the others pass None."""
        array = self.broadcast_object(None if value is None else value.detach().cpu().numpy(), src)
        return torch.from_numpy(array).to(self.device)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s object on every rank, pickled: control messages and batches among ranks that trust each other.

        An exception object is raised on every rank instead of returned, so that what fails on one fails on all: on
        rank `src` itself, on the others a copy, or a RuntimeError with its type and text where no copy can be made.
        """
        if self.size > 1:
            value = self._broadcast_pickled(value, src)
        if isinstance(value, Exception):
            mark_common(value, self.name)
            raise value
        return value

    def _broadcast_pickled(self, value: Any, src: int) -> Any:
        if self.rank == src:
            message = Thrown.of(value) if isinstance(value, Exception) else value
            payload = torch.frombuffer(bytearray(pickle.dumps(message, protocol=5)), dtype=torch.uint8)
            size = torch.tensor([payload.numel()], dtype=torch.int64)
            nothing = self._peers(lambda _: None)
            self.swap(self._peers(lambda _: size), nothing)
            self.swap(self._peers(lambda _: payload), nothing)
            return value
        size = torch.zeros(1, dtype=torch.int64)
        nothing = self._peers(lambda _: None)
        self.swap(nothing, self._peers(lambda p: size if p == src else None))
        payload = torch.empty(int(size), dtype=torch.uint8)
        self.swap(nothing, self._peers(lambda p: payload if p == src else None))
        received = pickle.loads(payload.numpy().data)
        return received.copy() if isinstance(received, Thrown) else received


__all__ = ["Mesh", "MeshError", "RankFailed"]
