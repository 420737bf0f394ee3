"""Produce: dynamics whose frames are kept."""

from __future__ import annotations

from dataclasses import dataclass

from .dynamics import Dynamics
from .ensembles import Ensemble, require, require_count
from .equilibrate import require_ensemble


@dataclass(frozen=True)
class Produce(Dynamics):
    """Run an ensemble for so many steps and write a trajectory.

    Velocities are kept; a system that comes without any gets Maxwell-Boltzmann ones at the ensemble's temperature
    (none under `NVE`, which has no temperature: heat first).

    Args:
        ensemble: `NVE` or `NVT`.
        steps: length.
        every: steps between frames; 0: no trajectory. Frame 0 is the state that came in.
        dt: fs.
    """

    ensemble: Ensemble
    steps: int = 10_000
    every: int = 100
    dt: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ensemble(self.ensemble)
        require_count(self.steps, "steps")
        require_count(self.every, "every", least=0)
        require(self.dt, "dt", "fs", positive=True)

    def sampled(self) -> Ensemble:
        return self.ensemble

    def length(self) -> int:
        return self.steps

    def time_step(self) -> float:
        return float(self.dt)

    @property
    def frames_every(self) -> int:
        return self.every


__all__ = ["Produce"]
