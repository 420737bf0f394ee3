"""What a campaign tells while it runs: frozen events, for progress displays, logs, dashboards and tests."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CampaignStarted:
    """`stages` in the order of the graph; `waiting` visits that are queued per stage (more come as systems move on)."""

    name: str
    folder: str
    ranks: int
    stages: tuple[str, ...]
    waiting: dict[str, int] = field(default_factory=dict)
    dashboard: str = ""


@dataclass(frozen=True)
class GangFormed:
    stage: str
    claim: str
    ranks: tuple[str, ...]


@dataclass(frozen=True)
class GangEnded:
    """`reason` is empty when it had nothing left to do; `lost` names ranks that are gone."""

    stage: str
    claim: str
    reason: str = ""
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class SegmentEnded:
    """One segment of one gang: `atom_steps` in `seconds`, `aboard` systems after it, `steps` done by each so far."""

    stage: str
    claim: str
    atom_steps: int
    seconds: float
    aboard: int
    steps: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class VisitEnded:
    system: str
    stage: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class VisitQueued:
    system: str
    stage: str


@dataclass(frozen=True)
class StageEnded:
    """The stage has sent its sentinel: nothing waits, nothing is aboard, nothing more will come."""

    stage: str


@dataclass(frozen=True)
class CampaignEnded:
    """`outcome` is finished, stopped or failed."""

    outcome: str
    reason: str = ""


Event = CampaignStarted | GangFormed | GangEnded | SegmentEnded | VisitEnded | VisitQueued | StageEnded | CampaignEnded

__all__ = [
    "CampaignEnded",
    "CampaignStarted",
    "Event",
    "GangEnded",
    "GangFormed",
    "SegmentEnded",
    "StageEnded",
    "VisitEnded",
    "VisitQueued",
]
