"""Rank grids and owners: every atom has one owner, no domain is too thin, every domain has its share of any shape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ase.build import bulk
from hypothesis import given, settings
from hypothesis import strategies as st

from mattermill.domain.arrangement import Arranger, cutting_order
from mattermill.domain.cuts import nested, order_statistics
from mattermill.domain.frame import Frame, sample, vacuum
from mattermill.domain.partition import WHOLE, choose_grid, divide, grid_for
from mattermill.domain.units import heights

REACH = 6.6
EYE = np.eye(3)
GRIDS = [g for g in itertools.product(range(1, 9), repeat=3) if 1 < np.prod(g) <= 8]


def _points(n, cell, seed=0):
    return np.random.default_rng(seed).random((n, 3)) @ cell


def _seen(grid, fractional, margin):
    """Images of others' atoms within a margin of each domain, one by one."""
    owners, counts = grid.owners(fractional), []
    axes = [(-1, 0, 1) if s and p else (0,) for s, p in zip(grid.split, grid.periodic, strict=True)]
    for domain in range(grid.n_domains):
        low, high = grid.bounds(domain)
        moved = [fractional[owners != domain] + np.array(shift) for shift in itertools.product(*axes)]
        counts.append(sum(np.all((m >= low - margin) & (m <= high + margin), axis=1).sum() for m in moved))
    return np.array(counts)


# --- how many domains along which axis --------------------------------------------------------------------------


def test_a_bar_is_split_where_it_is_longest():
    cell = np.diag([40.0, 20.0, 20.0])
    grid = choose_grid(cell, [True] * 3, 2, REACH, _points(4000, cell))
    assert grid.dims == (2, 1, 1)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
def test_all_ranks_work_in_a_large_cube(size):
    cell = 60 * EYE
    grid = choose_grid(cell, [True] * 3, size, REACH, _points(9000, cell))
    assert grid.n_domains == size
    assert max(grid.dims) <= 4


def test_the_fewest_ghosts_win():
    cell = np.diag([60.0, 60.0, 30.0])
    grid = choose_grid(cell, [True] * 3, 4, REACH, _points(9000, cell))
    assert grid.dims[2] == 1
    assert grid.n_domains == 4


@pytest.mark.parametrize("ghost_work", [0.25, 1.0])
@pytest.mark.parametrize("length", [30.0, 60.0])
def test_the_choice_is_the_best_of_all_by_exact_count(length, ghost_work):
    """Every arrangement there is, its owned atoms and ghosts counted one by one."""
    rng = np.random.default_rng(8)
    cell = np.diag([length, 1.5 * length, length])
    n = int(0.02 * np.prod(np.diag(cell)))
    fractional = rng.random((n, 3)) * [1.0, 0.6, 1.0]
    frame = Frame.of(cell, [True] * 3)
    costs = {(1, 1, 1): float(n)}
    for dims in GRIDS:
        grid = grid_for(frame, fractional, 8, REACH, grid=dims)
        if grid.dims == dims:
            owned = np.bincount(grid.owners(fractional), minlength=grid.n_domains)
            costs[dims] = float((owned + ghost_work * _seen(grid, fractional, REACH / frame.heights)).max())
    chosen = grid_for(frame, fractional, 8, REACH, split_atoms=1, ghost_work=ghost_work)
    assert costs[chosen.dims] <= 1.1 * min(costs.values()), (chosen.dims, sorted(costs.items(), key=lambda c: c[1])[:4])


def test_more_domains_only_where_they_pay():
    """Deep message passing in a small box: with the ghosts of eight domains each would do more than one of four."""
    cell = 60 * EYE
    points = _points(9000, cell)
    frame = Frame.of(cell, [True] * 3)
    few = grid_for(frame, frame.wrap(points)[0], 8, 20.0, ghost_work=1.0)
    many = grid_for(frame, frame.wrap(points)[0], 8, 20.0, ghost_work=0.0)
    assert few.n_domains == 1, "each of two domains would see all of the other one, and more"
    assert many.n_domains == 8


def test_equal_choices_do_not_flap():
    """A cube whose edges breathe by 1 %: the same arrangement all the time."""
    rng = np.random.default_rng(5)
    fractional = rng.random((4000, 3))
    found = set()
    for _ in range(30):
        frame = Frame.of(np.diag(60 + rng.uniform(-0.3, 0.3, 3)), [True] * 3)
        found.add(grid_for(frame, fractional, 4, REACH).dims)
    assert len(found) == 1


def test_the_sample_is_not_in_step_with_a_crystal():
    """Of a crystal whose atoms come row by row, a fixed stride may only meet every other plane."""
    n = 32
    layers = np.repeat(np.arange(n), n * n)
    rows = np.tile(np.arange(n), n * n)
    picked = sample(n**3)
    assert len(picked) == len(set(picked.tolist())) == 1536
    for coordinate in (layers, rows):
        counts = np.bincount(coordinate[picked], minlength=n)
        assert counts.min() > 0.5 * counts.mean()
        assert counts.max() < 1.5 * counts.mean()


def test_few_atoms_stay_together():
    cell = 60 * EYE
    assert choose_grid(cell, [True] * 3, 4, REACH, _points(900, cell), split_atoms=500).n_domains == 1
    assert choose_grid(cell, [True] * 3, 4, REACH, _points(1000, cell), split_atoms=500).n_domains == 2
    assert choose_grid(cell, [True] * 3, 4, REACH, np.zeros((0, 3)), split_atoms=1).n_domains == 1


@pytest.mark.parametrize("grid", [(2, 2), (0, 1, 1), (3, 1, 1)])
def test_a_grid_that_makes_no_sense(grid):
    cell = 60 * EYE
    with pytest.raises(ValueError, match="grid"):
        choose_grid(cell, [True] * 3, 2, REACH, _points(1000, cell), grid=grid)


def test_a_cell_that_is_none():
    with pytest.raises(ValueError, match="lattice vectors"):
        choose_grid(np.zeros((3, 3)), [True] * 3, 2, REACH, _points(10, EYE))


# --- thickness --------------------------------------------------------------------------------------------------


def _thinnest(grid, frame):
    """Å, the thinnest domain along periodic axes that are split."""
    thin = np.inf
    for domain in range(grid.n_domains):
        low, high = grid.bounds(domain)
        for axis in range(3):
            if frame.periodic[axis] and grid.split[axis]:
                thin = min(thin, float((high[axis] - low[axis]) * frame.heights[axis]))
    return thin


def test_a_domain_is_never_thinner_than_reach():
    rng = np.random.default_rng(1)
    split = 0
    for trial in range(300):
        cell = np.tril(rng.normal(size=(3, 3)) * 6) + np.diag(rng.uniform(7, 30, 3))
        pbc = rng.random(3) < 0.7
        n = int(rng.integers(1, 400))
        points = rng.normal(size=(n, 3)) * rng.uniform(1, 20, 3)
        dims = GRIDS[rng.integers(len(GRIDS))] if trial % 2 else None
        grid = choose_grid(cell, pbc, 8, REACH, points, split_atoms=10, grid=dims)
        split += any(p and s for p, s in zip(pbc, grid.split, strict=True))
        assert _thinnest(grid, Frame.of(cell, pbc)) >= REACH * (1 - 1e-12)
    assert split > 50


def test_too_thin_uses_fewer_ranks():
    """Case 9: an 8 Å box, 6 Å cutoff, 2 ranks."""
    cell = 8.0 * EYE
    points = _points(1200, cell)
    assert choose_grid(cell, [True] * 3, 2, 6.0, points) == WHOLE
    assert choose_grid(cell, [True] * 3, 2, 6.0, points, grid=(2, 1, 1)) == WHOLE


def test_triclinic_thickness_is_between_faces():
    # Long vectors, thin cell: 20 Å vectors at 30°, 10 Å between faces.
    cell = np.array([[20.0, 0, 0], [20 * np.cos(np.pi / 6), 10.0, 0], [0, 0, 30.0]])
    assert heights(cell)[:2] == pytest.approx([10.0, 10.0])
    grid = choose_grid(cell, [True] * 3, 4, REACH, _points(2000, cell))
    assert grid.dims[:2] == (1, 1)
    assert grid.dims[2] > 1


def test_thickness_does_not_throw_balance_away():
    """A dense layer, thinner than three domains must be: of three, two share it and the third stands aside."""
    rng = np.random.default_rng(6)
    fractional = rng.random((3000, 3))
    fractional[:, 0] = 0.5 + 0.04 * (fractional[:, 0] - 0.5)
    thinnest = np.array([0.2, 0.0, 0.0])
    (planes,), _, _ = nested(fractional, (3, 1, 1), (0, 1, 2), thinnest)
    counts = np.histogram(fractional[:, 0], [0.0, *planes, 1.0])[0]
    assert sorted(counts.tolist())[1:] == pytest.approx([1500, 1500], abs=5)
    assert np.diff([0.0, *planes, 1.0]).min() >= 0.2 - 1e-12


def test_spaced_planes_are_as_good_as_brute_force():
    rng = np.random.default_rng(7)
    for trial in range(20):
        parts = int(rng.integers(2, 5))
        thinnest = rng.uniform(0.5, 0.95) / parts
        values = rng.beta(*rng.uniform(1, 30, 2), 400)
        (planes,), _, _ = nested(np.stack([values] * 3, 1), (parts, 1, 1), (0, 1, 2), np.full(3, thinnest))
        ours = np.histogram(values, [0.0, *planes, 1.0])[0].max()
        starts, u = thinnest * np.arange(1, parts), np.linspace(0, 1 - parts * thinnest, 24)
        choices = itertools.combinations_with_replacement(u, parts - 1)
        best = min(np.histogram(values, [0.0, *(starts + c), 1.0])[0].max() for c in choices)
        assert ours <= best + 0.04 * len(values) / parts, (trial, ours, best)


# --- every atom has one owner -----------------------------------------------------------------------------------

FACES = [0.0, 1e-17, -1e-17, 1e-12, -1e-12, 1.0, np.nextafter(1.0, 0.0), -3.0, 2.0, 5.5, -41.25, 0.5]


def _tile(grid, frame, fractional):
    """Every atom lies within the bounds of the domain that owns it and of no other; bounds meet and fill the cell."""
    owners = grid.owners(fractional)
    inside = np.zeros(len(fractional), dtype=int)
    volume = 0.0
    for domain in range(grid.n_domains):
        low, high = grid.bounds(domain)
        member = np.all((fractional >= low) & (fractional < high), axis=1)
        inside += member
        assert np.array_equal(member, owners == domain)
        bounded = np.array(grid.split) & frame.periodic
        volume += float(np.prod((high - low)[bounded])) if not (np.array(grid.split) & ~frame.periodic).any() else 0
    assert (inside == 1).all()
    if volume:
        assert volume == pytest.approx(1.0, abs=1e-12)


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    dims=st.sampled_from(GRIDS),
    pbc=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    reach=st.floats(0.5, 12.0),
    places=st.lists(st.tuples(*[st.sampled_from(FACES)] * 3), max_size=30),
    n=st.integers(0, 60),
)
def test_domains_tile_space_and_contain_their_atoms(seed, dims, pbc, reach, places, n):
    rng = np.random.default_rng(seed)
    cell = np.tril(rng.normal(size=(3, 3)) * 5) + np.diag(rng.uniform(5, 40, 3))
    fractional = np.concatenate([np.array(places).reshape(-1, 3), rng.normal(0.3, rng.uniform(0.01, 3), (n, 3))])
    if not len(fractional):
        return
    positions = fractional @ cell
    frame = Frame.of(cell, pbc)
    done = divide(frame, positions, 8, reach, grid=dims)
    frame, grid, wrapped = done.frame, done.grid, done.fractional
    periodic = wrapped[:, frame.periodic]
    assert periodic.size == 0 or (periodic.min() >= 0.0 and periodic.max() < 1.0)
    assert not done.image[:, ~frame.periodic].any()
    back = (frame.origin + wrapped + done.image) @ frame.box
    assert np.abs(back - positions).max() < 1e-9 * max(1.0, np.abs(positions).max())
    assert np.bincount(grid.owners(wrapped), minlength=grid.n_domains).sum() == len(positions)
    assert all(g <= d for g, d in zip(grid.dims, dims, strict=True))
    assert _thinnest(grid, frame) >= reach * (1 - 1e-12)
    _tile(grid, frame, wrapped)


def test_an_atom_on_a_plane_belongs_above_it():
    fractional = np.array([[x, 0.5, 0.5] for x in (0.1, 0.2, 0.3, 0.8)])
    frame = Frame.of(60 * EYE, [True] * 3)
    grid = grid_for(frame, fractional, 2, REACH, grid=(2, 1, 1))
    plane = grid.bounds(0)[1][0]
    assert plane == grid.bounds(1)[0][0]
    on = np.array([[plane, 0.5, 0.5], [np.nextafter(plane, 0), 0.5, 0.5]])
    assert grid.owners(on).tolist() == [1, 0]


def test_numbers_of_domains_follow_their_place():
    """Whatever the order of the cuts, domain (i, j, k) is number (i * dims[1] + j) * dims[2] + k."""
    rng = np.random.default_rng(9)
    fractional = rng.random((4000, 3))
    frame = Frame.of(100 * EYE, [True] * 3)
    for dims in [(1, 2, 4), (4, 1, 2), (2, 4, 1), (2, 2, 2)]:
        grid = grid_for(frame, fractional, 8, REACH, grid=dims)
        assert grid.order == cutting_order(dims)
        for number, place in enumerate(itertools.product(*map(range, dims))):
            low, high = grid.bounds(number)
            middle = 0.5 * (np.maximum(low, 0.0) + np.minimum(high, 1.0))
            ideal = (np.array(place) + 0.5) / dims
            assert np.abs(middle - ideal).max() < 0.05


def test_axes_that_are_not_periodic_are_open_ended():
    points = np.array([[0.0, 0, 0], [100, 0, 0], [-500, 0, 0], [3, 0, 0]])
    grid = choose_grid(np.zeros((3, 3)), [False] * 3, 2, REACH, points, grid=(2, 1, 1))
    frame = Frame.of(np.zeros((3, 3)), [False] * 3)
    owners = grid.owners(frame.wrap(points)[0])
    assert sorted(np.bincount(owners, minlength=2)) == [2, 2]
    assert grid.bounds(0)[0][0] == -np.inf
    assert grid.bounds(1)[1][0] == np.inf


# --- balance ----------------------------------------------------------------------------------------------------

_rng = np.random.default_rng(2)


def _ball(n, radius, centre):
    direction = _rng.normal(size=(n, 3))
    direction /= np.linalg.norm(direction, axis=1)[:, None]
    return direction * radius * _rng.random((n, 1)) ** (1 / 3) + centre


def _ell(n):
    long, short = _rng.random((n, 3)) * [100, 30, 30], _rng.random((n, 3)) * [30, 70, 30] + [0, 30, 0]
    share = n * 3000 // 5100
    return np.concatenate([long[:share], short[: n - share]])


SHAPES = {
    "slab": (np.diag([60.0, 60, 100]), _rng.random((10_000, 3)) * [60, 60, 40] + [0, 0, 17]),
    "slab across a face": (np.diag([60.0, 60, 100]), _rng.random((10_000, 3)) * [60, 60, 40] + [0, 0, 80]),
    "droplet": (100 * EYE, _ball(10_000, 40, 50)),
    "droplet off centre": (120 * EYE, _ball(10_000, 40, [5, 90, 110])),
    "nanowire": (np.diag([90.0, 90, 60]), _rng.random((10_000, 3)) * [30, 30, 60] + [11, 50, 0]),
    "L": (np.diag([130.0, 130, 60]), _ell(10_000) + np.array([10, 10, 5])),
    "L across a face": (np.diag([130.0, 130, 60]), _ell(10_000) + np.array([80, 100, 40])),
    "two droplets": (
        np.diag([200.0, 100, 100]),
        np.concatenate([_ball(8000, 37, [50, 50, 50]), _ball(2000, 23, [150, 30, 70])]),
    ),
    "two on the diagonal": (160 * EYE, np.concatenate([_ball(8500, 38, 50), _ball(1500, 21, 130)])),
}


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_every_domain_has_its_share(name, size):
    cell, points = SHAPES[name]
    done = divide(Frame.of(cell, [True] * 3), points, size, 9.5)
    owned = np.bincount(done.grid.owners(done.fractional), minlength=done.grid.n_domains)
    assert done.grid.n_domains == size
    assert owned.max() <= 1.05 * owned.mean(), (done.grid, owned)


@pytest.mark.parametrize("dims", [(4, 1, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2), (3, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("name", SHAPES)
def test_so_has_every_domain_of_a_forced_grid(name, dims):
    cell, points = SHAPES[name]
    done = divide(Frame.of(cell, [True] * 3), points, 8, REACH, grid=dims)
    owned = np.bincount(done.grid.owners(done.fractional), minlength=done.grid.n_domains)
    assert done.grid.dims == dims
    assert owned.max() <= 1.15 * owned.mean(), (done.grid, owned)


def test_a_crystal_is_cut_between_its_layers():
    atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat((6, 6, 6))
    grid = choose_grid(atoms.cell.array, [True] * 3, 2, REACH, atoms.positions, split_atoms=100)
    axis = grid.dims.index(2)
    layers = np.unique(np.round(atoms.get_scaled_positions()[:, axis], 9))
    assert np.abs(layers - grid.bounds(0)[1][axis]).min() > 0.03


@pytest.mark.parametrize("n", [10_000, 50_000])
def test_order_statistics_without_sorting_all(n):
    rng = np.random.default_rng(4)
    for values in (rng.random(n), np.sort(rng.random(n)), np.round(rng.random(n), 2), rng.normal(size=n) ** 5):
        ordered = np.sort(values)
        for low in (0, 3, n // 3, n // 2, n - 40):
            assert np.array_equal(order_statistics(values, low, low + 37), ordered[low : low + 38])


# --- vacuum -----------------------------------------------------------------------------------------------------


def test_the_faces_move_into_the_vacuum():
    """A slab across the face: cut like the same slab in the middle of the cell, into as many pieces of matter."""
    cell, across = SHAPES["slab across a face"]
    frame = Frame.of(cell, [True] * 3)
    done = divide(frame, across, 3, REACH, grid=(1, 1, 3))
    z = (done.fractional * frame.heights)[:, 2]
    assert np.ptp(z) == pytest.approx(40, abs=0.1)
    matter = [done.grid.bounds(d)[1][2] * 100 for d in range(2)]
    assert matter == pytest.approx([z.min() + 40 / 3, z.min() + 80 / 3], abs=0.5)
    # Only planes through matter make ghosts: of the outer domains one each.
    seen = _seen(done.grid, done.fractional, REACH / done.frame.heights)
    assert seen[0] + seen[2] == pytest.approx(seen[1], rel=0.1)


def test_a_whole_system_keeps_its_frame():
    cell, points = SHAPES["slab across a face"]
    frame = Frame.of(cell, [True] * 3)
    done = divide(frame, points, 4, REACH, split_atoms=10_000)
    assert done.grid == WHOLE
    assert done.frame is frame
    assert np.array_equal(done.fractional, frame.wrap(points)[0])


def test_bulk_has_no_vacuum_and_neither_have_gaps_between_layers():
    frame = Frame.of(60 * EYE, [True] * 3)
    fractional = np.random.default_rng(1).random((5000, 3))
    assert frame.clear_of(fractional, REACH) is frame
    layered = fractional.copy()
    layered[:, 2] = np.floor(layered[:, 2] * 10) / 10 + 0.02
    assert frame.clear_of(layered, REACH) is frame
    assert frame.clear_of(layered, 4.0) is not frame


def test_vapour_does_not_fill_a_vacuum():
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.random(3000) * 0.4 + 0.3, rng.random(30)])
    start, length = vacuum(values)
    assert start == pytest.approx(0.7, abs=0.03)
    assert length == pytest.approx(0.6, abs=0.06)
    assert vacuum(rng.random(3000)) == (0.0, 0.0)
    assert vacuum(np.zeros(0)) == (0.0, 0.0)


def test_a_drifting_droplet_keeps_its_domains():
    """Across faces, edges and corners: who owns which atom depends on the droplet, not on where it is."""
    points = _ball(4000, 30, 0)
    frame = Frame.of(110 * EYE, [True] * 3)
    before = None
    for step in range(12):
        done = divide(frame, points + np.array([31.0, -17.0, 23.0]) * step / 3, 4, REACH, grid=(2, 2, 1))
        owners = done.grid.owners(done.fractional)
        assert np.bincount(owners).max() <= 1.05 * 1000
        if before is not None:
            assert np.count_nonzero(owners != before) < 0.03 * len(points)
        before = owners


# --- work of a domain -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(2, 1, 1), (2, 2, 1), (1, 2, 3), (2, 2, 2)])
def test_predicted_occupants_are_as_counted(dims):
    rng = np.random.default_rng(10)
    cell = np.array([[40.0, 0, 0], [9, 45.0, 0], [-6, 4, 38.0]])
    fractional = rng.random((12_000, 3)) ** [1.0, 1.5, 1.0]
    for pbc in [(True, True, True), (True, True, False), (False, True, True)]:
        frame = Frame.of(cell, pbc)
        positions = frame.wrap(fractional @ cell)[0]
        owned, seen = Arranger(frame, positions, REACH, 0.25).occupants(dims)
        grid = grid_for(frame, positions, 8, REACH, grid=dims)
        assert sorted(owned) == pytest.approx(sorted(np.bincount(grid.owners(positions))), rel=0.03)
        assert sorted(seen) == pytest.approx(sorted(_seen(grid, positions, REACH / frame.heights)), rel=0.2)
