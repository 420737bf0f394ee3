"""Langevin dynamics by the BAOAB splitting: constant temperature.

| equation (Leimkuhler & Matthews, J. Chem. Phys. 138, 174102 (2013), eqs. 8-12) | variable |
|---|---|
| B: v += dt/2 F/m | `velocities` |
| A: x += dt/2 v | `positions` |
| O: v <- c v + sqrt(1 - c^2) sqrt(kT/m) R, c = exp(-gamma dt) | `friction` gamma (1/ps), `temperature` T (K) |
| R: three standard normals | `gaussians(noise_key, atom_id, step)` |
| A, then forces, then B | |

`timestep` (fs), `temperature`, `friction` and `noise_key` are fields, per system: systems of different targets share a
batch. The temperature is read anew at each step, so that a ramp only writes the field. The noise of the step from
t to t + dt is that of the visit's step counter at t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import warp as wp

from ...domain.batch import Batch
from ...domain.kernels import launch
from ...domain.rng import gaussians
from ...domain.units import ACC, KB, PS
from ..fields import with_defaults
from .verlet import half_kick

if TYPE_CHECKING:
    import numpy as np

    from ...domain.runner import State

wp.set_module_options({"enable_backward": False})

_ACC = wp.constant(wp.float64(ACC))
#: k_B in amu Å²/fs²/K: kT/m is then a squared velocity
_KB_ACC = wp.constant(wp.float64(KB * ACC))
_PER_FS = wp.constant(wp.float64(1.0 / PS))
_HALF = wp.constant(wp.float64(0.5))
_ONE = wp.constant(wp.float64(1.0))


@wp.kernel(enable_backward=False)
def _factors(
    timestep: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    temperature: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    friction: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    factors: wp.array(dtype=wp.vec2d),  # type: ignore[valid-type]
):
    """Per system: c, and (1 - c²) kT."""
    s = wp.tid()
    c = wp.exp(-friction[s] * _PER_FS * timestep[s])
    factors[s] = wp.vec2d(c, (_ONE - c * c) * _KB_ACC * temperature[s])


@wp.kernel(enable_backward=False)
def _baoa(
    positions: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    velocities: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    forces: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    masses: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    system: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    timestep: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    factors: wp.array(dtype=wp.vec2d),  # type: ignore[valid-type]
    noise: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
):
    i = wp.tid()
    s = system[i]
    half = _HALF * timestep[s]
    v = velocities[i] + (half * _ACC / masses[i]) * forces[i]
    x = positions[i] + half * v
    c = factors[s]
    v = c[0] * v + wp.sqrt(c[1] / masses[i]) * noise[i]
    velocities[i] = v
    positions[i] = x + half * v


@dataclass(frozen=True)
class Langevin:
    """The integrator of `NVT`; reads `timestep`, `temperature`, `friction`, `noise_key`."""

    needs_stress: bool = False

    def prepare(self, batch: Batch) -> Batch:
        missing = [name for name in ("temperature", "noise_key") if name not in batch]
        if missing:
            raise ValueError(
                f"Langevin dynamics needs the per-system fields temperature and noise_key, got no {missing}"
            )
        return with_defaults(batch, timestep=1.0, friction=1.0)

    def pre_update(self, state: State) -> None:
        b: Any = state.batch
        factors = torch.empty((len(b), 2), dtype=torch.float64, device=b.timestep.device)
        launch(_factors, len(b), b.timestep, b.temperature, b.friction, factors)
        noise = gaussians(b.noise_key, state.system, b.atom_id, b.step)
        launch(
            _baoa,
            b.masses.shape[0],
            b.positions,
            b.velocities,
            b.forces,
            b.masses,
            state.system,
            b.timestep,
            factors,
            noise,
        )

    def post_update(self, state: State) -> None:
        half_kick(state)

    def converged(self, state: State) -> np.ndarray | None:
        return None


__all__ = ["Langevin"]
