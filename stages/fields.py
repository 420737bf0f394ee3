"""The fields that a visit adds to a batch, and that are taken off again when the system leaves.

All of them survive a restart, which is what makes a resumed visit continue to the last bit.
"""

from __future__ import annotations

import torch

from ..domain.batch import Batch
from ..domain.fields import declare_own_field

#: Fields of a visit in progress: not handed to the next stage.
VISIT_FIELDS: set[str] = {"reference", "reference_cell", "memory_grid"}


def visit_field(
    name: str,
    shape: tuple[int, ...] = (),
    *,
    per: str = "system",
    dtype: torch.dtype = torch.float64,
    unit: str = "",
    fill: float = 0.0,
) -> None:
    """Declare a field that belongs to a visit and is dropped at its end. A stage of a user's own calls this too."""
    declare_own_field(name, "atom" if per == "atom" else "system", shape, dtype=dtype, unit=unit, fill=fill)
    VISIT_FIELDS.add(name)


# Which stage's visit this is (a hash of its name); 0: none, the system is fresh.
visit_field("visit", dtype=torch.int64)
# Wall time of the visit until the last checkpoint; no part of what makes a visit go on to the last bit.
visit_field("visit_seconds", unit="s")
visit_field("timestep", unit="fs")
visit_field("temperature", unit="K")
visit_field("friction", unit="1/ps")
visit_field("noise_key", dtype=torch.int64)
# Atoms of the whole system (a rank's batch counts its own only), and degrees of freedom that carry temperature.
visit_field("natoms", dtype=torch.int64)
visit_field("dof", dtype=torch.int64)
# A ramp: from, to (K), over so many steps.
visit_field("ramp", (3,), unit="K, K, 1")
# Sums over samples: see stages.thermo.
visit_field("thermo_sums", (5,))
# FIRE: see stages.optimizers.fire.
visit_field("fire_velocities", (3,), per="atom", unit="sqrt(eV/amu)")
visit_field("fire", (4,))
visit_field("fire_dots", (6,))
visit_field("pressure_target", unit="GPa")

# What a frame has of its instant: see stages.reporter.Reporter.
declare_own_field("kinetic_energy", "system", unit="eV")
declare_own_field("kinetic_temperature", "system", unit="K")
declare_own_field("pressure", "system", unit="GPa")


def per_system(batch: Batch, value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """One value for every system of the batch."""
    return torch.full((len(batch),), value, dtype=dtype, device=batch.device)


def with_defaults(batch: Batch, **values: float) -> Batch:
    """The batch with these per-system float fields, and velocities (zero) and `natoms`, where it lacks them."""
    atoms = {}
    if "velocities" not in batch:
        atoms["velocities"] = torch.zeros_like(batch.positions)
    systems = {k: per_system(batch, v) for k, v in values.items() if k not in batch}
    if "natoms" not in batch:
        systems["natoms"] = torch.from_numpy(batch.counts.copy()).to(batch.device)
    return batch.with_fields(atoms=atoms, systems=systems)


def without_visit(batch: Batch) -> Batch:
    """The batch without what belongs to the visit."""
    return batch.without(VISIT_FIELDS)


__all__ = ["VISIT_FIELDS", "per_system", "visit_field", "with_defaults", "without_visit"]
