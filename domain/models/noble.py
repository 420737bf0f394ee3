"""Lennard-Jones parameters of the noble gases.

The file is not called noble_gases: importing a submodule sets it as an attribute of the package, where it would
hide the function of that name.
"""

from __future__ import annotations

import torch

from ..units import E_CHARGE
from .lennard_jones import LennardJones, Truncation

#: well depths, eV (given by the source in 1e-16 erg) ...
EPSILON = {
    "Ne": 50e-23 / E_CHARGE,
    "Ar": 167e-23 / E_CHARGE,
    "Kr": 225e-23 / E_CHARGE,
    "Xe": 320e-23 / E_CHARGE,
}
#: ... and distances of zero energy, Å
SIGMA = {"Ne": 2.74, "Ar": 3.40, "Kr": 3.65, "Xe": 3.98}


def noble_gases(
    *,
    cutoff: float = 10.0,
    truncation: Truncation = "switch",
    switch_onset: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> LennardJones:
    """Ne, Ar, Kr and Xe and their mixtures (Lorentz-Berthelot) as a `LennardJones`.

    ========  =========  ========
    species   ε, meV     σ, Å
    ========  =========  ========
    Ne         3.12075   2.74
    Ar        10.42332   3.40
    Kr        14.04340   3.65
    Xe        19.97283   3.98
    ========  =========  ========

    Source: N. Bernardes, Phys. Rev. 112, 1534 (1958), gas-phase data, as tabulated for the inert gas crystals by
    C. Kittel, Introduction to Solid State Physics, ch. 3, table 4 (ε there in 1e-16 erg: 50, 167, 225, 320), and by
    Ashcroft and Mermin, Solid State Physics, table 20.2. Static fcc crystals come out at a = 4.22, 5.24, 5.63 and
    6.14 Å with the full lattice sum (experiment: 4.46, 5.31, 5.64, 6.13; neon's zero-point motion is not in a classical
    model). Other arguments: see `LennardJones`; 10 Å is 2.5 σ of xenon and more of the others.
    """
    return LennardJones(
        epsilon=EPSILON, sigma=SIGMA, cutoff=cutoff, truncation=truncation, switch_onset=switch_onset, dtype=dtype
    )
