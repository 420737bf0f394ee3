"""Ranks and systems at the ends of what there is: ranks without atoms, systems that fit one rank, cells that jump."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from parity import cases, table
from parity.journey import travel

import mattermill as mm
from mattermill.domain.units import KE
from mattermill.stages.integrators.verlet import VelocityVerlet

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
KINDS = ("lj-switch", "mp-wide", "mp-refresh", "mp-graph")


def go(mesh, name, shape, *, steps=100, grid=None, on_step=None, skin=None):
    kind = table.MODELS[name]
    whole = cases.with_fields({shape: kind.shapes[shape](kind.reach)})
    return travel(
        mesh,
        kind.make(torch.float64),
        whole,
        VelocityVerlet(),
        steps=steps,
        on_step=on_step,
        strategy=kind.strategy,
        skin=kind.skin if skin is None else skin,
        grid=grid,
        split_atoms=8 if grid is None else 1,
    )


@functools.cache
def alone(name, shape, steps=100):
    return go(None, name, shape, steps=steps)[0]


def agree(got, expected):
    found = cases.differences(got, expected)
    assert max(found.values()) < 1e-9, found


# --- ranks without atoms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_eight_ranks_for_five_atoms(ranks, name):
    results = ranks.run(go, 8, name, "few", grid=(2, 2, 2))
    agree(results[0][0], alone(name, "few"))
    assert results[0][1].grids["few"] == (2, 2, 2)
    # At least three ranks own nothing, at any time.
    for step in zip(*(seen.owned for _, seen in results), strict=True):
        assert sum(step) == 5
        assert step.count(0) >= 3


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_without_atoms_for_the_whole_run(ranks, name):
    """Eight in a row for five atoms: the ends of the row stay empty, and the others go on."""
    results = ranks.run(go, 8, name, "few", grid=(1, 8, 1))
    agree(results[0][0], alone(name, "few"))
    assert sum(max(seen.owned) == 0 for _, seen in results) >= 1


@pytest.mark.parametrize("name", ["lj-switch", "mp-wide", "mp-refresh"])
def test_a_system_that_fits_one_rank_only(ranks, name):
    """Its cell is thinner than two reaches along every axis: one rank works, seven watch, and nobody waits."""
    results = ranks.run(go, 8, name, "tiny", grid=(2, 2, 2))
    agree(results[0][0], alone(name, "tiny"))
    assert results[0][1].grids["tiny"] == (1, 1, 1)
    assert sorted(max(seen.owned) for _, seen in results)[:7] == [0] * 7


def test_replicated_geometry_has_no_least_thickness(ranks):
    """Two atoms in a cell thinner than the cutoff, on two ranks: each sees all images of the other."""
    results = ranks.run(go, 2, "mp-graph", "tiny", grid=(2, 1, 1))
    agree(results[0][0], alone("mp-graph", "tiny"))
    assert results[0][1].grids["tiny"] == (2, 1, 1)


# --- a cell that changes between steps -------------------------------------------------------------------------------


def strain(state, step):
    """Every 20 steps the cell and all atoms follow a strain of 5 %, and a shear, at once; back and forth."""
    if step % 20:
        return
    m = torch.tensor([[1.05, 0.0, 0.0], [0.02, 0.97, 0.0], [-0.01, 0.03, 1.01]], dtype=torch.float64)
    if step % 40 == 0:
        m = torch.linalg.inv(m)
    state.batch.positions.copy_(state.batch.positions @ m)
    state.batch.cell.copy_(state.batch.cell @ m)


@functools.cache
def alone_strained(name, shape):
    return go(None, name, shape, steps=70, on_step=strain)[0]


@pytest.mark.parametrize(("shape", "size"), [("cubic", 2), SLOW("triclinic", 3), ("slab", 4), SLOW("thin", 2)])
@pytest.mark.parametrize("name", KINDS)
def test_a_cell_that_changes_between_steps(ranks, name, shape, size):
    results = ranks.run(
        go, size, name, shape, steps=70, on_step=strain, grid=table.GRIDS.get((shape, size), (size, 1, 1))
    )
    agree(results[0][0], alone_strained(name, shape))
    assert results[0][1].grids[shape] != (1, 1, 1)
    assert results[0][0].cell[0, 0, 0] != alone(name, shape, 0).cell[0, 0, 0]


# --- the skin only saves time ----------------------------------------------------------------------------------------


def watched(mesh, name, shape, skin, grid=None):
    """Positions at the end, total energy after every fourth step, rebuilds."""
    energies = []
    kind = table.MODELS[name]
    whole = cases.with_fields({shape: kind.shapes[shape](kind.reach)})
    with opened(mesh, kind, skin, grid) as runner:
        runner.partition(whole if runner.mesh.is_lead else None)
        for _ in range(25):
            runner.run(4)
            runner.energies()
            b = runner.state.batch
            kinetic = runner.state.sum_atoms(0.5 * KE * b.masses * (b.velocities**2).sum(dim=1))
            energies.append(float(b.energy[0] + kinetic[0]))
        return runner.gather(), np.array(energies), runner.rebuilds


def opened(mesh, kind, skin, grid):
    kwargs = {"strategy": kind.strategy, "skin": skin, "grid": grid}
    return mm.DomainParallel(kind.make(torch.float64), VelocityVerlet(), mesh, **kwargs)


@pytest.mark.parametrize("name", KINDS)
def test_energy_drifts_with_a_skin_as_without(ranks, name):
    expected, reference, _ = watched(None, name, "slab", 0.0)
    got, energies, rebuilds = ranks.run(watched, 2, name, "slab", table.MODELS[name].skin, (2, 1, 1))[0]
    agree(got, expected)
    assert rebuilds > 1 or name == "mp-graph"
    assert np.abs(energies - reference).max() < 1e-9
    # And it hardly drifts: 0.4 ps of hot atoms in steps of 4 fs.
    assert np.ptp(energies) < 2e-3 * len(got.positions)
