"""What a model is: per-atom energies, forces and the virial of the atoms one rank owns."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..neighborhood import Neighborhood


@dataclass
class ModelOutput:
    """What a model returns for one `Neighborhood`. All tensors are new: the next call does not overwrite them.

    Attributes:
        forces: eV/Å, float64, (n_owned, 3); (n_total, 3) if the model `folds_ghosts`.
        energies: potential energy per owned atom, eV, float64, (n_owned,), or None if it was not asked for.
        virial: this rank's part of W = -dE/d(strain), eV, float64, (systems, 3, 3), or None. Summed over the
            ranks it gives the stress, tensile positive as in ASE: stress = -W / volume.
    """

    forces: Tensor
    energies: Tensor | None = None
    virial: Tensor | None = None


class Model(abc.ABC):
    """A potential: a picklable value that holds parameters; what it needs per process it builds on first use.

    Attributes:
        cutoff: Å; pairs farther apart do not interact.
        hops: message-passing depth: an atom feels others up to hops * cutoff away.
        dtype: arithmetic of the model (the state is float64 always).
        species: atomic numbers the model knows.
        folds_ghosts: forces on remote ghosts come back too and must be added to their owners by the runner.
    """

    cutoff: float
    hops: int = 1
    dtype: torch.dtype
    folds_ghosts: bool = False

    @property
    @abc.abstractmethod
    def species(self) -> frozenset[int]:
        """Atomic numbers the model knows."""

    @abc.abstractmethod
    def identity(self) -> dict[str, Any]:
        """JSON-able name, version and parameters; equal for two models if and only if they are the same physics."""

    @abc.abstractmethod
    def compute(self, nb: Neighborhood, *, energy: bool = True, stress: bool = True) -> ModelOutput:
        """Forces, and energies and virial where asked for; see `ModelOutput`.

        Forces must have the same bits whatever else is asked for: energies are computed when somebody wants to see
        them, and a trajectory must not depend on who looks on. And a system's forces, energies and virial must not
        depend on the other systems in `nb`, to the last bit.
        """

    def unknown_species(self, numbers: Iterable[int]) -> list[str]:
        """Symbols among these atomic numbers that the model does not know, sorted by number; [] is good."""
        from ase.data import chemical_symbols

        unknown = sorted({int(n) for n in numbers} - self.species)
        return [chemical_symbols[n] if 0 <= n < len(chemical_symbols) else f"Z={n}" for n in unknown]
