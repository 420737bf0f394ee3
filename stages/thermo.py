"""Kinetic energy, temperature and pressure of systems, and their running sums over a visit.

The kinetic part comes from five sums per system: mass, momentum, energy. Where momentum is conserved (fewer than 3N
degrees of freedom) the motion of the centre of mass carries no temperature and is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import warp as wp
from torch import Tensor

from ..domain.batch import Batch
from ..domain.kernels import launch, segment_sum
from ..domain.units import GPA, KB, KE, volume

if TYPE_CHECKING:
    from ..domain.runner import State

wp.set_module_options({"enable_backward": False})

_KE = wp.constant(wp.float64(KE))
_HALF = wp.constant(wp.float64(0.5))

#: Columns of the time series and their units.
COLUMNS = {
    "step": "1",
    "time": "fs",
    "potential_energy": "eV",
    "kinetic_energy": "eV",
    "temperature": "K",
    "pressure": "GPa",
    "volume": "angstrom^3",
}
#: What the columns of the field `thermo_sums` add up.
SUMS = ("samples", "potential_energy", "kinetic_energy", "temperature", "pressure")


@wp.kernel(enable_backward=False)
def _moments(
    velocities: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    masses: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    out: wp.array2d(dtype=wp.float64),  # type: ignore[valid-type]
):
    i = wp.tid()
    m = masses[i]
    v = velocities[i]
    out[i, 0] = m
    out[i, 1] = m * v[0]
    out[i, 2] = m * v[1]
    out[i, 3] = m * v[2]
    out[i, 4] = _HALF * _KE * m * wp.dot(v, v)


@dataclass
class Thermo:
    """Instantaneous values per system, float64 tensors of shape (systems,).

    potential_energy, kinetic_energy (without the centre of mass where momentum is conserved): eV; temperature: K, 0
    with no degree of freedom; pressure: GPa, compression positive, kinetic part included, NaN without a volume;
    volume: Å^3.
    """

    potential_energy: Tensor
    kinetic_energy: Tensor
    temperature: Tensor
    pressure: Tensor
    volume: Tensor

    def as_numpy(self) -> dict[str, np.ndarray]:
        return {f.name: getattr(self, f.name).cpu().numpy() for f in fields(self)}


def atom_moments(velocities: Tensor, masses: Tensor) -> Tensor:
    """Per atom: mass, momentum (amu Å/fs), kinetic energy (eV); float64 (n, 5)."""
    out = torch.empty((masses.shape[0], 5), dtype=torch.float64, device=masses.device)
    launch(_moments, masses.shape[0], velocities, masses, out)
    return out


def thermo(state: State) -> Thermo:
    """What the systems of a running batch show now; collective. Energy and stress must be of this step."""
    b: Any = state.batch
    return _thermo(b, state.sum_atoms(atom_moments(b.velocities, b.masses)), b.natoms)


def thermo_of(batch: Batch) -> Thermo:
    """The same of a whole batch on one rank."""
    if "velocities" not in batch:
        batch = batch.with_fields(atoms={"velocities": torch.zeros_like(batch.positions)})
    ptr = torch.from_numpy(batch.ptr).to(batch.device)
    moments = atom_moments(batch.velocities.contiguous(), batch.masses.contiguous())
    return _thermo(batch, segment_sum(moments, ptr), torch.from_numpy(batch.counts).to(batch.device))


def _thermo(b: Any, sums: Tensor, atoms: Tensor) -> Thermo:
    # Everything here is elementwise sums, products and quotients: no bit depends on the other systems.
    # int64 * number would be float32: torch's default dtype, not the other factor's.
    dof = (b.dof if "dof" in b else 3 * atoms).to(torch.float64)
    momentum2 = sums[:, 1] * sums[:, 1] + sums[:, 2] * sums[:, 2] + sums[:, 3] * sums[:, 3]
    drift = torch.where(dof < 3 * atoms, 0.5 * KE * momentum2 / sums[:, 0], torch.zeros_like(momentum2))
    kinetic = torch.clamp(sums[:, 4] - drift, min=0.0)
    carries = dof > 0
    temperature = torch.where(carries, 2.0 * kinetic / (torch.clamp(dof, min=1) * KB), torch.zeros_like(kinetic))
    size = volume(b.cell)
    nothing = torch.full_like(size, float("nan"))
    potential = b.energy if "energy" in b else nothing
    virial = nothing
    if "stress" in b:
        virial = (b.stress[:, 0, 0] + b.stress[:, 1, 1] + b.stress[:, 2, 2]) / -3.0
    pressure = torch.where(size > 0, (virial + 2.0 * kinetic / (3.0 * size)) / GPA, nothing)
    return Thermo(potential, kinetic, temperature, pressure, size)


def degrees_of_freedom(batch: Batch, *, conserves_momentum: bool) -> Tensor:
    """3N, or 3N - 3 where the total momentum is conserved; at least 0. int64 (systems,)."""
    counts = torch.from_numpy(batch.counts).to(batch.device)
    return torch.clamp(3 * counts - 3, min=0) if conserves_momentum else 3 * counts


def no_samples(batch: Batch) -> Tensor:
    return torch.zeros((len(batch), len(SUMS)), dtype=torch.float64, device=batch.device)


def add_samples(batch: Any, now: Thermo, due: np.ndarray) -> None:
    """Add this instant to the running sums of the systems that are due (bool, (systems,))."""
    row = torch.stack(
        [torch.ones_like(now.volume), now.potential_energy, now.kinetic_energy, now.temperature, now.pressure], dim=1
    )
    which = torch.from_numpy(due).to(row.device)[:, None]
    batch.thermo_sums.copy_(torch.where(which, batch.thermo_sums + row, batch.thermo_sums))


__all__ = ["COLUMNS", "SUMS", "Thermo", "add_samples", "degrees_of_freedom", "no_samples", "thermo", "thermo_of"]
