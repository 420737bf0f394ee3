# mypy: disable-error-code="empty-body, valid-type"
# (Warp kernels: their scalar and vector types mean nothing to mypy)
"""The Warp kernels of Lennard-Jones: one source for CPU and CUDA, float32 and float64.

A kernel runs one thread per owned atom over its half list. Difference vectors are taken in float64 (positions may be
large, differences are not), the pair is worked out in the model's dtype, and forces, energies and virials are added
up in float64: in float32 runs the two halves of a pair then cancel to float64 round-off, so momentum is conserved,
and a sum does not lose digits to the order of its terms.

On a CPU an atom's pairs are taken 16 at a time, in three loops: differences are collected, the pairs worked out
(without branches, so that the compiler does several with one instruction), and forces handed out in the order of the
list. That takes half the time of going through them one by one, and gives the same bits.
"""

# No `from __future__ import annotations`: Warp must see the closure's types, not their names.
from functools import cache
from typing import Any

import torch
import warp as wp

_SCALAR = {torch.float64: wp.float64, torch.float32: wp.float32}
#: Pairs that are worked out side by side on a CPU.
_WIDTH = 16

_SNIPPET = """
#if defined(__CUDA_ARCH__)
    const int width = 1;
#else
    const int width = @width@;
#endif
    typedef @real@ real;
    const bool switched = @switched@, full = @full@;
    const auto here = positions.data[i];
    const auto own = coefficients.data[type.data[i] * (types + 1)];
    double fx_sum = 0.0, fy_sum = 0.0, fz_sum = 0.0, energy = 0.0, w[6] = {};
    const int last = first.data[i] + count.data[i];
    for (int k = first.data[i]; k < last; k += width) {
        const int n = last - k < width ? last - k : width;
        int row[width];
        double ex[width], ey[width], ez[width], fx[width], fy[width], fz[width], half[width];
        real c12[width], c6[width], shift[width];
        // Beyond the end of the list stands its first pair over again; nothing is made of it.
        for (int l = 0; l < width; ++l)
            row[l] = neighbors.data[k + (l < n ? l : 0)];
        for (int l = 0; l < width; ++l) {
            const auto c = uniform ? own : coefficients.data[type.data[i] * types + type.data[row[l]]];
            c12[l] = c.c[0];
            c6[l] = c.c[1];
            shift[l] = c.c[2];
        }
        for (int l = 0; l < width; ++l) {
            const auto& there = positions.data[row[l]];
            ex[l] = there.c[0] - here.c[0];
            ey[l] = there.c[1] - here.c[1];
            ez[l] = there.c[2] - here.c[2];
        }
        for (int l = 0; l < width; ++l) {
            const real x = real(ex[l]), y = real(ey[l]), z = real(ez[l]);
            const real r2 = x * x + y * y + z * z;
            const real inv = real(1) / r2, inv6 = inv * inv * inv;
            // fr = -(dU/dr) / r. No branch on the cutoff: a quarter of the pairs of a list with a skin lie beyond it.
            real fr = (real(12) * c12[l] * inv6 - real(6) * c6[l]) * inv6 * inv;
            real u = (c12[l] * inv6 - c6[l]) * inv6 - shift[l];
            if (switched) {
                // s = t²(3 - 2t), ds/d(r²) = -6 t (1 - t) / (rc² - ro²); t is 1 below the onset, 0 beyond the cutoff.
                real t = (rc2 - r2) * inv_width;
                t = t > real(0) ? t : real(0);
                t = t < real(1) ? t : real(1);
                const real s = t * t * (real(3) - real(2) * t);
                fr = s * fr + real(12) * inv_width * t * (real(1) - t) * u;
                u = s * u;
            } else {
                fr = r2 < rc2 ? fr : real(0);
                u = r2 < rc2 ? u : real(0);
            }
            fx[l] = double(fr * x);
            fy[l] = double(fr * y);
            fz[l] = double(fr * z);
            if (full) {
                half[l] = double(u) * 0.5;
                // The virial takes the vector as the model saw it.
                ex[l] = double(x);
                ey[l] = double(y);
                ez[l] = double(z);
            }
        }
        for (int l = 0; l < n; ++l) {
            const int j = node.data[row[l]];
            fx_sum += fx[l];
            fy_sum += fy[l];
            fz_sum += fz[l];
            wp::atomic_add(forces, j, wp::vec_t<3, wp::float64>(fx[l], fy[l], fz[l]));
            if (full) {
                energy += half[l];
                wp::atomic_add(energies, j, half[l]);
                w[0] += fx[l] * ex[l];
                w[1] += fy[l] * ey[l];
                w[2] += fz[l] * ez[l];
                w[3] += fy[l] * ez[l];
                w[4] += fx[l] * ez[l];
                w[5] += fx[l] * ey[l];
            }
        }
    }
    wp::atomic_add(forces, i, wp::vec_t<3, wp::float64>(-fx_sum, -fy_sum, -fz_sum));
    if (full) {
        wp::atomic_add(energies, i, energy);
        for (int a = 0; a < 6; ++a)
            virials.data[i].c[a] = w[a];
    }
"""


def _source(dtype: torch.dtype, switched: bool, full: bool) -> str:
    text = _SNIPPET
    real = "double" if dtype == torch.float64 else "float"
    for name, value in {"width": _WIDTH, "real": real, "switched": switched, "full": full}.items():
        text = text.replace(f"@{name}@", str(value).lower())
    return text


@cache
def pair_kernel(dtype: torch.dtype, switched: bool, full: bool) -> wp.Kernel:
    """The kernel for a dtype, with or without a switched tail, with or without energies and virial (`full`).

    Arguments: positions, node, first, count, neighbors, boundary as in Neighborhood; part: 0 for atoms that see no
    remote ghost, 1 for those that do, -1 for all; type: int32, (n_total,), type of each row; uniform: 1 if all rows are
    of one type; coefficients, types: see `lennard_jones.Tables`; rc2: squared cutoff; inv_width: 1 / (rc² - ro²) with
    the switch's onset ro; forces (n_nodes, 3), energies (n_nodes,), virials (n_owned, 6: xx, yy, zz, yz, xz, xy):
    float64, zeroed by the caller; the last two are not touched unless `full`.
    """
    scalar = _SCALAR[dtype]
    vec: Any = wp.types.vector(length=3, dtype=scalar)
    virial: Any = wp.types.vector(length=6, dtype=wp.float64)

    @wp.func_native(_source(dtype, switched, full))
    def pairs_of(
        i: int,
        positions: wp.array(dtype=wp.vec3d),
        node: wp.array(dtype=wp.int32),
        first: wp.array(dtype=wp.int32),
        count: wp.array(dtype=wp.int32),
        neighbors: wp.array(dtype=wp.int32),
        type: wp.array(dtype=wp.int32),
        uniform: int,
        coefficients: wp.array(dtype=vec),
        types: int,
        rc2: scalar,
        inv_width: scalar,
        forces: wp.array(dtype=wp.vec3d),
        energies: wp.array(dtype=wp.float64),
        virials: wp.array(dtype=virial),
    ): ...

    @wp.kernel(enable_backward=False, module="unique")
    def lennard_jones(
        positions: wp.array(dtype=wp.vec3d),
        node: wp.array(dtype=wp.int32),
        first: wp.array(dtype=wp.int32),
        count: wp.array(dtype=wp.int32),
        neighbors: wp.array(dtype=wp.int32),
        boundary: wp.array(dtype=wp.uint8),
        part: int,
        type: wp.array(dtype=wp.int32),
        uniform: int,
        coefficients: wp.array(dtype=vec),
        types: int,
        rc2: scalar,
        inv_width: scalar,
        forces: wp.array(dtype=wp.vec3d),
        energies: wp.array(dtype=wp.float64),
        virials: wp.array(dtype=virial),
    ):
        i = wp.tid()
        if part < 0 or int(boundary[i]) == part:
            pairs_of(
                i, positions, node, first, count, neighbors, type, uniform, coefficients, types, rc2, inv_width,
                forces, energies, virials,
            )  # fmt: skip

    return lennard_jones


def all_pair_kernels() -> list[wp.Kernel]:
    """Every variant, for compiling ahead of use."""
    return [
        pair_kernel(dtype, switched, full) for dtype in _SCALAR for switched in (False, True) for full in (False, True)
    ]
