"""The propagator that moves nothing: forces, energies and stress of systems as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...domain.batch import Batch

if TYPE_CHECKING:
    import numpy as np

    from ...domain.runner import State


@dataclass(frozen=True)
class Still:
    """Moves nothing; a step only counts."""

    needs_stress: bool = False

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def pre_update(self, state: State) -> None:
        pass

    def post_update(self, state: State) -> None:
        pass

    def converged(self, state: State) -> np.ndarray | None:
        return None


__all__ = ["Still"]
