"""Relax: to the nearest minimum of the energy, with or without the cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from ..domain.batch import Batch
from ..domain.units import volume
from .ensembles import require, require_count
from .fields import per_system
from .stage import Stage
from .status import Status

if TYPE_CHECKING:
    from ..domain.runner import Propagator, State

CELLS = ("fixed", "isotropic")


@dataclass(frozen=True)
class Relax(Stage):
    """FIRE (Bitzek 2006) until forces, and the pressure where the cell moves, are small.

    Ends as `converged`, or as `unconverged` at `max_steps`. The relaxed system is at rest: its velocities are zero.

    Args:
        fmax: eV/Å; the largest force on any atom must be below.
        cell: ``"fixed"``, or ``"isotropic"``: the cell scales, its shape is kept. (``"full"`` is to come.)
        smax: GPa; with a moving cell, the deviation of the pressure from `pressure` must be below. 0.01 GPa leaves soft
            crystals such as the noble gases (bulk moduli of 1 to 3 GPa) within 1 % of the volume; hard ones far closer.
            A crystal stretched until its atoms hardly feel each other meets any such criterion: look at its energy.
        pressure: GPa, compression positive; only with a moving cell.
        max_steps: after these the system leaves as `unconverged`.
        every: steps between frames of a trajectory; 0: none.
    """

    fmax: float = 0.01
    cell: Literal["fixed", "isotropic"] = "fixed"
    smax: float = 0.01
    pressure: float = 0.0
    max_steps: int = 2_000
    every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.fmax, "fmax", "eV/Å", positive=True)
        require(self.smax, "smax", "GPa", positive=True)
        require_count(self.max_steps, "max_steps")
        require_count(self.every, "every", least=0)
        if self.cell == "full":
            raise NotImplementedError("cell='full' is not implemented yet: use cell='isotropic' or cell='fixed'")
        if self.cell not in CELLS:
            raise ValueError(f"cell must be one of {', '.join(CELLS)}, is {self.cell!r}")
        if not isinstance(self.pressure, int | float) or not np.isfinite(self.pressure):
            raise ValueError(f"pressure must be a number (GPa), is {self.pressure!r}")
        if self.pressure and self.cell == "fixed":
            raise ValueError(f"pressure={self.pressure} GPa needs a cell that moves: cell='isotropic'")

    @property
    def frames_every(self) -> int:
        return self.every

    def check(self, batch: Batch) -> dict[str, str]:
        if self.cell == "fixed":
            return {}
        reasons = {}
        sizes, periodic = volume(batch.cell).tolist(), batch.pbc.all(dim=1).tolist()
        for system_id, size, bound in zip(batch.ids, sizes, periodic, strict=True):
            if not size > 0:
                reasons[system_id] = f"relaxing the cell ({self.cell}) needs one: its volume is {size:g} Å^3"
            elif not bound:
                reasons[system_id] = f"relaxing the cell ({self.cell}) needs three periodic axes"
        return reasons

    def prepare(self, batch: Batch, seed: int) -> Batch:
        batch = super().prepare(batch, seed)
        return batch.with_fields(
            atoms={"velocities": torch.zeros_like(batch.positions)},
            systems={"pressure_target": per_system(batch, float(self.pressure))},
        )

    def propagator(self) -> Propagator:
        from .optimizers.fire import Fire

        return Fire(fmax=self.fmax, smax=self.smax, moves_cell=self.cell == "isotropic")

    def reason(self, status: Status) -> str:
        if status is not Status.unconverged:
            return ""
        pressure = (
            "" if self.cell == "fixed" else f" and the pressure not within {self.smax:g} GPa of {self.pressure:g}"
        )
        return f"forces not below {self.fmax:g} eV/Å{pressure} after {self.max_steps} steps"

    def verdict(self, state: State, converged: np.ndarray | None) -> list[Status | None]:
        assert converged is not None
        spent = (state.batch.step >= self.max_steps).tolist()
        verdicts: list[Status | None] = []
        for there, late in zip(converged.tolist(), spent, strict=True):
            verdicts.append(Status.converged if there else Status.unconverged if late else None)
        return verdicts


__all__ = ["Relax"]
