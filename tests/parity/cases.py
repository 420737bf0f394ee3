"""Systems of every shape, for the parity tests: what is computed on several ranks must equal one rank's.

Everything here is small and hot enough to make atoms cross cuts and wrap around cells within 100 steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk

import mattermill as mm
from mattermill.domain.batch import Batch

CUTOFF, SKIN = 6.0, 0.6
REACH = CUTOFF + SKIN


def _shaken(atoms: Atoms, seed: int, speed: float = 4e-3) -> Atoms:
    # 4e-3 Å/fs is about 200 K for argon.
    rng = np.random.default_rng(seed)
    atoms.positions += rng.normal(scale=0.08, size=(len(atoms), 3))
    numbers = atoms.numbers.copy()
    numbers[rng.random(len(atoms)) < 0.3] = 36
    atoms.numbers = numbers
    atoms.set_masses()
    velocities = rng.normal(scale=speed, size=(len(atoms), 3))
    # A drift, so that atoms cross cuts and faces all the time.
    atoms.set_velocities((velocities + np.array([0.012, -0.007, 0.005])) / 0.09822694788464063)
    return atoms


def cubic() -> Atoms:
    return _shaken(bulk("Ar", "fcc", 5.5, cubic=True).repeat((5, 4, 3)), 1)


def triclinic() -> Atoms:
    """60° between all vectors: the primitive cell, repeated."""
    return _shaken(bulk("Ar", "fcc", 5.5).repeat((7, 6, 5)), 2)


def skewed() -> Atoms:
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((4, 4, 4))
    cell = atoms.cell.array
    # The same lattice in a strongly skewed cell.
    atoms.set_cell([cell[0], cell[1] + cell[0], cell[2] - cell[1]])
    return _shaken(atoms, 3)


def slab() -> Atoms:
    """Most of the cell is vacuum, and c is not periodic."""
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((4, 4, 2))
    atoms.center(vacuum=12.0, axis=2)
    atoms.pbc = (True, True, False)
    return _shaken(atoms, 4)


def wrapped_slab() -> Atoms:
    """Periodic along all axes, 60 % vacuum, the slab lies across the face of the cell."""
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((3, 3, 3))
    atoms.center(vacuum=11.0, axis=2)
    atoms.positions[:, 2] -= 17.0
    atoms.pbc = True
    return _shaken(atoms, 5)


def wire() -> Atoms:
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((2, 2, 6))
    atoms.pbc = (False, False, True)
    return _shaken(atoms, 6)


def cluster() -> Atoms:
    """No cell at all."""
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((4, 3, 3))
    atoms.pbc = False
    atoms.cell[:] = 0.0
    return _shaken(atoms, 7)


def thin() -> Atoms:
    """Barely two reaches thick: 13.3 Å of 13.2 Å."""
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((2, 2, 3))
    atoms.set_cell(np.diag([2.01 * REACH, 2.02 * REACH, 16.5]), scale_atoms=True)
    return _shaken(atoms, 8)


def tiny() -> Atoms:
    """Smaller than the cutoff: stays whole, sees its own images."""
    return _shaken(bulk("Ar", "fcc", 5.4, cubic=True), 9)


def far() -> Atoms:
    """Atoms up to three boxes away from the cell, and some exactly on faces, edges and corners."""
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((4, 4, 3))
    exact = atoms.positions[:8].copy()
    atoms = _shaken(atoms, 10)
    atoms.positions[:8] = exact
    length = atoms.cell.lengths()
    assert np.count_nonzero(np.abs(exact) < 1e-12) > 8
    rng = np.random.default_rng(10)
    atoms.positions += rng.integers(-3, 4, size=(len(atoms), 3)) * length
    return atoms


def short() -> Atoms:
    """A small wire, to keep others company."""
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((1, 3, 1))
    atoms.pbc = (False, True, False)
    return _shaken(atoms, 12)


def low() -> Atoms:
    """A sheet one cell high, likewise."""
    atoms = bulk("Ar", "fcc", 5.5, cubic=True).repeat((2, 2, 1))
    atoms.center(vacuum=9.0, axis=2)
    atoms.pbc = (True, True, False)
    return _shaken(atoms, 13)


def few() -> Atoms:
    """Five atoms: some of four ranks own none."""
    atoms = Atoms("Ar5", [[0, 0, 0], [3.8, 0, 0], [0, 3.8, 0.2], [3.7, 3.9, 0], [2, 2, 3.1]], pbc=False)
    return _shaken(atoms, 11)


SHAPES = {
    f.__name__: f
    for f in (cubic, triclinic, skewed, slab, wrapped_slab, wire, cluster, thin, tiny, far, few, short, low)
}


def model() -> Any:
    return mm.models.noble_gases(cutoff=CUTOFF, truncation="switch")


def batch(names: list[str]) -> Batch:
    """These shapes as one batch, with fields of every kind of a user's own."""
    return with_fields({name: SHAPES[name]() for name in names})


def with_fields(structures: Mapping[str, Atoms]) -> Batch:
    """Structures by id as a batch, with fields of every kind of a user's own, and those of all ensembles."""
    for atoms in structures.values():
        n = len(atoms)
        atoms.set_array("charge", np.linspace(-1.0, 1.0, n))
        atoms.set_array("tag3", np.arange(3 * n).reshape(n, 3))
    whole = Batch.from_atoms(list(structures.values()), list(structures))
    k = len(structures)
    return whole.with_fields(
        systems={
            "timestep": torch.full((k,), 4.0, dtype=torch.float64),
            "temperature": torch.linspace(50.0, 300.0, k, dtype=torch.float64),
            "friction": torch.full((k,), 2.0, dtype=torch.float64),
            "noise_key": torch.arange(k, dtype=torch.int64) * 7919 + 17,
            "label": torch.arange(k, dtype=torch.int32) + 5,
        }
    )


def propagator(name: str) -> Any:
    from mattermill.stages.integrators.langevin import Langevin
    from mattermill.stages.integrators.verlet import VelocityVerlet

    return {"nve": VelocityVerlet, "langevin": Langevin}[name]()


#: What a difference is measured against where a field's own values are smaller: 1 eV/Å, 1 GPa, 1e-3 Å/fs, else 1.
SCALES = {"forces": 1.0, "stress": 1.0 / 160.21766208, "velocities": 1e-3}


def difference(got: torch.Tensor, expected: torch.Tensor, name: str) -> float:
    """max|difference| / max(max|expected|, scale); NaN must stand in the same places."""
    a, b = got.numpy(), expected.numpy()
    assert a.shape == b.shape, name
    assert np.array_equal(np.isnan(a), np.isnan(b)), name
    a, b = np.nan_to_num(a), np.nan_to_num(b)
    if not b.size:
        return 0.0
    return float(np.abs(a - b).max() / max(np.abs(b).max(), SCALES.get(name, 1.0)))


def worst(got: Batch, expected: Batch, name: str) -> float:
    """The largest `difference` of a field in any system, each measured by its own values."""
    assert got.ids == expected.ids
    return max(difference(getattr(a, name), getattr(b, name), name) for a, b in zip(got, expected, strict=True))


COMPARED = ("positions", "velocities", "forces", "energy", "energies", "stress")


def differences(got: Batch, expected: Batch) -> dict[str, float]:
    """Of every compared field, see `worst`; everything else must be equal."""
    assert got.ids == expected.ids
    assert np.array_equal(got.counts, expected.counts)
    for name in ("atom_id", "numbers", "masses", "charge", "tag3", "label", "step", "pbc", "noise_key"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    return {name: worst(got, expected, name) for name in COMPARED}


def runner_of(mesh, hooks=(), mover=None, potential=None, **kwargs):
    """A runner as the tests like it: a small skin, and systems divided early."""
    kwargs = {"skin": SKIN, "split_atoms": 30, **kwargs}
    return mm.DomainParallel(potential or model(), mover or propagator("nve"), mesh, hooks=hooks, **kwargs)
