"""Relaxation: against lattice sums done by hand, and against ASE's FIRE."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ase.build import bulk, molecule
from ase.calculators.lj import LennardJones as AseLennardJones
from ase.collections import dcdft
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE
from scipy.optimize import minimize_scalar

import mattermill as mm
from mattermill.domain.models.noble import EPSILON, SIGMA
from mattermill.domain.units import GPA

CUTOFF = 8.5
# What ASE's criterion of 1e-4 eV/Å means for the pressure of a cell of 36 Å^3 per atom: virial / N.
SMAX = 1e-4 / 36 / GPA


def lattice_energy(a: float, epsilon: float, sigma: float, cutoff: float, truncation: str, onset: float) -> float:
    """Energy per atom of an fcc crystal by summing over lattice vectors, eV; no neighbour list, no project code."""
    n = int(np.ceil(2 * cutoff / a)) + 1
    hkl = np.array([h for h in itertools.product(range(-n, n + 1), repeat=3) if sum(h) % 2 == 0 and any(h)])
    r = a / 2 * np.linalg.norm(hkl, axis=1)
    r = r[r < cutoff]

    def pair(x):  # type: ignore[no-untyped-def]
        return 4 * epsilon * ((sigma / x) ** 12 - (sigma / x) ** 6)

    energies = pair(r)
    if truncation == "shift":
        energies = energies - pair(cutoff)
    if truncation == "switch":
        t = np.clip((r**2 - onset**2) / (cutoff**2 - onset**2), 0, 1)
        energies = energies * (1 - 3 * t**2 + 2 * t**3)
    return float(energies.sum() / 2)


@pytest.mark.parametrize("truncation", ["plain", "shift", "switch"])
def test_relaxed_crystals_of_the_four_gases_equal_the_lattice_sum(truncation: str) -> None:
    """From the collection's volumes, up to 25 % away, to the minimum: energy and lattice constant."""
    onset = 7.0
    model = mm.models.noble_gases(
        cutoff=CUTOFF, truncation=truncation, switch_onset=onset if truncation == "switch" else None
    )
    names = ["Ne", "Ar", "Kr", "Xe"]
    relaxed = mm.relax(model, [dcdft[n] for n in names], fmax=1e-5, cell="isotropic", smax=1e-6, max_steps=500)
    assert [i["status"] for i in relaxed.info] == ["converged"] * 4
    energy = relaxed.energy.numpy() / relaxed.counts
    for k, name in enumerate(names):
        single = relaxed.select([k])
        a = (4 * abs(np.linalg.det(single.cell[0].numpy())) / single.n_atoms) ** (1 / 3)
        args = (EPSILON[name], SIGMA[name], CUTOFF, truncation, onset)
        # within the shells that are inside the cutoff at the minimum found: the plain sum jumps where one crosses
        best = minimize_scalar(
            lattice_energy, bounds=(a - 0.02, a + 0.02), args=args, method="bounded", options={"xatol": 1e-9}
        )
        assert energy[k] == pytest.approx(lattice_energy(a, *args), rel=1e-11)
        assert energy[k] == pytest.approx(best.fun, rel=1e-9)
        assert a == pytest.approx(best.x, abs=1e-4)


def ase_calculator() -> AseLennardJones:
    # Its smooth form is our switch: from ro to rc.
    return AseLennardJones(epsilon=EPSILON["Ar"], sigma=SIGMA["Ar"], rc=CUTOFF, ro=0.66 * CUTOFF, smooth=True)


def ours() -> mm.models.LennardJones:
    return mm.models.noble_gases(cutoff=CUTOFF, truncation="switch", switch_onset=0.66 * CUTOFF)


def rattled(a: float, seed: int, repeat: int = 2):  # type: ignore[no-untyped-def]
    atoms = bulk("Ar", "fcc", a=a, cubic=True).repeat(repeat)
    atoms.rattle(0.15, seed=seed)
    return atoms


def test_relaxing_positions_agrees_with_ase() -> None:
    """Same minima, not more force calls; and the pressure of a target is reached."""
    structures = [rattled(5.3, s) for s in (1, 2, 3)]
    relaxed = mm.relax(ours(), structures, fmax=1e-4)
    for k, atoms in enumerate(structures):
        reference = atoms.copy()
        reference.calc = ase_calculator()
        optimizer = FIRE(reference, logfile=None)
        assert optimizer.run(fmax=1e-4, steps=1000)
        single = relaxed.select([k])
        assert single.info[0]["status"] == "converged"
        assert float(single.energy[0]) == pytest.approx(reference.get_potential_energy(), abs=1e-6 * 32)
        assert int(single.step[0]) <= optimizer.get_number_of_steps()


def test_relaxing_the_cell_agrees_with_ase() -> None:
    steps = []
    for a, pressure in ((5.7, 0.0), (5.0, 0.0), (5.4, 0.5)):
        atoms = rattled(a, 4, repeat=1)
        single = mm.relax(ours(), atoms, fmax=1e-4, cell="isotropic", smax=SMAX, pressure=pressure)
        reference = atoms.copy()
        reference.calc = ase_calculator()
        moved = FrechetCellFilter(reference, hydrostatic_strain=True, scalar_pressure=pressure * GPA)
        optimizer = FIRE(moved, logfile=None)
        assert optimizer.run(fmax=1e-4, steps=3000)
        assert single.info[0]["status"] == "converged"
        # the enthalpy is at its minimum, the energy under pressure is not
        volume = abs(np.linalg.det(single.cell[0].numpy()))
        enthalpy = reference.get_potential_energy() + pressure * GPA * reference.get_volume()
        assert float(single.energy[0]) + pressure * GPA * volume == pytest.approx(enthalpy, abs=1e-6 * 4)
        lengths = np.linalg.norm(single.cell[0].numpy(), axis=1)
        np.testing.assert_allclose(lengths, reference.cell.lengths(), atol=1e-3)
        stress = single.stress[0].numpy()
        assert -np.trace(stress) / 3 / GPA == pytest.approx(pressure, abs=SMAX)
        steps.append((int(single.step[0]), optimizer.get_number_of_steps()))
    assert sum(ours for ours, _ in steps) <= 1.05 * sum(theirs for _, theirs in steps), steps


def test_a_supercell_takes_as_many_steps_as_the_unit_cell() -> None:
    """The cell's coordinate has a mass that grows with the system: 500 atoms relax like 4."""
    small = bulk("Ar", "fcc", a=5.7, cubic=True)
    large = small.repeat(5)
    out = mm.relax(ours(), [small, large], fmax=1e-4, cell="isotropic", smax=1e-4)
    few, many = out.step.tolist()
    assert many <= few + 5
    assert float(out.energy[1]) / 500 == pytest.approx(float(out.energy[0]) / 4, rel=1e-7)


def test_far_from_the_minimum_and_clusters() -> None:
    """40 % in volume either way, and a cluster of no symmetry."""
    near = mm.relax(ours(), bulk("Ar", "fcc", a=5.3), fmax=1e-4, cell="isotropic", smax=1e-4)
    for a in (4.7, 6.1):
        far = mm.relax(ours(), bulk("Ar", "fcc", a=a), fmax=1e-4, cell="isotropic", smax=1e-4)
        assert far.info[0]["status"] == "converged"
        assert float(far.energy[0]) == pytest.approx(float(near.energy[0]), rel=1e-5)
    cluster = molecule("CH4")
    cluster.set_chemical_symbols(["Ar"] * 5)
    cluster.positions *= 3.2
    relaxed = mm.relax(ours(), cluster, fmax=1e-4)
    reference = cluster.copy()
    reference.calc = ase_calculator()
    FIRE(reference, logfile=None).run(fmax=1e-4, steps=2000)
    assert float(relaxed.energy[0]) == pytest.approx(reference.get_potential_energy(), abs=5e-6)
