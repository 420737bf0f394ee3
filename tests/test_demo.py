"""The demo: its systems are those it says, and it runs through to its table and its picture."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mattermill as mm

RECIPES = Path(mm.__file__).parent / "recipes"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"demo_{name}", RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_twelve_systems_of_four_gases_and_alloys() -> None:
    systems = load("noble_gases").structures()
    assert len({atoms.info["id"] for atoms in systems}) == len(systems)
    assert len(systems) in range(11, 14)
    assert min(map(len, systems)) == 256
    assert max(map(len, systems)) == 4_000
    assert {"Ne", "Ar", "Kr", "Xe"} == {symbol for atoms in systems for symbol in atoms.symbols}
    # The volume per atom of the pure crystals is that of the collection.
    from ase.collections import dcdft

    for atoms in systems:
        kinds = Counter(atoms.symbols)
        if len(kinds) == 1:
            [element] = kinds
            assert atoms.get_volume() / len(atoms) == pytest.approx(dcdft[element].get_volume() / len(dcdft[element]))


def test_alloys_are_mixed_as_they_say_and_always_the_same() -> None:
    demo = load("noble_gases")
    alloys = [atoms for atoms in demo.structures() if len(set(atoms.symbols)) == 2]
    assert len(alloys) == 2
    for atoms, again in zip(alloys, [a for a in demo.structures() if len(set(a.symbols)) == 2], strict=True):
        share = Counter(atoms.symbols)["Kr"] / len(atoms)
        assert f"Kr{round(100 * share)}" in atoms.info["id"]
        assert np.array_equal(atoms.numbers, again.numbers)
        assert set(np.round(atoms.get_masses(), 1)) == {39.9, 83.8}


def test_the_large_system_goes_to_two_ranks() -> None:
    recipe = load("noble_gases").recipe
    assert recipe.plan.stages["produce-large"].ranks == 2
    large, small = (recipe.plan.nodes[name] for name in ("large", "small"))
    for n_atoms in (256, 2_000, 2_001, 4_000):
        assert large({"n_atoms": n_atoms}) != small({"n_atoms": n_atoms})


def test_quick_demo_runs_to_its_table_and_picture(tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPES / "noble_gases.py"), "--quick", "--ranks", "2"]
    command += ["--out", str(tmp_path / "x.mill"), "--png", str(tmp_path / "x.png")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    for name in ("Ne-256", "Ar-4000", "Xe-256"):
        assert f" {name} " in ended.stdout
    assert "(2 ranks)" in ended.stdout
    # Static lattice: the table of the model's docstring; a Lennard-Jones crystal of range 10 Å is within 1 % of it.
    rows = {line.split("│")[1].strip(): line.split("│") for line in ended.stdout.splitlines() if line.startswith("│")}
    for system, lattice in (("Ne-256", 4.22), ("Ar-4000", 5.24), ("Xe-256", 6.14)):
        assert float(rows[system][3]) == pytest.approx(lattice, rel=0.01)
    # The command that it prints does open the results.
    line = next(line for line in ended.stdout.splitlines() if " -ic " in line)
    opened = line.partition(" -ic ")[2].strip().strip("'")
    shown = subprocess.run([sys.executable, "-c", opened], capture_output=True, text=True, timeout=120, check=True)
    assert "produce-large" in shown.stdout


def test_radial_distribution_of_a_crystal_and_of_an_ideal_gas() -> None:
    """fcc: peaks at nearest-neighbour distance times sqrt(n); no correlation: 1 everywhere."""
    plots = load("plots")
    import xarray
    from ase.build import bulk

    class One:
        def __init__(self, positions: np.ndarray, box: float) -> None:
            frames = np.stack([positions, positions])
            self.frames = xarray.Dataset(
                {
                    "coordinates": (("frame", "atom", "spatial"), frames),
                    "cell_lengths": (("frame", "cell_spatial"), np.full((2, 3), box)),
                }
            )

        def trajectory(self, system: str, stage: str) -> xarray.Dataset:
            return self.frames

    crystal = bulk("Ar", "fcc", a=5.0, cubic=True) * (5, 5, 5)
    r, g = plots.radial_distribution(One(crystal.get_positions(), 25.0), "x", "x")
    peaks = r[g > 5]
    for shell in (1, 2, 3):
        assert np.abs(peaks - 5.0 / np.sqrt(2) * np.sqrt(shell)).min() < 0.1
    gas = np.random.default_rng(0).uniform(0, 25.0, (800, 3))
    r, g = plots.radial_distribution(One(gas, 25.0), "x", "x")
    assert np.abs(g[r > 5] - 1).mean() < 0.05
