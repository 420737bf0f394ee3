"""Wrapped coordinates and image counts: against exact fractions, ASE and a free flight; nothing is moved by asking."""

from __future__ import annotations

from fractions import Fraction

import ase
import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.geometry import wrap_positions
from hypothesis import given, settings
from hypothesis import strategies as st

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.domain.fields import BatchError
from mattermill.domain.wrapping import image_counts

SETTINGS = settings(max_examples=60, deadline=None)
PERIODIC = st.tuples(st.booleans(), st.booleans(), st.booleans())


def some_system(seed, pbc, spread=40.0, n=20):
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(4, 9, 3)) + np.tril(rng.uniform(-3, 3, (3, 3)), -1)
    return ase.Atoms(f"Ar{n}", rng.uniform(-spread, spread, (n, 3)), cell=cell, pbc=pbc)


@SETTINGS
@given(st.integers(0, 10_000), PERIODIC)
def test_wrapped_and_image_make_up_the_position(seed, pbc):
    atoms = some_system(seed, pbc)
    batch = Batch.from_atoms(atoms)
    wrapped, image = batch.wrapped().numpy(), batch.image.numpy()
    assert image.dtype == np.int32
    cell = batch.cell[0].numpy()
    np.testing.assert_allclose(wrapped + image @ cell, batch.positions.numpy(), rtol=0, atol=1e-12)
    fractions = np.linalg.solve(cell.T, wrapped.T).T
    free = ~np.array(pbc)
    assert not image[:, free].any()
    assert (fractions[:, ~free] > -1e-12).all()
    assert (fractions[:, ~free] < 1 + 1e-12).all()
    # ASE's own, which leaves what is less than eps below a face where it is.
    np.testing.assert_allclose(wrapped, wrap_positions(batch.positions.numpy(), cell, pbc, eps=1e-13), atol=1e-9)


def expected(x: float, length: float) -> tuple[Fraction, int]:
    """The place of x in [0, length) and its image, exactly."""
    image = Fraction(x) // Fraction(length)
    return Fraction(x) - image * Fraction(length), int(image)


# Lengths whose reciprocal rounds up, down and not at all: 49 * (1 / 49) is less than 1.
@pytest.mark.parametrize("length", [1.0, 4.0, 5.4, 49.0, 0.1, 25.0, 103.0, 1e-3, 1e4 / 3])
def test_faces_and_what_lies_a_hair_beside_them(length):
    values = [0.0, -0.0, 1e-17, -1e-17, -5e-324, 1e-300, -1e-300, length / 2]
    for k in (-3, -1, 1, 2, 7):
        face = k * length
        values += [face, np.nextafter(face, np.inf), np.nextafter(face, -np.inf), face + 1e-9, face - 1e-9]
    atoms = ase.Atoms(f"Ar{len(values)}", [[v, 0.3 * length, 0.0] for v in values], cell=[length] * 3, pbc=True)
    batch = Batch.from_atoms(atoms)
    wrapped, image = batch.wrapped().numpy()[:, 0], batch.image.numpy()[:, 0]
    assert (wrapped >= 0).all()
    assert (wrapped < length).all()
    for x, at, count in zip(values, wrapped.tolist(), image.tolist(), strict=True):
        place, cells = expected(x, length)
        # What rounds to the upper face stands on the lower one, a cell further.
        same = cells == count and abs(Fraction(at) - place) < Fraction(4 * np.spacing(max(abs(x), length)))
        face = cells == count - 1 and at == 0.0 and Fraction(length) - place < Fraction(np.spacing(max(abs(x), length)))
        face |= cells == count - 1 and Fraction(length) - place + Fraction(at) < Fraction(4 * np.spacing(abs(x)))
        assert same or face, (x, at, count, float(place), cells)
    # Exactly on a face there is nothing to round.
    for k in (-3, -1, 1, 2, 7):
        if Fraction(k * length) == k * Fraction(length):
            assert (wrapped[values.index(k * length)], image[values.index(k * length)]) == (0.0, k)
    if length - 1e-17 == length:
        assert (wrapped[values.index(-1e-17)], image[values.index(-1e-17)]) == (0.0, 0)


def test_corners_and_edges_count_each_axis_alone():
    cell = np.diag([4.0, 6.0, 8.0])
    corners = np.array(np.meshgrid([-1, 0, 1, 2], [-1, 0, 1, 2], [-1, 0, 1, 2], indexing="ij")).reshape(3, -1).T
    wrapped, image = image_counts(corners @ cell, cell, np.array([True, True, False]))
    np.testing.assert_array_equal(image, corners * [1, 1, 0])
    np.testing.assert_array_equal(wrapped, corners @ cell * [0, 0, 1])


def test_what_is_inside_keeps_its_bits():
    atoms = some_system(4, True, spread=1.0)
    atoms.wrap()
    batch = Batch.from_atoms(atoms)
    inside = (batch.image == 0).all(dim=1)
    assert bool(inside.any())
    assert torch.equal(batch.wrapped()[inside], batch.positions[inside])


def test_a_row_depends_on_itself_alone():
    atoms = some_system(5, True, n=300)
    cell, pbc = atoms.cell.array, atoms.pbc
    wrapped, image = image_counts(atoms.positions, cell, pbc)
    for rows in (slice(0, 1), slice(7, 20), slice(33, 34)):
        one, count = image_counts(atoms.positions[rows], cell, pbc)
        assert np.array_equal(one, wrapped[rows])
        assert np.array_equal(count, image[rows])


def test_molecules_slabs_and_bulk_each_in_their_own_cell():
    molecule = ase.Atoms("Ar2", [[-50.0, 3, 9], [70, 0, 0]])
    slab = ase.Atoms("Ar", [[-1.0, 9.0, -40.0]], cell=[5, 4, 0], pbc=(True, True, False))
    solid = ase.Atoms("Ar", [[11.0, -1.0, 2.0]], cell=[5, 5, 5], pbc=True)
    batch = Batch.from_atoms([molecule, slab, solid])
    assert batch.image.tolist() == [[0, 0, 0], [0, 0, 0], [-1, 2, 0], [2, -1, 0]]
    assert batch.wrapped().tolist() == [[-50.0, 3, 9], [70, 0, 0], [4, 1, -40], [1, 4, 2]]
    empty = Batch.empty()
    assert tuple(empty.wrapped().shape) == tuple(empty.image.shape) == (0, 3)


def test_left_handed_and_tilted_cells():
    for cell in (
        np.diag([4.0, 5.0, -6.0]),
        [[0, 4.0, 0], [5.0, 0, 0], [0, 0, 6.0]],
        [[4, 0, 0], [8.1, 5, 0], [1, 9, 6]],
    ):
        cell = np.array(cell, dtype=float)
        x = np.random.default_rng(0).uniform(-30, 30, (50, 3))
        wrapped, image = image_counts(x, cell, np.array([True] * 3))
        fractions = np.linalg.solve(cell.T, wrapped.T).T
        assert ((fractions > -1e-12) & (fractions < 1 + 1e-12)).all()
        np.testing.assert_allclose(wrapped + image @ cell, x, atol=1e-12)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda b: b.positions[1].fill_(float("nan")), "system 'b': positions must be finite"),
        (lambda b: b.positions[1].fill_(1e12), r"system 'b': positions must be within 2\^31 cells"),
        (lambda b: b.cell[1].zero_(), "system 'b': lattice vectors"),
    ],
)
def test_what_has_no_place_in_a_cell_is_named(spoil, words):
    batch = Batch.from_atoms([bulk("Ar", cubic=True)[:1], bulk("Ar", cubic=True)[:1]], ["a", "b"]).clone()
    spoil(batch)
    for ask in (batch.wrapped, lambda: batch.image, lambda: batch.to_atoms(wrap=True)):
        with pytest.raises(BatchError, match=words):
            ask()
    assert batch.select(["a"]).image.tolist() == [[0, 0, 0]]


def test_to_atoms_wraps_when_it_is_told_to():
    """In the orientation that came in, which is not the one inside."""
    atoms = bulk("Ar", "fcc", a=5.3) * (2, 2, 2)
    atoms.rotate(33, (1, 2, 3), rotate_cell=True)
    atoms.positions += 40.0
    batch = Batch.from_atoms(atoms)
    np.testing.assert_allclose(batch.to_atoms()[0].positions, atoms.positions, atol=1e-12)
    wrapped = batch.to_atoms(wrap=True)[0]
    scaled = atoms.cell.scaled_positions(wrapped.positions)
    assert scaled.min() > -1e-12
    assert scaled.max() < 1 + 1e-12
    np.testing.assert_allclose(wrapped.get_all_distances(mic=True), atoms.get_all_distances(mic=True), atol=1e-9)


def _flight(mesh):
    """One atom alone in a box flies 0.5 Å a step; what is counted is what it crossed."""
    atoms = ase.Atoms("Ar", [[0.1, 9.8, 5.0]], cell=[10.0, 10.0, 10.0], pbc=(True, True, False))
    batch = Batch.from_atoms(atoms).with_fields(
        atoms={"velocities": torch.tensor([[0.25, -0.125, 0.5]], dtype=torch.float64)}
    )
    seen = []
    for _ in range(3):
        batch = mm.simulate(mm.models.noble_gases(cutoff=4.0), batch, mm.NVE(), steps=50, dt=2.0, mesh=mesh)
        seen.append((batch.positions[0].tolist(), batch.image[0].tolist()))
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_a_free_flight_is_counted_across_cells(ranks, size):
    for seen in [_flight(None)] if size == 1 else ranks.run(_flight, size):
        for k, (position, image) in enumerate(seen, 1):
            place = np.array([0.1 + 25.0 * k, 9.8 - 12.5 * k, 5.0 + 50.0 * k])
            assert position == pytest.approx(place, abs=1e-9)
            assert image == [int(place[0] // 10), int(place[1] // 10), 0]
