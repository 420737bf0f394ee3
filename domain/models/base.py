"""What a model is: per-atom energies, forces and the virial of the atoms one rank owns."""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..neighborhood import Neighborhood
from ..strategy import Pairs


@dataclass
class ModelOutput:
    """What a model returns for one `Neighborhood`. All tensors are new: the next call does not overwrite them.

    Attributes:
        forces: eV/Å, float64, (n_nodes, 3): -dE/dx of this rank's energy with respect to every node; what stands on
            remote ghosts is added to their owners' by the runner. A model without `folds_ghosts` returns (n_owned, 3).
        energies: potential energy per owned atom, eV, float64, (n_owned,), or None if it was not asked for. With half
            lists (n_nodes,): a ghost's half of each pair is added to its owner's.
        virial: this rank's part of W = -dE/d(strain), eV, float64, (systems, 3, 3), or None. Summed over the
            ranks it gives the stress, tensile positive as in ASE: stress = -W / volume.
    """

    forces: Tensor
    energies: Tensor | None = None
    virial: Tensor | None = None


class ModelError(RuntimeError):
    """A model that does not keep to what `Model` says."""


Phases = Generator[ModelOutput | None, None, ModelOutput]


class Model(abc.ABC):
    """A potential: a picklable value that holds parameters; what it needs per process it builds on first use.

    Attributes:
        cutoff: Å; pairs farther apart do not interact.
        hops: message-passing depth: an atom feels others up to hops * cutoff away.
        dtype: arithmetic of the model (the state is float64 always).
        species: atomic numbers the model knows.
        pairs: the list it wants: ``"half"``, each pair once over all ranks; ``"full"``, every node that receives
            messages has all its neighbours (`Neighborhood.edges`); ``"none"``, it builds its own graph from the
            positions of whole systems, which then stand on every rank.
        refreshes: whether it calls `Neighborhood.refresh` on its features between layers, so that a domain needs to
            see one cutoff of ghosts rather than `hops` of them.
        folds_ghosts: whether forces on ghosts come back too. False for a model that works out the whole force on each
            owned atom.
        bytes_per_node, bytes_per_edge: memory it needs at the peak of its computing, per node that has features (own
            atoms and ghosts) and per pair of its list or edge of its own graph; None: not known, see `memory.py`.
    """

    cutoff: float
    hops: int = 1
    dtype: torch.dtype
    pairs: Pairs = "full"
    refreshes: bool = False
    folds_ghosts: bool = True
    bytes_per_node: float | None = None
    bytes_per_edge: float | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Who overrides `compute` alone means all computing: phases inherited from a parent would bypass it.
        if "compute" in cls.__dict__ and "phases" not in cls.__dict__:
            cls.phases = Model.phases  # type: ignore[method-assign]

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

    def phases(self, nb: Neighborhood, *, energy: bool = True, stress: bool = True) -> Phases:
        """`compute` in three parts, so that messages travel while others compute.

        A generator that yields twice and returns the output. Before the first yield, positions of remote ghosts (and
        of their images) are those of an earlier step: work out what needs none. At the second yield, hand out the
        output as it is so far, forces (and energies) on ghosts being final. The parts and their order are always the
        same, so that the bits are, too. Without an override everything happens between the two yields.
        """
        yield None
        out = self.compute(nb, energy=energy, stress=stress)
        yield out
        return out

    def unknown_species(self, numbers: Iterable[int]) -> list[str]:
        """Symbols among these atomic numbers that the model does not know, sorted by number; [] is good."""
        from ase.data import chemical_symbols

        unknown = sorted({int(n) for n in numbers} - self.species)
        return [chemical_symbols[n] if 0 <= n < len(chemical_symbols) else f"Z={n}" for n in unknown]


def drained(phases: Phases) -> ModelOutput:
    """The output of phases run through at once: everything is there already."""
    while True:
        try:
            next(phases)
        except StopIteration as end:
            return end.value
