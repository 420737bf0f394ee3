"""Neighbour lists of one system on one rank, over explicit images.

Every periodic image within reach becomes a row of its own, so that a kernel needs no lattice shifts: the vector of a
pair is y[j] - y[i]. The order of images and pairs follows from the points, in the order in which they are given, and
from nothing else: sums over a list have the same bits wherever and whenever it is built from the same positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import hypot, isfinite, prod, sqrt
from typing import TYPE_CHECKING

import numpy as np

from .units import cross

if TYPE_CHECKING:
    from .strategy import Pairs

Vector = tuple[float, float, float]

#: Points that spread over more lattice vectors than this are wrapped before the search.
_SPREAD = 1.5
#: Lattice vectors from the origin: so far shifts are sure to be exact and to fit into 32 bits.
FAR = 1e8


@dataclass
class SystemList:
    """The neighbour list of one system on one rank. Indices are local to the system.

    Rows of the system's positions: owned atoms 0..n_owned-1, remote ghosts up to n_owned+n_remote-1 (these are the
    *nodes*), then the local periodic images of both.

    Attributes:
        image_of: int32, (m,), node that each image is an image of.
        image_shift: int32, (m, 3): y[image] = y[image_of] + image_shift @ cell.
        first, count: int32, (n_owned+n_remote,): the neighbours of node i are
            neighbors[first[i] : first[i] + count[i]]; stretches follow one another in the order of the nodes.
        neighbors: int32, (pairs,), rows.
        boundary: uint8, (n_owned,): 1 where an owned atom's list holds a remote ghost or an image of one.
    """

    n_owned: int
    n_remote: int
    image_of: np.ndarray
    image_shift: np.ndarray
    first: np.ndarray
    count: np.ndarray
    neighbors: np.ndarray
    boundary: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.uint8))

    @property
    def n_nodes(self) -> int:
        return self.n_owned + self.n_remote

    @property
    def n_total(self) -> int:
        return self.n_owned + self.n_remote + len(self.image_of)

    def node(self) -> np.ndarray:
        """int32, (n_total,): the node each row is (an image of)."""
        return np.concatenate([np.arange(self.n_nodes, dtype=np.int32), self.image_of])


def build_system_list(
    points: np.ndarray,
    n_owned: int,
    cell: np.ndarray,
    periodic: np.ndarray,
    reach: float,
    *,
    pairs: Pairs = "half",
    receivers: np.ndarray | None = None,
) -> SystemList:
    """The list of all pairs nearer than `reach`, images included.

    Lists of one node after another; in a half list first other owned atoms, then ghosts and images. Neighbours stand
    in the order of the bins they lie in (see `cell_list`), those of one bin by row, images behind nodes by (node,
    shift). Images are numbered in the order in which the lists first meet them.

    Args:
        points: float64, (n_owned + n_remote, 3), Å: owned atoms in canonical order, then remote ghosts.
        n_owned: number of owned atoms.
        cell: float64, (3, 3), lattice vectors as rows; vectors of axes that are not periodic may be zero.
        periodic: bool, (3,): axes along which images are made here (not those partitioned over ranks).
        reach: Å, cutoff + skin; a pair at this very distance is not listed.
        pairs: "half": a pair of owned atoms (or images of them) stands once, a pair (owned, remote) once, at the
            owned atom, with each shift; pairs of two remote atoms do not appear. Of two owned atoms it is the one
            whose partner has the lexicographically positive shift: half of the images are never needed. "full":
            every pair stands at each of its ends that receives, also that of an atom and its own image. "none": no
            pairs, no images.
        receivers: bool, (n_remote,), for "full": remote atoms that have a list of their own, as all owned atoms do.
            Default: none of them.

    Raises:
        ValueError: positions that are not finite or unreasonably far away, periodic axes without independent lattice
            vectors, reach not positive, more pairs than 32 bits count.
    """
    points = _checked(points, reach)
    n = len(points)
    receives = np.zeros(n, dtype=np.uint8)
    receives[:n_owned] = 1
    if pairs == "full" and receivers is not None:
        receives[n_owned:] = receivers
    return _search(points, n_owned, receives, cell, periodic, reach, pairs)


def _checked(points: np.ndarray, reach: float) -> np.ndarray:
    """The points as the kernels want them."""
    if not reach > 0:
        raise ValueError(f"the reach of a neighbour list must be positive, got {reach}")
    points = np.ascontiguousarray(points, dtype=np.float64).reshape(-1, 3)
    return points if points.flags.writeable else points.copy()


def _search(
    points: np.ndarray,
    n_owned: int,
    receives: np.ndarray,
    cell: np.ndarray,
    periodic: np.ndarray,
    reach: float,
    pairs: Pairs,
) -> SystemList:
    from .cell_list import Search

    n, n_remote = len(points), len(points) - n_owned
    box, dual, margin = _lattice(cell, periodic, reach)
    search = Search(points, receives, box, dual, margin, reach)
    if search.bad:
        raise ValueError(f"positions must be finite, {search.bad} of {n} are not (first: atom {search.first_bad})")
    if pairs == "none" or not receives.any():
        none = np.zeros((2, n), dtype=np.int32)
        empty = np.zeros((0, 3), dtype=np.int32)
        return SystemList(
            n_owned, n_remote, empty[:, 0], empty, none[0], none[1], empty[:, 0], np.zeros(n_owned, dtype=np.uint8)
        )
    if search.farthest > FAR:
        raise ValueError(
            f"positions must lie within {FAR:g} lattice vectors of the origin, one lies {search.farthest:g} away"
        )
    if search.spread <= _SPREAD:
        return SystemList(n_owned, n_remote, *search.pairs(n_owned, pairs == "half"))
    # Images of points strewn over many cells would be many: the points are brought together, and the shifts put back.
    offset = np.floor(points @ np.array(dual).T).astype(np.int64)
    search = Search(points - offset @ np.array(box), receives, box, dual, margin, reach)
    return _as_they_are(SystemList(n_owned, n_remote, *search.pairs(n_owned, pairs == "half")), offset)


def _as_they_are(one: SystemList, offset: np.ndarray) -> SystemList:
    """The list of points from that of the points less offset (n_nodes, 3) lattice vectors each."""
    node, neighbors = one.node(), one.neighbors
    shift = np.concatenate([np.zeros((one.n_nodes, 3), dtype=np.int64), one.image_shift]) - offset[node]
    sender = node[neighbors]
    shift = shift[neighbors] + np.repeat(offset, one.count, axis=0)
    shifted = np.flatnonzero(shift.any(axis=1))
    images, place = _unique(np.column_stack([sender[shifted], shift[shifted]]))
    neighbors = sender.copy()
    neighbors[shifted] = one.n_nodes + place
    return replace(one, image_of=images[:, 0].copy(), image_shift=images[:, 1:].copy(), neighbors=neighbors)


def _unique(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different ones among rows of int64, ascending, as int32; and for each row its place there."""
    low = rows.min(axis=0, initial=0)
    widths = (rows.max(axis=0, initial=0) - low + 1).tolist()
    if prod(widths) < 2**63:
        # One number for each row: many times faster than to compare them column by column.
        steps = np.array([prod(widths[k + 1 :]) for k in range(len(widths))], dtype=np.int64)
        keys, place = np.unique((rows - low) @ steps, return_inverse=True)
        different = keys[:, None] // steps % np.array(widths) + low
    else:
        different, place = np.unique(rows, axis=0, return_inverse=True)
    return different.astype(np.int32), place


def _lattice(cell: np.ndarray, periodic: np.ndarray, reach: float) -> tuple[list[Vector], list[Vector], Vector]:
    """Lattice vectors; their duals d (x · d is a fractional coordinate) and the reach in fractional coordinates.

    All are zero for axes that are not periodic.
    """
    box = full_box(cell, periodic).tolist()
    zero = (0.0, 0.0, 0.0)
    lattice, dual, margin = [zero] * 3, [zero] * 3, [0.0] * 3
    for axis in range(3):
        if periodic[axis]:
            x, y, z = face = cross(box[axis - 2], box[axis - 1])
            size = _dot(box[axis], face)
            lattice[axis], dual[axis] = box[axis], (x / size, y / size, z / size)
            margin[axis] = reach * sqrt(_dot(face, face)) / abs(size)
    return lattice, dual, (margin[0], margin[1], margin[2])


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def full_box(cell: np.ndarray, periodic: np.ndarray) -> np.ndarray:
    """The cell with the vectors of its non-periodic axes replaced by unit vectors normal to the periodic ones.

    In plain floats, which for three vectors are ten times as fast as numpy, and have the same bits everywhere.

    Raises:
        ValueError: periodic vectors that are zero, not finite, or linearly dependent.
    """
    box: list[Sequence[float]] = [*np.asarray(cell, dtype=np.float64).reshape(3, 3).tolist()]
    axes = [axis for axis in range(3) if periodic[axis]]
    _check([box[axis] for axis in axes])
    if len(axes) == 0:
        return np.eye(3)
    if len(axes) == 1:
        (k,) = axes
        # A Cartesian axis, the free one's own if that is not too near to the vector, made normal to it.
        unit = _scaled(box[k])
        near = next(axis for axis in (k - 2, k, k - 1) if abs(unit[axis]) < 0.7)
        box[k - 2] = _scaled([(axis == near % 3) - unit[near] * unit[axis] for axis in range(3)])
        box[k - 1] = _scaled(cross(unit, box[k - 2]))
    if len(axes) == 2:
        (k,) = {0, 1, 2} - set(axes)
        box[k] = _scaled(cross(box[k - 2], box[k - 1]))
    return np.array(box)


def _check(vectors: list[Sequence[float]]) -> None:
    """ValueError unless lattice vectors are finite, not zero and independent."""
    if not all(isfinite(x) for vector in vectors for x in vector):
        raise ValueError(f"lattice vectors of periodic axes must be finite, got {vectors}")
    if all(hypot(*vector) > 0 for vector in vectors):
        units = [_scaled(vector) for vector in vectors]
        normal = cross(units[0], units[1]) if len(units) > 1 else (1.0, 0.0, 0.0)
        flatness = abs(_dot(normal, units[2])) if len(units) == 3 else hypot(*normal)
        # The smallest singular value is at least a third of this; only near a flat cell it has to be worked out.
        if flatness > 1e-6 or np.linalg.svd(units, compute_uv=False).min() > 1e-10:
            return
    raise ValueError(f"lattice vectors of periodic axes must be independent and not zero, got {vectors}")


def _scaled(vector: Sequence[float]) -> Vector:
    x, y, z = vector
    length = hypot(x, y, z)
    return x / length, y / length, z / length


def overlapping_pairs(
    points: np.ndarray, cell: np.ndarray, periodic: np.ndarray, threshold: float = 0.1
) -> list[tuple[int, int, float]]:
    """Pairs of atoms nearer than `threshold` Å, images included: (i, j, distance), nearest first.

    What an intake check calls 'two atoms at one site'; an atom nearer than the threshold to its own image (a lattice
    vector that short) appears as (i, i, distance).
    """
    points = np.asarray(points, dtype=np.float64).reshape(-1, 3)
    one = build_system_list(points, len(points), cell, periodic, threshold)
    node, i = one.node(), np.repeat(np.arange(len(points)), one.count)
    j = node[one.neighbors]
    images = points[one.image_of] + one.image_shift @ full_box(cell, periodic)
    distances = np.linalg.norm(np.concatenate([points, images])[one.neighbors] - points[i], axis=1)
    found = zip(np.minimum(i, j).tolist(), np.maximum(i, j).tolist(), distances.tolist(), strict=True)
    return sorted(found, key=lambda pair: (pair[2], pair[0], pair[1]))
