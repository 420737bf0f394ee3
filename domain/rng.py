# mypy: disable-error-code="index, arg-type, valid-type"
# (Warp kernels: their scalar and vector types mean nothing to mypy)
"""Counter-based noise: numbers are a function of (key, atom id, step) and of nothing else.

So a trajectory does not depend on the number of ranks, on company in the batch, or on interruptions. The generator is
Philox4x32-10 (Salmon, Moraes, Dror & Shaw, SC'11, 2011), the normals are Box-Muller's.

A key names (campaign seed, system, stage, purpose): siblings and stages never share noise. The counter is 128 bits
wide: the atom id in its lower 64, the step of the visit in its upper 64.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import warp as wp
from torch import Tensor

from .kernels import launch

wp.set_module_options({"enable_backward": False})

_PHILOX_M0 = wp.constant(wp.uint64(0xD2511F53))
_PHILOX_M1 = wp.constant(wp.uint64(0xCD9E8D57))
_PHILOX_W0 = wp.constant(wp.uint32(0x9E3779B9))
_PHILOX_W1 = wp.constant(wp.uint32(0xBB67AE85))
_LOW = wp.constant(wp.uint64(0xFFFFFFFF))
_HALF_WORD = wp.constant(wp.uint64(32))

vec4u = wp.types.vector(length=4, dtype=wp.uint32)


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


@wp.func
def philox(counter: vec4u, key0: wp.uint32, key1: wp.uint32):
    """Philox4x32-10: four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0 = counter[0]
    c1 = counter[1]
    c2 = counter[2]
    c3 = counter[3]
    k0 = key0
    k1 = key1
    for _ in range(10):
        p0 = _PHILOX_M0 * wp.uint64(c0)
        p1 = _PHILOX_M1 * wp.uint64(c2)
        n0 = wp.uint32(p1 >> _HALF_WORD) ^ c1 ^ k0
        n2 = wp.uint32(p0 >> _HALF_WORD) ^ c3 ^ k1
        c1 = wp.uint32(p1 & _LOW)
        c3 = wp.uint32(p0 & _LOW)
        c0 = n0
        c2 = n2
        k0 = k0 + _PHILOX_W0
        k1 = k1 + _PHILOX_W1
    return vec4u(c0, c1, c2, c3)


@wp.func
def uniform_open(word: wp.uint32):
    """A uniform number in (0, 1), never 0 or 1: (word + 1/2) / 2^32."""
    return (wp.float64(word) + wp.float64(0.5)) * wp.float64(2.3283064365386963e-10)


@wp.func
def gaussian3(key: wp.int64, atom_id: wp.int64, step: wp.int64):
    """Three independent standard normals (float64) of this key, atom and step.

    Box-Muller on the four words of one Philox block; the fourth normal is not used. The tails end at 6.8 sigma, where
    32-bit uniforms end.
    """
    k = wp.uint64(key)
    a = wp.uint64(atom_id)
    s = wp.uint64(step)
    counter = vec4u(wp.uint32(a & _LOW), wp.uint32(a >> _HALF_WORD), wp.uint32(s & _LOW), wp.uint32(s >> _HALF_WORD))
    words = philox(counter, wp.uint32(k & _LOW), wp.uint32(k >> _HALF_WORD))
    turn = wp.float64(6.283185307179586)
    r0 = wp.sqrt(wp.float64(-2.0) * wp.log(uniform_open(words[0])))
    r1 = wp.sqrt(wp.float64(-2.0) * wp.log(uniform_open(words[2])))
    t0 = turn * uniform_open(words[1])
    t1 = turn * uniform_open(words[3])
    return wp.vec3d(r0 * wp.cos(t0), r0 * wp.sin(t0), r1 * wp.cos(t1))


@wp.kernel(enable_backward=False)
def _philox_rows(
    counters: wp.array2d(dtype=wp.int64),
    keys: wp.array2d(dtype=wp.int64),
    out: wp.array2d(dtype=wp.int64),
):
    i = wp.tid()
    counter = vec4u(
        wp.uint32(counters[i, 0]), wp.uint32(counters[i, 1]), wp.uint32(counters[i, 2]), wp.uint32(counters[i, 3])
    )
    words = philox(counter, wp.uint32(keys[i, 0]), wp.uint32(keys[i, 1]))
    for j in range(4):
        out[i, j] = wp.int64(words[j])


@wp.kernel(enable_backward=False)
def _gaussian_rows(
    keys: wp.array(dtype=wp.int64),
    system: wp.array(dtype=wp.int64),
    atom_id: wp.array(dtype=wp.int64),
    step: wp.array(dtype=wp.int64),
    out: wp.array(dtype=wp.vec3d),
):
    i = wp.tid()
    s = system[i]
    out[i] = gaussian3(keys[s], atom_id[i], step[s])


def philox_words(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of whole counters, for tests: uint32 (n, 4) and (n, 2) -> uint32 (n, 4)."""
    out = torch.zeros(counters.shape, dtype=torch.int64)
    launch(
        _philox_rows,
        len(counters),
        torch.from_numpy(counters.astype(np.int64)),
        torch.from_numpy(keys.astype(np.int64)),
        out,
    )
    return out.numpy().astype(np.uint32)


def gaussians(keys: Tensor, system: Tensor, atom_id: Tensor, step: Tensor) -> Tensor:
    """Three standard normals per atom, float64 (n, 3).

    Args:
        keys: int64 (systems,), from `noise_key`.
        system: int64 (n,), row of `keys` and `step` of each atom.
        atom_id: int64 (n,).
        step: int64 (systems,).
    """
    out = torch.empty((atom_id.shape[0], 3), dtype=torch.float64, device=atom_id.device)
    launch(_gaussian_rows, atom_id.shape[0], keys, system.to(torch.int64), atom_id, step, out)
    return out


__all__ = ["gaussian3", "gaussians", "noise_key", "philox", "philox_words"]
