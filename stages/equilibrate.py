"""Equilibrate: dynamics whose samples nobody counts."""

from __future__ import annotations

from dataclasses import dataclass

from .dynamics import Dynamics
from .ensembles import Ensemble, require, require_count


@dataclass(frozen=True)
class Equilibrate(Dynamics):
    """Run an ensemble for a fixed number of steps; the visit ends as `finished`.

    (Ending when the system is stationary, with the verdict `equilibrated` or `unequilibrated`, is to come; until then
    nothing is judged and nothing claims to be.) Velocities are kept; a system that comes without any gets
    Maxwell-Boltzmann ones at the ensemble's temperature.

    Args:
        ensemble: `NVT` or `NVE`.
        steps: length; `max_steps` is another name for it.
        dt: fs.
        every: steps between frames of a trajectory; 0: none.
    """

    ensemble: Ensemble
    steps: int | None = None
    max_steps: int | None = None
    dt: float = 1.0
    every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ensemble(self.ensemble)
        if self.steps is not None and self.max_steps is not None and self.steps != self.max_steps:
            raise ValueError(f"give steps or max_steps, not both: are {self.steps} and {self.max_steps}")
        if self.steps is None and self.max_steps is None:
            raise ValueError("Equilibrate needs steps=: how long to run")
        require_count(self.length(), "steps")
        require(self.dt, "dt", "fs", positive=True)
        require_count(self.every, "every", least=0)

    def sampled(self) -> Ensemble:
        return self.ensemble

    def length(self) -> int:
        steps = self.max_steps if self.steps is None else self.steps
        assert steps is not None
        return steps

    def time_step(self) -> float:
        return float(self.dt)

    @property
    def frames_every(self) -> int:
        return self.every


def require_ensemble(ensemble: object) -> None:
    """Refuse what is no ensemble."""
    if not isinstance(ensemble, Ensemble):
        raise ValueError(f"ensemble must be one such as mm.NVT(300) or mm.NVE(), is {ensemble!r}")


__all__ = ["Equilibrate", "require_ensemble"]
