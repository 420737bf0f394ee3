"""What a stage run tells about: outcomes, segment reports, and the protocol of whoever writes frames to disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..domain.batch import Batch
from .status import Status


@dataclass(frozen=True)
class Outcome:
    """How one visit ended.

    `results` are plain floats and ints by name (units: `stages.result_units.UNITS`), empty for a failed system.
    `seconds` is the system's share of the wall time it spent aboard, by its share of the atoms, over the whole visit:
    also what it spent before a checkpoint it was resumed from.
    """

    id: str
    status: Status
    reason: str = ""
    steps: int = 0
    n_atoms: int = 0
    results: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class SegmentReport:
    """What happened in one call of `StageRun.advance`. Complete on the lead; other ranks see counts and ids only.

    finished: final states of the systems that left with a status that goes on, visit memory removed. In the order of
        `outcomes` (which has the failed ones too).
    failed: last good states of the failed systems.
    resident: ids still aboard. waiting: ids in the inbox that had no room yet.
    progress: steps done so far by each resident system.
    atom_steps: atoms moved times steps, all ranks together. steps: steps of the loop.
    thermo: columns of the time series sampled in this segment (`stages.thermo.COLUMNS`), one row per sample, plus
        `system`: the index into `thermo_ids`.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    finished: Batch = field(default_factory=Batch.empty)
    failed: Batch = field(default_factory=Batch.empty)
    resident: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    progress: dict[str, int] = field(default_factory=dict)
    atom_steps: int = 0
    steps: int = 0
    seconds: float = 0.0
    frames: int = 0
    thermo_ids: tuple[str, ...] = ()
    thermo: dict[str, Any] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        """Whether nothing is aboard and nothing waits."""
        return not self.resident and not self.waiting


@runtime_checkable
class Reporter(Protocol):
    """Whoever keeps trajectories. Called on the lead only, between steps.

    A frame batch has the usual fields (positions unwrapped, velocities, forces, cell, numbers, atom_id, step, energy,
    stress) and, per system, `kinetic_energy` (eV), `kinetic_temperature` (K) and `pressure` (GPa, compression positive,
    kinetic part included) at that instant, `timestep` (fs).
    """

    def open(self, system_id: str, single: Batch, step: int) -> None:
        """A system comes aboard: with step 0 a new trajectory, else one that has frames up to and including `step`."""

    def frame(self, batch: Batch) -> None:
        """These systems (one or several) are at a frame step: `batch.step` says at which."""

    def close(self, system_id: str, single: Batch) -> None:
        """The system left the stage; `single` is its final state."""


class NoReporter:
    """Keeps nothing."""

    def open(self, system_id: str, single: Batch, step: int) -> None:
        pass

    def frame(self, batch: Batch) -> None:
        pass

    def close(self, system_id: str, single: Batch) -> None:
        pass


class MemoryReporter:
    """Keeps every frame in memory: for notebooks and tests. `frames[id]` is a list of one-system batches."""

    def __init__(self) -> None:
        self.frames: dict[str, list[Batch]] = {}
        self.closed: list[str] = []

    def open(self, system_id: str, single: Batch, step: int) -> None:
        kept = self.frames.setdefault(system_id, [])
        kept[:] = [f for f in kept if int(f.step[0]) <= step and step > 0]

    def frame(self, batch: Batch) -> None:
        for single in batch.clone().split():
            self.frames.setdefault(single.ids[0], []).append(single)

    def close(self, system_id: str, single: Batch) -> None:
        self.closed.append(system_id)

    def steps(self, system_id: str) -> Sequence[int]:
        return [int(f.step[0]) for f in self.frames.get(system_id, [])]


__all__ = ["MemoryReporter", "NoReporter", "Outcome", "Reporter", "SegmentReport"]
