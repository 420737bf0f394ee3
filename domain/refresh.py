"""Warp kernels of every step: displacements since the last rebuild, model positions from the state, messages.

The model sees each atom at its wrapped place, y = x - image @ cell; the image is fixed at a rebuild, so y is
continuous in between and follows the cell. A ghost is an owned atom under another net shift of whole lattice vectors.
"""

from __future__ import annotations

import warp as wp
from torch import Tensor

from .kernels import launch

wp.set_module_options({"enable_backward": False})

#: A move of more Å than this between two rebuilds is no trajectory any more.
ABSURD = 1000.0

BROKEN = float("inf")


@wp.func
def _moved(x: wp.vec3d, net: wp.vec3i, h: wp.mat33d):
    # In a fixed order, so that a row's bits do not depend on where it is computed.
    y = x
    for axis in range(3):
        f = wp.float64(net[axis])  # type: ignore[index]
        y += wp.vec3d(f * h[axis, 0], f * h[axis, 1], f * h[axis, 2])  # type: ignore[index,operator]
    return y


@wp.kernel(enable_backward=False)
def _refresh(
    n_owned: wp.int32,
    absurd: wp.float64,
    positions: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    reference: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    cells: wp.array(dtype=wp.mat33d),  # type: ignore[valid-type]
    deformation: wp.array(dtype=wp.mat33d),  # type: ignore[valid-type]
    scale: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
    system: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    source: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    net: wp.array(dtype=wp.vec3i),  # type: ignore[valid-type]
    y: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    worst: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
):
    k = wp.tid()
    s = system[k]
    if k < n_owned:
        r = reference[k]
        m = deformation[s]
        carried = wp.vec3d(
            r[0] * m[0, 0] + r[1] * m[1, 0] + r[2] * m[2, 0],
            r[0] * m[0, 1] + r[1] * m[1, 1] + r[2] * m[2, 1],
            r[0] * m[0, 2] + r[1] * m[1, 2] + r[2] * m[2, 2],
        )
        d = positions[k] - carried
        d2 = wp.dot(d, d)
        value = d2 * scale[s]
        # Not `d2 > absurd`: NaN fails every comparison.
        if not (d2 <= absurd):
            value = wp.float64(wp.inf)
        wp.atomic_max(worst, s, value)
    if source[k] >= 0:
        y[k] = _moved(positions[source[k]], net[k], cells[s])


@wp.kernel(enable_backward=False)
def _images_of_ghosts(
    first: wp.int32,
    cells: wp.array(dtype=wp.mat33d),  # type: ignore[valid-type]
    system: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    source: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    net: wp.array(dtype=wp.vec3i),  # type: ignore[valid-type]
    y: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
):
    k = first + wp.tid()
    if source[k] <= -2:
        y[k] = _moved(y[-2 - source[k]], net[k], cells[system[k]])


@wp.kernel(enable_backward=False)
def _pack(
    positions: wp.array(dtype=wp.vec3d),  # type: ignore[valid-type]
    cells: wp.array(dtype=wp.mat33d),  # type: ignore[valid-type]
    system: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    source: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    net: wp.array(dtype=wp.vec3i),  # type: ignore[valid-type]
    place: wp.array(dtype=wp.int32),  # type: ignore[valid-type]
    out: wp.array(dtype=wp.float64),  # type: ignore[valid-type]
):
    k = wp.tid()
    x = _moved(positions[source[k]], net[k], cells[system[k]])
    for axis in range(3):
        out[place[k] + axis] = x[axis]


def refresh(
    n_owned: int,
    positions: Tensor,
    reference: Tensor,
    cells: Tensor,
    deformation: Tensor,
    scale: Tensor,
    system: Tensor,
    source: Tensor,
    net: Tensor,
    y: Tensor,
    worst: Tensor,
) -> None:
    """Model positions of all rows that derive from owned atoms, and each system's largest scaled displacement.

    Args:
        positions, reference: float64, (n_owned, 3), Å, as integrated (unwrapped).
        cells: (systems, 3, 3), Å. deformation: (systems, 3, 3), reference cell -> cell.
        scale: (systems,), 1/Å²: what a squared displacement is multiplied with.
        system, source: int32, (n,); source is the owned row a row derives from, negative for other rows.
        net: int32, (n, 3), lattice vectors added to the source.
        y: float64, (n, 3), written. worst: (systems,), maximum of itself and the displacements; inf where one is
            not finite or absurd.
    """
    launch(
        _refresh, y.shape[0], n_owned, ABSURD * ABSURD, positions, reference, cells, deformation, scale, system,
        source, net, y, worst,
    )  # fmt: skip


def images_of_ghosts(first: int, cells: Tensor, system: Tensor, source: Tensor, net: Tensor, y: Tensor) -> None:
    """Images of remote ghosts (source = -2 - row of the ghost) from `first` on, once the ghosts have arrived."""
    launch(_images_of_ghosts, y.shape[0] - first, first, cells, system, source, net, y)


def pack(
    positions: Tensor, cells: Tensor, system: Tensor, source: Tensor, net: Tensor, place: Tensor, out: Tensor
) -> None:
    """Write shifted positions of owned atoms into a flat message buffer; `place` is where each one starts."""
    launch(_pack, source.shape[0], positions, cells, system, source, net, place, out)


__all__ = ["ABSURD", "BROKEN", "images_of_ghosts", "pack", "refresh"]
