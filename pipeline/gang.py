"""A gang as the campaign sees it: the tasks of one claim, and what happens when one of its ranks dies.

Phases: form, then receive / advance / collect again and again, then dissolve; abandon from anywhere. Every wait ends:
by its result, by the news that a rank has gone, or by its limit. What ends otherwise than by its result is `GangLost`,
or the error that a task raised; both leave the gang to be abandoned.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..domain.mesh import MeshError, RankFailed
from . import worker as tasks
from .claims import Claim
from .errors import GangLost
from .orders import Arrival, Order, Post, Report, StateFile

if TYPE_CHECKING:
    from distributed import Client, Future

logger = logging.getLogger(__name__)

#: Seconds between looks at what no event tells.
POLL = 0.5

#: Seconds to wait for the news of a death, when a rank says that it cannot reach a peer.
GRACE = 2.0


class SourceGone(RuntimeError):
    """A worker that held arrivals has gone: they are to be read from their files."""

    def __init__(self, phase: str, reason: str) -> None:
        super().__init__(f"{phase}: {reason}")


@dataclass(frozen=True)
class Limits:
    """Seconds after which a wait gives up.

    Args:
        form: to meet, the import of torch in a new worker included.
        peer: that a rank waits for another inside a collective.
        segment: beyond its own length that a segment may take: one step, the compilation of kernels, the files.
        small: for what only moves or drops something.
        free: until a rank whose gang has failed must be free again; then its process is restarted.
    """

    form: float = 120.0
    peer: float = 300.0
    segment: float = 900.0
    small: float = 120.0
    free: float = 180.0


class Gang:
    """The tasks of one claim.

    Args:
        client: asynchronous.
        session: of the campaign, see `worker.RankPlugin`.
        claim: the ranks.
        limits: of waits.
        max_atoms: room aboard.
        alive: addresses of all ranks that are there now.
    """

    def __init__(
        self,
        client: Client,
        session: str,
        claim: Claim,
        limits: Limits,
        max_atoms: int | None,
        alive: Callable[[], Collection[str]],
    ) -> None:
        self.client, self.session, self.claim = client, session, claim
        self.alive = alive
        self.limits, self.max_atoms = limits, max_atoms
        self.segments = 0
        self._dead: list[str] = []
        self._lost = asyncio.Event()
        self._futures: set[Future] = set()
        self._tasks = 0

    def lose(self, address: str) -> None:
        """News that one of its ranks has gone: whatever is awaited now, and all that comes later, ends at once."""
        self._dead.append(address)
        self._lost.set()

    @property
    def dead(self) -> tuple[str, ...]:
        return tuple(self._dead)

    # --- phases ------------------------------------------------------------------------------------------------

    async def form(self) -> None:
        """All ranks take their seats, or none: an error here leaves nothing that `abandon` does not undo."""
        claim, limit = self.claim, self.limits.form
        meeting = None
        if len(claim.ranks) > 1:
            (meeting,) = await self._together("forming", [(claim.lead, tasks.serve, (claim, limit))], limit)
        posts = [
            Post(claim, rank, claim.stage, meeting, self.limits.peer, self.max_atoms)
            for rank in range(len(claim.ranks))
        ]
        jobs = [(address, tasks.join, (post,)) for address, post in zip(claim.ranks, posts, strict=True)]
        await self._together("forming", jobs, limit)

    async def receive(self, arrivals: Sequence[Arrival], batches: Sequence[Any], sources: Sequence[str] = ()) -> None:
        """Systems into the lead's inbox. `batches` are futures (peer to peer, on `sources`) or None (from the file).

        Raises:
            SourceGone: a source has gone; receive from the files.
            DamagedFile: a file cannot be trusted; nothing was received.
        """
        job = (self.claim.lead, tasks.receive, (self.claim, list(arrivals), list(batches)))
        await self._together("receiving", [job], self.limits.small, sources)

    async def advance(self, seconds: float, *, admits: bool, checkpoint: bool) -> Report:
        self.segments += 1
        order = Order(self.segments, seconds, admits, checkpoint)
        jobs = [(address, tasks.advance, (self.claim, order)) for address in self.claim.ranks]
        reports = await self._together("advancing", jobs, seconds + self.limits.segment)
        assert isinstance(reports[0], Report)
        return reports[0]

    def collect(self, number: int) -> Future:
        """The finished batch of a segment as a future on the lead. Submitted, not awaited: the file serves as well."""
        return self._submit(self.claim.lead, tasks.collect, (self.claim, number), priority=10)

    async def dissolve(self, *, checkpoint: bool = False) -> StateFile | None:
        jobs = [(address, tasks.dissolve, (self.claim, checkpoint)) for address in self.claim.ranks]
        kept = await self._together("dissolving", jobs, self.limits.segment)
        return kept[0]

    async def abandon(self) -> tuple[str, ...]:
        """After a failure: nothing of this claim runs any more when this returns, or its rank is named.

        A cancelled task that runs already cannot be taken away; it ends when its collective notices that a peer has
        gone. A task behind it on the same single thread therefore proves that the rank is free.

        Returns:
            Living ranks that were not free within the limit: their processes must be restarted.
        """
        await self._cancel(list(self._futures))
        living = [a for a in self.claim.ranks if a not in self._dead]
        self._lost.clear()
        ends = [self._end(address) for address in living]
        return tuple(address for address in await asyncio.gather(*ends) if address)

    # --- waiting -------------------------------------------------------------------------------------------------

    async def _end(self, address: str) -> str | None:
        """Run `abandon` on one rank; its address if that does not come to an end."""
        future = self._submit(address, tasks.abandon, (self.claim,), priority=100)
        settled = asyncio.ensure_future(_settled(future))
        deadline = _now() + self.limits.free
        try:
            while not settled.done() and address not in self._dead:
                if _now() > deadline:
                    return address
                await asyncio.wait([settled], timeout=POLL)
            return None
        finally:
            await _drop(settled)
            if not future.done():
                await self._cancel([future])

    def _submit(self, address: str, task: Callable[..., Any], arguments: tuple[Any, ...], priority: int = 0) -> Future:
        self._tasks += 1
        # Dask groups tasks by the leading words of their keys: "<stage>-advance" is what its dashboard shows.
        stage = self.claim.stage.replace("-", "_")
        return self.client.submit(
            task,
            self.session,
            *arguments,
            key=f"{stage}-{task.__name__}-{self.session}.{self.claim.key}.{self._tasks}",
            workers=[address],
            allow_other_workers=False,
            retries=0,
            pure=False,
            priority=priority,
        )

    async def _together(
        self, phase: str, jobs: Sequence[tuple[str, Any, tuple[Any, ...]]], limit: float, sources: Sequence[str] = ()
    ) -> list[Any]:
        """Run one task a rank, all at once; their results in this order.

        Raises:
            GangLost: a rank has gone, or the limit has passed.
            SourceGone: one of the `sources` (workers that hold what the tasks need) has gone; the gang itself is well.
            Exception: what a task raised. Of several errors the one that is not a peer's complaint about another's.
        """
        self._check(phase)
        futures = [self._submit(*job) for job in jobs]
        self._futures.update(futures)
        results = [asyncio.ensure_future(_result(phase, future)) for future in futures]
        try:
            await self._settle(phase, results, limit, sources)
            return [r.result() for r in results]
        finally:
            for result in results:
                await _drop(result)
            self._futures.difference_update(futures)
            if any(not f.done() for f in futures):
                await self._cancel(futures)

    async def _settle(
        self, phase: str, results: Sequence[asyncio.Task[Any]], limit: float, sources: Sequence[str]
    ) -> None:
        """Wait until all have results; raise at the first sign that they will not."""
        lost = asyncio.ensure_future(self._lost.wait())
        deadline = _now() + limit
        pending: set[asyncio.Task[Any]] = set(results)
        try:
            while pending:
                done, rest = await asyncio.wait({*pending, lost}, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
                pending = rest - {lost}
                self._check(phase)
                if any(_error(r) for r in done - {lost}):
                    await self._explain(phase, results, lost)
                # What has arrived needs its source no more: to receive it again would do it twice.
                if pending and any(s not in self.alive() for s in sources):
                    raise SourceGone(phase, "a worker that held arrivals has gone")
                if pending and _now() > deadline:
                    raise GangLost(phase, f"no answer within {limit:.0f} s")
        finally:
            await _drop(lost)

    async def _explain(self, phase: str, results: Sequence[asyncio.Task[Any]], lost: asyncio.Task[Any]) -> None:
        """A task has failed: wait a moment for what the others say and for news of a death, then raise the cause."""
        deadline = _now() + GRACE
        while _now() < deadline and not lost.done() and _peer_complaint(results):
            unsettled = {r for r in results if not r.done()}
            await asyncio.wait({lost, *unsettled}, timeout=POLL, return_when=asyncio.FIRST_COMPLETED)
        self._check(phase)
        errors = [e for e in map(_error, results) if e is not None]
        raise min(errors, key=_how_far_from_the_cause)

    def _check(self, phase: str) -> None:
        if self._lost.is_set():
            raise GangLost(phase, f"{', '.join(self._dead)} gone", self.dead)

    async def _cancel(self, futures: list[Future]) -> None:
        if not futures:
            return
        try:
            await asyncio.wait_for(self.client.cancel(futures, force=True), timeout=self.limits.small)
        except (TimeoutError, OSError) as error:
            # The scheduler is out of reach: the campaign's watch on it decides what follows.
            logger.warning("claim %s: could not cancel its tasks: %s", self.claim.key, error)


async def _result(phase: str, future: Future) -> Any:
    """A future's result. One that Dask cancelled by itself is a loss; it must not look like our own cancellation."""
    try:
        return await future.result()
    except asyncio.CancelledError as error:
        if future.cancelled():
            raise GangLost(phase, f"Dask gave {future.key} up: {error}") from error
        raise


async def _settled(future: Future) -> None:
    """Ends when the future has, however it did."""
    await asyncio.gather(_result("ending", future), return_exceptions=True)


async def _drop(waiting: asyncio.Future[Any]) -> None:
    """Take the outcome of something nobody waits for any more, so that asyncio does not complain of it."""
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def _error(result: asyncio.Task[Any]) -> BaseException | None:
    return result.exception() if result.done() and not result.cancelled() else None


def _peer_complaint(results: Sequence[asyncio.Task[Any]]) -> bool:
    """Whether all that is known is that a rank could not reach another."""
    return all(isinstance(e, MeshError | GangLost) for e in map(_error, results) if e is not None)


def _how_far_from_the_cause(error: BaseException) -> int:
    """An error of a rank's own, else one that a rank was told in the words of another, else the loss of a peer."""
    if isinstance(error, RankFailed):
        return 1
    return 2 if isinstance(error, MeshError | GangLost) else 0


def _now() -> float:
    return asyncio.get_running_loop().time()


__all__ = ["Gang", "Limits", "SourceGone"]
