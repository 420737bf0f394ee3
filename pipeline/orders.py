"""What travels between the campaign and its ranks: small frozen values, never the data of a system."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .claims import Claim

if TYPE_CHECKING:
    from ..domain.batch import Batch
    from ..stages.reporter import Outcome


@dataclass(frozen=True)
class Post:
    """What a rank needs to take its place in a gang.

    Args:
        claim: whose; `rank` this one's number in it.
        stage: name of the node.
        meeting: host and port of the store on the lead; None in a gang of one.
        timeout: seconds that a peer may take to answer.
        max_atoms: room aboard.
    """

    claim: Claim
    rank: int
    stage: str
    meeting: tuple[str, int] | None
    timeout: float
    max_atoms: int | None

    @property
    def size(self) -> int:
        return len(self.claim.ranks)


@dataclass(frozen=True)
class Order:
    """One segment: its number within the claim, how long, whether systems were received, whether it ends in a
    checkpoint."""

    number: int
    seconds: float
    admits: bool
    checkpoint: bool = False


@dataclass(frozen=True)
class Arrival:
    """Some systems of one parcel: from `batch` where that came peer to peer, else from the file."""

    ids: tuple[str, ...]
    file: str
    digest: str | None
    batch: Batch | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class StateFile:
    """States that a lead wrote durably; the path is relative to the campaign's folder."""

    file: str
    digest: str
    ids: tuple[str, ...]
    steps: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What a lead tells at the end of a segment.

    Args:
        outcomes: visits that ended.
        finished, failed: where the states of those that go on, and the last good states of the failed, lie.
        verdicts: per finished system the answers of the filters behind the stage: True, False, or why there is none.
        checkpoint: states of those still aboard.
        aboard: systems that have not ended, with their steps so far.
        thermo_ids, thermo: time series, see `stages.reporter.SegmentReport`.
    """

    number: int
    outcomes: tuple[Outcome, ...] = ()
    finished: StateFile | None = None
    failed: StateFile | None = None
    verdicts: dict[str, dict[str, bool | str]] = field(default_factory=dict)
    checkpoint: StateFile | None = None
    aboard: dict[str, int] = field(default_factory=dict)
    atom_steps: int = 0
    seconds: float = 0.0
    thermo_ids: tuple[str, ...] = ()
    thermo: dict[str, Any] = field(default_factory=dict)


__all__ = ["Arrival", "Order", "Post", "Report", "StateFile"]
