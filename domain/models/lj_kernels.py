"""The Warp kernels of Lennard-Jones: one source for CPU and CUDA, float32 and float64.

A kernel runs one thread per owned atom over its half list. Difference vectors are taken in float64 (positions may be
large, differences are not), the pair is worked out in the model's dtype, and forces, energies and virials are added
up in float64: in float32 runs the two halves of a pair then cancel to float64 round-off, so momentum is conserved,
and a sum does not lose digits to the order of its terms.
"""

# No `from __future__ import annotations`: Warp must see the closure's types, not their names.
from functools import cache
from typing import Any

import torch
import warp as wp

_SCALAR = {torch.float64: wp.float64, torch.float32: wp.float32}


@cache
def pair_kernel(dtype: torch.dtype, switched: bool, full: bool) -> wp.Kernel:
    """The kernel for a dtype, with or without a switched tail, with or without energies and virial (`full`).

    Arguments: positions, node, first, count, neighbors, boundary, numbers as in Neighborhood; part: 0 for atoms that
    see no remote ghost, 1 for those that do, -1 for all; type_of, rows, types: see `lennard_jones.Tables`; rc2: squared
    cutoff; inv_width: 1 / (rc² - ro²) with the switch's onset ro; forces (n_nodes, 3), energies (n_nodes,), virials
    (n_owned, 6: xx, yy, zz, yz, xz, xy): float64, zeroed by the caller; the last two are not touched unless `full`.
    """
    scalar = _SCALAR[dtype]
    vec3: Any = wp.vec3d if dtype == torch.float64 else wp.vec3f
    vec: Any = wp.types.vector(length=3, dtype=scalar)
    virial: Any = wp.types.vector(length=6, dtype=wp.float64)

    @wp.kernel(enable_backward=False, module="unique")
    def lennard_jones(
        positions: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
        node: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
        first: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
        count: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
        neighbors: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
        boundary: wp.array(dtype=wp.uint8),  # type: ignore[valid-type]
        part: int,
        numbers: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
        type_of: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
        rows: wp.array(dtype=vec),  # type: ignore[valid-type]
        types: int,
        rc2: scalar,  # type: ignore[valid-type]
        inv_width: scalar,  # type: ignore[valid-type]
        forces: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
        energies: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
        virials: wp.array(dtype=virial),  # type: ignore[valid-type]
    ):
        i = wp.tid()
        if part >= 0 and int(boundary[i]) != part:
            return
        here = positions[i]
        base = type_of[numbers[i]] * types
        start = first[i]
        force = wp.vec3d()
        if wp.static(full):
            energy = wp.float64(0.0)
            w = virial()
        for k in range(start, start + count[i]):
            j = neighbors[k]
            d = positions[j] - here
            e = vec3(scalar(d[0]), scalar(d[1]), scalar(d[2]))
            r2 = wp.dot(e, e)
            c = rows[base + type_of[numbers[j]]]
            inv = scalar(1.0) / r2
            inv6 = inv * inv * inv
            # fr = -(dU/dr) / r. No branch on the cutoff: a quarter of the pairs of a list with a skin lie beyond it,
            # and mispredicting them costs twice what working them out does.
            fr = (scalar(12.0) * c[0] * inv6 - scalar(6.0) * c[1]) * inv6 * inv
            if wp.static(switched or full):
                u = (c[0] * inv6 - c[1]) * inv6 - c[2]
            if wp.static(switched):
                # s = t²(3 - 2t) and ds/d(r²) = -6 t (1 - t) / (rc² - ro²); t is 1 below the onset, 0 beyond the cutoff.
                t = wp.clamp((rc2 - r2) * inv_width, scalar(0.0), scalar(1.0))
                s = t * t * (scalar(3.0) - scalar(2.0) * t)
                fr = s * fr + scalar(12.0) * inv_width * t * (scalar(1.0) - t) * u
                u = s * u
            else:
                inside = r2 < rc2
                fr = wp.where(inside, fr, scalar(0.0))
                if wp.static(full):
                    u = wp.where(inside, u, scalar(0.0))
            fx = wp.float64(fr * e[0])
            fy = wp.float64(fr * e[1])
            fz = wp.float64(fr * e[2])
            pair = wp.vec3d(fx, fy, fz)
            force += pair  # type: ignore[operator]
            n = node[j]
            forces[n] += pair
            if wp.static(full):
                half = wp.float64(u) * wp.float64(0.5)
                energy += half
                energies[n] += half
                x = wp.float64(e[0])
                y = wp.float64(e[1])
                z = wp.float64(e[2])
                w += virial(fx * x, fy * y, fz * z, fy * z, fx * z, fx * y)
        forces[i] -= force
        if wp.static(full):
            energies[i] += energy
            virials[i] = w

    return lennard_jones


def all_pair_kernels() -> list[wp.Kernel]:
    """Every variant, for compiling ahead of use."""
    return [
        pair_kernel(dtype, switched, full) for dtype in _SCALAR for switched in (False, True) for full in (False, True)
    ]
