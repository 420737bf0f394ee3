"""Balance between ranks: few moves, none without need, and a system that moves keeps the bits of one that stays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mattermill.domain.balance import THRESHOLD, Loads, cost_of, plan_moves
from mattermill.domain.density import mean_neighbors
from mattermill.domain.frame import Frame
from mattermill.domain.neighbors import build_system_list


def _loads(costs, places, fixed):
    return fixed + np.bincount(places, weights=costs, minlength=len(fixed))


def test_nothing_moves_without_need():
    assert plan_moves([1.0, 1.0, 1.2], [0, 1, 2], np.zeros(3)) == {}
    assert plan_moves([], [], np.zeros(4)) == {}
    assert plan_moves([5.0], [0], np.zeros(4)) == {}, "one system cannot be spread by moving it"
    assert plan_moves([5.0, 5.0], [1, 0], np.array([0.0, 9.0])) == {0: 0}


def test_one_rank_left_with_all():
    moves = plan_moves([1.0] * 4, [2] * 4, np.zeros(4))
    assert sorted(moves.values()) == [0, 1, 3]


def test_what_is_divided_counts_and_stays():
    places = [0, 0, 0, 1, 1, 1]
    moves = plan_moves([1.0] * 6, places, np.array([6.0, 0.0]))
    assert list(moves.values()) == [1, 1], "9:3 is uneven, 7:5 is good enough"
    assert all(places[s] == 0 for s in moves)


def _fewest(costs, places, fixed):
    """The fewest moves that reach the threshold, by trying all; None if none do."""
    n, size = len(costs), len(fixed)
    goal = THRESHOLD * _loads(costs, places, fixed).mean()
    for count in range(n + 1):
        for chosen in itertools.combinations(range(n), count):
            for ranks in itertools.product(range(size), repeat=count):
                after = list(places)
                for s, rank in zip(chosen, ranks, strict=True):
                    after[s] = rank
                if _loads(costs, after, fixed).max() <= goal:
                    return count
    return None


def test_as_few_moves_as_brute_force_finds():
    rng = np.random.default_rng(0)
    more = reached = 0
    for _ in range(150):
        n, size = int(rng.integers(2, 7)), int(rng.integers(2, 4))
        costs = rng.uniform(0.2, 2.0, n)
        places = rng.integers(0, size, n) * (rng.random(n) < 0.6)
        fixed = rng.uniform(0, 1, size) * (rng.random() < 0.5)
        moves = plan_moves(costs, places, fixed)
        before = _loads(costs, places, fixed)
        after = _loads(costs, [moves.get(s, p) for s, p in enumerate(places)], fixed)
        assert after.max() <= before.max()
        assert all(places[s] != rank for s, rank in moves.items())
        best = _fewest(costs, places, fixed)
        if best is not None and after.max() <= THRESHOLD * before.mean():
            reached += 1
            assert len(moves) <= best + 1
            more += len(moves) > best
        elif best is not None:
            # A swap would be needed: never better than what moving alone can do by much.
            assert after.max() <= 1.5 * before.mean() or len(moves) == 0
    assert reached > 80
    assert more < 0.1 * reached


def test_loads_follow_the_owners():
    loads = Loads(3)
    loads.add(12.0, np.array([0, 0, 1, 1, 1, 1]))
    loads.add(1.0, np.array([2]))
    loads.add(0.0, np.zeros(0, dtype=int))
    assert loads.work.tolist() == [4.0, 8.0, 1.0]
    assert loads.order() == (2, 0, 1)


# --- how crowded ------------------------------------------------------------------------------------------------

_rng = np.random.default_rng(3)
CROWDS = {
    "bulk": (45 * np.eye(3), _rng.random((4000, 3)) * 45, True),
    "large": (100 * np.eye(3), _rng.random((30_000, 3)) * 100, True),
    "droplet": (100 * np.eye(3), _rng.normal(size=(10_000, 3)) * 12 + 50, True),
    "slab": (np.diag([60.0, 60, 100]), _rng.random((10_000, 3)) * [60, 60, 40], True),
    "tiny": (np.array([[8.0, 0, 0], [3, 9, 0], [1, 2, 7]]), _rng.random((12, 3)) * 7, True),
    "one": (5 * np.eye(3), np.zeros((1, 3)), True),
    "skewed": (np.array([[14.0, 0, 0], [-11, 15.0, 0], [6, -9, 15.0]]), _rng.random((150, 3)) * 14, True),
    "molecule": (np.zeros((3, 3)), _rng.random((30, 3)) * 8, False),
}


@pytest.mark.parametrize("reach", [3.0, 6.6, 9.5])
@pytest.mark.parametrize("name", CROWDS)
def test_neighbors_are_as_many_as_the_list_has(name, reach):
    cell, points, periodic = CROWDS[name]
    frame = Frame.of(cell, [periodic] * 3)
    exact = 2 * len(build_system_list(points, len(points), cell, frame.periodic, reach).neighbors) / len(points)
    found = mean_neighbors(frame, frame.wrap(points)[0], reach)
    exactly = len(points) <= 32
    assert found == pytest.approx(exact, rel=1e-12 if exactly else 0.15, abs=0.3)


def test_work_is_pairs_and_atoms():
    assert cost_of(100, 40.0) == 100 * (20 + 10)
    assert mean_neighbors(Frame.of(np.eye(3), [True] * 3), np.zeros((0, 3)), 5.0) == 0.0
