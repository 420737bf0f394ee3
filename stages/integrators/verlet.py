# mypy: disable-error-code="arg-type, empty-body, valid-type"
# (Warp kernels: their scalar and vector types mean nothing to mypy)
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
from typing import TYPE_CHECKING

import warp as wp

from ...domain.batch import Batch
from ...domain.kernels import launch_rows, over_rows
from ...domain.units import ACC
from ..fields import with_defaults

if TYPE_CHECKING:
    import numpy as np

    from ...domain.runner import State

wp.set_module_options({"enable_backward": False})

_KICK = f"""
        const double dt = timestep.data[s];
        for (int k = at; k < to; ++k) {{
            const double factor = 0.5 * dt * {ACC!r} / masses.data[k];
            for (int a = 0; a < 3; ++a)
                velocities.data[k].c[a] = velocities.data[k].c[a] + factor * forces.data[k].c[a];
        }}
"""
_DRIFT = """
        for (int k = at; k < to; ++k)
            for (int a = 0; a < 3; ++a)
                positions.data[k].c[a] = positions.data[k].c[a] + dt * velocities.data[k].c[a];
"""


@wp.func_native(over_rows(_KICK))
def _kick_rows(
    begin: wp.int32,
    n: wp.int32,
    velocities: wp.array(dtype=wp.vec3d),
    forces: wp.array(dtype=wp.vec3d),
    masses: wp.array(dtype=wp.float64),
    system: wp.array(dtype=wp.int32),
    timestep: wp.array(dtype=wp.float64),
): ...


@wp.func_native(over_rows(_KICK + _DRIFT))
def _kick_drift_rows(
    begin: wp.int32,
    n: wp.int32,
    positions: wp.array(dtype=wp.vec3d),
    velocities: wp.array(dtype=wp.vec3d),
    forces: wp.array(dtype=wp.vec3d),
    masses: wp.array(dtype=wp.float64),
    system: wp.array(dtype=wp.int32),
    timestep: wp.array(dtype=wp.float64),
): ...


@wp.kernel(enable_backward=False)
def _kick_drift(
    rows: wp.int32,
    n: wp.int32,
    positions: wp.array(dtype=wp.vec3d),
    velocities: wp.array(dtype=wp.vec3d),
    forces: wp.array(dtype=wp.vec3d),
    masses: wp.array(dtype=wp.float64),
    system: wp.array(dtype=wp.int32),
    timestep: wp.array(dtype=wp.float64),
):
    _kick_drift_rows(rows * wp.tid(), n, positions, velocities, forces, masses, system, timestep)


@wp.kernel(enable_backward=False)
def _kick(
    rows: wp.int32,
    n: wp.int32,
    velocities: wp.array(dtype=wp.vec3d),
    forces: wp.array(dtype=wp.vec3d),
    masses: wp.array(dtype=wp.float64),
    system: wp.array(dtype=wp.int32),
    timestep: wp.array(dtype=wp.float64),
):
    _kick_rows(rows * wp.tid(), n, velocities, forces, masses, system, timestep)


def half_kick(state: State) -> None:
    """v += dt/2 F/m for every owned atom."""
    atoms, systems = state.batch.atoms, state.batch.systems
    launch_rows(
        _kick,
        state.n_owned,
        atoms["velocities"],
        atoms["forces"],
        atoms["masses"],
        state.system,
        systems["timestep"],
    )


@dataclass(frozen=True)
class VelocityVerlet:
    """The integrator of `NVE`; reads `timestep`."""

    needs_stress: bool = False

    def prepare(self, batch: Batch) -> Batch:
        return with_defaults(batch, timestep=1.0)

    def pre_update(self, state: State) -> None:
        atoms, systems = state.batch.atoms, state.batch.systems
        launch_rows(
            _kick_drift,
            state.n_owned,
            atoms["positions"],
            atoms["velocities"],
            atoms["forces"],
            atoms["masses"],
            state.system,
            systems["timestep"],
        )

    def post_update(self, state: State) -> None:
        half_kick(state)

    def converged(self, state: State) -> np.ndarray | None:
        return None


__all__ = ["VelocityVerlet", "half_kick"]
