"""The watch on the cluster: which ranks are there, asked of the scheduler twice a second.

Errors of tasks tell of a death only when somebody waits for the dead one, and Dask keeps a pinned task of a worker
that is gone waiting for ever. So the campaign asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .claims import Claim, Claims
from .cluster import Member, members
from .errors import CampaignError

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

#: Seconds between two looks, and without an answer until the scheduler counts as gone.
PERIOD, SCHEDULER_LIMIT = 0.4, 30.0

#: Seconds that a rank may be paused before it counts as lost.
PAUSE_LIMIT = 15.0


#: What a worker is called that runs what it runs, takes nothing more and goes: retired, or at the end of its lifetime.
LEAVING = frozenset({"closing_gracefully", "closing"})


class Membership:
    """Keeps `Claims` up to date with the scheduler.

    Args:
        client: asynchronous.
        claims: told of ranks that come, go, pause and go on.
        limit: how many ranks the campaign may use; None for all.
        on_loss: called with the address of a rank that has gone and the claim that it takes down, if any.
        on_pause: called with the address of a rank that has been paused for `PAUSE_LIMIT` seconds.
        on_leave: called, again and again, with the address of a rank that is about to retire.
        on_change: called after something has changed.
    """

    def __init__(
        self,
        client: Client,
        claims: Claims,
        limit: int | None,
        on_loss: Callable[[str, Claim | None], None],
        on_pause: Callable[[str], None],
        on_leave: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.client, self.claims, self.limit = client, claims, limit
        self.on_loss, self.on_pause, self.on_leave, self.on_change = on_loss, on_pause, on_leave, on_change
        self.alive: frozenset[str] = frozenset()
        self._refused: set[str] = set()
        self._excluded: set[str] = set()
        self._paused: dict[str, float] = {}

    async def look(self) -> dict[str, Member]:
        """Who is there; errors as of `identity`."""
        return members(await self.identity())

    async def identity(self) -> dict[str, Any]:
        """Ask the scheduler once.

        Raises:
            OSError, TimeoutError: the scheduler does not answer.
        """
        scheduler = self.client.scheduler
        if scheduler is None:
            raise ConnectionError("the client has been closed")
        return await asyncio.wait_for(scheduler.identity(), timeout=SCHEDULER_LIMIT)

    def exclude(self, address: str) -> None:
        """Use this rank no more, though it is there."""
        self.claims.leave(address)
        self._excluded.add(address)

    def update(self, found: dict[str, Member]) -> None:
        """Take in who is there."""
        self.alive = frozenset(found)
        self._excluded &= found.keys()  # an address may be given to a new process
        changed = False
        for address in self.claims.addresses - found.keys():
            claim = self.claims.leave(address)
            logger.info("rank %s has gone%s", address, f" with claim {claim.key}" if claim else "")
            self.on_loss(address, claim)
            changed = True
        for member in found.values():
            changed |= self._take_in(member)
        if changed:
            self.on_change()

    def _take_in(self, member: Member) -> bool:
        known = member.address in self.claims.addresses
        if member.address in self._excluded:
            return False
        if member.status in LEAVING:
            # To restart it would fight whoever retires it.
            self.claims.pause(member.address)
            self._paused.pop(member.address, None)
            self.on_leave(member.address)
            return False
        if member.status != "running":
            if known:
                self._pause(member.address)
            return False
        self._paused.pop(member.address, None)
        if known:
            self.claims.unpause(member.address)
            return False
        if member.threads != 1:
            if member.address not in self._refused:
                self._refused.add(member.address)
                logger.warning("worker %s is not used: it has %d threads, not one", member.name, member.threads)
            return False
        if self.limit is not None and len(self.claims.addresses) >= self.limit:
            return False
        self.claims.join(member.address, member.host)
        return True

    def _pause(self, address: str) -> None:
        now = asyncio.get_running_loop().time()
        self.claims.pause(address)
        if now - self._paused.setdefault(address, now) > PAUSE_LIMIT:
            del self._paused[address]
            self.on_pause(address)

    async def watch(self) -> None:
        """Look for ever.

        Raises:
            CampaignError: the scheduler has gone.
        """
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while True:
            await asyncio.sleep(PERIOD)
            try:
                self.update(await self.look())
                answered = loop.time()
            except (OSError, TimeoutError) as error:
                if loop.time() - answered > SCHEDULER_LIMIT or self.client.status in ("closed", "closing"):
                    raise CampaignError(f"the Dask scheduler does not answer any more ({error})") from error


__all__ = ["Membership"]
