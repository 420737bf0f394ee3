"""Heat (or cool) along a linear ramp."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..domain.batch import Batch
from .dynamics import Timed
from .ensembles import NVT, Ensemble, require

if TYPE_CHECKING:
    from ..domain.runner import State


@dataclass(frozen=True)
class Heat(Timed):
    """Langevin dynamics whose target temperature goes linearly from `start` to `stop`, up or down.

    At the start of the visit velocities are always drawn anew: Maxwell-Boltzmann at `start`, total momentum removed.
    At step n of the visit the target is start + (stop - start) n/steps, a function of each system's own step: a system
    that comes later, or after an interruption, has its own ramp.

    Args:
        start, stop: K.
        steps: length of the ramp.
        dt: fs (2 suits noble gases, 0.5 anything with hydrogen).
        friction: 1/ps.
        every: steps between frames of a trajectory; 0: none.
    """

    start: float
    stop: float
    steps: int = 5_000
    friction: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.start, "start", "K")
        require(self.stop, "stop", "K")
        require(self.friction, "friction", "1/ps", positive=True)

    def sampled(self) -> Ensemble:
        return NVT(self.start, self.friction)

    def length(self) -> int:
        return self.steps

    def start_temperature(self, batch: Batch) -> tuple[float | None, torch.Tensor]:
        return float(self.start), torch.ones(len(batch), dtype=torch.bool)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        batch = super().prepare(batch, seed)
        row = torch.tensor([float(self.start), float(self.stop), float(self.steps)], dtype=torch.float64)
        return batch.with_fields(systems={"ramp": row.to(batch.device).repeat(len(batch), 1)})

    def before_step(self, state: State) -> None:
        b = state.batch
        start, stop, steps = b.ramp.unbind(1)
        # Elementwise products and sums only: the bits of one system's target do not depend on its neighbours.
        done = torch.minimum(b.step.to(torch.float64), steps)
        b.temperature.copy_(start + (stop - start) * done / steps)


__all__ = ["Heat"]
