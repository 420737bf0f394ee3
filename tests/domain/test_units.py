"""Constants against two references that nobody here wrote; volumes against determinants."""

from __future__ import annotations

import ase.units
import numpy as np
import pytest
import scipy.constants as codata
import torch

from mattermill.domain import units


def test_constants_match_codata() -> None:
    ev, amu = codata.elementary_charge, codata.atomic_mass
    assert pytest.approx(codata.Boltzmann / ev, rel=1e-12) == units.KB
    assert pytest.approx(ev / amu * 1e-10, rel=1e-8) == units.ACC  # scipy has CODATA 2022
    assert pytest.approx(1e9 / ev * 1e-30, rel=1e-12) == units.GPA
    assert pytest.approx(codata.calorie * 1000 / codata.Avogadro / ev, rel=1e-12) == units.KCAL_PER_MOL


def test_constants_match_ase() -> None:
    # ASE keeps CODATA 2014.
    assert pytest.approx(ase.units.kB, rel=1e-6) == units.KB
    assert pytest.approx(ase.units.fs**2, rel=1e-7) == units.ACC
    assert pytest.approx(ase.units.GPa, rel=1e-7) == units.GPA
    assert pytest.approx(ase.units.kcal / ase.units.mol, rel=1e-7) == units.KCAL_PER_MOL
    assert pytest.approx(1.0 / units.ACC) == units.KE


def test_volume_is_the_determinant_alone_and_in_company() -> None:
    cells = np.random.default_rng(3).normal(size=(17, 3, 3))
    assert units.volume(cells) == pytest.approx(abs(np.linalg.det(cells)), rel=1e-12)
    together = units.volume(torch.from_numpy(cells))
    for k in range(17):
        assert together[k] == units.volume(torch.from_numpy(cells[k : k + 1]))[0]
        assert together[k] == units.volume(torch.from_numpy(cells[k]))


def test_heights_are_distances_between_faces() -> None:
    assert units.heights(np.diag([2.0, 3.0, 5.0])) == pytest.approx([2, 3, 5])
    sheared = np.array([[4.0, 0, 0], [3.0, 2.0, 0], [1.0, 1.0, 6.0]])
    assert units.heights(sheared)[2] == pytest.approx(6.0)
    assert units.heights(sheared) == pytest.approx(1 / np.linalg.norm(np.linalg.inv(sheared), axis=0))
