"""The stage: a value that says what is done to a system. Ours and a user's own derive from `Stage` alike."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from ..domain.batch import Batch
from .ensembles import require_count
from .fields import per_system
from .graph import Node
from .status import Status

if TYPE_CHECKING:
    from ..domain.models.base import Model
    from ..domain.runner import Propagator, State

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True, kw_only=True)
class Stage(Node):
    """What is done to a system: a frozen value to compare, print, pickle and store.

    A stage of your own subclasses this: `propagator` is required, the rest has defaults. It is used by `StageRun`:
    `check` and `prepare` on the lead when a system comes, `before_step` and `verdict` on every rank in every step,
    `results` on the lead when the system leaves.

    Args:
        name: unique within a recipe; the class's name in lower case by default. It seeds the noise.
        ranks: how many ranks work on one batch, or ``"auto"``.
        model: overrides the recipe's.
        thermo_every: steps between samples of energy, temperature and pressure; 0 takes none.
        velocities, forces: whether a trajectory keeps them beside the coordinates (see `frame_fields`).
    """

    name: str = ""
    ranks: int | Literal["auto"] = 1
    model: Model | None = None
    thermo_every: int = 10
    velocities: bool = False
    forces: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", type(self).__name__.lower())
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a stage's name must be letters, digits and . _ + - (it names files), letter or digit first; "
                f"is {self.name!r}"
            )
        if self.ranks != "auto":
            require_count(self.ranks, "ranks (a number or 'auto')")
        require_count(self.thermo_every, "thermo_every", least=0)
        for name, wanted in (("velocities", self.velocities), ("forces", self.forces)):
            if not isinstance(wanted, bool):
                raise ValueError(f"{name} must be True or False (does a trajectory keep them?), is {wanted!r}")

    # --- when a system comes: on the lead ------------------------------------------------------------------

    def check(self, batch: Batch) -> dict[str, str]:
        """Reasons, by id, why systems cannot enter this stage. What no stage can bear is checked elsewhere."""
        return {}

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """The batch at the start of a visit: step 0, and the parameters of this stage as fields, per system.

        A subclass calls this first and adds its own fields (declare them with `visit_field`).
        """
        from .thermo import degrees_of_freedom, no_samples

        return batch.with_fields(
            systems={
                "step": per_system(batch, 0, torch.int64),
                "visit": per_system(batch, visit_key(self.name), torch.int64),
                "natoms": torch.from_numpy(batch.counts.copy()).to(batch.device),
                "dof": degrees_of_freedom(batch, conserves_momentum=False),
                "thermo_sums": no_samples(batch),
                "visit_seconds": per_system(batch, 0.0),
            }
        )

    # --- while it runs: on every rank ------------------------------------------------------------------------

    def propagator(self) -> Propagator:
        """The integrator or optimizer that moves the atoms."""
        raise NotImplementedError(f"{type(self).__name__} must say which propagator moves its atoms")

    def before_step(self, state: State) -> None:
        """Before each step: change parameters of the systems as a function of their own `step`. Local, cheap."""

    def verdict(self, state: State, converged: np.ndarray | None) -> list[Status | None]:
        """After each step (and once at step 0): how each system's visit ends, or None while it goes on.

        The same on every rank: use only per-system fields and `converged`.
        """
        return [None] * len(state.batch)

    def reason(self, status: Status) -> str:
        """Why a visit ends with this status, for one that is not plain success."""
        return ""

    # --- when it leaves: on the lead ---------------------------------------------------------------------------

    def results(self, batch: Batch) -> dict[str, np.ndarray]:
        """Scalars of these final states, arrays of shape (systems,); units in `stages.result_units.UNITS`."""
        from .observables import final_results

        return final_results(batch)

    @property
    def frames_every(self) -> int:
        """Steps between frames of the trajectory; 0: no trajectory."""
        return 0

    @property
    def frame_fields(self) -> tuple[str, ...]:
        """Per-atom fields that a trajectory on disk keeps: positions, and what was asked for of velocities and forces.

        (A `MemoryReporter` keeps them all.)
        """
        return ("positions", *(["velocities"] if self.velocities else []), *(["forces"] if self.forces else []))


def visit_key(name: str) -> int:
    """What the field `visit` holds while a system is in the stage of this name; never 0."""
    from ..domain.rng import noise_key

    return noise_key(0, "", name, "visit") or 1


__all__ = ["Stage", "Status", "visit_key"]
