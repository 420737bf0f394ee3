# mypy: disable-error-code="arg-type, empty-body, valid-type"
# (Warp kernels: their scalar and vector types mean nothing to mypy)
"""Counter-based noise: numbers are a function of (key, atom id, step) and of nothing else.

So a trajectory does not depend on the number of ranks, on company in the batch, or on interruptions. The generator is
Philox4x32-10 (Salmon, Moraes, Dror & Shaw, SC'11, 2011), the normals are Box-Muller's.

A key names (campaign seed, system, stage, purpose): siblings and stages never share noise. The counter is 128 bits
wide: the atom id in its lower 64, the step of the visit in its upper 64.

Logarithm, sine and cosine are series of our own here, and that for two reasons. A C library's differ from one machine
to the next; these consist of correctly rounded operations in a given order (`fma` where one is meant), so that noise
has the same bits everywhere. And the compiler vectorises them: on a CPU a normal costs 6 ns instead of 30.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import warp as wp
from torch import Tensor

from .kernels import launch

wp.set_module_options({"enable_backward": False})

#: Rows that a thread works out side by side on a CPU; on a device each has one.
ROWS = 16


def noise_key(seed: int, system_id: str, stage: str, purpose: str) -> int:
    """The 64-bit key of one system's noise in one stage for one purpose, as a signed int64.

    blake2b over the parts, each with its length before it, so that no two different tuples spell the same bytes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (str(int(seed)), system_id, stage, purpose):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _series(argument: str, coefficients: Sequence[float]) -> str:
    """C for a power series, by Horner's rule; the lowest power first."""
    *lower, text = map(repr, coefficients)
    for coefficient in reversed(lower):
        text = f"fma({argument}, {text}, {coefficient})"
    return text


# ln x = 2 (q + q³/3 + q⁵/5 ...), q = (x - 1)/(x + 1): abs(q) <= 0.172 for x in [sqrt(1/2), sqrt(2)).
_LOG = _series("z", [2.0 / (2 * k + 1) for k in range(1, 11)])
# sin x and cos x for abs(x) <= pi/4.
_SIN = _series("z", [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(1, 8)])
_COS = _series("z", [(-1.0) ** k / math.factorial(2 * k) for k in range(9)])

# Each step is a loop over the rows of its own, without branches, which a compiler vectorises. A row beyond the end is
# the last one over again, so that every row goes through the same operations. Integers of 32 bits lie in 64, as
# products need them there.
_NORMALS = f"""
#if defined(__CUDA_ARCH__)
    const int rows = 1;
#else
    const int rows = {ROWS};
#endif
    const wp::uint64 low = 0xFFFFFFFFull;
    wp::uint64 key[rows], id[rows], at[rows];
    for (int l = 0; l < rows; ++l) {{
        const int i = begin + l < n ? begin + l : n - 1;
        const int s = system.data[i];
        key[l] = keys.data[s];
        id[l] = atom_id.data[i];
        at[l] = step.data[s];
    }}
    // Philox4x32-10. word: the four words, each moved to the middle of its step of 1, so that none is 0.
    double word[4][rows];
    for (int l = 0; l < rows; ++l) {{
        wp::uint64 c0 = id[l] & low, c1 = id[l] >> 32, c2 = at[l] & low, c3 = at[l] >> 32;
        wp::uint64 k0 = key[l] & low, k1 = key[l] >> 32;
        for (int round = 0; round < 10; ++round) {{
            const wp::uint64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
            c0 = (p1 >> 32) ^ c1 ^ k0;
            c1 = p1 & low;
            c2 = (p0 >> 32) ^ c3 ^ k1;
            c3 = p0 & low;
            k0 = (k0 + 0x9E3779B9ull) & low;
            k1 = (k1 + 0xBB67AE85ull) & low;
        }}
        word[0][l] = double(wp::int64(c0)) + 0.5;
        word[1][l] = double(wp::int64(c1)) + 0.5;
        word[2][l] = double(wp::int64(c2)) + 0.5;
        word[3][l] = double(wp::int64(c3)) + 0.5;
    }}
    // Box-Muller, with radius sqrt(-2 ln u) and angle 2 pi u of two words each, u = word / 2^32.
    double radius[2][rows], cosine[2][rows], sine[2][rows];
    for (int h = 0; h < 2; ++h) {{
        for (int l = 0; l < rows; ++l) {{
            // word = 2^e x with x in [sqrt(1/2), sqrt(2)), by its bits: adding 1 - sqrt(1/2) carries into the exponent.
            const wp::uint64 root_half = 0x3FE6A09E667F3BCCull, one = 0x3FF0000000000000ull;
            wp::uint64 bits;
            memcpy(&bits, &word[2 * h][l], 8);
            bits += one - root_half;
            const wp::uint64 mantissa = (bits & 0x000FFFFFFFFFFFFFull) + root_half;
            // The exponent as a number: the low bits of 2^52 count ones.
            const wp::uint64 counted = (bits >> 52) | 0x4330000000000000ull;
            double x, e;
            memcpy(&x, &mantissa, 8);
            memcpy(&e, &counted, 8);
            e -= 4503599627370496.0 + 1023.0 + 32.0;
            const double q = (x - 1.0) / (x + 1.0), z = q * q;
            const double series = {_LOG};
            radius[h][l] = sqrt(-2.0 * fma(e, {math.log(2.0)!r}, fma(q * z, series, q + q)));
        }}
        for (int l = 0; l < rows; ++l) {{
            // The nearest quarter of a turn, and what is beyond it. Adding 1.5 * 2^52 rounds, and shows the quarters
            // as the lowest bits. All is exact up to the product with 2 pi.
            const double u = word[2 * h + 1][l] * {2.0**-32!r}, rounding = 6755399441055744.0;
            const double shown = 4.0 * u + rounding;
            wp::uint64 quarters;
            memcpy(&quarters, &shown, 8);
            const double x = (u - 0.25 * (shown - rounding)) * {2.0 * math.pi!r}, z = x * x;
            const double sin = fma(x * z, {_SIN}, x), cos = {_COS};
            const double c = quarters & 1 ? sin : cos, s = quarters & 1 ? cos : sin;
            cosine[h][l] = (quarters + 1) & 2 ? -c : c;
            sine[h][l] = quarters & 2 ? -s : s;
        }}
    }}
    for (int l = 0; l < rows && begin + l < n; ++l) {{
        out.data[begin + l].c[0] = radius[0][l] * cosine[0][l];
        out.data[begin + l].c[1] = radius[0][l] * sine[0][l];
        out.data[begin + l].c[2] = radius[1][l] * cosine[1][l];
    }}
"""


@wp.func_native(_NORMALS)
def _normals(
    begin: wp.int32,
    n: wp.int32,
    keys: wp.array(dtype=wp.int64),
    system: wp.array(dtype=wp.int32),
    atom_id: wp.array(dtype=wp.int64),
    step: wp.array(dtype=wp.int64),
    out: wp.array(dtype=wp.vec3d),
): ...


@wp.kernel(enable_backward=False)
def _gaussians(
    rows: wp.int32,
    n: wp.int32,
    keys: wp.array(dtype=wp.int64),
    system: wp.array(dtype=wp.int32),
    atom_id: wp.array(dtype=wp.int64),
    step: wp.array(dtype=wp.int64),
    out: wp.array(dtype=wp.vec3d),
):
    _normals(rows * wp.tid(), n, keys, system, atom_id, step, out)


def gaussians(keys: Tensor, system: Tensor, atom_id: Tensor, step: Tensor) -> Tensor:
    """Three independent standard normals per atom, float64 (n, 3).

    Box-Muller on the four words of one Philox block; the fourth normal is not used. The tails end at 6.8 sigma, where
    32-bit uniforms end.

    Args:
        keys: int64 (systems,), from `noise_key`.
        system: int32 (n,), row of `keys` and `step` of each atom.
        atom_id: int64 (n,).
        step: int64 (systems,).
    """
    n, device = atom_id.shape[0], atom_id.device
    out = torch.empty((n, 3), dtype=torch.float64, device=device)
    rows = ROWS if device.type == "cpu" else 1
    launch(_gaussians, -(-n // rows), rows, n, keys, system, atom_id, step, out)
    return out


__all__ = ["gaussians", "noise_key"]
