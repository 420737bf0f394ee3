"""Velocity Verlet: constant energy.

| equation | variable |
|---|---|
| v(t + dt/2) = v + dt/2 F/m | `velocities`, half a kick |
| x(t + dt) = x + dt v(t + dt/2) | `positions` |
| v(t + dt) = v(t + dt/2) + dt/2 F(x(t + dt))/m | `velocities`, the other half |

Swope, Andersen, Berens & Wilson, J. Chem. Phys. 76, 637 (1982), eqs. 5-6. `timestep` (fs) is a field, per system.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import warp as wp

from ...domain.batch import Batch
from ...domain.kernels import launch
from ...domain.units import ACC
from ..fields import with_defaults

if TYPE_CHECKING:
    import numpy as np

    from ...domain.runner import State

wp.set_module_options({"enable_backward": False})

_ACC = wp.constant(wp.float64(ACC))
_HALF = wp.constant(wp.float64(0.5))


@wp.kernel(enable_backward=False)
def _kick_drift(
    positions: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    velocities: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    forces: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    masses: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    system: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    timestep: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
):
    i = wp.tid()
    dt = timestep[system[i]]
    v = velocities[i] + (_HALF * dt * _ACC / masses[i]) * forces[i]
    velocities[i] = v
    positions[i] = positions[i] + dt * v


@wp.kernel(enable_backward=False)
def _kick(
    velocities: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    forces: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    masses: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    system: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    timestep: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
):
    i = wp.tid()
    velocities[i] = velocities[i] + (_HALF * timestep[system[i]] * _ACC / masses[i]) * forces[i]


def half_kick(state: State) -> None:
    """v += dt/2 F/m for every owned atom."""
    b: Any = state.batch
    launch(_kick, b.masses.shape[0], b.velocities, b.forces, b.masses, state.system, b.timestep)


@dataclass(frozen=True)
class VelocityVerlet:
    """The integrator of `NVE`; reads `timestep`."""

    needs_stress: bool = False

    def prepare(self, batch: Batch) -> Batch:
        return with_defaults(batch, timestep=1.0)

    def pre_update(self, state: State) -> None:
        b: Any = state.batch
        launch(_kick_drift, b.masses.shape[0], b.positions, b.velocities, b.forces, b.masses, state.system, b.timestep)

    def post_update(self, state: State) -> None:
        half_kick(state)

    def converged(self, state: State) -> np.ndarray | None:
        return None


__all__ = ["VelocityVerlet", "half_kick"]
