"""Cases that broke other codes: atoms on, across and far beyond boundaries.

Numbers are those of the project's list of cases; the rest are their siblings. The reference is brute force over all
images (`brute.py`), ASE, or the same thing done otherwise; each test can fail.
"""

from __future__ import annotations

import itertools

import brute
import numpy as np
import pytest
import torch
from ase import Atoms
from brute import assert_all_owned, assert_exact, crystal, every_rank, start, watched

import mattermill as mm

CUTOFF = 5.0


# --- 1: atoms cross a boundary while nothing moves between ranks --------------------------------------------------


def traveller(direction, offset=(0.0, 0.0, 0.0), speed=0.05):
    """A crystal with a site free along a line, and an atom that flies down it across the middle of the box."""
    atoms = crystal((6, 4, 4), spacing=4.2, seed=3)
    middle = atoms.cell.array.sum(axis=0) / 2 + np.array(offset)
    direction = np.array(direction, dtype=float) / np.linalg.norm(direction)
    # Room along the line, 3 Å about it; 0.2 Å before the middle at the start.
    d = atoms.positions - middle
    d -= atoms.cell.lengths() * np.round(d / atoms.cell.lengths())
    along = d @ direction
    away = np.linalg.norm(d - along[:, None] * direction, axis=1)
    atoms = atoms[~((np.abs(along) < 6.0) & (away < 3.0))]
    atoms += Atoms("Ar", [middle - 0.2 * direction])
    batch = start(atoms)
    batch.velocities[-1] = torch.from_numpy(speed * direction)
    return batch


def owner_of(results, frame, atom):
    (rank,) = [r for r, seen in enumerate(results) if atom in seen["owned"][frame]["system"]]
    return rank


CROSSINGS = [
    # direction, where (from the middle), ranks, grid
    ((1, 0, 0), (0, 0, 0), 2, (2, 1, 1)),
    ((-1, 0, 0), (0, 0, 0), 2, (2, 1, 1)),
    ((1, 0, 0), (12.6, 0, 0), 2, (2, 1, 1)),  # the face of the box is a boundary, too
    ((-1, 0, 0), (12.6, 0, 0), 2, (2, 1, 1)),
    ((1, 1, 0), (0, 0, 0), 4, (2, 2, 1)),  # an edge
    ((1, -1, 1), (0, 0, 0), 8, (2, 2, 2)),  # a corner
]


@pytest.mark.parametrize(("direction", "offset", "size", "grid"), CROSSINGS)
def test_case_01_an_atom_crosses_while_migration_is_deferred(ranks, direction, offset, size, grid):
    batch = traveller(direction, offset)
    atom = int(batch.atom_id[-1])
    # A generous skin: no rebuild before the atom has gone 0.65 Å.
    results = every_rank(ranks, size, batch, 9, skin=1.3 if size == 2 else 0.9, grid=grid)
    assert all(seen["grids"][-1]["system"] == grid for seen in results)
    assert_all_owned(results, batch)
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF)
    # It went over the boundary under its old owner: a fresh partition of the last frame would give it to another.
    last = results[0]["frames"][-1].without(["reference", "reference_cell"])
    fresh = every_rank(ranks, size, last, 0, skin=1.3 if size == 2 else 0.9, grid=grid)
    deferred = [owner_of(results, f, atom) for f in range(10)]
    assert len(set(deferred[:6])) == 1
    assert owner_of(fresh, 0, atom) != deferred[0]


@pytest.mark.parametrize(("size", "grid"), [(2, (2, 1, 1)), (4, (2, 2, 1))])
def test_case_01_to_and_fro_across_the_boundary(ranks, size, grid):
    """An atom that swings over the cut, never half a skin from where it was: it never migrates, and is always seen."""
    batch = traveller((1, 0, 0))

    def swing(step, state):
        state.batch.velocities[state.batch.atom_id == batch.atom_id[-1], 0] = 0.1 if step % 8 < 4 else -0.1

    results = every_rank(ranks, size, batch, 24, skin=0.9, grid=grid, change=swing)
    assert results[0]["rebuilds"][-1] == 0
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF)


def hurl(step, state):
    """Further than any domain is wide: all together in step 3, each over boxes of its own in step 6."""
    b = state.batch
    if step == 3:
        b.positions.add_(torch.tensor([14.0, -30.0, 60.0], dtype=torch.float64))
    if step == 6:
        boxes = torch.stack([b.atom_id % 3 - 1, b.atom_id % 5 - 2, b.atom_id % 2], dim=1).to(torch.float64)
        b.positions.add_(boxes @ b.cell[0])


@pytest.mark.parametrize(("size", "grid"), [(1, None), (2, (2, 1, 1)), (3, (3, 1, 1)), (4, (2, 2, 1))])
def test_case_01_a_flight_across_whole_domains_in_one_step(ranks, size, grid):
    batch = start(crystal((6, 4, 4), spacing=4.2, seed=5), speed=0.002)
    results = every_rank(ranks, size, batch, 8, grid=grid, change=hurl)
    assert_all_owned(results, batch)
    assert results[0]["broken"] == {}
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF, 1e-9)
    if size > 1:
        assert all(results[0]["owned"][2] != results[0]["owned"][f] for f in (3, 8)), "nobody moved"


# --- 2: atoms outside the cell ------------------------------------------------------------------------------------


def scattered(shape, boxes, pbc=(True, True, True), seed=2):
    """The same crystal twice: in its cell, and with atoms up to so many cells away along periodic axes."""
    inside = crystal(shape, spacing=4.2, seed=seed)
    inside.pbc = pbc
    outside = inside.copy()
    away = np.random.default_rng(seed).integers(-boxes, boxes + 1, (len(inside), 3)) * np.array(pbc)
    outside.positions += away @ inside.cell.array
    return inside, outside, away


@pytest.mark.parametrize(("size", "boxes"), [(1, 3), (2, 3), (4, 3), (3, 1000)])
def test_case_02_atoms_that_start_outside_the_cell(ranks, size, boxes):
    inside, outside, away = scattered((6, 4, 4), boxes)
    outside.positions[0] = inside.positions[0] + [25.1 - 25.1 % 25.2, 0, 0]
    away[0] = 0
    wrapped, far = start(inside, speed=0.01), start(outside, speed=0.01)
    expected = watched(None, wrapped, 30, look=10)["frames"]
    results = every_rank(ranks, size, far, 30, look=10)
    plain = every_rank(ranks, size, wrapped, 0)
    for seen, same in zip(results, plain, strict=True):
        assert seen["owned"][0] == same["owned"][0], "owners go by the wrapped place"
    shift = away @ inside.cell.array
    for got, reference in zip(results[0]["frames"], expected, strict=True):
        # Reported unwrapped: as far away as they started. A position of 25,000 Å has an ulp of 4e-12.
        np.testing.assert_allclose(got.positions.numpy() - shift, reference.positions.numpy(), atol=1e-8)
        np.testing.assert_allclose(got.forces.numpy(), reference.forces.numpy(), atol=1e-9)
        assert_exact(got, CUTOFF, 1e-9)
    first = results[0]["frames"][0]
    assert torch.equal(first.positions, far.positions), "looking at it moved it"


def _evaluated(mesh, atoms):
    return mm.evaluate(brute.model(), atoms, mesh=mesh)


@pytest.mark.parametrize("pbc", [(True, False, True), (False, False, True), (False, False, False)])
@pytest.mark.parametrize("size", [1, 3])
def test_case_02_atoms_beyond_an_axis_that_is_not_periodic_stay_there(ranks, size, pbc):
    """A slab far below its cell is no slab inside it; beyond a periodic face it is."""
    _, outside, _ = scattered((6, 6, 4), 3, pbc)
    outside.positions[:, ~np.array(pbc)] -= 77.0
    outside.positions[5, ~np.array(pbc)] += 500.0
    results = [_evaluated(None, outside)] if size == 1 else ranks.run(_evaluated, size, outside)
    for got in results:
        assert torch.equal(got.positions, torch.from_numpy(outside.positions))
        assert_exact(got, CUTOFF)


# --- 10: both neighbours are one peer -----------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)])
@pytest.mark.parametrize("lean", [False, True])
def test_case_10_the_left_and_the_right_neighbour_are_one_peer(ranks, grid, lean):
    """Barely two reaches long: most atoms are seen on both sides, in different places. Nothing is symmetric."""
    atoms = crystal((3, 3, 3), spacing=4.2, seed=12, shake=0.5)
    rng = np.random.default_rng(12)
    del atoms[rng.choice(len(atoms), 6, replace=False)]
    if lean:
        atoms.set_cell(atoms.cell.array @ np.array([[1, 0, 0], [0.15, 1.02, 0], [-0.1, 0.1, 1.03]]), scale_atoms=True)
    batch = start(atoms, speed=0.01, dt=2.0)
    results = ranks.run(watched, int(np.prod(grid)), batch, 20, grid=grid, look=2)
    assert all(seen["grids"][0]["system"] == grid for seen in results)
    assert_all_owned(results, batch)
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF)


def test_case_10_two_atoms_on_two_ranks_see_each_other_on_both_sides(ranks):
    """6 Å to one side, 6.5 Å to the other, and themselves at 12.5 Å: pulled apart along the axis by hand."""
    atoms = Atoms("ArKr", [[1.0, 2.0, 2.0], [5.7, 2.0, 2.5]], cell=[12.5, 13.0, 14.0], pbc=True)

    def pull(step, state):
        state.batch.positions[state.batch.atom_id == 1, 0] += 0.45

    results = ranks.run(watched, 2, start(atoms), 20, grid=(2, 1, 1), change=pull)
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF)
    signs = {float(torch.sign(f.forces[0, 0])) for f in results[0]["frames"]}
    assert signs >= {1.0, -1.0}, "it was never drawn to both sides"


# --- 11: on faces, edges and corners ------------------------------------------------------------------------------


def on_faces(seed, length=24.0, lean=False):
    """A lattice of 6 x 6 x 6 whose first layer stands on the face along every axis, or a hair beside it, or boxes
    away; the fourth in the middle of the box, where a cut may be."""
    rng = np.random.default_rng(seed)
    low = [0.0, -0.0, 1e-17, -1e-17, 1e-15, -1e-15, length, np.nextafter(length, 0), np.nextafter(length, 99),
           -3 * length, np.nextafter(-length, 0), 2 * length - 1e-14, 5e-324]  # fmt: skip
    half = length / 2
    mid = [half, np.nextafter(half, 0), np.nextafter(half, 99), half + length, half - 1e-15]
    positions = []
    for site in itertools.product(range(6), repeat=3):
        positions.append([float(rng.choice(low if k == 0 else mid if k == 3 else [k * length / 6])) for k in site])
    atoms = Atoms(rng.choice([18, 36], 216), positions, cell=[length] * 3, pbc=True)
    if lean:
        atoms.set_cell(atoms.cell.array @ np.array([[1, 0, 0], [0.3, 1, 0], [-0.2, 0.1, 1]]), scale_atoms=True)
    return atoms


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(("size", "grid"), [(1, None), (2, (2, 1, 1)), (3, (1, 1, 3)), (4, (2, 2, 1)), (8, (2, 2, 2))])
def test_case_11_atoms_on_faces_edges_and_corners(ranks, size, grid, lean):
    for seed in range(2):
        batch = start(on_faces(seed, lean=lean), speed=0.004)
        results = every_rank(ranks, size, batch, 3, grid=grid)
        assert_all_owned(results, batch)
        assert torch.equal(results[0]["frames"][0].positions, batch.positions)
        for whole in results[0]["frames"]:
            assert_exact(whole, CUTOFF)


@pytest.mark.parametrize("length", [24.0, 49.0, 24.3])
def test_case_11_whole_layers_on_the_faces(ranks, length):
    """Every atom at 0 or L along one axis: one layer in truth, one domain's."""
    atoms = crystal((4, 6, 6), spacing=4.1, seed=3)
    atoms.cell[0, 0] = length
    atoms.positions[:, 0] = np.where(np.arange(len(atoms)) % 2, 0.0, length)
    keep = np.unique(np.round(atoms.positions[:, 1:] / 4.1) % 6, axis=0, return_index=True)[1]
    atoms = atoms[np.sort(keep)]
    results = ranks.run(watched, 2, start(atoms), 3, grid=(2, 1, 1))
    assert_all_owned(results, start(atoms))
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF)
