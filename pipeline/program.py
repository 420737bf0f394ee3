"""The program: a campaign at work, in asyncio beside an asynchronous `distributed.Client`.

    watch the cluster | ask for ranks, nearest the end first | one shift a claim | end the lines that have run dry

Data never passes through here: tickets and reports do.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .books import Books, Ended
from .claims import Claim, Claims
from .cluster import Address, check_members, members, wait_for_members
from .errors import CampaignError
from .events import CampaignStarted, Event, StageEnded, VisitEnded
from .folder import Folder
from .ledger import Checkpointed, Entry, Ledger, LedgerError, Recorded
from .line import INPUT, Line, build_lines
from .lock import Lock, LockLost
from .membership import Membership
from .options import Options
from .orders import Report
from .scribe import Scribe
from .shift import Shift
from .stream import Parcel, Ticket
from .work import Work
from .worker import RankPlugin, plugin_name

if TYPE_CHECKING:
    from distributed import Client

    from .recipe import Recipe

logger = logging.getLogger(__name__)

#: Seconds between two looks at the state of things when nothing happens.
TICK = 0.5

#: Times that the workers are asked to take the plugin, while some of them die.
PLUGIN_ATTEMPTS = 10

#: Key of the ledger's `meta` with the sessions whose plugins may still be on the workers of a user's cluster.
SESSIONS = "sessions"


class Program:
    """One run of a campaign, from the tickets in its ledger to the end or to a stop.

    Args:
        recipe, folder, ledger, lock, options: of the campaign.
        tell: called with every event, on the campaign's thread.
        own: whether the cluster is the campaign's own.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Folder,
        ledger: Ledger,
        lock: Lock,
        options: Options,
        tell: Callable[[Event], None],
        own: bool = False,
    ) -> None:
        self.recipe, self.folder, self.ledger, self.options = recipe, folder, ledger, options
        self.lock, self.tell, self.own = lock, tell, own
        self.session = uuid.uuid4().hex[:8]
        self.books = Books(recipe.plan, self.session, options.strict)
        self.claims = Claims(options.patience)
        self.lines = build_lines(recipe.plan, options.capacity, options.max_atoms)
        self.scribe = Scribe(folder, ledger, options.summary_seconds)
        self.changed = asyncio.Event()
        self.stopping = False
        self.failure: CampaignError | None = None
        self.pulled = 0  # systems that moved peer to peer
        self._tasks: dict[asyncio.Task[None], Shift] = {}
        self._visits: Counter[bool] = Counter()
        self._reasons: Counter[str] = Counter()
        self._idle_since: float | None = None
        self._errands: set[asyncio.Task[None]] = set()

    # --- life --------------------------------------------------------------------------------------------------

    async def run(self, address: Address, ranks: int | None, dashboard: str = "") -> None:
        """Until everything has ended, or `stop`.

        Raises:
            CampaignError: it cannot start, or cannot go on.
        """
        async with await _connect(address) as client:
            self.client = client
            await self._prepare(ranks)
            try:
                self.tell(self._started(dashboard))
                await self._work()
            finally:
                await self._clean_up()
        if self.failure is not None:
            raise self.failure
        self._complain()

    async def conclude(self) -> None:
        """Where nothing is left to run: the summary only. Raises `CampaignError`: it cannot be written."""
        await asyncio.to_thread(self.scribe.close)
        self._complain()

    def _complain(self) -> None:
        trouble = self.scribe.trouble
        if trouble is not None:
            raise CampaignError(
                f"the ledger is whole, the summary or the time series are not: {type(trouble).__name__}: {trouble}; "
                f"`mattermill resume {self.folder.path}` writes the summary anew"
            ) from trouble

    async def _prepare(self, ranks: int | None) -> None:
        self.membership = Membership(
            self.client,
            self.claims,
            ranks,
            on_loss=self._on_loss,
            on_pause=self._on_pause,
            on_leave=self._on_leave,
            on_change=self.changed.set,
        )
        needed, seconds = max(line.size for line in self.lines.values()), self.options.worker_seconds
        found = await wait_for_members(self.membership.identity, max(needed, ranks or 1), seconds)
        if not found:
            raise CampaignError(
                f"the cluster has no workers, and none has come within {seconds:g} s (worker_seconds): start some and "
                f"go on with `mattermill resume {self.folder.path}`"
            )
        check_members(found, needed, ranks)
        await self._end_earlier_sessions()
        work = Work.of(self.recipe).pickled()
        plugin = RankPlugin(self.session, str(self.folder.path), work, self.options.device, own=self.own)
        await self._seat(plugin)
        self.membership.update(members(await self.membership.identity()))
        self._load()

    async def _seat(self, plugin: RankPlugin) -> None:
        """Put the plugin on every worker, now and in future. One that dies meanwhile is only a reason to ask again.

        Raises:
            CampaignError: the workers do not take it.
        """
        for attempt in range(PLUGIN_ATTEMPTS):
            try:
                await self.client.register_plugin(plugin)
                return
            except OSError as error:  # distributed's CommClosedError is one
                logger.warning("a worker went while it was being prepared: %s", error)
                trouble = error
                await asyncio.sleep(TICK * (attempt + 1))
        raise CampaignError(
            f"the workers could not be prepared ({trouble}): see why they die, then go on with "
            f"`mattermill resume {self.folder.path}`"
        ) from trouble

    async def _end_earlier_sessions(self) -> None:
        """Take the seats away that a campaign process which was killed has left on a cluster that outlived it."""
        if self.own:
            return
        left = [s for s in self.ledger.meta(SESSIONS, []) if not await self._unregister(s)]
        await asyncio.to_thread(self.ledger.set_meta, SESSIONS, [*left, self.session])

    async def _unregister(self, session: str) -> bool:
        """Take a session's plugin off all workers; its seats are given up. False when that is not sure."""
        try:
            await asyncio.wait_for(self.client.unregister_worker_plugin(plugin_name(session)), timeout=10)
        except ValueError:
            logger.debug("session %s has no plugin here", session)
        except (OSError, TimeoutError) as error:
            logger.info("the plugin of session %s could not be taken off the workers: %s", session, error)
            return False
        return True

    def _load(self) -> None:
        """Tickets for all visits that have not ended: from their last checkpoint, or from the stage's input."""
        kept = self.ledger.all_checkpoints()
        by_stage: dict[str, list[Ticket]] = {}
        for visit in self.ledger.pending():
            states = [Parcel(c.file, c.digest) for c in kept.get((visit.system, visit.stage), ())]
            for state in states:
                self.scribe.checkpoint(state.file)
            assert visit.input_file is not None, f"{visit.system} waits for {visit.stage} without a state"
            states.append(Parcel(visit.input_file, visit.input_digest))
            ticket = Ticket(visit.system, visit.n_atoms, states[0], tuple(states[1:]), visit.deaths)
            by_stage.setdefault(visit.stage, []).append(ticket)
        for stage, tickets in by_stage.items():
            self.lines[stage].stream.put_back(tickets)
        for head in self.recipe.plan.heads:
            self.lines[head].stream.end(INPUT)

    def _started(self, dashboard: str) -> CampaignStarted:
        waiting = {name: len(line.stream) for name, line in self.lines.items()}
        return CampaignStarted(
            self.recipe.name, str(self.folder.path), self.claims.size, tuple(self.lines), waiting, dashboard
        )

    async def _work(self) -> None:
        watch = asyncio.create_task(self.membership.watch())
        try:
            while not self._is_over():
                self.changed.clear()
                self._ask()
                self._hire()
                self.scribe.summarise()
                waiting = asyncio.create_task(self.changed.wait())
                await asyncio.wait({waiting, watch, *self._tasks}, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                self._reap()
                if watch.done():
                    await watch
                self._check_ranks()
        finally:
            watch.cancel()
            for task in (*self._tasks, *self._errands):
                task.cancel()
            await asyncio.gather(watch, *self._tasks, *self._errands, return_exceptions=True)

    async def _clean_up(self) -> None:
        if await self._unregister(self.session) and not self.own:
            await self._forget_session()
        await asyncio.to_thread(self.scribe.close)

    async def _forget_session(self) -> None:
        """Only while the folder is ours: whoever forced the lock has a list of its own."""
        try:
            self.lock.check()
            left = [s for s in self.ledger.meta(SESSIONS, []) if s != self.session]
            await asyncio.to_thread(self.ledger.set_meta, SESSIONS, left)
        except (LockLost, LedgerError) as error:
            logger.info("%s: the end of session %s is not recorded: %s", self.folder.path, self.session, error)

    def stop(self) -> None:
        """Drain: gangs end their segment, write a checkpoint and leave. To be called on the event loop."""
        self.stopping = True
        self.changed.set()

    # --- each round ----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self.stopping:
            return not self._tasks
        for line in self.lines.values():
            # Upstream ones come first, so one pass carries a sentinel all the way.
            if not line.ended and line.is_over:
                line.ended = True
                for outlet in line.outlets:
                    outlet.stream.end(line.name)
                self.tell(StageEnded(line.name))
        return all(line.ended for line in self.lines.values())

    def _ask(self) -> None:
        """One open request a stage that has something to do; none of those that have not."""
        for line in self.lines.values():
            wants = line.wants_gang and not self.stopping
            if wants and line.request is None:
                line.request = self.claims.request(line.name, line.size, line.height)
            elif not wants and line.request is not None:
                self.claims.withdraw(line.request)
                line.request = None

    def _hire(self) -> None:
        """A shift for every claim that is granted; a stage that still has work waiting asks again at once."""
        while granted := self.claims.grant():
            for request, claim in granted:
                line = self.lines[request.stage]
                line.request = None
                self._begin(line, claim)
            self._ask()

    def _begin(self, line: Line, claim: Claim) -> None:
        shift = Shift(self, line, claim)
        line.shifts.append(shift)
        shift.incoming = line.stream.take_alone() or self.share(line, 0)
        shift.alone = any(ticket.is_alone for ticket in shift.incoming)
        assert shift.incoming, f"{line.name} asked for ranks and has nothing to do"
        task = asyncio.create_task(shift.work(), name=f"{line.name} {claim.key}")
        self._tasks[task] = shift

    def _reap(self) -> None:
        """Shifts that have ended; what one of them raises ends the campaign."""
        for task in [t for t in self._tasks if t.done()]:
            shift = self._tasks.pop(task)
            error = task.exception()
            if isinstance(error, CampaignError):
                self._give_up(error)
            elif error is not None:
                raise CampaignError(f"{shift.line.name}: {type(error).__name__}: {error}") from error

    def _check_ranks(self) -> None:
        """A campaign that waits for ranks that never come must not wait for ever."""
        loop = asyncio.get_running_loop()
        if self._tasks or self.stopping or not self.claims.requests:
            self._idle_since = None
            return
        self._idle_since = self._idle_since or loop.time()
        if loop.time() - self._idle_since > self.options.worker_seconds:
            request = self.claims.requests[0]
            raise CampaignError(
                f"stage {request.stage!r} waits for {request.size} ranks, the cluster has {self.claims.size} left: "
                f"add workers and go on with `mattermill resume {self.folder.path}`"
            )

    def _give_up(self, error: CampaignError) -> None:
        if self.failure is None:
            logger.error("%s", error)
            self.failure = error
        self.stop()

    def share(self, line: Line, aboard: int) -> list[Ticket]:
        """What a gang of this stage that has so many atoms aboard should take in now."""
        nearer = sum(other.ranks_held for other in self.lines.values() if other.height < line.height)
        return line.share(self.claims, nearer, aboard)

    # --- for the shifts -------------------------------------------------------------------------------------------

    async def record(self, entries: Sequence[Entry]) -> None:
        """Into the ledger, in one transaction, off the event loop.

        Raises:
            CampaignError: the ledger cannot be written.
        """
        if not entries:
            return
        try:
            recorded = await asyncio.to_thread(self._write, entries)
        except LockLost as error:
            raise CampaignError(str(error)) from error
        except (LedgerError, sqlite3.Error) as error:
            raise CampaignError(f"the ledger {self.ledger.path} cannot be written: {error}") from error
        if recorded.repeated or recorded.stale:
            # Claims are ours alone, so these visits were ended by somebody else: to go on would do things twice.
            system, stage = (*recorded.repeated, *recorded.stale)[0]
            raise CampaignError(
                f"{self.ledger.path} says that {system} has left {stage} already: does another process write it?"
            )
        for entry in entries:
            if isinstance(entry, Checkpointed):
                self.scribe.checkpoint(entry.file)

    def _write(self, entries: Sequence[Entry]) -> Recorded:
        self.lock.check()
        return self.ledger.record(entries)

    def note(self, ended: Ended) -> None:
        """A visit has ended: tell, and stop a campaign that does nothing but fail."""
        self.tell(VisitEnded(ended.system, ended.stage, ended.status, ended.reason))
        if ended.stage not in self.lines:
            return
        failed = ended.status in ("failed", "quarantined")
        self._visits[failed] += 1
        if failed:
            self._reasons[ended.reason] += 1
        total, bad = self._visits.total(), self._visits[True]
        if total >= self.options.failure_visits and bad > self.options.max_failure_rate * total:
            reason, times = self._reasons.most_common(1)[0]
            self._give_up(
                CampaignError(
                    f"{bad} of {total} visits failed, more than max_failure_rate={self.options.max_failure_rate:g} "
                    f"allows; the reason most often given ({times} times): {reason}"
                )
            )

    def keep_thermo(self, stage: str, report: Report) -> None:
        self.scribe.thermo(stage, report)

    async def restart(self, addresses: Sequence[str]) -> None:
        """Replace processes that do not come free."""
        logger.warning("restarting %s: not free after their gang had failed", ", ".join(addresses))
        answers: dict[str, str] = {}
        try:
            answers = await self.client.restart_workers(list(addresses), timeout=60, raise_for_error=False)
        except (OSError, TimeoutError, ValueError) as error:
            # Without a nanny there is nobody to restart it.
            logger.warning("could not restart %s: %s", ", ".join(addresses), error)
        for address in addresses:
            if answers.get(address) not in ("OK", "removed"):
                logger.warning("rank %s is not used any more (%s)", address, answers.get(address, "not restarted"))
                self.membership.exclude(address)

    def _on_pause(self, address: str) -> None:
        """A rank that stays paused runs no task; its gang is lost, and the process starts anew with empty memory."""
        logger.warning("rank %s is out of memory and paused: it is given up and started again", address)
        claim = self.claims.leave(address)
        self._on_loss(address, claim)
        restart = asyncio.create_task(self.restart([address]))
        self._errands.add(restart)
        restart.add_done_callback(self._errands.discard)

    def _on_leave(self, address: str) -> None:
        """A rank is about to retire (`retire_workers`, --lifetime): it ends what it runs and begins nothing."""
        for shift in self._tasks.values():
            shift.leaving |= address in shift.claim.ranks

    def _on_loss(self, address: str, claim: Claim | None) -> None:
        for shift in self._tasks.values():
            if address in shift.claim.ranks:
                shift.gang.lose(address)
        self.changed.set()


async def _connect(address: Address) -> Client:
    """A connection of the campaign's own. Raises `CampaignError`."""
    from distributed import Client

    options = {"security": address.security} if address.security is not None else {}
    try:
        return await Client(address.scheduler, asynchronous=True, set_as_default=False, timeout=30, **options)
    except (OSError, TimeoutError) as error:
        raise CampaignError(f"no Dask scheduler answers at {address.scheduler}: {error}") from error


__all__ = ["Program"]
