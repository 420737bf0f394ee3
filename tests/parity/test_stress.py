"""Stress and pressure do not depend on the number of ranks, and the virial is the derivative that it should be."""

from __future__ import annotations

import functools

import pytest
import torch
from parity import cases, shapes, table

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.stages.integrators.still import Still
from mattermill.stages.integrators.verlet import VelocityVerlet
from mattermill.stages.thermo import degrees_of_freedom, thermo

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
KINDS = tuple(table.MODELS)


def _runner(mesh, kind, propagator, grid=None):
    kwargs = {"strategy": kind.strategy, "skin": kind.skin, "grid": grid, "split_atoms": 8}
    return mm.DomainParallel(kind.make(torch.float64), propagator, mesh, **kwargs)


# --- pressure, step by step ------------------------------------------------------------------------------------------


def pressures(mesh, name):
    """Stress, kinetic energy, temperature and pressure of three systems after each of some steps."""
    kind = table.MODELS[name]
    batch = cases.with_fields({shape: kind.shapes[shape](kind.reach) for shape in ("triclinic", "slab", "tiny")})
    batch = batch.with_fields(systems={"dof": degrees_of_freedom(batch, conserves_momentum=True)})
    seen = []
    grid = None if mesh is None else {2: (2, 1, 1), 3: (3, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}[mesh.size]
    with _runner(mesh, kind, VelocityVerlet(), grid) as runner:
        runner.partition(batch if runner.mesh.is_lead else None)
        for _ in range(12):
            runner.want(energy=True, stress=True)
            runner.step()
            now = thermo(runner.state)
            seen.append(
                {
                    "stress": runner.state.batch.stress.clone(),
                    "pressure": now.pressure,
                    "temperature": now.temperature,
                    "kinetic_energy": now.kinetic_energy,
                }
            )
        assert mesh is None or runner.grids["triclinic"] != (1, 1, 1)
    return seen


@functools.cache
def _alone(name):
    return pressures(None, name)


@pytest.mark.parametrize("size", [2, SLOW(3), SLOW(4), 8])
@pytest.mark.parametrize("name", KINDS)
def test_pressure_on_any_number_of_ranks(ranks, name, size):
    expected = _alone(name)
    # Pressures of some GPa, both parts of which matter.
    assert all(float(now["kinetic_energy"].min()) > 0 for now in expected)
    for seen in ranks.run(pressures, size, name):
        for now, then in zip(seen, expected, strict=True):
            for field, value in now.items():
                assert cases.difference(value, then[field], field) < 1e-9, field


# --- the virial of a split system is -dE/d(strain) -------------------------------------------------------------------

STEP = 1e-4


def strained(batch, strain):
    """The batch with cell and positions multiplied by 1 + strain."""
    m = torch.eye(3, dtype=torch.float64) + strain
    return Batch(
        batch.ids,
        batch.counts,
        batch.atoms | {"positions": batch.positions @ m},
        batch.systems | {"cell": batch.cell @ m},
        batch.info,
    )


def slopes(mesh, name, shape, grid):
    """-stress * volume and dE/d(strain) by central differences of order 4, both (3, 3), of a split system."""
    kind = table.MODELS[name]
    batch = cases.with_fields({shape: kind.shapes[shape](kind.reach)})

    def energy_and_stress(strain):
        with _runner(mesh, kind, Still(), grid) as runner:
            runner.partition(strained(batch, strain) if runner.mesh.is_lead else None)
            runner.energies()
            return float(runner.state.batch.energy), runner.state.batch.stress[0].clone(), runner.grids[shape]

    _, stress, grid_used = energy_and_stress(torch.zeros((3, 3), dtype=torch.float64))
    found = torch.zeros((3, 3), dtype=torch.float64)
    for a in range(3):
        for b in range(3):
            for factor, weight in ((1, 8.0), (-1, -8.0), (2, -1.0), (-2, 1.0)):
                strain = torch.zeros((3, 3), dtype=torch.float64)
                strain[a, b] = factor * STEP
                found[a, b] += weight * energy_and_stress(strain)[0] / (12.0 * STEP)
    volume = float(torch.linalg.det(batch.cell[0]).abs())
    return stress * volume, found, grid_used


@pytest.mark.parametrize(("shape", "size"), [("triclinic", 2), ("slab", 4)])
@pytest.mark.parametrize("name", [k for k in KINDS if k != "lj"])
def test_the_virial_is_the_slope_of_the_energy(ranks, name, shape, size):
    """Of a potential that is smooth: plain truncation has no slope."""
    stress, slope, grid = ranks.run(slopes, size, name, shape, table.GRIDS[shape, size])[0]
    assert grid == table.GRIDS[shape, size]
    # Rotations do not change the energy: stress is symmetric.
    assert torch.allclose(stress, stress.T, rtol=0, atol=1e-9)
    assert float((stress - slope).abs().max()) < 1e-7 * max(1.0, float(slope.abs().max()))
    assert float(slope.abs().max()) > 0.1


def test_a_virial_of_half_the_pairs_turns_it_red(ranks):
    results = ranks.run(_half_virial, 2, "mp-refresh", "triclinic", (2, 1, 1))
    stress, slope, _ = results[0]
    assert float((stress - slope).abs().max()) > 1e-2


def _half_virial(mesh, name, shape, grid):
    """One rank's part of the virial is lost."""
    from mattermill.domain.mesh import Mesh

    whole = Mesh.sum

    def partial(self, value):
        if value.ndim == 2 and value.shape[1] == 10 and self.rank == 1:
            value = torch.cat([value[:, :1], torch.zeros_like(value[:, 1:])], dim=1)
        return whole(self, value)

    Mesh.sum = partial
    try:
        return slopes(mesh, name, shape, grid)
    finally:
        Mesh.sum = whole


# --- a cell that moves -----------------------------------------------------------------------------------------------


def breathing(mesh, name):
    """FIRE with a cell that moves, under a tension of 3 GPa: the cell follows the stress."""
    from mattermill.stages.optimizers.fire import Fire

    kind = table.MODELS[name]
    batch = cases.with_fields({shape: shapes.SHAPES[shape](kind.reach) for shape in ("cubic", "tiny")})
    batch = batch.with_fields(systems={"pressure_target": torch.full((2,), -3.0, dtype=torch.float64)})
    grid = None if mesh is None else (2, 1, 1)
    with _runner(mesh, kind, Fire(moves_cell=True), grid) as runner:
        runner.partition(batch if runner.mesh.is_lead else None)
        runner.run(25)
        return runner.gather()


@pytest.mark.parametrize(("name", "size"), [("mp-wide", 2), ("mp-refresh", 3), ("mp-graph", 2)])
def test_a_relaxing_cell(ranks, name, size):
    expected = breathing(None, name)
    cell = cases.with_fields({"cubic": shapes.cubic(0.0)}).cell[0]
    assert float((expected.cell[0] - cell).abs().max()) > 0.05
    got = ranks.run(breathing, size, name)[0]
    found = cases.differences(got, expected) | {"cell": cases.worst(got, expected, "cell")}
    assert max(found.values()) < 1e-9, found
