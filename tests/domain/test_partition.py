"""Rank grids and owners: every atom has one owner, no domain is too thin, vacuum costs nobody work."""

from __future__ import annotations

import numpy as np
import pytest
from ase.build import bulk

from mattermill.domain.partition import Frame, choose_grid, grid_for
from mattermill.domain.units import heights

REACH = 6.6
EYE = np.eye(3)


def _points(n, cell, seed=0):
    return np.random.default_rng(seed).random((n, 3)) @ cell


def test_a_cube_is_split_where_it_is_longest():
    cell = np.diag([40.0, 20.0, 20.0])
    grid = choose_grid(cell, [True] * 3, 4000, 2, REACH, _points(4000, cell))
    assert grid.dims == (2, 1, 1)


@pytest.mark.parametrize(("size", "dims"), [(2, 2), (4, 4), (8, 8)])
def test_all_ranks_work_in_a_large_cube(size, dims):
    cell = 60 * EYE
    grid = choose_grid(cell, [True] * 3, 9000, size, REACH, _points(9000, cell))
    assert grid.n_domains == dims
    assert max(grid.dims) <= 4


def test_the_fewest_ghosts_win():
    cell = np.diag([60.0, 60.0, 30.0])
    grid = choose_grid(cell, [True] * 3, 9000, 4, REACH, _points(9000, cell))
    assert grid.dims[2] == 1
    assert grid.n_domains == 4


def test_a_domain_is_never_thinner_than_reach():
    rng = np.random.default_rng(1)
    for trial in range(200):
        cell = np.tril(rng.normal(size=(3, 3)) * 6) + np.diag(rng.uniform(7, 30, 3))
        pbc = rng.random(3) < 0.7
        n = int(rng.integers(1, 400))
        points = rng.normal(size=(n, 3)) * rng.uniform(1, 20, 3)
        dims = tuple(rng.integers(1, 3, 3)) if trial % 2 else None
        grid = choose_grid(cell, pbc, n, 8, REACH, points, split_atoms=10, grid=dims)
        thick = Frame.of(cell, pbc).heights
        for axis in range(3):
            if pbc[axis]:
                edges = np.array([0.0, *grid.cuts[axis], 1.0])
                assert grid.dims[axis] == 1 or (np.diff(edges) * thick[axis]).min() >= REACH * (1 - 1e-12)


def test_too_thin_uses_fewer_ranks():
    """Case 9: an 8 Å box, 6 Å cutoff, 2 ranks."""
    cell = 8.0 * EYE
    points = _points(1200, cell)
    assert choose_grid(cell, [True] * 3, 1200, 2, 6.0, points).dims == (1, 1, 1)
    assert choose_grid(cell, [True] * 3, 1200, 2, 6.0, points, grid=(2, 1, 1)).dims == (1, 1, 1)


def test_triclinic_thickness_is_between_faces():
    # Long vectors, thin cell: 20 Å vectors at 30°, 10 Å between faces.
    cell = np.array([[20.0, 0, 0], [20 * np.cos(np.pi / 6), 10.0, 0], [0, 0, 30.0]])
    assert heights(cell)[:2] == pytest.approx([10.0, 10.0])
    grid = choose_grid(cell, [True] * 3, 2000, 4, REACH, _points(2000, cell))
    assert grid.dims[:2] == (1, 1)
    assert grid.dims[2] == 4


VACUUM = {
    "slab": (np.diag([60.0, 60, 100]), np.random.default_rng(2).random((10_000, 3)) * [60, 60, 40] + [0, 0, 17]),
    "droplet": (100 * EYE, np.random.default_rng(3).normal(size=(10_000, 3)) * 12 + 50),
    "wire": (np.diag([90.0, 90, 60]), np.random.default_rng(4).random((10_000, 3)) * [30, 30, 60] + [11, 50, 0]),
}


@pytest.mark.parametrize("dims", [None, (4, 1, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2)])
@pytest.mark.parametrize("name", VACUUM)
def test_vacuum_costs_nobody_work(name, dims):
    cell, points = VACUUM[name]
    frame = Frame.of(cell, [True] * 3)
    fractional, _ = frame.wrap(points)
    grid = grid_for(frame, fractional, 4, REACH, grid=dims)
    owned = np.bincount(grid.owners(fractional), minlength=4)
    assert owned.max() <= 1.15 * owned.mean(), (grid, owned)


def test_a_crystal_is_cut_between_its_layers():
    atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat((6, 6, 6))
    grid = choose_grid(atoms.cell.array, [True] * 3, len(atoms), 2, REACH, atoms.positions, split_atoms=100)
    axis = grid.dims.index(2)
    layers = np.unique(np.round(atoms.get_scaled_positions()[:, axis], 9))
    assert np.abs(layers - grid.cuts[axis][0]).min() > 0.03


@pytest.mark.parametrize("cell", [20 * EYE, np.array([[20.0, 0, 0], [10, 17.3, 0], [10, 5.8, 16.3]])])
def test_faces_edges_corners_have_one_owner(cell):
    eps = [0.0, 1e-17, -1e-17, 1e-12, -1e-12]
    values = [base + e for base in (0.0, 0.5, 1.0, -3.0, 2.0) for e in eps] + [np.nextafter(1.0, 0.0)]
    fractional = np.array([[a, b, c] for a in values for b in values[:6] for c in values[10:16]])
    frame = Frame.of(cell, [True] * 3)
    positions = fractional @ cell
    wrapped, image = frame.wrap(positions)
    assert wrapped.min() >= 0.0
    assert wrapped.max() < 1.0
    assert np.abs((wrapped + image) @ cell - positions).max() < 1e-9
    grid = grid_for(frame, wrapped, 8, 6.0, grid=(2, 2, 1))
    owners = grid.owners(wrapped)
    inside = np.zeros(len(owners), dtype=int)
    for domain in range(grid.n_domains):
        low, high = grid.bounds(domain)
        member = np.all((wrapped >= low) & (wrapped < high), axis=1)
        inside += member
        assert np.array_equal(member, owners == domain)
    assert (inside == 1).all()


def test_axes_that_are_not_periodic_are_open_ended():
    points = np.array([[0.0, 0, 0], [100, 0, 0], [-500, 0, 0], [3, 0, 0]])
    grid = choose_grid(np.zeros((3, 3)), [False] * 3, 4, 2, REACH, points, grid=(2, 1, 1))
    frame = Frame.of(np.zeros((3, 3)), [False] * 3)
    owners = grid.owners(frame.wrap(points)[0])
    assert sorted(np.bincount(owners, minlength=2)) == [2, 2]
    assert grid.bounds(0)[0][0] == -np.inf
    assert grid.bounds(1)[1][0] == np.inf


def test_few_atoms_stay_together():
    cell = 60 * EYE
    assert choose_grid(cell, [True] * 3, 900, 4, REACH, _points(900, cell), split_atoms=500).n_domains == 1
    assert choose_grid(cell, [True] * 3, 1000, 4, REACH, _points(1000, cell), split_atoms=500).n_domains == 2
    assert choose_grid(cell, [True] * 3, 0, 4, REACH, np.zeros((0, 3)), split_atoms=1).n_domains == 1


@pytest.mark.parametrize("grid", [(2, 2), (0, 1, 1), (3, 1, 1)])
def test_a_grid_that_makes_no_sense(grid):
    cell = 60 * EYE
    with pytest.raises(ValueError, match="grid"):
        choose_grid(cell, [True] * 3, 1000, 2, REACH, _points(1000, cell), grid=grid)


def test_a_cell_that_is_none():
    with pytest.raises(ValueError, match="lattice vectors"):
        choose_grid(np.zeros((3, 3)), [True] * 3, 10, 2, REACH, _points(10, EYE))
