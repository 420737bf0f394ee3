"""Balance between ranks: few moves, none without need, and a system that moves keeps the bits of one that stays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from ase.build import bulk

import mattermill as mm
from mattermill.domain.balance import THRESHOLD, Loads, cost_of, plan_moves
from mattermill.domain.batch import Batch
from mattermill.domain.density import mean_neighbors
from mattermill.domain.frame import Frame
from mattermill.domain.neighbors import build_system_list
from mattermill.domain.runner import DomainParallel
from mattermill.stages.integrators.langevin import Langevin


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


# --- in a run ---------------------------------------------------------------------------------------------------


def _systems():
    """Nine small systems and one to be divided, hot, with fields of a user's own."""
    sizes = [
        (2, 2, 2),
        (3, 2, 2),
        (2, 2, 2),
        (3, 3, 2),
        (2, 2, 2),
        (2, 3, 2),
        (2, 2, 2),
        (3, 2, 3),
        (2, 2, 3),
        (5, 4, 3),
    ]
    crystals = [bulk("Ar", "fcc", 5.5, cubic=True).repeat(n) for n in sizes]
    rng = np.random.default_rng(5)
    for atoms in crystals:
        atoms.positions += rng.normal(scale=0.08, size=(len(atoms), 3))
        atoms.set_velocities(rng.normal(scale=0.04, size=(len(atoms), 3)))
        atoms.set_array("charge", rng.normal(size=len(atoms)))
    k = len(crystals)
    return Batch.from_atoms(crystals, [f"s{i}" for i in range(k)]).with_fields(
        systems={
            "timestep": torch.full((k,), 4.0, dtype=torch.float64),
            "temperature": torch.full((k,), 120.0, dtype=torch.float64),
            "friction": torch.full((k,), 2.0, dtype=torch.float64),
            "noise_key": torch.arange(k, dtype=torch.int64) * 7919 + 17,
        }
    )


def _left_uneven(mesh, level):
    """All whole systems of the last rank but one, and of the others all but one, leave; the rest goes on."""
    model = mm.models.noble_gases(cutoff=6.0, truncation="switch")
    seen = []
    with DomainParallel(model, Langevin(), mesh, skin=0.6, split_atoms=100) as runner:
        aboard = runner._aboard
        if not level:
            aboard.level = lambda: False
        runner.partition(_systems() if mesh.is_lead else None)
        assert sum(r.grid.n_domains > 1 for r in aboard.residents) == 1
        runner.run(7)
        busy = mesh.size - 1
        gone = [r.id for r in aboard.residents if r.grid.n_domains == 1 and r.ranks[0] != busy]
        runner.release(gone)
        before = {r.id: r.ranks[0] for r in aboard.residents}
        for _ in range(4):
            runner.run(8)
            owned = mesh.sum(torch.tensor([float(runner.state.n_owned)], dtype=torch.float64))
            assert int(owned) == sum(r.n_atoms for r in aboard.residents)
        moved = [r.id for r in aboard.residents if r.ranks[0] != before[r.id] and r.grid.n_domains == 1]
        load = Loads(mesh.size)
        for r in aboard.residents:
            load.add(r.cost, r.owners)
        # Newcomers after a move, and another one: rows and state still belong together.
        two = _systems().select([0, 2]).with_ids(["n0", "n2"])
        runner.admit(two if mesh.is_lead else None)
        runner.run(5)
        seen = (runner.gather(), moved, load.work, runner.rebuilds)
    return seen


@pytest.mark.parametrize("size", [2, 3, 4])
def test_systems_that_move_keep_their_bits(ranks, size):
    expected, stayed, uneven, _ = ranks.run(_left_uneven, size, False)[0]
    got, moved, even, rebuilds = ranks.run(_left_uneven, size, True)[0]
    assert not stayed
    assert moved, "nothing was moved"
    assert rebuilds > len(got.ids), "lists must have been made again after a move"
    assert uneven.max() > THRESHOLD * uneven.mean()
    assert even.max() < uneven.max()
    assert got.ids == expected.ids
    for name in (*expected.atoms, *expected.systems):
        a, b = getattr(got, name), getattr(expected, name)
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), name


def _placed(mesh):
    """Work of each rank after ten systems have come aboard at once."""
    model = mm.models.noble_gases(cutoff=6.0, truncation="switch")
    with DomainParallel(model, Langevin(), mesh, skin=0.6, split_atoms=100) as runner:
        runner.partition(_systems() if mesh.is_lead else None)
        loads = Loads(mesh.size)
        for r in runner._aboard.residents:
            loads.add(r.cost, r.owners)
        runner.step()
        return loads.work, sum(int(r.list.count.sum()) for r in runner._aboard.residents), runner.state.n_owned


@pytest.mark.parametrize("size", [2, 3])
def test_arrivals_are_spread_by_cost(ranks, size):
    """What was predicted is balanced, and so are the pairs that the lists really have."""
    placed = ranks.run(_placed, size)
    work = placed[0][0]
    assert all(np.array_equal(work, other) for other, _, _ in placed)
    assert work.max() < 1.1 * work.mean()
    real = np.array([pairs + 10.0 * atoms for _, pairs, atoms in placed])
    assert real.max() < 1.1 * real.mean()
    assert work == pytest.approx(real, rel=0.1)
