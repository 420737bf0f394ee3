"""Ghosts: compared with brute force over all images, for every domain of every grid."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mattermill.domain.halo import Sight, ghosts, plan_halo
from mattermill.domain.partition import Frame, grid_for

REACH = 5.0

CELLS = {
    "cubic": (np.diag([14.0, 13.0, 16.0]), (True, True, True)),
    "triclinic": (np.array([[16.0, 0, 0], [8, 14.0, 0], [8, 4.6, 13.2]]), (True, True, True)),
    "skewed": (np.array([[14.0, 0, 0], [-11, 15.0, 0], [6, -9, 15.0]]), (True, True, True)),
    "slab": (np.diag([14.0, 13.0, 16.0]), (True, True, False)),
    "cluster": (np.zeros((3, 3)), (False, False, False)),
}
GRIDS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (2, 2, 2)]


def _system(name, n=150):
    cell, pbc = CELLS[name]
    rng = np.random.default_rng(5)
    box = cell if np.any(cell) else np.diag([14.0, 13.0, 16.0])
    positions = rng.uniform(-1.5, 2.5, (n, 3)) @ box if any(pbc) else rng.random((n, 3)) @ box
    return Frame.of(cell, pbc), positions


@pytest.mark.parametrize("dims", GRIDS)
@pytest.mark.parametrize("name", CELLS)
def test_every_pair_within_reach_is_seen(name, dims):
    frame, positions = _system(name)
    fractional, _ = frame.wrap(positions)
    grid = grid_for(frame, fractional, 8, REACH, grid=dims)
    assert grid.n_domains > 1
    domains = grid.owners(fractional)
    wrapped = fractional @ frame.box
    margin = REACH / frame.heights
    ranges = [(-1, 0, 1) if p else (0,) for p in frame.periodic]
    for domain in range(grid.n_domains):
        atoms, shifts = ghosts(grid, fractional, domains, Sight(margin), domain)
        have = {(int(a), *map(int, s)) for a, s in zip(atoms, shifts, strict=True)}
        assert len(have) == len(atoms), "a ghost stands twice"
        mine = np.flatnonzero(domains == domain)
        others = np.flatnonzero(domains != domain)
        for shift in itertools.product(*ranges):
            moved = wrapped[others] + np.array(shift) @ frame.box
            distance = np.linalg.norm(moved[None] - wrapped[mine][:, None], axis=2)
            for k in np.flatnonzero((distance < REACH).any(axis=0)):
                # Along axes that are not split the neighbour list makes the images.
                key = tuple(s if split else 0 for s, split in zip(shift, grid.split, strict=True))
                assert (int(others[k]), *key) in have
            if any(shift):
                # An own image within reach must come by an axis that is not split.
                own = np.linalg.norm(
                    (wrapped[mine] + np.array(shift) @ frame.box)[None] - wrapped[mine][:, None], axis=2
                )
                if (own < REACH).any():
                    assert all(s == 0 for s, split in zip(shift, grid.split, strict=True) if split)


@pytest.mark.parametrize("dims", GRIDS)
@pytest.mark.parametrize("name", CELLS)
def test_one_sided_halos_see_every_pair_across_a_cut_once(name, dims):
    """Both directions of a pair across a cut are in two-sided halos; one of them, and never both, in one-sided ones."""
    frame, positions = _system(name)
    fractional, _ = frame.wrap(positions)
    grid = grid_for(frame, fractional, 8, REACH, grid=dims)
    domains = grid.owners(fractional)
    wrapped = fractional @ frame.box
    margin = REACH / frame.heights

    def pairs(sight):
        found = []
        for domain in range(grid.n_domains):
            mine = np.flatnonzero(domains == domain)
            atoms, shifts = ghosts(grid, fractional, domains, sight, domain)
            distance = np.linalg.norm((wrapped[atoms] + shifts @ frame.box)[None] - wrapped[mine][:, None], axis=2)
            for a, k in np.argwhere(distance < REACH):
                found.append((int(mine[a]), int(atoms[k]), tuple(int(v) for v in shifts[k])))
        return found

    both, one = pairs(Sight(margin)), pairs(Sight(margin, one_sided=True))
    assert len(both) == 2 * len(one) > 0
    mirrored = [(j, i, tuple(-v for v in s)) for i, j, s in one]
    assert set(one) | set(mirrored) == set(both)
    assert not set(one) & set(mirrored)


def test_receivers_of_a_wide_halo_lie_within_their_margin():
    frame, positions = _system("triclinic")
    fractional, _ = frame.wrap(positions)
    grid = grid_for(frame, fractional, 2, REACH, grid=(2, 1, 1))
    domains = grid.owners(fractional)
    narrow, wide = 2.0 / frame.heights, REACH / frame.heights
    plan = plan_halo(grid, fractional, domains, Sight(wide, narrow), (0, 1), 0)
    near, near_shifts = ghosts(grid, fractional, domains, Sight(narrow), 0)
    kept = {(int(a), *map(int, s)) for a, s in zip(near, near_shifts, strict=True)}
    mask = [(int(a), *map(int, s)) in kept for a, s in zip(plan.ghost_atoms, plan.ghost_shifts, strict=True)]
    assert np.array_equal(plan.receivers, mask)
    assert 0 < sum(mask) < len(mask)


def test_a_domain_may_see_everything():
    frame, positions = _system("cubic")
    fractional, _ = frame.wrap(positions)
    grid = grid_for(frame, fractional, 4, 1e-3, grid=(2, 2, 1))
    domains = grid.owners(fractional)
    for domain in range(4):
        atoms, shifts = ghosts(grid, fractional, domains, Sight(None), domain)
        assert np.array_equal(atoms, np.flatnonzero(domains != domain))
        assert not shifts.any()


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_what_is_sent_is_what_is_expected(name, one_sided):
    frame, positions = _system(name)
    fractional, _ = frame.wrap(positions)
    grid = grid_for(frame, fractional, 8, REACH, grid=(2, 2, 1))
    domains = grid.owners(fractional)
    margin = REACH / frame.heights
    ranks = (0, 2, 5, 6)[: grid.n_domains]
    sight = Sight(margin, one_sided=one_sided)
    plans = {r: plan_halo(grid, fractional, domains, sight, ranks, r) for r in range(7)}
    for rank, plan in plans.items():
        assert set(plan.receives) == {p for p in plans if rank in plans[p].sends}
        for peer, places in plan.receives.items():
            rows, shifts = plans[peer].sends[rank]
            owned = np.flatnonzero(domains == ranks.index(peer))
            assert np.array_equal(owned[rows], plan.ghost_atoms[places])
            assert np.array_equal(shifts, plan.ghost_shifts[places])
        covered = np.concatenate([*plan.receives.values(), np.zeros(0, dtype=int)])
        assert sorted(covered.tolist()) == list(range(len(plan.ghost_atoms)))


def test_one_peer_on_both_sides():
    """Case 10: two ranks along a periodic axis; the ghosts to the left and to the right are not the same atoms."""
    frame = Frame.of(np.diag([20.0, 20, 20]), (True, True, True))
    x = np.array([1.0, 4.0, 9.0, 11.0, 16.5, 19.0])
    fractional = np.stack([x / 20, np.full(6, 0.3), np.full(6, 0.6)], axis=1)
    grid = grid_for(frame, fractional, 2, 3.0, grid=(2, 1, 1))
    assert 0.45 < grid.bounds(0)[1][0] < 0.55
    atoms, shifts = ghosts(grid, fractional, grid.owners(fractional), Sight(3.0 / frame.heights), 0)
    assert [(int(a), int(s[0])) for a, s in zip(atoms, shifts, strict=True)] == [(3, 0), (5, -1)]
    atoms, shifts = ghosts(grid, fractional, grid.owners(fractional), Sight(3.0 / frame.heights), 1)
    assert [(int(a), int(s[0])) for a, s in zip(atoms, shifts, strict=True)] == [(0, 1), (2, 0)]
