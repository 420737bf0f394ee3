"""What heat, equilibrate, produce and a plain simulation share: a length and a time step, an ensemble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..domain.batch import Batch
from .ensembles import NVE, Ensemble, require, require_count, require_ensemble
from .fields import per_system
from .stage import Stage
from .status import Status

if TYPE_CHECKING:
    from ..domain.runner import Propagator, State


@dataclass(frozen=True, kw_only=True)
class Dynamics(Stage):
    """A stage that integrates equations of motion for a fixed number of steps."""

    def sampled(self) -> Ensemble:
        """The ensemble whose integrator moves the atoms."""
        return NVE()

    def length(self) -> int:
        """Steps of a visit."""
        raise NotImplementedError

    def time_step(self) -> float:
        """fs."""
        return 1.0

    def start_temperature(self, batch: Batch) -> tuple[float | None, torch.Tensor]:
        """Temperature (K) at which velocities are drawn at the start of a visit, and for which systems (bool).

        By default: the ensemble's target, for systems that come without velocities (missing, or all zero).
        """
        from .velocities import at_rest

        return self.sampled().target, at_rest(batch)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        from ..domain.rng import noise_key
        from .thermo import degrees_of_freedom
        from .velocities import with_velocities

        ensemble = self.sampled()
        batch = super().prepare(batch, seed)
        keys = [noise_key(seed, i, self.name, "dynamics") for i in batch.ids]
        batch = batch.with_fields(
            systems={
                "timestep": per_system(batch, self.time_step()),
                "temperature": per_system(batch, ensemble.target or 0.0),
                "friction": per_system(batch, ensemble.damping),
                "noise_key": torch.tensor(keys, dtype=torch.int64, device=batch.device),
                "dof": degrees_of_freedom(batch, conserves_momentum=ensemble.conserves_momentum),
            }
        )
        temperature, which = self.start_temperature(batch)
        if temperature is None:
            return with_velocities(batch)
        keys = [noise_key(seed, i, self.name, "velocities") for i in batch.ids]
        return with_velocities(batch, temperature, which, torch.tensor(keys, dtype=torch.int64, device=batch.device))

    def propagator(self) -> Propagator:
        return self.sampled().propagator()

    def verdict(self, state: State, converged: np.ndarray | None) -> list[Status | None]:
        done = (state.batch.step >= self.length()).tolist()
        return [Status.finished if d else None for d in done]


@dataclass(frozen=True, kw_only=True)
class Timed(Dynamics):
    """Dynamics with a time step `dt` (fs), and `every` so many steps a frame (0: none)."""

    dt: float = 1.0
    every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.length(), "steps")
        require(self.dt, "dt", "fs", positive=True)
        require_count(self.every, "every", least=0)

    def time_step(self) -> float:
        return float(self.dt)

    @property
    def frames_every(self) -> int:
        return self.every


@dataclass(frozen=True)
class Sampling(Timed):
    """An ensemble for `steps` steps. Velocities are kept; a system that comes without any gets Maxwell-Boltzmann ones
    at the ensemble's temperature, if it has one."""

    ensemble: Ensemble
    steps: int | None = None

    def __post_init__(self) -> None:
        require_ensemble(self.ensemble)
        super().__post_init__()

    def sampled(self) -> Ensemble:
        return self.ensemble

    def length(self) -> int:
        return self.steps  # type: ignore[return-value] # None is refused when the stage is made


__all__ = ["Dynamics", "Sampling", "Timed"]
