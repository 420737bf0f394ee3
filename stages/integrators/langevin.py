# mypy: disable-error-code="arg-type, empty-body, valid-type"
# (Warp kernels: their scalar and vector types mean nothing to mypy)
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
from typing import TYPE_CHECKING

import torch
import warp as wp

from ...domain.batch import Batch
from ...domain.kernels import launch, launch_rows, over_rows
from ...domain.rng import gaussians
from ...domain.units import ACC, KB, PS
from ..fields import with_defaults
from .verlet import half_kick

if TYPE_CHECKING:
    import numpy as np

    from ...domain.runner import State

wp.set_module_options({"enable_backward": False})

#: k_B in amu Å²/fs²/K: kT/m is then a squared velocity
_KB_ACC = wp.constant(wp.float64(KB * ACC))
_PER_FS = wp.constant(wp.float64(1.0 / PS))
_ONE = wp.constant(wp.float64(1.0))

_BAOA = f"""
        const double half = 0.5 * timestep.data[s], c = factors.data[s].c[0], heat = factors.data[s].c[1];
        for (int k = at; k < to; ++k) {{
            const double kick = half * {ACC!r} / masses.data[k], width = sqrt(heat / masses.data[k]);
            for (int a = 0; a < 3; ++a) {{
                const double v = velocities.data[k].c[a] + kick * forces.data[k].c[a];
                const double x = positions.data[k].c[a] + half * v;
                const double w = c * v + width * noise.data[k].c[a];
                velocities.data[k].c[a] = w;
                positions.data[k].c[a] = x + half * w;
            }}
        }}
"""


@wp.kernel(enable_backward=False)
def _factors(
    timestep: wp.array(dtype=wp.float64),
    temperature: wp.array(dtype=wp.float64),
    friction: wp.array(dtype=wp.float64),
    factors: wp.array(dtype=wp.vec2d),
):
    """Per system: c, and (1 - c²) kT."""
    s = wp.tid()
    c = wp.exp(-friction[s] * _PER_FS * timestep[s])
    factors[s] = wp.vec2d(c, (_ONE - c * c) * _KB_ACC * temperature[s])


@wp.func_native(over_rows(_BAOA))
def _baoa_rows(
    begin: wp.int32,
    n: wp.int32,
    positions: wp.array(dtype=wp.vec3d),
    velocities: wp.array(dtype=wp.vec3d),
    forces: wp.array(dtype=wp.vec3d),
    masses: wp.array(dtype=wp.float64),
    system: wp.array(dtype=wp.int32),
    timestep: wp.array(dtype=wp.float64),
    factors: wp.array(dtype=wp.vec2d),
    noise: wp.array(dtype=wp.vec3d),
): ...


@wp.kernel(enable_backward=False)
def _baoa(
    rows: wp.int32,
    n: wp.int32,
    positions: wp.array(dtype=wp.vec3d),
    velocities: wp.array(dtype=wp.vec3d),
    forces: wp.array(dtype=wp.vec3d),
    masses: wp.array(dtype=wp.float64),
    system: wp.array(dtype=wp.int32),
    timestep: wp.array(dtype=wp.float64),
    factors: wp.array(dtype=wp.vec2d),
    noise: wp.array(dtype=wp.vec3d),
):
    _baoa_rows(
        rows * wp.tid(), n, positions, velocities, forces, masses, system, timestep, factors, noise,
    )  # fmt: skip


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
        atoms, systems = state.batch.atoms, state.batch.systems
        timestep = systems["timestep"]
        factors = torch.empty((state.n_systems, 2), dtype=torch.float64, device=timestep.device)
        launch(_factors, state.n_systems, timestep, systems["temperature"], systems["friction"], factors)
        launch_rows(
            _baoa,
            state.n_owned,
            atoms["positions"],
            atoms["velocities"],
            atoms["forces"],
            atoms["masses"],
            state.system,
            timestep,
            factors,
            gaussians(systems["noise_key"], state.system, atoms["atom_id"], systems["step"]),
        )

    def post_update(self, state: State) -> None:
        half_kick(state)

    def converged(self, state: State) -> np.ndarray | None:
        return None


__all__ = ["Langevin"]
