"""Velocities at the start of a visit: Maxwell-Boltzmann, counter-based, momentum removed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..domain.batch import Batch
from ..domain.kernels import segment_sum
from ..domain.units import ACC, KB


def at_rest(batch: Batch) -> Tensor:
    """Which systems have no velocities, or none but zeros: bool (systems,)."""
    if "velocities" not in batch:
        return torch.ones(len(batch), dtype=torch.bool)
    ptr = batch.ptr
    moving = [bool((batch.velocities[ptr[k] : ptr[k + 1]] != 0).any()) for k in range(len(batch))]
    return ~torch.tensor(moving, dtype=torch.bool)


def with_velocities(
    batch: Batch, temperature: float = 0.0, which: Tensor | None = None, keys: Tensor | None = None
) -> Batch:
    """The batch with Maxwell-Boltzmann velocities at `temperature` (K) for the systems in `which`, the rest kept.

    Drawn from (key, atom id, step 0): the same for any number of ranks, order of atoms or company. The total momentum
    is removed, nothing is rescaled: the kinetic energy fluctuates as it does in nature, with 3N - 3 degrees of
    freedom. Without keys only the field is added where it lacks.
    """
    if "velocities" not in batch:
        batch = batch.with_fields(atoms={"velocities": torch.zeros_like(batch.positions)})
    if keys is None or which is None:
        return batch
    drawn = _draw(batch, temperature, keys)
    chosen = torch.from_numpy(np.repeat(which.numpy(), batch.counts)).to(batch.device)[:, None]
    return batch.with_fields(atoms={"velocities": torch.where(chosen, drawn, batch.velocities)})


def _draw(batch: Batch, temperature: float, keys: Tensor) -> Tensor:
    from ..domain.rng import gaussians

    system = torch.from_numpy(batch.system_of_atom()).to(batch.device)
    normal = gaussians(keys, system.to(torch.int32), batch.atom_id.contiguous(), torch.zeros_like(keys))
    mass = batch.masses[:, None]
    velocities = normal * torch.sqrt(KB * ACC * temperature / mass)
    ptr = torch.from_numpy(batch.ptr).to(batch.device)
    # In the order of the atoms, so that the bits of one system depend on nothing else.
    drift = segment_sum(velocities * mass, ptr) / segment_sum(batch.masses.reshape(-1, 1), ptr)
    return velocities - drift[system]


__all__ = ["at_rest", "with_velocities"]
