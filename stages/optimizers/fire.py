# mypy: disable-error-code="arg-type, operator, valid-type"
# (Warp kernels: their scalar and vector types mean nothing to mypy)
"""FIRE: a fast inertial relaxation engine, batched over systems, with an optional isotropic cell.

| equation (Bitzek, Koskinen, Gähler, Moseler & Gumbsch, Phys. Rev. Lett. 97, 170201 (2006)) | variable |
|---|---|
| P = F · v | `fire_dots[:, 0]` |
| v <- (1 - alpha) v + alpha F/abs(F) abs(v) | factors `on_v`, `on_f` |
| P > 0 for more than N_min steps: dt <- min(dt f_inc, dt_max), alpha <- alpha f_alpha | `fire[:, 0]`, `fire[:, 1]` |
| P <= 0: v <- 0, dt <- dt f_dec, alpha <- alpha_start | `fire[:, 2]` counts the steps since |
| v += dt F, x += dt v (masses 1; times in Å sqrt(amu/eV), 10.18 fs, as in ASE) | `fire_velocities`, `positions` |

Parameter values are those of ASE's `FIRE`. Differences from it: the step limit of 0.2 Å holds for each atom, not for
the norm over all atoms, so that large systems do not crawl; and the cell is one coordinate more, below.

Cell: with the logarithmic strain s (lengths scale as exp(s)), -dE/ds - 3 p V = 3 V (P - p), P the instantaneous
pressure. The coordinate is q = c s with c^2 = N (V/N)^(2/3), a third of the metric of the displacements that a strain
makes (fewest steps on argon, of 1 to 1/10): so the cell moves about as fast as the atoms do, whatever their number.
Atoms scale with the cell. At most 2 % of a length per step, so that crystals far from their minimum get there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import warp as wp

from ...domain.batch import Batch
from ...domain.kernels import launch
from ...domain.units import GPA
from ..fields import per_system, with_defaults

if TYPE_CHECKING:
    from ...domain.runner import State

wp.set_module_options({"enable_backward": False})

# ASE's values, time in Å sqrt(amu/eV).
DT_START, DT_MAX, N_MIN, F_INC, F_DEC, ALPHA_START, F_ALPHA = 0.1, 1.0, 5, 1.1, 0.5, 0.1, 0.99
#: largest displacement of an atom in a step, Å; largest change of a length of the cell in a step
MAX_STEP, MAX_STRAIN = 0.2, 0.02

_DT_MAX, _N_MIN = wp.constant(wp.float64(DT_MAX)), wp.constant(wp.float64(N_MIN))
_F_INC, _F_DEC = wp.constant(wp.float64(F_INC)), wp.constant(wp.float64(F_DEC))
_ALPHA_START, _F_ALPHA = wp.constant(wp.float64(ALPHA_START)), wp.constant(wp.float64(F_ALPHA))
_MAX_STEP, _MAX_STRAIN = wp.constant(wp.float64(MAX_STEP)), wp.constant(wp.float64(MAX_STRAIN))
_GPA = wp.constant(wp.float64(GPA))
_ZERO, _ONE = wp.constant(wp.float64(0.0)), wp.constant(wp.float64(1.0))


@wp.kernel(enable_backward=False)
def _products(
    forces: wp.array(dtype=wp.vec3d),
    velocities: wp.array(dtype=wp.vec3d),
    ptr: wp.array(dtype=wp.int64),
    out: wp.array2d(dtype=wp.float64),
):
    """Per system, over the atoms here in their order: sums of F·v, F·F, v·v, and the largest F·F."""
    s = wp.tid()
    fv = wp.float64(0.0)
    ff = wp.float64(0.0)
    vv = wp.float64(0.0)
    most = wp.float64(-wp.inf)
    for i in range(int(ptr[s]), int(ptr[s + 1])):
        f = forces[i]
        v = velocities[i]
        square = wp.dot(f, f)
        fv += wp.dot(f, v)
        ff += square
        vv += wp.dot(v, v)
        most = _larger(most, square)
    out[s, 0] = fv
    out[s, 1] = ff
    out[s, 2] = vv
    out[s, 3] = most


@wp.func
def _larger(a: wp.float64, b: wp.float64):
    """The maximum; NaN wins."""
    return wp.where(a != a or b <= a, a, b)


@wp.kernel(enable_backward=False)
def _gathered(
    parts: wp.array3d(dtype=wp.float64),
    dots: wp.array2d(dtype=wp.float64),
):
    """Per system: what `_products` made on every rank, added up in the order of the ranks."""
    s = wp.tid()
    fv = parts[0, s, 0]
    ff = parts[0, s, 1]
    vv = parts[0, s, 2]
    most = parts[0, s, 3]
    for r in range(1, parts.shape[0]):
        fv += parts[r, s, 0]
        ff += parts[r, s, 1]
        vv += parts[r, s, 2]
        most = _larger(most, parts[r, s, 3])
    dots[s, 0] = fv
    dots[s, 1] = ff
    dots[s, 2] = vv
    dots[s, 3] = wp.sqrt(most)


@wp.kernel(enable_backward=False)
def _with_cell(
    natoms: wp.array(dtype=wp.int64),
    cells: wp.array(dtype=wp.mat33d),
    stress: wp.array(dtype=wp.mat33d),
    target: wp.array(dtype=wp.float64),
    memory: wp.array2d(dtype=wp.float64),
    dots: wp.array2d(dtype=wp.float64),
):
    """Per system: the cell's force 3 V (P - p)/c and metric c, and their part of the products."""
    s = wp.tid()
    h = cells[s]
    size = wp.abs(
        h[0, 0] * (h[1, 1] * h[2, 2] - h[1, 2] * h[2, 1])
        + h[0, 1] * (h[1, 2] * h[2, 0] - h[1, 0] * h[2, 2])
        + h[0, 2] * (h[1, 0] * h[2, 1] - h[1, 1] * h[2, 0])
    )
    atoms = wp.float64(natoms[s])
    pressure = (stress[s][0, 0] + stress[s][1, 1] + stress[s][2, 2]) / wp.float64(-3.0)
    metric = wp.cbrt(size / atoms) * wp.sqrt(atoms)
    force = wp.float64(3.0) * size * (pressure - target[s] * _GPA) / metric
    speed = memory[s, 3]
    dots[s, 0] = dots[s, 0] + force * speed
    dots[s, 1] = dots[s, 1] + force * force
    dots[s, 2] = dots[s, 2] + speed * speed
    dots[s, 4] = force
    dots[s, 5] = metric


@wp.kernel(enable_backward=False)
def _factors(
    dots: wp.array2d(dtype=wp.float64),
    memory: wp.array2d(dtype=wp.float64),
    factors: wp.array2d(dtype=wp.float64),
):
    """Per system: FIRE's decision. factors: on v, on F, dt, scale of lengths."""
    s = wp.tid()
    dt = memory[s, 0]
    alpha = memory[s, 1]
    count = memory[s, 2]
    cell_v = memory[s, 3]
    cell_f = dots[s, 4]
    metric = dots[s, 5]
    on_v = _ZERO
    on_f = _ZERO
    if count < _ZERO:
        count = _ZERO  # the first step: nothing moves yet, nothing is judged
    elif dots[s, 0] > _ZERO:
        on_v = _ONE - alpha
        if dots[s, 1] > _ZERO:
            on_f = alpha * wp.sqrt(dots[s, 2] / dots[s, 1])
        if count > _N_MIN:
            dt = wp.min(dt * _F_INC, _DT_MAX)
            alpha = alpha * _F_ALPHA
        count = count + _ONE
    else:
        dt = dt * _F_DEC
        alpha = _ALPHA_START
        count = _ZERO
    on_f = on_f + dt
    scale = _ONE
    if metric > _ZERO:
        cell_v = on_v * cell_v + on_f * cell_f
        scale = _ONE + wp.max(-_MAX_STRAIN, wp.min(_MAX_STRAIN, dt * cell_v / metric))
    memory[s, 0] = dt
    memory[s, 1] = alpha
    memory[s, 2] = count
    memory[s, 3] = cell_v
    factors[s, 0] = on_v
    factors[s, 1] = on_f
    factors[s, 2] = dt
    factors[s, 3] = scale


@wp.kernel(enable_backward=False)
def _move(
    positions: wp.array(dtype=wp.vec3d),
    velocities: wp.array(dtype=wp.vec3d),
    forces: wp.array(dtype=wp.vec3d),
    system: wp.array(dtype=wp.int32),
    factors: wp.array2d(dtype=wp.float64),
):
    i = wp.tid()
    s = system[i]
    v = factors[s, 0] * velocities[i] + factors[s, 1] * forces[i]
    velocities[i] = v
    step = factors[s, 2] * v
    size = wp.length(step)
    if size > _MAX_STEP:
        step = (_MAX_STEP / size) * step
    positions[i] = factors[s, 3] * (positions[i] + step)


@dataclass(frozen=True)
class Fire:
    """The optimizer of `Relax`.

    Args:
        fmax: eV/Å, converged when the largest atomic force is below.
        smax: GPa, and, if the cell moves, the pressure this close to the field `pressure_target` (GPa).
        moves_cell: whether the cell scales isotropically.

    Fields: `fire` (dt, alpha, steps since the last reset or -1 at the start, velocity of the cell coordinate),
    `fire_velocities` per atom, and `fire_dots` (F·v, F·F, v·v with the cell's terms, largest atomic force, force on
    the cell coordinate, its metric c), measured anew whenever forces are.
    """

    fmax: float = 0.01
    smax: float = 0.01
    moves_cell: bool = False

    @property
    def needs_stress(self) -> bool:
        return self.moves_cell

    def prepare(self, batch: Batch) -> Batch:
        batch = with_defaults(batch, pressure_target=0.0)
        atoms, systems = {}, {}
        if "fire_velocities" not in batch:
            atoms["fire_velocities"] = torch.zeros_like(batch.positions)
        if "fire" not in batch:
            start = torch.tensor([DT_START, ALPHA_START, -1.0, 0.0], dtype=torch.float64, device=batch.device)
            systems["fire"] = start.repeat(len(batch), 1)
        if "fire_dots" not in batch:
            systems["fire_dots"] = per_system(batch, 0.0)[:, None].repeat(1, 6)
        return batch.with_fields(atoms=atoms, systems=systems)

    def pre_update(self, state: State) -> None:
        b: Any = state.batch
        factors = torch.empty((len(b), 4), dtype=torch.float64, device=b.fire.device)
        launch(_factors, len(b), b.fire_dots, b.fire, factors)
        launch(_move, b.positions.shape[0], b.positions, b.fire_velocities, b.forces, state.system, factors)
        if self.moves_cell:
            b.cell.mul_(factors[:, 3].reshape(-1, 1, 1))

    def post_update(self, state: State) -> None:
        self.primed(state)

    def primed(self, state: State) -> None:
        """Bring `fire_dots` up to date with forces, velocities and stress: a pure function of these. Collective."""
        b: Any = state.batch
        n = state.n_systems
        mine = torch.empty((n, 4), dtype=torch.float64, device=b.forces.device)
        launch(_products, n, b.forces, b.fire_velocities, state.ptr, mine)
        parts = state.mesh.gather_known_rows(mine, [n] * state.mesh.size)
        launch(_gathered, n, torch.stack(parts), b.fire_dots)
        if self.moves_cell:
            launch(_with_cell, n, b.natoms, b.cell, b.stress, b.pressure_target, b.fire, b.fire_dots)

    def converged(self, state: State) -> np.ndarray:
        b: Any = state.batch
        # The runner wants to know now; on a device this waits for it.
        there = b.fire_dots.cpu().numpy()[:, 3] < self.fmax
        if self.moves_cell:
            stress = b.stress.cpu().numpy()
            pressure = (stress[:, 0, 0] + stress[:, 1, 1] + stress[:, 2, 2]) / -3.0
            there &= np.abs(pressure / GPA - b.pressure_target.cpu().numpy()) < self.smax
        return there


__all__ = ["Fire"]
