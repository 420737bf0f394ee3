"""Structures of every shape for models of a short range: simple cubic, sparse, hot, and adrift.

Sizes are chosen so that a reach of 7.6 Å (two hops of 3.6 Å and a skin) still lets most of them be divided.
"""

from __future__ import annotations

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.units import fs

SPACING = 3.06


def shaken(atoms: Atoms, seed: int, *, speed: float = 4e-3, spread: float = 0.08) -> Atoms:
    """Displaced, of two species, with velocities (Å/fs) and a drift: atoms cross cuts and faces all the time."""
    rng = np.random.default_rng(seed)
    atoms.positions += rng.normal(scale=spread, size=(len(atoms), 3))
    numbers = atoms.numbers.copy()
    numbers[rng.random(len(atoms)) < 0.3] = 36
    atoms.numbers = numbers
    atoms.set_masses()
    velocities = rng.normal(scale=speed, size=(len(atoms), 3)) + np.array([0.006, -0.004, 0.0025])
    atoms.set_velocities(velocities / fs)
    return atoms


def block(repeat: tuple[int, int, int], pbc: tuple[int, int, int] = (1, 1, 1)) -> Atoms:
    """A simple cubic block; without a cell if no axis is periodic."""
    atoms = bulk("Ar", "sc", SPACING).repeat(repeat)
    atoms.pbc = pbc
    if not any(pbc):
        atoms.cell[:] = 0.0
    return atoms


def box(lengths: tuple[float, float, float]) -> Atoms:
    """A periodic box of exactly these lengths, Å, filled with about that lattice."""
    repeat = [max(1, round(length / SPACING)) for length in lengths]
    atoms = block((repeat[0], repeat[1], repeat[2]))
    atoms.set_cell(np.diag(lengths), scale_atoms=True)
    return atoms


def cubic(reach: float) -> Atoms:
    return shaken(block((5, 5, 5)), 1)


def triclinic(reach: float) -> Atoms:
    """60° between all vectors: fcc, in its primitive cell."""
    return shaken(bulk("Ar", "fcc", 4.5).repeat((7, 4, 4)), 2)


def skewed(reach: float) -> Atoms:
    """The cubic lattice in a strongly skewed cell."""
    atoms = block((5, 5, 5))
    cell = atoms.cell.array
    atoms.set_cell([cell[0], cell[1] + cell[0], cell[2] - cell[1]])
    return shaken(atoms, 3)


def slab(reach: float) -> Atoms:
    """Most of the cell is vacuum, and c is not periodic."""
    atoms = block((5, 5, 2))
    atoms.center(vacuum=9.0, axis=2)
    atoms.pbc = (True, True, False)
    return shaken(atoms, 4)


def wire(reach: float) -> Atoms:
    """Long enough for eight domains in a row."""
    return shaken(block((2, 2, 20), (0, 0, 1)), 5)


def cluster(reach: float) -> Atoms:
    """No cell at all."""
    return shaken(block((4, 4, 4), (0, 0, 0)), 6)


def thin(reach: float) -> Atoms:
    """Barely thicker than two reaches, and than one."""
    return shaken(box((2.01 * reach, 1.02 * reach, 4 * SPACING)), 7)


def few(reach: float) -> Atoms:
    """Five atoms in the open."""
    atoms = Atoms("Ar5", [[0, 0, 0], [2.9, 0, 0], [0, 3.0, 0.2], [2.8, 3.1, 0], [1.4, 1.6, 2.5]], pbc=False)
    return shaken(atoms, 8)


def tiny(reach: float) -> Atoms:
    """Thinner than the cutoff along two axes: atoms see their own images."""
    return shaken(block((2, 1, 1)), 9)


def flake(reach: float) -> Atoms:
    """A square sheet, periodic in its plane, across the face of its cell."""
    atoms = block((3, 3, 1))
    atoms.cell[2, 2] = 15.0
    atoms.positions[:, 2] -= 0.01
    return shaken(atoms, 10)


def chain(reach: float) -> Atoms:
    """A single row of atoms along a periodic axis."""
    return shaken(block((1, 8, 1), (0, 1, 0)), 11)


SHAPES = {f.__name__: f for f in (cubic, triclinic, skewed, slab, wire, cluster, thin, few, tiny, flake, chain)}
#: what travels with the shape under test in a batch of five
COMPANIONS = ("few", "tiny", "flake", "chain")
