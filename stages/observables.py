"""Scalars of a system at the end of a visit: what summary.nc and a filter see."""

from __future__ import annotations

import numpy as np
import torch

from ..domain.batch import Batch
from ..domain.kernels import segment_max, segment_sum
from ..domain.units import AMU_KG
from .result_units import UNITS
from .thermo import SUMS, thermo_of

#: g/cm^3 per amu/Å^3
_DENSITY = AMU_KG * 1e3 / 1e-24


def final_results(batch: Batch) -> dict[str, np.ndarray]:
    """Results of these final states (whole systems), arrays of shape (systems,); units in `UNITS`.

    Energies and `max_force` are of the final state; `temperature`, `kinetic_energy` and `pressure` (kinetic part
    included, compression positive) too, and `*_mean` are means over the visit's samples (NaN without any).
    """
    now = thermo_of(batch)
    counts = batch.counts.astype(float)
    ptr = torch.from_numpy(batch.ptr).to(batch.device)
    # Sums of a system's own rows, in order: torch and NumPy may add up in another one beside other systems.
    lengths = _lengths(batch.cell).cpu().numpy()
    size = now.volume.cpu().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        mass = segment_sum(batch.masses, ptr).cpu().numpy()
        density = np.where(size > 0, mass / size * _DENSITY, np.nan)
        means = _means(batch)
    energy = now.potential_energy.cpu().numpy()
    return {
        "n_atoms": batch.counts.copy(),
        "steps": batch.step.cpu().numpy(),
        "energy": energy,
        "energy_per_atom": energy / counts,
        "kinetic_energy": now.kinetic_energy.cpu().numpy(),
        "temperature": now.temperature.cpu().numpy(),
        "temperature_mean": means["temperature"],
        "energy_mean": means["potential_energy"],
        "pressure": now.pressure.cpu().numpy(),
        "pressure_mean": means["pressure"],
        "volume": np.where(size > 0, size, np.nan),
        "density": density,
        "max_force": _max_force(batch, ptr),
        "cell_a": lengths[:, 0],
        "cell_b": lengths[:, 1],
        "cell_c": lengths[:, 2],
    }


def _means(batch: Batch) -> dict[str, np.ndarray]:
    if "thermo_sums" not in batch:
        return dict.fromkeys(SUMS, np.full(len(batch), np.nan))
    sums = batch.thermo_sums.cpu().numpy()
    return {name: sums[:, k] / np.where(sums[:, 0] > 0, sums[:, 0], np.nan) for k, name in enumerate(SUMS)}


def _max_force(batch: Batch, ptr: torch.Tensor) -> np.ndarray:
    if "forces" not in batch:
        return np.full(len(batch), np.nan)
    return segment_max(_lengths(batch.forces), ptr).cpu().numpy()


def _lengths(vectors: torch.Tensor) -> torch.Tensor:
    """(..., 3) -> (...)"""
    x, y, z = vectors.unbind(-1)
    return torch.sqrt(x * x + y * y + z * z)


__all__ = ["UNITS", "final_results"]
