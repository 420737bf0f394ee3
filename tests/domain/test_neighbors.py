"""Neighbour lists against brute force and ASE, their canonical order, and what must not crash the process."""

from __future__ import annotations

import ase.neighborlist
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mattermill.domain.batch import Batch
from mattermill.domain.neighborhood import neighborhood_of
from mattermill.domain.neighbors import SystemList, build_system_list, full_box, overlapping_pairs
from mattermill.domain.units import heights

Pair = tuple[int, int, tuple[int, int, int]]


def listed(one: SystemList) -> list[Pair]:
    """(i, atom, shift) of every pair of a list, in its order."""
    base = np.concatenate([np.arange(one.n_owned + one.n_remote), one.image_of])
    shift = np.concatenate([np.zeros((one.n_owned + one.n_remote, 3), int), one.image_shift])
    return [
        (i, int(base[k]), tuple(shift[k].tolist()))
        for i in range(one.n_owned + one.n_remote)
        for k in one.neighbors[one.first[i] : one.first[i] + one.count[i]]
    ]


def both_ways(pairs: list[Pair]) -> list[Pair]:
    return pairs + [(j, i, (-s[0], -s[1], -s[2])) for i, j, s in pairs]


def brute_force(points: np.ndarray, cell: np.ndarray, periodic: np.ndarray, reach: float) -> set[Pair]:
    """Every (i, j, shift) nearer than reach, both ways, by going through all images."""
    box = full_box(cell, periodic)
    spread = np.ptp(points @ np.linalg.inv(box), axis=0)
    most = np.where(periodic, np.ceil(reach / heights(box) + spread), 0).astype(int)
    shifts = np.stack(np.meshgrid(*[np.arange(-m, m + 1) for m in most], indexing="ij"), axis=-1).reshape(-1, 3)
    vectors = points[None, :, None] - points[:, None, None] + shifts @ box
    near = np.argwhere((vectors**2).sum(-1) < reach**2)
    return {(int(i), int(j), tuple(shifts[s].tolist())) for i, j, s in near if not (i == j and not shifts[s].any())}


def random_system(seed: int, n: int, skew: float, outside: bool) -> tuple[np.ndarray, np.ndarray]:
    """Points and a lower-triangular cell of 1 to 8 Å edges; `skew` 0: orthogonal, 3: very flat angles."""
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(1.0, 8.0, 3))
    cell += np.tril(rng.uniform(-skew, skew, (3, 3)), -1) * np.diag(cell)
    points = rng.random((n, 3)) @ cell
    return points + (rng.integers(-3, 4, (n, 3)) @ cell if outside else 0.0), cell


systems = {
    "seed": st.integers(0, 2**31),
    "n": st.integers(1, 7),
    "skew": st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    "outside": st.booleans(),
    "periodic": st.tuples(st.booleans(), st.booleans(), st.booleans()),
    "reach": st.floats(0.5, 6.0),
}
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@relaxed
@given(**systems)
def test_equals_brute_force(
    seed: int, n: int, skew: float, outside: bool, periodic: tuple[bool, bool, bool], reach: float
) -> None:
    points, cell = random_system(seed, n, skew, outside)
    pbc = np.array(periodic)
    pairs = listed(build_system_list(points, n, cell, pbc, reach))
    assert len(set(both_ways(pairs))) == 2 * len(pairs), "a pair stands twice"
    assert set(both_ways(pairs)) == brute_force(points, cell, pbc, reach)


@settings(max_examples=40, deadline=None)
@given(**{k: v for k, v in systems.items() if k not in ("outside",)})
def test_equals_ase(seed: int, n: int, skew: float, periodic: tuple[bool, bool, bool], reach: float) -> None:
    points, cell = random_system(seed, n, skew, outside=False)
    pairs = listed(build_system_list(points, n, cell, np.array(periodic), reach))
    atoms = Atoms("Ar" * n, positions=points, cell=cell, pbc=periodic)
    i, j, shift = ase.neighborlist.neighbor_list("ijS", atoms, reach)
    theirs = [(int(a), int(b), tuple(s.tolist())) for a, b, s in zip(i, j, shift, strict=True)]
    assert sorted(both_ways(pairs)) == sorted(theirs)


@relaxed
@given(**systems)
def test_a_half_list_takes_the_upper_image_and_no_row_too_many(
    seed: int, n: int, skew: float, outside: bool, periodic: tuple[bool, bool, bool], reach: float
) -> None:
    points, cell = random_system(seed, n, skew, outside)
    one = build_system_list(points, n, cell, np.array(periodic), reach)
    pairs = listed(one)
    if not outside and all(periodic):
        assert all(s > (0, 0, 0) or (s == (0, 0, 0) and i != j) for i, j, s in pairs)
    images = list(zip(one.image_of.tolist(), map(tuple, one.image_shift.tolist()), strict=True))
    assert len(set(images)) == len(images), "an image has two rows"
    assert set(one.neighbors[one.neighbors >= n].tolist()) == set(range(n, one.n_total)), "an image nobody needs"
    assert one.first.tolist() == (np.cumsum(one.count) - one.count).tolist()
    assert not one.boundary.any()


@relaxed
@given(**systems, owned=st.integers(0, 7))
def test_lists_are_a_function_of_their_arguments(
    seed: int, n: int, skew: float, outside: bool, periodic: tuple[bool, bool, bool], reach: float, owned: int
) -> None:
    points, cell = random_system(seed, n, skew, outside)
    for pairs in ("half", "full"):
        one, two = (
            build_system_list(x, min(owned, n), cell, np.array(periodic), reach, pairs=pairs)
            for x in (points, np.concatenate([points, points])[n:])
        )
        for name in ("image_of", "image_shift", "first", "count", "neighbors", "boundary"):
            assert (getattr(one, name) == getattr(two, name)).all()
            assert getattr(one, name).dtype == (np.uint8 if name == "boundary" else np.int32)


@relaxed
@given(**systems, owned=st.integers(0, 7))
def test_remote_ghosts_stand_at_the_owned_atom_only(
    seed: int,
    n: int,
    skew: float,
    outside: bool,
    periodic: tuple[bool, bool, bool],
    reach: float,
    owned: int,
) -> None:
    n_owned = min(owned, n)
    points, cell = random_system(seed, n, skew, outside)
    one = build_system_list(points, n_owned, cell, np.array(periodic), reach)
    pairs = listed(one)
    whole = brute_force(points, cell, np.array(periodic), reach)
    local = {p for p in whole if p[0] < n_owned and p[1] < n_owned}
    mixed = {p for p in whole if p[0] < n_owned <= p[1]}
    assert {p for p in pairs if p[1] >= n_owned} == mixed
    assert set(both_ways([p for p in pairs if p[1] < n_owned])) == local
    assert len(pairs) == len(set(pairs)) == len(mixed) + len(local) // 2
    assert set(np.flatnonzero(one.boundary).tolist()) == {p[0] for p in mixed}
    assert one.node().tolist() == [*range(n), *one.image_of.tolist()]


@relaxed
@given(**systems, owned=st.integers(0, 7), receiving=st.integers(0, 127))
def test_a_full_list_holds_every_edge_into_each_receiver(
    seed: int,
    n: int,
    skew: float,
    outside: bool,
    periodic: tuple[bool, bool, bool],
    reach: float,
    owned: int,
    receiving: int,
) -> None:
    n_owned, pbc = min(owned, n), np.array(periodic)
    points, cell = random_system(seed, n, skew, outside)
    receivers = np.array([bool(receiving >> k & 1) for k in range(n - n_owned)], dtype=bool)
    one = build_system_list(points, n_owned, cell, pbc, reach, pairs="full", receivers=receivers)
    edges = listed(one)
    receives = np.concatenate([np.ones(n_owned, dtype=bool), receivers])
    assert len(edges) == len(set(edges))
    assert set(edges) == {p for p in brute_force(points, cell, pbc, reach) if receives[p[0]]}
    assert set(np.flatnonzero(one.boundary).tolist()) == {i for i, j, _ in edges if i < n_owned <= j}
    assert set(one.neighbors[one.neighbors >= n].tolist()) == set(range(n, one.n_total)), "an image nobody needs"
    of_owned = build_system_list(points, n_owned, cell, pbc, reach, pairs="full")
    assert set(listed(of_owned)) == {p for p in edges if p[0] < n_owned}


def test_no_pairs_on_request() -> None:
    points, cell = random_system(1, 5, 0.5, outside=True)
    one = build_system_list(points, 3, cell, np.array([True] * 3), 6.0, pairs="none")
    assert (one.n_total, len(one.neighbors), one.count.tolist(), one.boundary.tolist()) == (5, 0, [0] * 5, [0] * 3)
    with pytest.raises(ValueError, match="finite"):
        build_system_list(points * np.inf, 3, cell, np.array([True] * 3), 6.0, pairs="none")


def test_no_atoms_and_one_atom() -> None:
    none = build_system_list(np.zeros((0, 3)), 0, np.eye(3), np.array([True] * 3), 5.0)
    assert (none.n_total, len(none.neighbors), len(none.first), len(none.boundary)) == (0, 0, 0, 0)
    lone = build_system_list(np.zeros((1, 3)), 1, np.zeros((3, 3)), np.array([False] * 3), 5.0)
    assert (lone.n_total, len(lone.neighbors), lone.count.tolist()) == (1, 0, [0])
    remote = build_system_list(np.zeros((2, 3)), 0, np.zeros((3, 3)), np.array([False] * 3), 5.0)
    assert (remote.n_total, len(remote.neighbors), remote.count.tolist()) == (2, 0, [0, 0])


@pytest.mark.parametrize(
    "shape", [(1e6, 3, 3), (3, 2e5, 3), (2e3, 2e3, 3), (5e3, 3, 5e3), (1e6, 1e6, 1e6), (1e9, 3, 3)]
)
@pytest.mark.parametrize("periodic", [(True, True, True), (False, False, False), (False, True, False)])
def test_long_thin_systems_do_not_kill_the_process(shape: tuple[float, ...], periodic: tuple[bool, ...]) -> None:
    # vesin 0.6.2 divides by zero on these; a float exception is no Python error.
    cell = np.diag(shape)
    points = np.random.default_rng(1).random((12, 3)) @ cell
    points[1], points[2] = points[0] + [1.0, 0.5, 0.5], points[3] - [0.5, 1.0, 0.5]
    pbc = np.array(periodic)
    pairs = listed(build_system_list(points, 12, cell, pbc, 5.0))
    assert set(both_ways(pairs)) == brute_force(points, cell, pbc, 5.0)
    assert {(0, 1), (2, 3)} <= {(i, j) for i, j, s in pairs if s == (0, 0, 0)}


@relaxed
@given(seed=st.integers(0, 2**31), periodic=st.tuples(st.booleans(), st.booleans(), st.booleans()), along=st.booleans())
def test_a_cell_is_completed_by_unit_vectors_normal_to_it(
    seed: int, periodic: tuple[bool, bool, bool], along: bool
) -> None:
    rng = np.random.default_rng(seed)
    cell = rng.normal(size=(3, 3)) * rng.uniform(0.1, 50.0, (3, 1))
    if along:
        cell = np.diag(cell.diagonal())[rng.permutation(3)]
    pbc = np.array(periodic)
    box = full_box(cell, pbc)
    kept, made = box[pbc], box[~pbc]
    assert np.array_equal(kept, cell[pbc])
    assert made @ made.T == pytest.approx(np.eye(len(made)), abs=1e-12)
    assert made @ kept.T == pytest.approx(np.zeros((len(made), len(kept))), abs=1e-6)
    assert pbc.all() or np.linalg.det(box) > 0


def test_axes_without_a_vector_are_the_cartesian_ones_where_they_can() -> None:
    for k in range(3):
        one, two = np.arange(3) == k, np.arange(3) != k
        assert np.array_equal(full_box(np.diag(5.0 * one), one), np.diag(1 + 4.0 * one))
        assert np.array_equal(full_box(np.diag(5.0 * two), two), np.diag(1 + 4.0 * two))
    assert np.array_equal(full_box(np.zeros((3, 3)), np.array([False] * 3)), np.eye(3))


def test_atoms_on_faces_edges_and_corners_are_there_once() -> None:
    edge = 6.0
    eps = np.nextafter(edge, 0)
    points = np.array([[0, 0, 0], [eps, eps, eps], [edge, 0, 3.0], [0, 3.0, eps], [3.0, edge, edge]], dtype=float)
    pbc = np.array([True] * 3)
    pairs = listed(build_system_list(points, 5, np.eye(3) * edge, pbc, 4.0))
    assert set(both_ways(pairs)) == brute_force(points, np.eye(3) * edge, pbc, 4.0)


@pytest.mark.parametrize(
    ("points", "cell", "periodic", "reach", "message"),
    [
        ([[0, 0, np.nan], [1, 1, 1]], np.eye(3), [True] * 3, 2.0, "finite, 1 of 2.*atom 0"),
        ([[0, 0, np.inf]], np.eye(3), [False] * 3, 2.0, "finite"),
        ([[0, 0, 0]], np.zeros((3, 3)), [True, False, False], 2.0, "independent and not zero"),
        ([[0, 0, 0]], [[1, 0, 0], [2, 0, 0], [0, 0, 1]], [True] * 3, 2.0, "independent"),
        ([[0, 0, 0]], np.full((3, 3), np.nan), [True] * 3, 2.0, "lattice vectors"),
        ([[0, 0, 0]], np.eye(3), [True] * 3, 0.0, "reach.*positive"),
    ],
)
def test_bad_input_is_named(points: list, cell: np.ndarray, periodic: list, reach: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_system_list(np.array(points, dtype=float), len(points), np.array(cell), np.array(periodic), reach)


def test_two_atoms_at_one_site_are_found_across_the_boundary() -> None:
    cell, pbc = np.eye(3) * 10, np.array([True, True, False])
    points = np.array([[0.01, 5, 5], [9.99, 5, 5], [3, 3, 3], [3, 3, 3], [3, 3, 3.2]])
    found = overlapping_pairs(points, cell, pbc, 0.1)
    assert [pair[:2] for pair in found] == [(2, 3), (0, 1)]
    assert [pair[2] for pair in found] == pytest.approx([0.0, 0.02])
    assert overlapping_pairs(points[:1], cell, pbc) == []
    assert [pair[:2] for pair in overlapping_pairs(points[:1], np.diag([0.05, 9, 9.0]), pbc)] == [(0, 0)]


def test_a_batch_is_its_systems_side_by_side() -> None:
    molecule = Atoms("Ar3", positions=[[0, 0, 0], [3.5, 0, 0], [0, 3.5, 0]])
    slab = bulk("Ne", a=4.4, cubic=True)
    slab.pbc = (True, True, False)
    batch = Batch.from_atoms([molecule, slab, Atoms(), bulk("Kr", a=5.6)])
    nb = neighborhood_of(batch, 6.0)
    assert (nb.n_owned, nb.n_systems) == (8, 4)
    assert nb.ptr.tolist() == [0, 3, 7, 7, 8]
    assert nb.system.tolist() == [0] * 3 + [1] * 4 + [3]
    assert nb.numbers[:8].tolist() == batch.numbers.tolist()
    assert torch.equal(nb.positions[:8], batch.positions)
    node = nb.node.long()
    assert bool((node < 8).all())
    assert torch.equal(nb.numbers, nb.numbers[node])
    i = torch.repeat_interleave(torch.arange(8), nb.count.long())
    assert torch.equal(nb.system[i], nb.system[node[nb.neighbors.long()]]), "a pair across two systems"
    lengths = (nb.positions[nb.neighbors.long()] - nb.positions[i]).norm(dim=1)
    alone = [neighborhood_of(batch.select([k]), 6.0) for k in range(4)]
    assert nb.n_pairs == sum(one.n_pairs for one in alone)
    assert bool((lengths < 6.0).all())


def test_the_bad_system_of_a_batch_is_named() -> None:
    good, bad = bulk("Ar", a=5.3), bulk("Kr", a=5.6)
    bad.positions[0, 1] = np.nan
    with pytest.raises(ValueError, match="system 'rotten': positions must be finite"):
        neighborhood_of(Batch.from_atoms([good, bad], ids=["fine", "rotten"]), 5.0)
