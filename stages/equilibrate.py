"""Equilibrate: dynamics whose samples nobody counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from .dynamics import Sampling


@dataclass(frozen=True)
class Equilibrate(Sampling):
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

    max_steps: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.steps is not None and self.max_steps is not None and self.steps != self.max_steps:
            raise ValueError(f"give steps or max_steps, not both: are {self.steps} and {self.max_steps}")
        if self.steps is None and self.max_steps is None:
            raise ValueError("Equilibrate needs steps=: how long to run")
        super().__post_init__()

    def length(self) -> int:
        steps = self.max_steps if self.steps is None else self.steps
        assert steps is not None
        return steps


__all__ = ["Equilibrate"]
