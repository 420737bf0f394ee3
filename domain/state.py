"""What propagators and hooks see on one rank, and what a propagator is."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from .batch import Batch
from .mesh import Mesh


class State:
    """The owned atoms of all resident systems on one rank.

    Attributes:
        batch: owned atoms, system after system, ascending atom id in each; a system may have none here. Per-system
            fields are replicated: every rank changes them alike. `batch.forces` always belongs to `batch.positions`.
        mesh: this rank's mesh.
        ptr: int64, (systems + 1,): system s owns rows ptr[s]:ptr[s+1] here.
        system: int32, (n_owned,), system of each owned atom.
        steps: steps taken by the runner so far.
        converged: bool, (systems,), in an on_converge hook: which systems have just converged; None elsewhere.

    Change tensors in place; positions and cells only in `pre_update` (or a before-step hook). What identifies an
    atom (atom_id, numbers) and the fields `reference` and `reference_cell` are the runner's.
    """

    __slots__ = ("batch", "converged", "mesh", "ptr", "steps", "system")

    converged: np.ndarray | None

    def __init__(self, batch: Batch, mesh: Mesh, ptr: Tensor, system: Tensor, steps: int = 0) -> None:
        self.batch, self.mesh, self.ptr, self.system, self.steps = batch, mesh, ptr, system, steps
        self.converged = None

    @property
    def n_systems(self) -> int:
        return len(self.batch)

    @property
    def n_owned(self) -> int:
        return int(self.system.shape[0])

    def sum_atoms(self, values: Tensor) -> Tensor:
        """Sums over the atoms of each system, on all ranks: (n_owned,) or (n_owned, k) -> (systems,) or (systems, k).

        float64; the order of addition is fixed, all ranks get the same bits. Collective.
        """
        from .kernels import segment_sum

        return self.mesh.sum(segment_sum(values, self.ptr))

    def max_atoms(self, values: Tensor) -> Tensor:
        """As `sum_atoms`, the maximum; NaN wins; -inf for a system without atoms. Collective."""
        from .kernels import segment_max

        return self.mesh.max(segment_max(values, self.ptr))


class Propagator(Protocol):
    """An integrator or an optimizer: what moves atoms. Its memory lives in fields of the batch.

    One that judges by forces may also have `primed(state)`, collective: called when systems have come aboard and their
    forces are there, so that `converged` has something to judge before the first step.
    """

    @property
    def needs_stress(self) -> bool:
        """Whether stress must be computed in every step."""
        ...

    def prepare(self, batch: Batch) -> Batch:
        """Add own fields, with defaults, to whole systems that enter. Not collective, called on the lead."""
        ...

    def pre_update(self, state: State) -> None:
        """The first half of a step: moves positions, and cells if it will."""
        ...

    def post_update(self, state: State) -> None:
        """The rest, with the new forces (and stress, if needed)."""
        ...

    def converged(self, state: State) -> np.ndarray | None:
        """bool, (systems,), the same on every rank; None from what never converges."""
        ...


__all__ = ["Propagator", "State"]
