"""The cell list on systems of many bins: against vesin and a k-d tree, where space is empty, and when room runs out."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ase.build import bulk
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from vesin import NeighborList

from mattermill.domain import cell_list
from mattermill.domain.cell_list import Search
from mattermill.domain.neighbors import SystemList, build_system_list, full_box

EVERYWHERE, NOWHERE = np.array([True] * 3), np.array([False] * 3)


def table(i: np.ndarray, j: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Rows (i, j, shift), sorted."""
    rows = np.column_stack([i, j, shifts]).astype(np.int64)
    return rows[np.lexsort(rows.T[::-1])]


def listed(one: SystemList) -> np.ndarray:
    """Rows (i, j, shift) of a list, sorted."""
    shift = np.concatenate([np.zeros((one.n_nodes, 3), dtype=int), one.image_shift])
    i = np.repeat(np.arange(one.n_nodes), one.count)
    return table(i, one.node()[one.neighbors], shift[one.neighbors])


def both_ways(rows: np.ndarray) -> np.ndarray:
    back = np.column_stack([rows[:, 1], rows[:, 0], -rows[:, 2:]])
    both = np.concatenate([rows, back])
    return table(both[:, 0], both[:, 1], both[:, 2:])


def by_vesin(points: np.ndarray, cell: np.ndarray, periodic: bool, reach: float) -> np.ndarray:
    finder = NeighborList(cutoff=reach, full_list=True)
    pairs, shifts = finder.compute(points, cell, periodic=periodic, quantities="PS")
    return table(pairs[:, 0].astype(int), pairs[:, 1].astype(int), shifts)


def by_tree(points: np.ndarray, reach: float) -> np.ndarray:
    pairs = cKDTree(points).query_pairs(reach, output_type="ndarray")
    return both_ways(np.column_stack([pairs, np.zeros((len(pairs), 3), dtype=int)]))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 300),
    edge=st.floats(4.0, 30.0),
    skew=st.sampled_from([0.0, 0.4, 1.0]),
    periodic=st.booleans(),
    reach=st.floats(1.0, 9.0),
    margin=st.sampled_from([0.0, 0.2]),
)
def test_many_bins_equal_vesin(
    seed: int, n: int, edge: float, skew: float, periodic: bool, reach: float, margin: float
) -> None:
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(0.5, 1.5, 3)) * edge + np.tril(rng.uniform(-skew, skew, (3, 3)), -1) * edge
    # Also turned, so that no lattice vector lies along a row of bins, and a little out of the cell.
    cell = cell @ np.linalg.qr(rng.normal(size=(3, 3)))[0]
    points = rng.uniform(-margin, 1.0 + margin, (n, 3)) @ cell
    pbc = np.array([periodic] * 3)
    theirs = by_vesin(points, cell, periodic, reach)
    half = build_system_list(points, n, cell, pbc, reach)
    assert np.array_equal(both_ways(listed(half)), theirs)
    full = build_system_list(points, n, cell, pbc, reach, pairs="full")
    assert np.array_equal(listed(full), theirs)


@pytest.mark.parametrize("periodic", [EVERYWHERE, np.array([True, False, True])])
def test_owned_and_remote_atoms_of_a_crystal(periodic: np.ndarray) -> None:
    atoms = bulk("Ar", a=5.3, cubic=True).repeat(6)
    atoms.rattle(0.3, seed=2)
    points, cell, n = atoms.positions, atoms.cell.array, len(atoms)
    whole = listed(build_system_list(points, n, cell, periodic, 7.0, pairs="full"))
    n_owned = n // 3
    receivers = np.arange(n - n_owned) % 2 == 0
    receives = np.concatenate([np.ones(n_owned, dtype=bool), receivers])
    full = build_system_list(points, n_owned, cell, periodic, 7.0, pairs="full", receivers=receivers)
    assert np.array_equal(listed(full), whole[receives[whole[:, 0]]])
    half = listed(build_system_list(points, n_owned, cell, periodic, 7.0))
    local, mixed = half[half[:, 1] < n_owned], half[half[:, 1] >= n_owned]
    mine = whole[whole[:, 0] < n_owned]
    assert np.array_equal(both_ways(local), mine[mine[:, 1] < n_owned])
    assert np.array_equal(mixed, mine[mine[:, 1] >= n_owned])


def blob(n: int, width: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 3)) * width


@pytest.mark.parametrize(
    "points",
    [
        np.concatenate([blob(800, 6.0, k) + at for k, at in enumerate(([0, 0, 0], [3e6, 2e6, -1e5], [-1e4, 7e6, 0]))]),
        np.concatenate([blob(2000, 4.0), [[500.0, 0, 0]]]),
        np.random.default_rng(1).random((3000, 3)) * [3e4, 2.0, 2.0],
        np.random.default_rng(2).random((3000, 3)) * 900.0,
        blob(2000, 1.0) * [1e-3, 1.0, 1e3],
    ],
    ids=["far fragments", "a dense cluster and one atom", "a wire", "a gas", "a blade"],
)
def test_empty_space_costs_neither_pairs_nor_time(points: np.ndarray) -> None:
    began = time.perf_counter()
    one = build_system_list(points, len(points), np.zeros((3, 3)), NOWHERE, 4.0)
    # Milliseconds; a bin for every 64 Å³ of the first would be 1e17.
    assert time.perf_counter() - began < 2.0
    assert np.array_equal(both_ways(listed(one)), by_tree(points, 4.0))


def test_a_sheet_in_a_vast_periodic_cell() -> None:
    cell = np.array([[40.0, 0, 0], [15.0, 30.0, 0], [1e5, 2e5, 1e7]])
    points = np.random.default_rng(3).random((400, 3)) * [1, 1, 3e-7] @ cell
    periodic = build_system_list(points, 400, cell, EVERYWHERE, 5.0, pairs="full")
    slab = build_system_list(points, 400, cell, np.array([True, True, False]), 5.0, pairs="full")
    assert np.array_equal(listed(periodic), listed(slab))
    assert len(slab.neighbors) > 1000


@pytest.mark.parametrize("pairs", ["half", "full"])
def test_a_list_that_outgrows_its_room_is_the_same_list(pairs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    atoms = bulk("Ar", a=5.3, cubic=True).repeat(5)
    atoms.rattle(0.3, seed=3)
    arguments = (atoms.positions, 400, atoms.cell.array, EVERYWHERE, 8.0)
    expected = build_system_list(*arguments, pairs=pairs)
    rooms = []
    for room in (0, 1000, len(expected.neighbors), len(expected.neighbors) + 1):
        monkeypatch.setattr(Search, "_room", lambda *_, room=room: rooms.append(room) or room)
        one = build_system_list(*arguments, pairs=pairs)
        for name in ("image_of", "image_shift", "first", "count", "neighbors", "boundary"):
            assert np.array_equal(getattr(one, name), getattr(expected, name))
    assert len(rooms) == 4


def test_what_32_bits_cannot_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at most 2147483647 images"):
        build_system_list(np.zeros((2, 3)), 2, np.eye(3) * 1e-3, EVERYWHERE, 5.0)
    monkeypatch.setattr(cell_list, "_MOST", 1000)
    monkeypatch.setattr(Search, "_room", lambda *_: 500)
    with pytest.raises(ValueError, match="at most 1000 pairs"):
        build_system_list(blob(200, 1.0), 200, np.zeros((3, 3)), NOWHERE, 5.0)


def test_positions_beyond_all_reason_are_refused() -> None:
    with pytest.raises(ValueError, match="positions must lie within"):
        build_system_list(np.array([[0, 0, 0], [1e30, 0, 0]]), 2, np.eye(3), EVERYWHERE, 2.0)
    # Without a lattice they are just far apart.
    assert build_system_list(np.array([[0, 0, 0], [1e30, 0, 0]]), 2, np.eye(3), NOWHERE, 2.0).count.tolist() == [0, 0]


def test_a_whole_system_far_out_is_the_same_system() -> None:
    atoms = bulk("Ar", a=5.3, cubic=True).repeat(3)
    atoms.rattle(0.3, seed=4)
    cell = atoms.cell.array
    here = build_system_list(atoms.positions, 108, cell, EVERYWHERE, 6.0, pairs="full")
    moved = atoms.positions + [3, -5000, 7] @ cell
    there = build_system_list(moved, 108, cell, EVERYWHERE, 6.0, pairs="full")
    assert np.array_equal(listed(here), listed(there))


@pytest.mark.parametrize("flat", [[[1, 0, 0], [0, 1, 0], [0, 1, 1e-12]], [[0, 1, 0], [0, 1, 1e-12], [1, 0, 0]]])
def test_any_two_vectors_that_lie_along_one_another_are_refused(flat: list) -> None:
    with pytest.raises(ValueError, match="independent"):
        build_system_list(np.zeros((1, 3)), 1, np.array(flat, dtype=float), EVERYWHERE, 0.5)


def test_vectors_of_axes_that_are_not_periodic_do_not_matter() -> None:
    points, pbc = blob(50, 3.0), np.array([True, False, True])
    lists = [
        build_system_list(points, 50, np.array([[7.0, 1, 0], middle, [0, 2.0, 9]]), pbc, 5.0)
        for middle in ([0, 0, 0], [np.nan, np.inf, 0], [3, 8, 1])
    ]
    box = full_box(np.array([[7.0, 1, 0], [0, 0, 0], [0, 2.0, 9]]), pbc)
    assert (lists[0].image_shift[:, 1] == 0).all()
    vectors = points[lists[0].image_of] + lists[0].image_shift @ box
    assert len(vectors)
    for other in lists[1:]:
        assert np.array_equal(listed(lists[0]), listed(other))


def test_points_of_any_layout_are_taken() -> None:
    points = blob(40, 3.0)
    expected = listed(build_system_list(points, 40, np.eye(3) * 9, EVERYWHERE, 5.0))
    frozen = points.copy()
    frozen.flags.writeable = False
    for other in (np.asfortranarray(points), np.repeat(points, 2, axis=0)[::2], frozen, points.tolist()):
        assert np.array_equal(listed(build_system_list(other, 40, np.eye(3) * 9, EVERYWHERE, 5.0)), expected)


def test_faster_than_vesin() -> None:
    """Issue 3: 32,000 atoms; a sixth of vesin's time on an idle core, so half leaves room for a busy one."""
    atoms = bulk("Ar", a=5.3, cubic=True).repeat(20)
    atoms.rattle(0.2, seed=1)
    points, cell = atoms.positions, atoms.cell.array
    finder = NeighborList(cutoff=9.5, full_list=False, n_threads=1)
    ours, theirs = [], []
    for _ in range(4):
        began = time.thread_time()
        one = build_system_list(points, 32_000, cell, EVERYWHERE, 9.5)
        ours.append(time.thread_time() - began)
        began = time.thread_time()
        (pairs,) = finder.compute(points, cell, periodic=True, quantities="P", copy=False)
        theirs.append(time.thread_time() - began)
    assert len(one.neighbors) == len(pairs)
    assert min(ours) < 0.5 * min(theirs)
