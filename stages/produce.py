"""Produce: dynamics whose frames are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from .dynamics import Sampling


@dataclass(frozen=True)
class Produce(Sampling):
    """Run an ensemble for so many steps and write a trajectory.

    Velocities are kept; a system that comes without any gets Maxwell-Boltzmann ones at the ensemble's temperature
    (none under `NVE`, which has no temperature: heat first).

    Args:
        ensemble: `NVE` or `NVT`.
        steps: length.
        every: steps between frames; 0: no trajectory. Frame 0 is the state that came in.
        dt: fs.
        velocities, forces: write these, too, with every frame (Å/fs and eV/Å inside, the file says its units).
    """

    steps: int | None = 10_000
    every: int = field(default=100, kw_only=True)


__all__ = ["Produce"]
