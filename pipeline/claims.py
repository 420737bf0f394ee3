"""Claims: which ranks belong to whom. The only place that grants ranks, and it grants whole sub-meshes or nothing.

Two gangs that each wait for the other's half would wait for ever; so nobody ever holds a part of what was asked.
This file knows nothing of Dask: ranks are addresses with a host, time is a function, decisions are values.

The order of grants:

1. Requests of stages nearest the end of the graph first (`height` 0 is an end), then the oldest.
2. A request that cannot be met lets others pass for `patience` seconds. After that it *reserves*: whatever comes free
   is kept for it, and `wanted` tells gangs of its own height or further from the end to take no more systems. So many
   small gangs never starve a large one.
3. A request larger than the cluster reserves nothing: it would hold up everybody for ranks that may never come.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class RankState(Enum):
    READY = "ready"
    PAUSED = "paused"  # a worker out of memory, or about to retire: keeps its claim, gets no other


@dataclass(frozen=True)
class Claim:
    """A stage's lease of a sub-mesh. Ranks count in this order, the first leads. `epoch` is never used twice."""

    id: int
    epoch: int
    stage: str
    ranks: tuple[str, ...]

    @property
    def lead(self) -> str:
        return self.ranks[0]

    @property
    def key(self) -> str:
        return f"{self.id}.{self.epoch}"


@dataclass(frozen=True)
class Request:
    """A stage asks for `size` ranks; `height` is its distance from the end of the graph."""

    id: int
    stage: str
    size: int
    height: int
    since: float


@dataclass
class _Rank:
    address: str
    host: str
    order: int
    state: RankState = RankState.READY
    claim: Claim | None = None


@dataclass
class Claims:
    """The ranks of a cluster and who holds them.

    Args:
        patience: seconds after which a request that cannot be met reserves ranks.
        clock: seconds, monotonic.
    """

    patience: float = 10.0
    clock: Callable[[], float] = time.monotonic
    _ranks: dict[str, _Rank] = field(default_factory=dict)
    _requests: dict[int, Request] = field(default_factory=dict)
    _claims: dict[int, Claim] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _epochs: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    # --- ranks come and go ---------------------------------------------------------------------------------

    def join(self, address: str, host: str) -> None:
        """A rank is there. One that is known already stays as it is."""
        if address not in self._ranks:
            self._ranks[address] = _Rank(address, host, next(self._ids))

    def leave(self, address: str) -> Claim | None:
        """A rank is gone. Returns the claim that it takes down, which stays to be released."""
        rank = self._ranks.pop(address, None)
        return rank.claim if rank else None

    def pause(self, address: str) -> None:
        if address in self._ranks:
            self._ranks[address].state = RankState.PAUSED

    def unpause(self, address: str) -> None:
        if address in self._ranks:
            self._ranks[address].state = RankState.READY

    # --- asking --------------------------------------------------------------------------------------------

    def request(self, stage: str, size: int, height: int) -> Request:
        """Ask for `size` ranks at once; `grant` answers when it can."""
        assert size >= 1
        request = Request(next(self._ids), stage, size, height, self.clock())
        self._requests[request.id] = request
        return request

    def withdraw(self, request: Request) -> None:
        self._requests.pop(request.id, None)

    def grant(self) -> list[tuple[Request, Claim]]:
        """Meet what can be met now, in order."""
        granted = []
        free = [r for r in self._ranks.values() if r.claim is None and r.state is RankState.READY]
        for request in self._in_order():
            if request.size <= len(free):
                chosen = _choose(free, request.size)
                granted.append((request, self._give(request, chosen)))
                free = [r for r in free if r not in chosen]
            elif self._reserves(request):
                # The kept ranks are the ones it will get: the best choice so far.
                kept = _choose(free, min(request.size, len(free)))
                free = [r for r in free if r not in kept]
        return granted

    def wanted(self, height: int, stage: str | None = None) -> bool:
        """Whether a gang of a stage at this height should take no more systems, so that a reservation is met."""
        return any(
            self._reserves(request) and request.height <= height and request.stage != stage
            for request in self._requests.values()
        )

    def _in_order(self) -> list[Request]:
        return sorted(self._requests.values(), key=lambda r: (r.height, r.since, r.id))

    def _reserves(self, request: Request) -> bool:
        return request.size <= self.size and self.clock() - request.since >= self.patience

    def _give(self, request: Request, ranks: list[_Rank]) -> Claim:
        claim = Claim(next(self._ids), next(self._epochs), request.stage, tuple(r.address for r in ranks))
        for rank in ranks:
            assert rank.claim is None, f"{rank.address} is held by {rank.claim}"
            rank.claim = claim
        self._claims[claim.id] = claim
        del self._requests[request.id]
        return claim

    # --- giving back ---------------------------------------------------------------------------------------

    def revoke(self, claim: Claim) -> None:
        """The claim's epoch is over: nothing that is said in its name counts. Its ranks stay held until `release`."""
        self._claims.pop(claim.id, None)

    def release(self, claim: Claim) -> None:
        """Its ranks, as far as they are still here, are free. To release twice changes nothing."""
        self._claims.pop(claim.id, None)
        for address in claim.ranks:
            rank = self._ranks.get(address)
            if rank is not None and rank.claim is claim:
                rank.claim = None

    # --- looking -------------------------------------------------------------------------------------------

    def is_current(self, claim: Claim) -> bool:
        return self._claims.get(claim.id) is claim and all(address in self._ranks for address in claim.ranks)

    @property
    def size(self) -> int:
        """Ranks that are here and may work."""
        return sum(r.state is RankState.READY for r in self._ranks.values())

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(self._ranks)

    @property
    def n_free(self) -> int:
        return sum(r.claim is None and r.state is RankState.READY for r in self._ranks.values())

    @property
    def claims(self) -> tuple[Claim, ...]:
        return tuple(self._claims.values())

    @property
    def requests(self) -> tuple[Request, ...]:
        return tuple(self._in_order())


def _choose(free: list[_Rank], size: int) -> list[_Rank]:
    """`size` ranks on as few hosts as can be: the smallest host that has room for all, else the largest ones."""
    hosts: dict[str, list[_Rank]] = {}
    for rank in sorted(free, key=lambda r: r.order):
        hosts.setdefault(rank.host, []).append(rank)
    enough = [ranks for ranks in hosts.values() if len(ranks) >= size]
    if enough:
        return min(enough, key=len)[:size]
    largest_first = sorted(hosts.values(), key=len, reverse=True)
    return [rank for ranks in largest_first for rank in ranks][:size]


__all__ = ["Claim", "Claims", "RankState", "Request"]
