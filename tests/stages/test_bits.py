"""Bits depend on a system alone: not on its place in the arrays, on company, on threads, on torch's default dtype."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from stages.systems import argon, assert_same_bits, finish

import mattermill as mm
from mattermill.domain.batch import Batch

STAGES = {
    "relax": mm.Relax(fmax=1e-6, max_steps=9, thermo_every=2),
    "cell": mm.Relax(fmax=1e-6, smax=1e-6, cell="isotropic", max_steps=9, thermo_every=2),
    "heat": mm.Heat(start=20, stop=90, steps=9, dt=3.0, friction=5.0, thermo_every=2),
    "nvt": mm.Produce(mm.NVT(70), steps=9, dt=3.0, every=4, thermo_every=2),
    "nve": mm.Equilibrate(mm.NVE(), steps=9, dt=3.0, thermo_every=2),
}
MOST = 17


@functools.cache
def crowd() -> Batch:
    """Seventeen systems of 1 to 7 atoms, no two alike: every offset into every row of a vectorised loop occurs."""
    rng = np.random.default_rng(5)
    systems = []
    for k in range(MOST):
        n = 1 + k % 7
        repeat = (1, 1, n) if n < 5 else (1, n, 1)
        atoms = bulk(["Ar", "Kr", "Ne"][k % 3], "fcc", a=5.3 + 0.031 * k).repeat(repeat)
        atoms.positions += rng.normal(0, 0.04, (n, 3))
        atoms.set_velocities(rng.normal(0, 0.02, (n, 3)))
        systems.append(atoms)
    return Batch.from_atoms(systems, ids=[f"s{k}" for k in range(MOST)])


def told(report: Any) -> dict[str, tuple[Any, ...]]:
    """By id, all that is told of a system in numbers: results, and its rows of the series."""
    rows: dict[str, list[tuple[float, ...]]] = {i: [] for i in report.thermo_ids}
    for system, *values in zip(*report.thermo.values(), strict=True):
        rows[report.thermo_ids[system]].append(tuple(map(float, values)))
    return {o.id: (o.status, repr(o.results), repr(rows[o.id])) for o in report.outcomes}


@functools.cache
def alone(kind: str) -> tuple[Batch, dict[str, tuple[Any, ...]]]:
    reports = [finish(STAGES[kind], single) for single in crowd().split()]
    return Batch.concat([r.finished for r in reports]), {i: t for r in reports for i, t in told(r).items()}


@pytest.mark.parametrize("kind", STAGES)
def test_any_place_in_any_company(kind: str) -> None:
    """Batches of 1 to 17 systems, each in another order, give what each system gives alone."""
    states, expected = alone(kind)
    for n in range(1, MOST + 1) if kind in ("cell", "nvt") else (2, 3, 7, MOST):
        order = np.random.default_rng(n).permutation(MOST)[:n]
        report = finish(STAGES[kind], crowd().select(order))
        assert_same_bits(states.select(list(report.finished.ids)), report.finished)
        for system_id, found in told(report).items():
            assert found == expected[system_id]


@pytest.mark.parametrize("kind", STAGES)
def test_torch_s_default_dtype_does_not_matter(kind: str) -> None:
    """An integer tensor times a Python number has that dtype: whoever forgets it computes in float32."""
    states, expected = alone(kind)
    torch.set_default_dtype(torch.float64)
    try:
        report = finish(STAGES[kind], crowd())
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(states, report.finished)
    assert told(report) == expected


def test_threads_do_not_matter() -> None:
    """With 11,000 atoms torch shares its loops among threads (from 32,768 numbers on)."""
    atoms = argon(14)
    atoms.rotate(20, (1, 2, 3), rotate_cell=True)  # so that intake turns it
    before = torch.get_num_threads()
    outcomes = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            systems = Batch.from_atoms(atoms, ids=["large"])
            outcomes.append(finish(mm.Heat(start=50, stop=60, steps=3, thermo_every=1), systems))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(outcomes[0].finished, outcomes[1].finished)
    assert told(outcomes[0]) == told(outcomes[1])


def test_temperature_is_exact_to_float64() -> None:
    """T = 2 E / (n k_B), k_B as the SI defines it."""
    batch = Batch.from_atoms([moving(5), moving(1)], ids=["five", "one"])
    out = mm.simulate(mm.models.noble_gases(), batch, mm.NVT(0.0, friction=0.0), steps=1, dt=1e-9)
    from mattermill.stages.thermo import thermo_of

    now = thermo_of(out.without(["dof"]))
    for k, n in enumerate(out.counts):
        expected = 2.0 * float(now.kinetic_energy[k]) / (3 * int(n) * 1.380649e-23 / 1.602176634e-19)
        assert float(now.temperature[k]) == pytest.approx(expected, rel=1e-15)


def moving(n: int) -> Atoms:
    atoms = Atoms(f"Ar{n}", positions=np.arange(3.0 * n).reshape(n, 3) * 2.3)
    atoms.set_velocities(np.random.default_rng(n).normal(0, 0.02, (n, 3)))
    return atoms
