"""Units and constants: Å, eV, amu, fs, K, e inside; GPa where a user gives or reads a pressure.

Values are CODATA 2018: the Boltzmann constant and the elementary charge are exact by definition (SI 2019); the
atomic mass constant is Tiesinga et al., Rev. Mod. Phys. 93, 025010 (2021). (ASE keeps CODATA 2014; the two differ
in the ninth digit, which is why conversions of ASE quantities use ASE's own units.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import TypeVar

import numpy as np
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)

#: elementary charge, C, and so joules per eV (exact)
E_CHARGE = 1.602176634e-19
#: atomic mass constant, kg
AMU_KG = 1.66053906660e-27
#: Boltzmann constant, eV/K (exact: 1.380649e-23 J/K over the charge)
KB = 1.380649e-23 / E_CHARGE
#: eV/Å/amu -> Å/fs²: acceleration = force / mass * ACC
ACC = E_CHARGE / AMU_KG * 1e-10
#: amu Å²/fs² -> eV: kinetic energy = 0.5 * mass * v² * KE
KE = 1.0 / ACC
#: one GPa in eV/Å³: pressure[eV/Å³] = pressure[GPa] * GPA
GPA = 1e-21 / E_CHARGE
#: one kcal/mol in eV (thermochemical calorie 4.184 J, Avogadro exact): what AMBER files use
KCAL_PER_MOL = 4184.0 / 6.02214076e23 / E_CHARGE
#: fs per ps
PS = 1000.0


def volume(cell: Array) -> Array:
    """Volume |a · (b × c)| of cells with the lattice vectors as rows, shape (..., 3, 3) -> (...), Å³.

    Written out in products and sums, so that the bits of one cell's volume do not depend on how many cells stand
    beside it (a batched determinant's may).
    """
    a, b, c = cell[..., 0, :], cell[..., 1, :], cell[..., 2, :]
    x = b[..., 1] * c[..., 2] - b[..., 2] * c[..., 1]
    y = b[..., 2] * c[..., 0] - b[..., 0] * c[..., 2]
    z = b[..., 0] * c[..., 1] - b[..., 1] * c[..., 0]
    return abs(a[..., 0] * x + a[..., 1] * y + a[..., 2] * z)


def heights(cell: np.ndarray) -> np.ndarray:
    """Distances between opposite faces of one cell, shape (3,), Å; needs a cell of non-zero volume."""
    # In plain floats: for three vectors numpy takes ten times as long.
    a, b, c = np.asarray(cell).tolist()
    faces = cross(b, c), cross(c, a), cross(a, b)
    size = abs(a[0] * faces[0][0] + a[1] * faces[0][1] + a[2] * faces[0][2])
    return np.array([size / hypot(*face) for face in faces])


def cross(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """a × b in plain floats."""
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]
