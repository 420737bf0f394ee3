"""A shift: the life of one gang, from its claim to the release of its ranks, whatever happens in between.

form -> [receive -> advance -> report -> collect]* -> dissolve
             any error -> abandon -> systems go back -> release
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .books import Ended
from .claims import Claim
from .errors import CampaignError, GangLost, StaleClaim
from .events import GangEnded, GangFormed, SegmentEnded, VisitQueued
from .gang import Gang, SourceGone
from .handoff import DamagedFile
from .ledger import Entry, Finished, Returned, Started
from .orders import Arrival, Report, StateFile
from .scheduling import checkpoint_is_due
from .stream import MAX_DEATHS, Parcel, Ticket

if TYPE_CHECKING:
    from .line import Line
    from .program import Program

logger = logging.getLogger(__name__)

#: What a full, read-only or broken disk says. It is no system's fault, and no other gang would fare better.
STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE})

#: Gangs of one stage that may fail to form, one after the other, before the campaign gives up.
MAX_FORM_FAILURES = 5


class Shift:
    """One gang at work on one stage.

    Args:
        program: the campaign it belongs to.
        line: the stage.
        claim: its ranks.

    `incoming` is what it takes in next, given before it starts; with `alone` nothing joins what it began with.
    """

    def __init__(self, program: Program, line: Line, claim: Claim) -> None:
        self.program, self.line, self.claim = program, line, claim
        self.incoming: list[Ticket] = []
        self.alone = False
        self.aboard: dict[str, Ticket] = {}
        self.formed = False
        self.leaving = False  # a rank of it is about to retire
        self.gang = Gang(
            program.client,
            program.session,
            claim,
            program.options.limits,
            line.budget(len(claim.ranks)),
            lambda: program.membership.alive,
        )
        self._started = time.monotonic()
        self._checkpointed = self._started

    @property
    def n_atoms(self) -> int:
        return sum(t.n_atoms for t in (*self.aboard.values(), *self.incoming))

    async def work(self) -> None:
        """Live. Returns when its ranks are free; raises only what must end the campaign."""
        reason = ""
        try:
            await self._serve()
        except asyncio.CancelledError:
            # The campaign ends at once: the ledger has what is needed to go on.
            raise
        except Exception as error:
            if isinstance(error, CampaignError) and not isinstance(error, DamagedFile):
                raise
            if getattr(error, "errno", None) in STORAGE:
                raise CampaignError(
                    f"{self.line.name}: {error}; put that right and go on with "
                    f"`mattermill resume {self.program.folder.path}`"
                ) from error
            # A task's error, of any type: the model's, the user's stage's, a dead peer's. It is recorded with the
            # systems that were aboard, and goes on as their reason if they fail alone.
            reason = await self._fail(error)
        finally:
            self.line.shifts.remove(self)
            self.program.claims.release(self.claim)
            self.program.changed.set()
        self.program.tell(GangEnded(self.line.name, self.claim.key, reason, self.gang.dead))

    # --- phases ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        await self.gang.form()
        self.formed, self.line.form_failures = True, 0
        self.program.tell(GangFormed(self.line.name, self.claim.key, self.claim.ranks))
        while True:
            admits = bool(self.incoming) and await self._receive()
            if not self.aboard:
                break
            await self._segment(admits)
            if self.leaving:
                # It runs no task any more, so there is no leaving together: the last checkpoint must do.
                raise GangLost("leaving", "a rank retires")
            if self.program.stopping:
                break
            self.incoming = self._refill()
            if not self.aboard and not self.incoming:
                break
        kept = await self.gang.dissolve(checkpoint=bool(self.aboard))
        if kept is not None:
            await self.program.record(self.program.books.checkpointed(self.line.name, kept))
            self._remember(kept)
        await self._give_back(died=False, fault="")

    async def _receive(self) -> bool:
        """Take what is incoming aboard. False when nothing came, because no file of it could be trusted."""
        while self.incoming:
            tickets = self.incoming
            key = self.program.books.claim_key(self.claim)
            await self.program.record([Started(t.system, self.line.name, key) for t in tickets])
            self.aboard |= {t.system: t for t in tickets}
            self.incoming = []
            try:
                await self._pull(tickets)
            except DamagedFile as error:
                self.incoming = await self._without_damage(tickets, error)
                continue
            # The file is enough from here on: let Dask forget the batch.
            for ticket in tickets:
                parcel = replace(ticket.parcel, future=None, holder=None)
                self.aboard[ticket.system] = replace(ticket, parcel=parcel)
            return True
        return False

    async def _pull(self, tickets: Sequence[Ticket]) -> None:
        """Peer to peer where the batch still is on its lead, else from the file."""
        groups: dict[tuple[str, int], list[Ticket]] = {}
        for ticket in tickets:
            groups.setdefault((ticket.parcel.file, id(ticket.parcel.future)), []).append(ticket)
        arrivals, batches, holders = [], [], []
        for group in groups.values():
            parcel = group[0].parcel
            arrivals.append(Arrival(tuple(t.system for t in group), parcel.file, parcel.digest))
            here = parcel.future is not None and parcel.holder in self.program.membership.alive
            ready = here and parcel.future.status == "finished"
            batches.append(parcel.future if ready else None)
            holders += [parcel.holder] if ready and parcel.holder else []
        if holders:
            try:
                await self.gang.receive(arrivals, batches, holders)
                self.program.pulled += len(tickets)
                return
            except (SourceGone, GangLost) as error:
                if self.gang.dead:
                    raise
                logger.info("claim %s reads its arrivals from their files: %s", self.claim.key, error)
        await self.gang.receive(arrivals, [None] * len(arrivals))

    async def _segment(self, admits: bool) -> None:
        options = self.program.options
        now = time.monotonic()
        due = checkpoint_is_due(now, self._checkpointed, options.checkpoint_seconds, self._started)
        report = await self.gang.advance(options.segment_seconds, admits=admits, checkpoint=due)
        if due:
            self._checkpointed = time.monotonic()
        await self._report(report)

    async def _report(self, report: Report) -> None:
        """Ledger first, in one transaction; then the systems go on, and everybody hears of it."""
        program, line = self.program, self.line
        posting = program.books.post(self.claim, report)
        future = self.gang.collect(report.number) if report.finished is not None and posting.onward else None
        await program.record(posting.entries)
        if report.checkpoint is not None:
            self._remember(report.checkpoint)
        gone = {outcome.id: self.aboard.pop(outcome.id) for outcome in report.outcomes}
        if report.finished is not None:
            parcel = Parcel(report.finished.file, report.finished.digest, self.claim.lead, future)
            for stage, systems in posting.onward.items():
                program.lines[stage].stream.put([Ticket(i, gone[i].n_atoms, parcel) for i in systems], line.name)
        for ended in posting.ended:
            program.note(ended)
        for stage, systems in posting.onward.items():
            for system in systems:
                program.tell(VisitQueued(system, stage))
        program.keep_thermo(line.name, report)
        program.tell(
            SegmentEnded(
                line.name, self.claim.key, report.atom_steps, report.seconds, len(self.aboard), dict(report.aboard)
            )
        )
        program.changed.set()

    def _refill(self) -> list[Ticket]:
        line = self.line
        if self.alone or line.is_held_back or self.program.claims.wanted(line.height, line.name):
            return []
        return self.program.share(line, sum(t.n_atoms for t in self.aboard.values()))

    def _remember(self, kept: StateFile) -> None:
        """A checkpoint is where these systems start again; what they came from is kept for when it is damaged."""
        parcel = Parcel(kept.file, kept.digest)
        for system in kept.ids:
            if system in self.aboard:
                ticket = self.aboard[system]
                older = (ticket.parcel, *ticket.fallbacks)
                # The one before, and the stage's input, which comes last.
                fallbacks = older if len(older) < 3 else (older[0], older[-1])
                self.aboard[system] = replace(ticket, parcel=parcel, fallbacks=fallbacks)

    # --- when it goes wrong ------------------------------------------------------------------------------------

    async def _without_damage(self, tickets: Sequence[Ticket], error: DamagedFile) -> list[Ticket]:
        """Replace a state that cannot be trusted by the one before it; a system without one has failed.

        Raises:
            DamagedFile: it is none of their files, so nothing would be different the next time; all stay aboard.
        """
        resolve = self.program.folder.resolve
        hit = {t.system for t in tickets if str(resolve(t.parcel.file)) == error.path}
        if not hit:
            raise error
        logger.warning("%s", error)
        again, entries = [], []
        for ticket in tickets:
            del self.aboard[ticket.system]
            if ticket.system not in hit:
                again.append(ticket)
            elif ticket.fallbacks:
                again.append(replace(ticket, parcel=ticket.fallbacks[0], fallbacks=ticket.fallbacks[1:]))
            else:
                reason = f"its state is lost: {error.reason} ({error.path})"
                entries.append(Finished(ticket.system, self.line.name, "failed", reason))
        await self._end_visits(entries)
        return again

    async def _fail(self, error: BaseException) -> str:
        """The gang is lost: end it everywhere, give its systems back, and say so."""
        program = self.program
        program.claims.revoke(self.claim)
        stuck = await self.gang.abandon()
        if stuck:
            await program.restart(stuck)
        reason = f"{type(error).__name__}: {error}"
        # After a death no task's error is a surprise: what others said is a consequence.
        own_fault = not self.gang.dead and _is_own_fault(error)
        logger.warning("%s: gang %s ended by %s", self.line.name, self.claim.key, reason)
        if not self.formed:
            self._count_form_failure(error)
            self.line.stream.put_back(self.incoming)
            return reason
        if own_fault and _is_out_of_memory(error):
            largest = max((t.n_atoms for t in self.aboard.values()), default=0)
            total = self.n_atoms
            if total > largest and self.line.halve_budget(total // len(self.claim.ranks)):
                logger.warning("%s: out of memory with %d atoms aboard, the budget is halved", self.line.name, total)
                await self._give_back(died=False, fault="")
                return reason
        await self._give_back(died=not own_fault and not self.leaving, fault=reason if own_fault else "")
        return reason

    async def _give_back(self, died: bool, fault: str) -> None:
        """What is aboard waits again, or has failed for good."""
        back, entries, returned = [], [], []
        for ticket in self.aboard.values():
            returned.append(Returned(ticket.system, self.line.name, died))
            if self.alone and (fault or (died and ticket.deaths >= MAX_DEATHS)):
                entries.append(self._verdict(ticket, fault))
            else:
                back.append(ticket.died() if died else replace(ticket, fault=fault or ticket.fault))
        self.aboard = {}
        await self.program.record(returned)
        await self._end_visits(entries)
        self.line.stream.put_back([*back, *self.incoming])
        self.incoming = []

    def _verdict(self, ticket: Ticket, fault: str) -> Finished:
        """A suspect has taken its gang down once more, all alone."""
        if fault:
            return self._ending(ticket, "failed", fault)
        deaths = ticket.deaths + 1
        return self._ending(ticket, "quarantined", f"{deaths} gangs died with it aboard, the last with it alone")

    def _ending(self, ticket: Ticket, status: str, reason: str) -> Finished:
        """It ends in the state it started from last, which is the last good one: a checkpoint, or the stage's input."""
        state = ticket.parcel
        return Finished(ticket.system, self.line.name, status, reason, file=state.file, digest=state.digest)

    async def _end_visits(self, entries: Sequence[Finished]) -> None:
        await self.program.record(list[Entry](entries))
        for entry in entries:
            self.program.note(Ended(entry.system, entry.stage, entry.status, entry.reason))

    def _count_form_failure(self, error: BaseException) -> None:
        if self.gang.dead:
            return
        self.line.form_failures += 1
        if self.line.form_failures >= MAX_FORM_FAILURES:
            raise CampaignError(
                f"no gang of stage {self.line.name!r} can be formed, the last time because of "
                f"{type(error).__name__}: {error}"
            ) from error


def _is_own_fault(error: BaseException) -> bool:
    """Whether an error came out of what was computed, rather than from ranks that could not reach each other."""
    from ..domain.mesh import MeshError, RankFailed

    if isinstance(error, RankFailed):
        return True  # the words of a rank whose own error has not come through
    return not isinstance(error, GangLost | StaleClaim | MeshError | ConnectionError | SourceGone)


def _is_out_of_memory(error: BaseException) -> bool:
    # Of what a peer died of only the text has come: Python's, numpy's and the device's words for it.
    text = str(error)
    told = "MemoryError" in text or "Unable to allocate" in text or "out of memory" in text.lower()
    return isinstance(error, MemoryError) or told


__all__ = ["Shift"]
