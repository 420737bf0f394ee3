# mypy: disable-error-code="arg-type, empty-body, index, operator, valid-type"
# (Warp kernels: their scalar and vector types mean nothing to mypy)
"""Warp kernels of every step: displacements since the last rebuild, model positions from the state, messages.

The model sees each atom at its wrapped place, y = x - image @ cell; the image is fixed at a rebuild, so y is
continuous in between and follows the cell. A ghost is an owned atom under another net shift of whole lattice vectors.
"""

from __future__ import annotations

import warp as wp
from torch import Tensor

from .kernels import launch, launch_rows, over_rows

wp.set_module_options({"enable_backward": False})

#: A move of more Å than this between two rebuilds is no trajectory any more.
ABSURD = 1000.0

BROKEN = float("inf")


@wp.func
def _moved(x: wp.vec3d, net: wp.vec3i, h: wp.mat33d):
    # In a fixed order, so that a row's bits do not depend on where it is computed.
    y = x
    for axis in range(3):
        f = wp.float64(net[axis])
        y += wp.vec3d(f * h[axis, 0], f * h[axis, 1], f * h[axis, 2])
    return y


# Owned rows. Most steps move no cell and most atoms are where they were wrapped to: then nothing is added, or
# multiplied by one, and leaving that out changes no bit.
_OWNED = """
        const auto h = cells.data[s], m = deformation.data[s];
        bool rigid = true;
        for (int a = 0; a < 3; ++a)
            for (int b = 0; b < 3; ++b)
                rigid = rigid && m.data[a][b] == (a == b ? 1.0 : 0.0);
        int shifted = 0;
        for (int k = at; k < to; ++k)
            shifted |= net.data[k].c[0] | net.data[k].c[1] | net.data[k].c[2];
        double squared[rows];
        for (int k = at; k < to; ++k) {
            const auto x = positions.data[k], r = reference.data[k];
            double d[3];
            for (int a = 0; a < 3; ++a) {
                const double carried = r.c[0] * m.data[0][a] + r.c[1] * m.data[1][a] + r.c[2] * m.data[2][a];
                d[a] = x.c[a] - (rigid ? r.c[a] : carried);
            }
            squared[k - at] = d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
        }
        double most = worst.data[s];
        for (int k = at; k < to; ++k) {
            // Not `squared > absurd`: NaN fails every comparison.
            const double value = squared[k - at] <= absurd ? squared[k - at] * scale.data[s] : broken;
            most = value > most ? value : most;
        }
        wp::atomic_max(worst, s, most);
        // As in `_moved`, in that order.
        for (int k = at; k < to; ++k) {
            const auto x = positions.data[k];
            for (int a = 0; a < 3; ++a)
                y.data[k].c[a] = shifted == 0 ? x.c[a]
                    : x.c[a] + net.data[k].c[0] * h.data[0][a] + net.data[k].c[1] * h.data[1][a]
                        + net.data[k].c[2] * h.data[2][a];
        }
"""


@wp.func_native(over_rows(_OWNED))
def _owned_rows(
    begin: wp.int32,
    n: wp.int32,
    absurd: wp.float64,
    broken: wp.float64,
    positions: wp.array(dtype=wp.vec3d),
    reference: wp.array(dtype=wp.vec3d),
    cells: wp.array(dtype=wp.mat33d),
    deformation: wp.array(dtype=wp.mat33d),
    scale: wp.array(dtype=wp.float64),
    system: wp.array(dtype=wp.int32),
    net: wp.array(dtype=wp.vec3i),
    y: wp.array(dtype=wp.vec3d),
    worst: wp.array(dtype=wp.float64),
): ...


@wp.kernel(enable_backward=False)
def _owned(
    rows: wp.int32,
    n: wp.int32,
    absurd: wp.float64,
    broken: wp.float64,
    positions: wp.array(dtype=wp.vec3d),
    reference: wp.array(dtype=wp.vec3d),
    cells: wp.array(dtype=wp.mat33d),
    deformation: wp.array(dtype=wp.mat33d),
    scale: wp.array(dtype=wp.float64),
    system: wp.array(dtype=wp.int32),
    net: wp.array(dtype=wp.vec3i),
    y: wp.array(dtype=wp.vec3d),
    worst: wp.array(dtype=wp.float64),
):
    _owned_rows(
        rows * wp.tid(), n, absurd, broken, positions, reference, cells, deformation, scale, system, net, y, worst,
    )  # fmt: skip


@wp.kernel(enable_backward=False)
def _images(
    first: wp.int32,
    positions: wp.array(dtype=wp.vec3d),
    cells: wp.array(dtype=wp.mat33d),
    system: wp.array(dtype=wp.int32),
    source: wp.array(dtype=wp.int32),
    net: wp.array(dtype=wp.vec3i),
    y: wp.array(dtype=wp.vec3d),
):
    k = first + wp.tid()
    j = source[k]
    if j >= 0:
        y[k] = _moved(positions[j], net[k], cells[system[k]])


@wp.kernel(enable_backward=False)
def _images_of_ghosts(
    first: wp.int32,
    cells: wp.array(dtype=wp.mat33d),
    system: wp.array(dtype=wp.int32),
    source: wp.array(dtype=wp.int32),
    net: wp.array(dtype=wp.vec3i),
    y: wp.array(dtype=wp.vec3d),
):
    k = first + wp.tid()
    if source[k] <= -2:
        y[k] = _moved(y[-2 - source[k]], net[k], cells[system[k]])


@wp.kernel(enable_backward=False)
def _pack(
    positions: wp.array(dtype=wp.vec3d),
    cells: wp.array(dtype=wp.mat33d),
    system: wp.array(dtype=wp.int32),
    source: wp.array(dtype=wp.int32),
    net: wp.array(dtype=wp.vec3i),
    place: wp.array(dtype=wp.int32),
    out: wp.array(dtype=wp.float64),
):
    k = wp.tid()
    x = _moved(positions[source[k]], net[k], cells[system[k]])
    for axis in range(3):
        out[place[k] + axis] = x[axis]


@wp.kernel(enable_backward=False)
def _unpack(
    inbox: wp.array(dtype=wp.float64),
    rows: wp.array(dtype=wp.int32),
    place: wp.array(dtype=wp.int32),
    y: wp.array(dtype=wp.vec3d),
):
    k = wp.tid()
    at = place[k]
    y[rows[k]] = wp.vec3d(inbox[at], inbox[at + 1], inbox[at + 2])


@wp.kernel(enable_backward=False)
def _collect(
    columns: wp.int32,
    rows: wp.array(dtype=wp.int32),
    forces: wp.array(dtype=wp.vec3d),
    energies: wp.array(dtype=wp.float64),
    out: wp.array(dtype=wp.float64),
):
    k = wp.tid()
    f = forces[rows[k]]
    for axis in range(3):
        out[columns * k + axis] = f[axis]
    if columns == 4:
        out[columns * k + 3] = energies[rows[k]]


@wp.kernel(enable_backward=False)
def _add_home(
    columns: wp.int32,
    rows: wp.array(dtype=wp.int32),
    inbox: wp.array(dtype=wp.float64),
    forces: wp.array(dtype=wp.vec3d),
    energies: wp.array(dtype=wp.float64),
):
    # On the CPU in order: an atom seen more than once gets everything, always in the same order.
    k = wp.tid()
    at = columns * k
    forces[rows[k]] += wp.vec3d(inbox[at], inbox[at + 1], inbox[at + 2])
    if columns == 4:
        energies[rows[k]] += inbox[at + 3]


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
        system, source: int32, (n,), that of owned rows ascending; source is the owned row a row derives from (for
            owned rows themselves), negative for other rows.
        net: int32, (n, 3), lattice vectors added to the source.
        y: float64, (n, 3), written. worst: (systems,), maximum of itself and the displacements; inf where one is
            not finite or absurd.
    """
    launch_rows(
        _owned, n_owned, ABSURD * ABSURD, BROKEN, positions, reference, cells, deformation, scale, system, net, y,
        worst,
    )  # fmt: skip
    launch(_images, y.shape[0] - n_owned, n_owned, positions, cells, system, source, net, y)


def images_of_ghosts(first: int, cells: Tensor, system: Tensor, source: Tensor, net: Tensor, y: Tensor) -> None:
    """Images of remote ghosts (source = -2 - row of the ghost) from `first` on, once the ghosts have arrived."""
    launch(_images_of_ghosts, y.shape[0] - first, first, cells, system, source, net, y)


def pack(
    positions: Tensor, cells: Tensor, system: Tensor, source: Tensor, net: Tensor, place: Tensor, out: Tensor
) -> None:
    """Write shifted positions of owned atoms into a flat message buffer; `place` is where each one starts."""
    launch(_pack, source.shape[0], positions, cells, system, source, net, place, out)


def unpack(inbox: Tensor, rows: Tensor, place: Tensor, y: Tensor) -> None:
    """Positions out of a flat message buffer, where `place` says, into `rows` of y."""
    launch(_unpack, rows.shape[0], inbox, rows, place, y)


def collect(rows: Tensor, forces: Tensor, energies: Tensor | None, out: Tensor) -> None:
    """Forces, and energies unless None, of `rows` into a flat message buffer, 3 or 4 numbers a row."""
    launch(_collect, rows.shape[0], 3 if energies is None else 4, rows, forces, energies, out)


def add_home(rows: Tensor, inbox: Tensor, forces: Tensor, energies: Tensor | None) -> None:
    """What others have collected is added to `rows`."""
    launch(_add_home, rows.shape[0], 3 if energies is None else 4, rows, inbox, forces, energies)


__all__ = ["ABSURD", "BROKEN", "add_home", "collect", "images_of_ghosts", "pack", "refresh", "unpack"]
