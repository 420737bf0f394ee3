"""Reading structures: ids, failures, what is left behind."""

from __future__ import annotations

import gzip
import itertools
import os
import pickle
import subprocess
import sys
import warnings

import ase
import numpy as np
import pytest
from ase.build import bulk, molecule
from ase.constraints import FixAtoms
from ase.io import write

from mattermill.domain.batch import Batch
from mattermill.domain.reading import ReadError, Structures, StructureWarning, read


@pytest.fixture
def argon():
    return bulk("Ar", cubic=True)


def test_a_file_gives_its_stem_and_frames_are_numbered(tmp_path, argon):
    write(tmp_path / "one.cif", argon)
    write(tmp_path / "many.extxyz", [argon, argon * 2, argon * 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read(tmp_path / "one.cif", str(tmp_path / "many.extxyz"))
    assert found.ids == ("one", "many-0", "many-1", "many-2")
    assert [b.n_atoms for b in found] == [4, 4, 32, 108]
    assert not found.failures
    assert len(found.batch) == 4
    np.testing.assert_allclose(found["many-1"].to_atoms()[0].positions, (argon * 2).positions, atol=1e-7)


@pytest.mark.parametrize(
    "ending", ["cif", "extxyz", "xyz", "vasp", "traj", "json", "xsf", "gen", "res", "xyz.gz", "cfg"]
)
def test_formats_of_ase(tmp_path, argon, ending):
    path = tmp_path / f"argon.{ending}"
    write(path, argon)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read(path)
    assert found.failures == {}
    assert found.ids == ("argon",)
    back = found.batch.to_atoms()[0]
    assert back.get_chemical_symbols() == ["Ar"] * 4
    assert back.get_volume() if ending not in ("xyz", "xyz.gz") else True
    distances = np.sort(back.get_all_distances(mic=back.pbc.all()).ravel())
    reference = argon.get_all_distances(mic=bool(back.pbc.all())).ravel()
    np.testing.assert_allclose(distances, np.sort(reference), atol=1e-4)


def test_patterns_lists_atoms_and_batches_mix(tmp_path, argon):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.xyz", argon)
    named = argon.copy()
    named.info["id"] = "mine"
    found = read([tmp_path / "*.xyz", [named]], molecule("H2O"), Batch.from_atoms([argon], ["given"]))
    assert found.ids == ("a", "b", "mine", "H2O", "given")


def test_a_name_with_brackets_is_a_file_first(tmp_path, argon):
    write(tmp_path / "a[1]@2.xyz", argon)
    assert read(tmp_path / "a[1]@2.xyz").ids == ("a[1]@2",)


def test_a_pattern_without_match_is_an_error(tmp_path):
    with pytest.raises(ReadError, match="no file matches"):
        read(str(tmp_path / "*.cif"))
    with pytest.raises(ReadError, match="a path, a pattern"):
        read(3)


def test_ids_do_not_depend_on_the_order_of_sources(tmp_path, argon):
    paths = []
    for k in range(3):
        (tmp_path / str(k)).mkdir()
        paths.append(tmp_path / str(k) / "POSCAR")
        write(paths[-1], argon * (k + 1, 1, 1), format="vasp")
    seen = set()
    for order in itertools.permutations(paths):
        found = read(list(order))
        seen.add(tuple(sorted((i, b.n_atoms) for i, b in zip(found.ids, found, strict=True))))
        assert len(set(found.ids)) == 3
        assert all(i.startswith("POSCAR-") for i in found.ids)
    assert len(seen) == 1
    joined = read(paths[0]) + read(paths[1]) + read(paths[2])
    assert tuple(sorted((i, b.n_atoms) for i, b in zip(joined.ids, joined, strict=True))) in seen


def test_copies_of_one_structure_are_told_apart(argon):
    found = read([argon, argon.copy(), argon.copy()])
    assert len(found) == len(set(found.ids)) == 3


def test_a_bad_file_is_one_failure_with_its_reason(tmp_path, argon):
    write(tmp_path / "good.xyz", argon)
    (tmp_path / "empty.cif").touch()
    (tmp_path / "noise.xyz").write_text("this is no structure\nat all\n")
    (tmp_path / "binary.cif").write_bytes(bytes(range(256)))
    (tmp_path / "folder.xyz").mkdir()
    found = read(
        *(tmp_path / n for n in ("good.xyz", "empty.cif", "noise.xyz", "binary.cif", "folder.xyz", "missing.cif"))
    )
    assert found.ids == ("good",)
    assert found.failures.keys() == {"empty", "noise", "binary", "folder", "missing"}
    assert "empty file" in found.failures["empty"]
    assert "no such file" in found.failures["missing"]
    assert "unreadable" in found.failures["noise"]
    assert "a folder" in found.failures["folder"]
    with pytest.raises(KeyError, match="no such file"):
        found["missing"]


def test_frames_before_a_broken_one_are_kept(tmp_path, argon):
    write(tmp_path / "run.extxyz", [argon, argon])
    text = (tmp_path / "run.extxyz").read_text()
    (tmp_path / "run.extxyz").write_text(text + text.splitlines()[0] + "\nbroken\nAr x y z\n")
    found = read(tmp_path / "run.extxyz")
    assert len(found) + len(found.failures) >= 1
    assert found.failures, "the third frame cannot be read and must be told"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_structures_are_kept_out(argon, value):
    bad = argon.copy()
    bad.positions[2, 1] = value
    worse = argon.copy()
    worse.cell[0, 0] = value
    moving = argon.copy()
    moving.set_momenta(np.full((4, 3), value))
    found = read([bad, argon, worse, moving])
    assert len(found) == 1
    assert sorted(found.failures.values()) == ["non-finite cell", "non-finite momenta", "non-finite positions"]


def test_no_atoms_is_a_failure():
    assert list(read(ase.Atoms()).failures.values()) == ["no atoms"]


CIF = """data_alloy
_cell_length_a 5.3
_cell_length_b 5.3
_cell_length_c 5.3
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 90
_symmetry_space_group_name_H-M 'P 1'
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_occupancy
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
Ar1 Ar {first} 0 0 0
Kr1 Kr {second} 0 0 0
Ar2 Ar 1.0 0.5 0.5 0
"""


def test_partial_occupancies_are_refused_and_full_ones_are_not(tmp_path):
    (tmp_path / "alloy.cif").write_text(CIF.format(first=0.75, second=0.25))
    full = CIF.format(first=1.0, second=1.0).replace("Kr1 Kr 1.0 0 0 0\n", "")
    (tmp_path / "full.cif").write_text(full)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read(tmp_path / "alloy.cif", tmp_path / "full.cif")
    assert found.ids == ("full",)
    assert "partial occupancies" in found.failures["alloy"]
    assert "Ar 0.75" in found.failures["alloy"]


def test_what_is_left_behind_is_named_once_in_one_warning(tmp_path, argon):
    fixed = argon.copy()
    fixed.set_constraint(FixAtoms([0]))
    fixed.set_array("label", np.array(["a", "b", "c", "d"]))
    fixed.set_array("forces", np.zeros((4, 3)))
    fixed.info["object"] = object()
    from ase.calculators.singlepoint import SinglePointCalculator

    fixed.calc = SinglePointCalculator(fixed, energy=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read([fixed, fixed.copy()])
    told = [str(w.message) for w in caught if issubclass(w.category, StructureWarning)]
    assert len(told) == 1
    for name in ("constraints (2", "label (2", "forces (2", "calculator result 'energy' (1", "info 'object' (2"):
        assert told[0].count(name) == 1, (name, told)
    assert "label" not in found.batch
    assert "forces" not in found.batch


def test_nothing_left_behind_no_warning(argon):
    argon.set_array("charge", np.arange(4.0))
    argon.info["tag"] = ["a", 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read(argon)
    np.testing.assert_array_equal(found.batch.charge.numpy(), np.arange(4.0))
    assert found.batch.info[0]["tag"] == ["a", 1]


def test_own_fields_of_different_shape_or_dtype_can_be_joined(argon):
    a, b, c = argon.copy(), argon.copy(), argon.copy()
    a.set_array("charge", np.arange(4))
    b.set_array("charge", np.arange(4.0) / 2)
    a.set_array("moment", np.zeros(4))
    b.set_array("moment", np.zeros((4, 3)))
    with pytest.warns(StructureWarning, match="'moment'"):
        found = read([a, b, c])
    assert str(found.batch.charge.dtype) == "torch.float64"
    assert found.batch.charge[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found.batch.charge[8:].isnan().all()
    assert "moment" not in found.batch


def test_opening_never_runs_code(tmp_path, argon):
    """A Python script under any name, and a pickle, are data: refused, not run."""
    mark = tmp_path / "ran"
    (tmp_path / "script.py").write_text(f"open({str(mark)!r}, 'w')\n")

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(mark),))

    for ending in ("traj", "pckl", "json", "db", "xyz", "nc", "npz", "bundle"):
        (tmp_path / f"evil.{ending}").write_bytes(pickle.dumps(Evil()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = read(tmp_path / "script.py", tmp_path / "evil.*")
    assert not found.ids
    assert len(found.failures) == 9
    assert not mark.exists()


def test_database_servers_are_not_contacted():
    found = read("postgresql://user@localhost:5432/x")
    assert next(iter(found.failures.values())).startswith("no such file")


def test_compressed_files(tmp_path, argon):
    write(tmp_path / "a.xyz", argon)
    (tmp_path / "b.xyz.gz").write_bytes(gzip.compress((tmp_path / "a.xyz").read_bytes()))
    assert read(tmp_path / "b.xyz.gz").ids == ("b",)


def test_structures_is_a_small_collection(argon):
    found = read([argon, argon * 2, argon * 3])
    assert isinstance(found[:2], Structures)
    assert found[:2].ids == found.ids[:2]
    assert found[0].ids == found.ids[:1]
    assert found.ids[0] in found
    assert "3 systems" in repr(found)
    assert len(found + read(molecule("H2"))) == 4


def test_importing_the_reader_does_not_import_ase():
    code = "import sys, mattermill.domain.reading; assert 'ase' not in sys.modules and 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
