"""One, two, three and four ranks give one answer: positions, energies, forces, stress after 100 steps."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from parity import cases

import mattermill as mm

TOLERANCE = 1e-9


def travel(mesh, names, ensemble, steps=100, grid=None, split_atoms=30, cell_step=None):
    """Run on a mesh; the lead's final batch, and what every rank counted on the way."""
    lead = mesh is None or mesh.is_lead
    kwargs = {"grid": grid, "split_atoms": split_atoms, "skin": cases.SKIN}
    with mm.DomainParallel(cases.model(), cases.propagator(ensemble), mesh, **kwargs) as runner:
        runner.partition(cases.batch(names) if lead else None)
        total = sum(len(cases.SHAPES[n]()) for n in names)
        owned = []
        for k in range(steps):
            if cell_step is not None and k and k % 20 == 0:
                cell_step(runner.state)
            runner.step()
            owned.append(runner.state.n_owned)
        sums = torch.tensor(owned, dtype=torch.float64)
        assert bool((runner.mesh.sum(sums) == total).all()), "owned atoms do not add up to all atoms"
        result = runner.gather()
        return result, {"grids": runner.grids, "owned": owned, "rebuilds": runner.rebuilds}


@functools.cache
def alone(names, ensemble, steps=100):
    return travel(None, list(names), ensemble, steps)[0]


def check(ranks, names, ensemble, size, steps=100, **kwargs):
    results = ranks.run(travel, size, names, ensemble, steps, **kwargs)
    found = cases.differences(results[0][0], alone(tuple(names), ensemble, steps))
    assert max(found.values()) < TOLERANCE, found
    return [r[1] for r in results]


ONE_SYSTEM = [
    # shape, ensemble, ranks, grid (None: as chosen)
    ("cubic", "nve", 2, None),
    ("cubic", "langevin", 3, None),
    pytest.param("cubic", "nve", 4, None, marks=pytest.mark.slow),
    ("cubic", "nve", 4, (2, 2, 1)),
    ("triclinic", "nve", 2, None),
    ("triclinic", "langevin", 4, (2, 1, 2)),
    pytest.param("triclinic", "nve", 3, (3, 1, 1), marks=pytest.mark.slow),
    ("skewed", "nve", 2, (1, 2, 1)),
    pytest.param("skewed", "langevin", 2, (1, 1, 2), marks=pytest.mark.slow),
    ("slab", "nve", 2, None),
    ("slab", "langevin", 4, (2, 2, 1)),
    pytest.param("slab", "nve", 3, (1, 1, 3), marks=pytest.mark.slow),
    ("wrapped_slab", "nve", 2, None),
    ("wrapped_slab", "langevin", 3, (1, 1, 3)),
    pytest.param("wrapped_slab", "nve", 4, (1, 2, 2), marks=pytest.mark.slow),
    ("wire", "nve", 4, None),
    pytest.param("wire", "langevin", 4, (2, 2, 1), marks=pytest.mark.slow),
    ("cluster", "nve", 2, None),
    pytest.param("cluster", "langevin", 3, None, marks=pytest.mark.slow),
    pytest.param("cluster", "nve", 4, (2, 2, 1), marks=pytest.mark.slow),
    ("thin", "nve", 2, (2, 1, 1)),
    ("thin", "langevin", 4, (2, 2, 1)),
    ("far", "nve", 2, None),
    pytest.param("far", "langevin", 4, None, marks=pytest.mark.slow),
    ("tiny", "nve", 2, (2, 1, 1)),
    ("few", "nve", 4, (4, 1, 1)),
    ("few", "langevin", 3, None),
]


@pytest.mark.parametrize(("shape", "ensemble", "size", "grid"), ONE_SYSTEM)
def test_one_system(ranks, shape, ensemble, size, grid):
    seen = check(ranks, [shape], ensemble, size, grid=grid)
    if grid is not None and shape != "tiny":
        assert seen[0]["grids"][shape] == grid
    if shape in ("cubic", "far", "triclinic"):
        assert seen[0]["rebuilds"] > 2, "atoms never moved far enough to test migration"
        changed = [len(set(s["owned"])) > 1 for s in seen]
        assert any(changed), "no atom ever changed its rank"


SEVERAL = [
    ("nve", 2),
    ("langevin", 3),
    ("nve", 4),
    *(pytest.param(e, n, marks=pytest.mark.slow) for e, n in (("langevin", 2), ("nve", 3), ("langevin", 4))),
]


@pytest.mark.parametrize(("ensemble", "size"), SEVERAL)
def test_several_systems(ranks, size, ensemble):
    names = ["few", "cubic", "tiny", "slab", "cluster", "triclinic"]
    seen = check(ranks, names, ensemble, size, split_atoms=60)
    assert any(np.prod(g) > 1 for g in seen[0]["grids"].values())
    assert any(np.prod(g) == 1 for g in seen[0]["grids"].values())


def test_a_rank_without_atoms(ranks):
    """A tiny cell on four ranks, of which three can only watch."""
    seen = check(ranks, ["tiny"], "nve", 4, grid=(2, 2, 1))
    assert sorted(max(s["owned"]) for s in seen) == [0, 0, 0, 4]


def test_few_atoms_on_many_ranks(ranks):
    seen = check(ranks, ["few"], "nve", 4, grid=(4, 1, 1))
    assert any(max(s["owned"]) == 0 for s in seen)


def strain(state):
    """The cell and all atoms follow a strain of 5 %, and a shear, at once."""
    m = torch.tensor([[1.05, 0.0, 0.0], [0.02, 0.97, 0.0], [-0.01, 0.03, 1.01]], dtype=torch.float64)
    state.batch.positions.copy_(state.batch.positions @ m)
    state.batch.cell.copy_(state.batch.cell @ m)


@pytest.mark.parametrize(("shape", "grid"), [("cubic", (2, 1, 1)), ("triclinic", (1, 2, 1)), ("slab", (2, 1, 1))])
def test_the_cell_changes_between_steps(ranks, shape, grid):
    results = ranks.run(travel, 2, [shape], "nve", 70, grid=grid, cell_step=strain)
    expected = travel(None, [shape], "nve", 70, cell_step=strain)[0]
    found = cases.differences(results[0][0], expected)
    assert max(found.values()) < TOLERANCE, found


# --- every comparison above can fail -----------------------------------------------------------------------------


def _drop_a_ghost(mesh):
    from mattermill.domain import halo

    whole = halo.ghosts

    def fewer(*args):
        atoms, shifts = whole(*args)
        return atoms[1:], shifts[1:]

    halo.ghosts = fewer


def _keep_an_old_cell(mesh):
    from mattermill.domain import exchange

    whole = exchange.Exchange.run

    def stale(self, positions, cells, header):
        if not hasattr(self.mesh, "first_cells"):
            self.mesh.first_cells = cells.clone()
        return whole(self, positions, self.mesh.first_cells, header)

    exchange.Exchange.run = stale


def _never_rebuild(mesh):
    from mattermill.domain import aboard

    whole = aboard.Aboard._follow
    aboard.Aboard._follow = lambda self: np.minimum(whole(self), 1.0)


def _swap_left_and_right(mesh):
    from mattermill.domain import halo

    whole = halo.ghosts

    def mirrored(*args):
        atoms, shifts = whole(*args)
        return atoms, -shifts

    halo.ghosts = mirrored


FAULTS = [
    (_drop_a_ghost, None),
    (_keep_an_old_cell, strain),
    (_never_rebuild, None),
    (_swap_left_and_right, None),
]


def faulty(mesh, names, fault, cell_step):
    """In this process's modules the fault is put in and taken out again."""
    from mattermill.domain import aboard, exchange, halo

    kept = halo.ghosts, exchange.Exchange.run, aboard.Aboard._follow
    fault(mesh)
    try:
        return travel(mesh, names, "nve", 70, grid=(2, 1, 1), cell_step=cell_step)
    finally:
        halo.ghosts, exchange.Exchange.run, aboard.Aboard._follow = kept


@pytest.mark.parametrize(("fault", "cell_step"), FAULTS)
def test_a_fault_turns_it_red(ranks, fault, cell_step):
    results = ranks.run(faulty, 2, ["cubic"], fault, cell_step)
    expected = travel(None, ["cubic"], "nve", 70, cell_step=cell_step)[0]
    assert cases.worst(results[0][0], expected, "positions") > 1e-6
