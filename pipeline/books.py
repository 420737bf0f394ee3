"""The books: what a report means for the ledger and for who comes next. Pure; `record` is the only one that writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .claims import Claim
from .ledger import Checkpointed, Entry, Finished
from .orders import Report, StateFile
from .plan import Plan

#: Statuses that stop a system where `strict` asks for it.
UNFINISHED = frozenset({"unconverged", "unequilibrated"})


@dataclass(frozen=True)
class Ended:
    """One visit that ended: of a stage or of a filter."""

    system: str
    stage: str
    status: str
    reason: str = ""


@dataclass
class Posting:
    """What one report comes to: entries for one transaction, visits that ended, and systems that go on.

    `onward` has per stage the systems that enter its stream.
    """

    entries: list[Entry] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    onward: dict[str, list[str]] = field(default_factory=dict)


class Books:
    """Turns reports into ledger entries, along the graph.

    Args:
        plan: the graph.
        strict: whether systems that did not reach their goal stop.
        session: of this run of the campaign; part of what claims are called in the ledger.
    """

    def __init__(self, plan: Plan, session: str, strict: bool = False) -> None:
        self.plan, self.session, self.strict = plan, session, strict

    def claim_key(self, claim: Claim) -> str:
        return f"{self.session}-{claim.key}"

    def post(self, claim: Claim, report: Report) -> Posting:
        """What a gang's report means."""
        posting = Posting()
        if report.checkpoint is not None:
            posting.entries += self.checkpointed(claim.stage, report.checkpoint)
        for outcome in report.outcomes:
            goes_on = outcome.status.goes_on and not (self.strict and str(outcome.status) in UNFINISHED)
            state = _holding(outcome.id, report.finished, report.failed)
            targets = self.plan.targets[claim.stage] if goes_on else ()
            posting.entries.append(
                Finished(
                    outcome.id,
                    claim.stage,
                    str(outcome.status),
                    outcome.reason,
                    outcome.steps,
                    outcome.seconds,
                    outcome.results,
                    state.file if state else None,
                    state.digest if state else None,
                    targets,
                    self.claim_key(claim),
                )
            )
            posting.ended.append(Ended(outcome.id, claim.stage, str(outcome.status), outcome.reason))
            self._lead_on(posting, outcome.id, targets, state, report.verdicts.get(outcome.id, {}))
        return posting

    def checkpointed(self, stage: str, kept: StateFile) -> list[Entry]:
        return [Checkpointed(i, stage, kept.file, kept.digest, kept.steps.get(i, 0)) for i in kept.ids]

    def _lead_on(
        self,
        posting: Posting,
        system: str,
        targets: Sequence[str],
        state: StateFile | None,
        verdicts: Mapping[str, bool | str],
    ) -> None:
        """Through the filters behind a stage, as its lead has answered them, to the stages behind those."""
        for target in targets:
            if not self.plan.is_filter(target):
                posting.onward.setdefault(target, []).append(system)
                continue
            answer = verdicts.get(target, "its stage's lead gave no answer")
            status = "finished" if answer is True else "filtered" if answer is False else "failed"
            reason = "" if answer is True else self._why(target, answer)
            further = self.plan.targets[target] if answer is True else ()
            # A filter changes no state: it names one only for those that start from it.
            passed = state if further else None
            file, digest = (passed.file, passed.digest) if passed else (None, None)
            posting.entries.append(
                Finished(system, target, status, reason, file=file, digest=digest, next_stages=further)
            )
            posting.ended.append(Ended(system, target, status, reason))
            self._lead_on(posting, system, further, state, verdicts)

    def _why(self, name: str, answer: bool | str) -> str:
        if answer is False:
            return f"not {self.plan.nodes[name].reference}"  # type: ignore[attr-defined]
        return str(answer)


def _holding(system: str, *files: StateFile | None) -> StateFile | None:
    return next((f for f in files if f is not None and system in f.ids), None)


__all__ = ["Books", "Ended", "Posting"]
