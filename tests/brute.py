"""Lennard-Jones by brute force: every pair, every image within the cutoff, in NumPy; nothing of the project's own.

Also what the tests of the cases share: the model it belongs to, and a run whose every step is looked at.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import torch
from ase import Atoms

import mattermill as mm
from mattermill.domain.batch import Batch

EPSILON = {18: 0.0104, 36: 0.0140}
SIGMA = {18: 3.40, 36: 3.65}


def model(cutoff: float = 5.0) -> Any:
    """Shifted at the cutoff: forces jump there, so a pair that is missed, or seen too far away, shows at once."""
    names = {18: "Ar", 36: "Kr"}
    return mm.models.LennardJones(
        epsilon={names[z]: e for z, e in EPSILON.items()},
        sigma={names[z]: s for z, s in SIGMA.items()},
        cutoff=cutoff,
        truncation="shift",
    )


def images(cell: np.ndarray, pbc: np.ndarray, reach: float) -> np.ndarray:
    """All lattice vectors, Å, that may bring two points of one cell within reach of each other; the zero one too."""
    box = np.array(cell, dtype=float)
    ranges = []
    for axis in range(3):
        if not pbc[axis]:
            ranges.append((0,))
            continue
        # Thickness of the cell along this axis, whatever the other vectors do.
        others = [box[k] for k in range(3) if k != axis and pbc[k]]
        basis = np.linalg.qr(np.array(others).T)[0].T if others else np.zeros((0, 3))
        normal = box[axis] - basis.T @ (basis @ box[axis])
        # Points of one cell differ by less than one fraction.
        most = int(np.floor(reach / np.linalg.norm(normal))) + 1
        ranges.append(tuple(range(-most, most + 1)))
    periodic = np.array(pbc, dtype=float)
    return np.array([(np.array(n) * periodic) @ box for n in itertools.product(*ranges)])


def brute(
    positions: np.ndarray, numbers: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float
) -> dict[str, Any]:
    """Energy (eV), energies, forces and the virial sum of r f over pairs (eV); positions may lie anywhere."""
    x = np.array(positions, dtype=float)
    pbc = np.array(pbc, dtype=bool)
    if pbc.any():
        # Into one cell: fractions along the periodic vectors (least squares leaves the rest alone).
        vectors = np.array(cell, dtype=float)[pbc]
        x = x - np.floor(np.linalg.lstsq(vectors.T, x.T, rcond=None)[0].T) @ vectors
    epsilons, sigmas = np.array([[EPSILON[int(z)], SIGMA[int(z)]] for z in numbers]).reshape(-1, 2).T
    energies, forces, virial = np.zeros(len(x)), np.zeros((len(x), 3)), np.zeros((3, 3))
    for shift in images(cell, pbc, cutoff):
        d = x[None, :] + shift - x[:, None]
        near = (d**2).sum(-1) < cutoff**2
        if not shift.any():
            np.fill_diagonal(near, False)
        i, j = np.nonzero(near)
        d = d[i, j]
        r2 = (d**2).sum(-1)
        epsilon, sigma = np.sqrt(epsilons[i] * epsilons[j]), 0.5 * (sigmas[i] + sigmas[j])
        six = (sigma**2 / r2) ** 3
        last = (sigma / cutoff) ** 6
        np.add.at(energies, i, 2 * epsilon * (six**2 - six - last**2 + last))
        pull = (24 * epsilon * (2 * six**2 - six) / r2)[:, None] * d  # on the neighbour, away from here
        np.subtract.at(forces, i, pull)
        virial += 0.5 * d.T @ pull
    return {"energy": energies.sum(), "energies": energies, "forces": forces, "virial": virial}


def brute_of(single: Batch, cutoff: float) -> dict[str, Any]:
    """`brute` of one system; the stress too, where there is a volume."""
    cell, pbc = single.cell[0].numpy(), single.pbc[0].numpy()
    found = brute(single.positions.numpy(), single.numbers.numpy(), cell, pbc, cutoff)
    size = abs(np.linalg.det(cell))
    return found | ({"stress": -found["virial"] / size} if size > 0 else {})


def error_of(single: Batch, cutoff: float) -> dict[str, float]:
    """Largest difference between what a batch of one system holds and brute force, relative to 1 eV, eV/Å or GPa."""
    expected = brute_of(single, cutoff)
    errors = {}
    for name in ("energy", "energies", "forces", "stress"):
        if name in expected:
            got = getattr(single, name).numpy().reshape(np.shape(expected[name]) or ())
            scale = 1.0 / 160.21766208 if name == "stress" else 1.0
            errors[name] = float(np.abs(got - expected[name]).max() / max(np.abs(expected[name]).max(), scale))
    return errors


def assert_exact(batch: Batch, cutoff: float, tolerance: float = 1e-10) -> None:
    """Energy, forces and stress of every system are those of brute force."""
    for single in batch:
        errors = error_of(single, cutoff)
        assert max(errors.values()) < tolerance, (single.ids[0], errors)


def crystal(shape: tuple[int, int, int], spacing: float = 4.0, seed: int = 0, shake: float = 0.3) -> Atoms:
    """A simple cubic crystal of Ar and Kr, disturbed: nothing in it is symmetric."""
    rng = np.random.default_rng(seed)
    sites = np.array(list(itertools.product(*map(range, shape)))) * spacing
    numbers = rng.choice([18, 36], len(sites))
    positions = sites + rng.uniform(-shake, shake, sites.shape)
    return Atoms(numbers, positions, cell=np.array(shape) * spacing, pbc=True)


def argon(shape: tuple[int, int, int], **kwargs: Any) -> Atoms:
    """`crystal` of one species, for ASE's LennardJones."""
    atoms = crystal(shape, **kwargs)
    atoms.numbers[:] = 18
    atoms.set_masses()
    return atoms


def ase_of(single: Batch, cutoff: float = 5.0) -> Atoms:
    """A system as ASE sees it, under ASE's own Lennard-Jones (one species)."""
    from ase.calculators.lj import LennardJones

    atoms = single.to_atoms()[0]
    assert set(atoms.numbers) == {18}
    atoms.calc = LennardJones(sigma=SIGMA[18], epsilon=EPSILON[18], rc=cutoff, smooth=False)
    return atoms


def start(atoms: Atoms, name: str = "system", speed: float = 0.0, dt: float = 1.0, seed: int = 1) -> Batch:
    """Ready for a bare propagator: a time step and, if `speed` (Å/fs) is given, velocities."""
    batch = Batch.from_atoms(atoms, [name])
    velocities = np.random.default_rng(seed).normal(scale=speed or 1.0, size=(len(atoms), 3)) * bool(speed)
    return batch.with_fields(
        atoms={"velocities": torch.from_numpy(velocities)},
        systems={"timestep": torch.full((1,), dt, dtype=torch.float64)},
    )


def watched(
    mesh: Any,
    batch: Batch,
    steps: int,
    *,
    cutoff: float = 5.0,
    look: int = 1,
    change: Any = None,
    propagator: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Run on a mesh and look at every `look`-th step (and at step 0).

    Args:
        change: ``change(step, state)``, called before each step.
        options: for `DomainParallel`.

    Returns:
        frames: whole batches with energy, forces and stress, on the lead. owned: per frame this rank's atom ids by
        system. grids: per frame. rebuilds: at each step so far. log: what was logged on this rank.
    """
    from mattermill.stages.integrators.verlet import VelocityVerlet

    options = {"split_atoms": 1, "skin": 0.8, **options}
    seen: dict[str, Any] = {"frames": [], "owned": [], "grids": [], "rebuilds": []}
    with (
        Listening() as log,
        mm.DomainParallel(model(cutoff), propagator or VelocityVerlet(), mesh, **options) as runner,
    ):
        runner.partition(batch if runner.mesh.is_lead else None)
        for step in range(steps + 1):
            if step:
                if change is not None:
                    change(step, runner.state)
                if step % look == 0:
                    runner.want(energy=True, stress=True)
                runner.step()
            if step % look == 0:
                seen["frames"].append(runner.gather())
                own = runner.state.batch
                seen["owned"].append({i: s.atom_id.tolist() for i, s in zip(own.ids, own, strict=True)})
                seen["grids"].append(runner.grids)
            seen["rebuilds"].append(runner.rebuilds)
        seen["broken"] = runner.broken
    seen["log"] = log.messages
    return seen


def every_rank(ranks: Any, size: int, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """`watched` on so many ranks of the pool; one is this process."""
    found: list[dict[str, Any]] = (
        ranks.run(watched, size, *args, **kwargs) if size > 1 else [watched(None, *args, **kwargs)]
    )
    return found


def assert_all_owned(results: list[dict[str, Any]], batch: Batch) -> None:
    """Of every system each atom stands on one rank, in every frame."""
    for frame in range(len(results[0]["owned"])):
        for single in batch:
            name = single.ids[0]
            ids = [a for r in results for a in r["owned"][frame].get(name, [])]
            assert sorted(ids) == sorted(single.atom_id.tolist()), (frame, name)


class Listening(logging.Handler):
    """What the package logs within a `with`."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname}: {record.getMessage()}")

    def __enter__(self) -> Listening:
        logger = logging.getLogger("mattermill")
        self._level = logger.level
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *exc: object) -> None:
        logger = logging.getLogger("mattermill")
        logger.removeHandler(self)
        logger.setLevel(self._level)
