"""From ASE and back: nothing moves, nothing is turned for good, nothing is lost silently."""

from __future__ import annotations

import subprocess
import sys

import ase
import numpy as np
import pytest
import torch
from ase import units
from ase.build import bulk, fcc111, molecule
from ase.calculators.lj import LennardJones
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from hypothesis import given, settings
from hypothesis import strategies as st

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.domain.fields import FIELDS, BatchError, declare_field
from mattermill.domain.structures import ASE_TIME_FS, lower_triangular, not_taken_along, turned

SETTINGS = settings(max_examples=60, deadline=None)


def random_atoms(seed, n=5, left_handed=False, pbc=True):
    rng = np.random.default_rng(seed)
    cell = rng.normal(size=(3, 3)) * 2 + np.eye(3)[rng.permutation(3)] * 6
    if (np.linalg.det(cell) < 0) != left_handed:
        cell[2] *= -1
    atoms = ase.Atoms(rng.integers(1, 30, n), rng.normal(size=(n, 3)) * 5, cell=cell, pbc=pbc)
    atoms.set_momenta(rng.normal(size=(n, 3)))
    return atoms


@SETTINGS
@given(st.integers(0, 10_000), st.booleans(), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_there_and_back(seed, left_handed, pbc):
    atoms = random_atoms(seed, left_handed=left_handed, pbc=pbc)
    batch = Batch.from_atoms(atoms, ["x"])
    back = batch.to_atoms()[0]
    np.testing.assert_allclose(back.positions, atoms.positions, atol=1e-12)
    np.testing.assert_allclose(back.cell.array, atoms.cell.array, atol=1e-12)
    np.testing.assert_allclose(back.get_momenta(), atoms.get_momenta(), atol=1e-12)
    np.testing.assert_array_equal(back.numbers, atoms.numbers)
    np.testing.assert_array_equal(back.pbc, atoms.pbc)
    np.testing.assert_allclose(back.get_masses(), atoms.get_masses(), rtol=1e-15)
    # Inside, the cell is lower-triangular, its hand and all distances are those of the input.
    cell = batch.cell[0].numpy()
    assert not np.triu(cell, 1).any()
    assert cell[0, 0] > 0
    assert cell[1, 1] > 0
    assert np.linalg.det(cell) == pytest.approx(np.linalg.det(atoms.cell.array), rel=1e-12)
    inside = ase.Atoms(atoms.numbers, batch.positions.numpy(), cell=cell, pbc=pbc)
    np.testing.assert_allclose(
        inside.get_all_distances(mic=True), atoms.get_all_distances(mic=True), rtol=1e-10, atol=1e-10
    )


def test_a_cell_that_is_lower_triangular_is_left_to_the_bit():
    atoms = bulk("Ar", "hcp", a=3.7, c=6.0) * (2, 1, 1)
    atoms.rattle(0.1, seed=1)
    batch = Batch.from_atoms(atoms)
    np.testing.assert_array_equal(batch.positions.numpy(), atoms.positions)
    np.testing.assert_array_equal(batch.cell[0].numpy(), atoms.cell.array)


@pytest.mark.parametrize("mask", [(1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
def test_cells_with_vectors_of_no_length(mask):
    """Slabs, rods and molecules: the vectors that are there turn as the convention says, the others stay zero."""
    cell = np.random.default_rng(3).normal(size=(3, 3)) * np.array(mask)[:, None]
    lower, rotation = lower_triangular(cell)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1.0)
    np.testing.assert_allclose(cell @ rotation, lower, atol=1e-12)
    assert not np.triu(lower, 1).any()
    np.testing.assert_allclose(np.linalg.norm(lower, axis=1), np.linalg.norm(cell, axis=1), atol=1e-12)
    # ASE draws the same cell from lengths and angles.
    from ase.geometry import cellpar_to_cell, complete_cell

    if sum(mask) == 2:
        full = ase.cell.Cell(complete_cell(lower))
        if np.linalg.det(full.array) > 0:
            np.testing.assert_allclose(
                cellpar_to_cell(full.cellpar())[np.array(mask) > 0], lower[np.array(mask) > 0], atol=1e-9
            )


def test_a_diagonal_cell_with_a_negative_side_is_turned():
    lower, rotation = lower_triangular(np.diag([-3.0, 4.0, 5.0]))
    np.testing.assert_allclose(lower, np.diag([3.0, 4.0, -5.0]), atol=1e-14)
    assert np.linalg.det(rotation) == pytest.approx(1.0)


def test_dependent_vectors_are_returned_as_they_are():
    flat = np.array([[1.0, 1.0, 0], [2.0, 2.0, 0], [0, 0, 3.0]])
    lower, rotation = lower_triangular(flat)
    np.testing.assert_array_equal(lower, flat)
    np.testing.assert_array_equal(rotation, np.eye(3))


def test_velocities_are_in_angstrom_per_fs():
    """Against ASE's own unit of time: fs is the number of its time units in a femtosecond."""
    assert pytest.approx(1 / units.fs, rel=1e-7) == ASE_TIME_FS
    atoms = ase.Atoms("Ar", pbc=False)
    atoms.set_velocities([[0.002 / units.fs, 0, 0]])  # 0.002 Å/fs
    assert Batch.from_atoms(atoms).velocities[0, 0].item() == pytest.approx(0.002, rel=1e-7)


def test_kinetic_energy_and_stress_keep_their_invariants():
    atoms = random_atoms(5, n=4)
    atoms.calc = LennardJones(sigma=2.0, epsilon=0.01, rc=5.0)
    stress, energy, forces = atoms.get_stress(voigt=False), atoms.get_potential_energy(), atoms.get_forces()
    batch = Batch.from_atoms(atoms)
    rotation = batch.rotation[0]
    turned = rotation.T @ torch.from_numpy(stress) @ rotation
    batch = batch.with_fields(
        atoms={"forces": torch.from_numpy(forces) @ rotation},
        systems={"stress": turned[None], "energy": torch.tensor([energy], dtype=torch.float64)},
    )
    back = batch.to_atoms()[0]
    np.testing.assert_allclose(back.get_stress(voigt=False), stress, atol=1e-12)
    np.testing.assert_allclose(back.get_forces(), forces, atol=1e-10)
    assert back.get_potential_energy() == energy
    assert back.get_kinetic_energy() == pytest.approx(atoms.get_kinetic_energy(), rel=1e-12)


def test_molecule_slab_and_bulk_in_one_batch():
    systems = [molecule("H2O"), fcc111("Al", (2, 2, 3)), bulk("Ar", cubic=True)]
    batch = Batch.from_atoms(systems, ["m", "s", "b"])
    assert batch.counts.tolist() == [3, 12, 4]
    assert batch.pbc.tolist() == [[False] * 3, [True, True, False], [True] * 3]
    for atoms, back in zip(systems, batch.to_atoms(), strict=True):
        np.testing.assert_allclose(back.positions, atoms.positions, atol=1e-12)
        np.testing.assert_allclose(back.cell.array, atoms.cell.array, atol=1e-12)


def test_positions_outside_the_cell_are_not_wrapped():
    atoms = bulk("Ar", cubic=True)
    atoms.positions += 100.0
    assert Batch.from_atoms(atoms).to_atoms()[0].positions.min() >= 100.0


def test_own_arrays_of_any_number_type_travel():
    atoms = bulk("Ar", cubic=True)
    atoms.set_array("charge", np.arange(4, dtype=np.float32))
    atoms.set_array("spin", np.arange(12, dtype=np.int16).reshape(4, 3))
    atoms.set_array("chosen", np.array([True, False, True, False]))
    batch = Batch.concat([Batch.from_atoms(atoms, ["a"]), Batch.from_atoms(bulk("Kr", cubic=True), ["b"])])
    assert batch.charge.dtype == torch.float64
    assert batch.spin.dtype == torch.int64
    assert batch.chosen.dtype == torch.bool
    first, second = batch.to_atoms()
    for name in ("charge", "spin", "chosen"):
        np.testing.assert_array_equal(first.get_array(name), atoms.get_array(name))
    assert "charge" not in second.arrays, "a field that a system never had is not invented"


def test_what_is_not_taken_along_is_named():
    atoms = bulk("Ar", cubic=True)
    assert not_taken_along(atoms) == []
    atoms.set_array("label", np.array(list("abcd")))
    atoms.set_array("forces", np.zeros((4, 3)))
    atoms.set_constraint(FixAtoms([1]))
    atoms.set_celldisp([1.0, 0, 0])
    atoms.info.update({"ok": [1, np.float64(2)], "bad": {"deep": object()}, 3: "key"})
    atoms.calc = SinglePointCalculator(atoms, energy=1.0)
    left = not_taken_along(atoms)
    for name in ("label", "forces", "constraints", "celldisp", "calculator result 'energy'", "info 'bad'", "info 3"):
        assert left.count(name) == 1, (name, left)
    assert "info 'ok'" not in left
    batch = Batch.from_atoms(atoms)
    assert batch.info[0] == {"ok": [1, 2.0]}
    assert "label" not in batch
    assert "forces" not in batch


def test_names_of_our_own_fields_are_kept_for_us():
    """Also those that stages declare, once they are imported."""
    from mattermill.domain.fields import is_own_name
    from mattermill.stages.fields import VISIT_FIELDS

    assert {name for name in (*VISIT_FIELDS, "forces", "ids", "pressure") if not is_own_name(name)} == set()
    atoms = bulk("Ar", cubic=True)
    atoms.set_array("temperature", np.ones(4))
    assert not_taken_along(atoms) == ["temperature"]
    assert "temperature" not in Batch.from_atoms(atoms)


EARLY = """
import warnings
import numpy as np, mattermill as mm
from ase.build import bulk
atoms = bulk("Ar", cubic=True)
atoms.set_array("friction", np.arange(4.0))
batch = mm.read(atoms).batch
assert batch.friction.tolist() == [0, 1, 2, 3]
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    out = mm.simulate(mm.models.noble_gases(), batch, mm.NVT(50), steps=2)
assert out.info[0]["status"] == "finished", out.info
assert any("friction" in str(w.message) for w in heard), heard
assert "friction" not in out.to_atoms()[0].arrays
"""


def test_structures_may_be_read_before_stages_are_imported():
    """An array that turns out to bear a stage's name is left out with a warning; nothing fails."""
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_field_that_a_user_declares_is_the_users():
    field = declare_field("test_charge", "atom", unit="e")
    try:
        atoms = bulk("Ar", cubic=True)
        atoms.set_array("test_charge", np.array([1.0, -1.0, 0.5, 2.0]))
        assert not_taken_along(atoms) == []
        structures = mm.read(atoms, bulk("Kr", cubic=True))
        with_charge, without = structures.batch.to_atoms()
        assert with_charge.get_array("test_charge").tolist() == [1.0, -1.0, 0.5, 2.0]
        assert "test_charge" not in without.arrays
        # Numbers of two kinds under one name are made alike, as for a field that nobody declared.
        other = bulk("Kr", cubic=True)
        other.set_array("test_charge", np.array([1, 2, 3, 4]))
        assert mm.read(atoms, other).batch.test_charge.tolist() == [1.0, -1.0, 0.5, 2.0, 1.0, 2.0, 3.0, 4.0]
    finally:
        assert FIELDS.pop("test_charge") is field


OWN = {
    "k_number": (torch.tensor([1.5, 2.5], dtype=torch.float64), 1.5, 2.5),
    "k_count": (torch.tensor([2**60 + 1, -7]), 2**60 + 1, -7),
    "k_flag": (torch.tensor([True, False]), True, False),
    "k_small": (torch.tensor([3, 4], dtype=torch.int16), 3, 4),
    "k_vector": (torch.arange(6, dtype=torch.float64).reshape(2, 3), [0, 1, 2], [3, 4, 5]),
    "k_matrix": (torch.arange(18, dtype=torch.float32).reshape(2, 3, 3), None, None),
    "k_lacking": (torch.tensor([float("nan"), 8.0], dtype=torch.float64), None, 8.0),
}


def test_a_users_per_system_fields_come_out_in_info():
    batch = Batch.from_atoms([bulk("Ar", cubic=True), bulk("Kr", cubic=True)], ["a", "b"])
    batch = batch.with_fields(
        systems={name: value for name, (value, *_) in OWN.items()} | {"_mine": torch.ones(2), "energy": torch.zeros(2)},
        info=[{"k_number": "older", "note": "kept"}, {}],
    )
    first, second = batch.to_atoms()
    for k, atoms in enumerate((first, second)):
        for name, (value, *plain) in OWN.items():
            if name == "k_lacking" and k == 0:
                assert name not in atoms.info, "a field that a system never had is not invented"
            elif value.ndim == 1:
                assert (atoms.info[name], type(atoms.info[name])) == (plain[k], type(plain[k]))
            else:
                np.testing.assert_array_equal(atoms.info[name], value[k].numpy())
        assert not {"_mine", "energy", "pbc", "cell", "step", "rotation"} & set(atoms.info)
    assert first.info["note"] == "kept"
    assert (first.info["id"], second.info["id"]) == ("a", "b")
    first.info["k_vector"][:] = 99
    assert batch.k_vector[0].tolist() == [0, 1, 2], "what comes out shares no memory"


def test_declared_fields_go_there_and_back(tmp_path):
    """Also through a file of ASE's, with a system that lacks them beside."""
    from ase.io import write

    fields = [
        declare_field("k_number", "system", unit="e"),
        declare_field("k_count", "system", dtype=torch.int64),
        declare_field("k_flag", "system", dtype=torch.bool),
        declare_field("k_vector", "system", (3,)),
        declare_field("k_matrix", "system", (3, 3)),
    ]
    try:
        batch = Batch.from_atoms([bulk("Ar", cubic=True), bulk("Kr", cubic=True)], ["a", "b"])
        own = {f.name: OWN[f.name][0].to(f.dtype) for f in fields}
        batch = batch.with_fields(systems=own)
        back = Batch.from_atoms(batch.to_atoms())
        assert back.ids == ("a", "b")
        for name, value in own.items():
            assert back.systems[name].dtype == value.dtype
            assert torch.equal(back.systems[name], value), name
        assert all(set(info) == {"id"} for info in back.info), "an item stands in one place"
        write(tmp_path / "x.extxyz", batch.to_atoms())
        read = mm.read(tmp_path / "x.extxyz", bulk("Ne", cubic=True)).batch
        for name, value in own.items():
            assert torch.equal(read.systems[name][:2], value), name
        assert torch.isnan(read.k_vector[2]).all()
        assert "k_vector" not in read.to_atoms()[2].info
    finally:
        for field in fields:
            FIELDS.pop(field.name)


@pytest.mark.parametrize(
    ("value", "per_atom", "words"),
    [
        (
            [1.0, 2.0],
            False,
            r"info 'k_vector' of 'x' is declared per system as float64 of shape \(3,\), is \[1.0, 2.0\]",
        ),
        ("north", False, "is 'north'"),
        ([1.0, "b", 3.0], False, "declared per system"),
        (np.zeros((4, 3)), True, "declared per system, the structure 'x' has it per atom"),
    ],
)
def test_what_was_declared_otherwise_is_refused(value, per_atom, words):
    field = declare_field("k_vector", "system", (3,))
    try:
        atoms = bulk("Ar", cubic=True)
        if per_atom:
            atoms.set_array("k_vector", value)
        else:
            atoms.info["k_vector"] = value
        with pytest.raises(BatchError, match=words):
            Batch.from_atoms(atoms, ["x"])
        good = bulk("Kr", cubic=True)
        good.info |= {"id": "good", "k_vector": None}
        atoms.info["id"] = "x"
        structures = mm.read(atoms, good)
        assert list(structures.failures) == ["x"]
        assert structures.ids == ("good",)
    finally:
        assert FIELDS.pop("k_vector") is field


def test_numbers_are_not_rounded_into_a_declared_field():
    field = declare_field("k_count", "system", dtype=torch.int64)
    try:
        atoms = bulk("Ar", cubic=True)
        for value, good in ((3, True), (3.0, True), (np.array([3]), True), (3.5, False), (float("nan"), False)):
            atoms.info["k_count"] = value
            if good:
                assert Batch.from_atoms(atoms).k_count.tolist() == [3]
            else:
                with pytest.raises(BatchError, match="declared per system as one int64"):
                    Batch.from_atoms(atoms)
    finally:
        assert FIELDS.pop("k_count") is field


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13, 40])
def test_turning_has_the_same_bits_for_every_row(n):
    """The first rows of many turn as the rows of few: BLAS would not promise it."""
    rng = np.random.default_rng(n)
    vectors = rng.normal(size=(50_000, 3))
    _, rotation = lower_triangular(rng.normal(size=(3, 3)))
    whole = turned(vectors, rotation)
    np.testing.assert_array_equal(turned(vectors[7 : 7 + n], rotation), whole[7 : 7 + n])
    np.testing.assert_allclose(whole, vectors @ rotation, rtol=1e-13, atol=1e-13)


def test_as_many_ids_as_structures():
    with pytest.raises(BatchError, match="2 structures need as many ids, got 1"):
        Batch.from_atoms([bulk("Ar"), bulk("Kr")], ["a"])


def test_a_cell_that_is_not_finite_leaves_the_others_alone() -> None:
    good, bad = bulk("Ar", "fcc", 5.4), bulk("Ar", "fcc", 5.4)
    cell = bad.cell.array.copy()
    cell[0, 0] = np.nan
    bad.set_cell(cell)
    batch = Batch.from_atoms([good, bad])
    assert np.isfinite(batch.cell[0].numpy()).all()
    assert np.isnan(batch.cell[1].numpy()).any()


def test_structures_keep_the_names_they_have() -> None:
    one, other = bulk("Ar", "fcc", 5.4), bulk("Kr", "fcc", 5.7)
    one.info["id"], other.info["id"] = "mine", "yours"
    assert Batch.from_atoms([one, other]).ids == ("mine", "yours")
    assert Batch.from_atoms([one, other]).to_atoms()[0].info["id"] == "mine"
    other.info["id"] = "mine"
    assert Batch.from_atoms([one, other]).ids == ("system-0", "system-1")
