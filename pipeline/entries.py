"""What the ledger is told, and what it tells: rows as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SystemRow:
    """A system at intake; with a `failure` it never enters a stage."""

    id: str
    n_atoms: int
    formula: str = ""
    source: str = ""
    failure: str | None = None


@dataclass(frozen=True)
class Queued:
    """A system waits for a stage; its state lies in `file` (relative to the folder)."""

    system: str
    stage: str
    n_atoms: int = 0
    file: str | None = None
    digest: str | None = None
    parent: str = ""


@dataclass(frozen=True)
class Started:
    system: str
    stage: str
    claim: str = ""


@dataclass(frozen=True)
class Checkpointed:
    """A running system's state lies in `file`; the checkpoint before it is kept."""

    system: str
    stage: str
    file: str
    digest: str
    step: int


@dataclass(frozen=True)
class Finished:
    """A visit has ended. `claim`, where given, must be the one that runs it: a cut-off gang's word is refused."""

    system: str
    stage: str
    status: str
    reason: str = ""
    steps: int = 0
    seconds: float = 0.0
    results: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    digest: str | None = None
    next_stages: tuple[str, ...] = ()
    claim: str | None = None


@dataclass(frozen=True)
class Returned:
    """A running system waits again; `died` counts a death of its gang."""

    system: str
    stage: str
    died: bool = False


Entry = Queued | Started | Checkpointed | Finished | Returned


@dataclass(frozen=True)
class Recorded:
    """What `Ledger.record` did not take: (system, stage) of visits that had ended already, and of stale claims."""

    repeated: tuple[tuple[str, str], ...] = ()
    stale: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Visit:
    """A row of the table `visits`; `status` is None while it is pending or running."""

    system: str
    stage: str
    parent: str
    status: str | None
    reason: str
    attempts: int
    deaths: int
    steps: int
    n_atoms: int
    claim: str | None
    queued: str
    started: str | None
    ended: str | None
    seconds: float
    input_file: str | None
    input_digest: str | None
    state_file: str | None
    state_digest: str | None
    results: dict[str, Any]

    @property
    def is_running(self) -> bool:
        return self.status is None and self.claim is not None


__all__ = [
    "Checkpointed",
    "Entry",
    "Finished",
    "Queued",
    "Recorded",
    "Returned",
    "Started",
    "SystemRow",
    "Visit",
]
