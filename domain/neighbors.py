"""Neighbour lists of one system on one rank, in canonical order, over explicit ghosts.

Every periodic image within reach becomes a ghost of its own, so that a kernel needs no lattice shifts: the vector of
a pair is y[j] - y[i]. The order of atoms, images and pairs depends on the system alone (atom ids and shifts), so
sums over a list have the same bits wherever and whenever it is built from the same positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .units import heights, volume

Lists = Literal["half", "full", "none"]


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

    def home(self) -> np.ndarray:
        """int32, (n_total,): the owned atom each row is (an image of), -1 for remote ghosts and their images."""
        node = self.node()
        return np.where(node < self.n_owned, node, np.int32(-1))


def build_system_list(
    points: np.ndarray,
    n_owned: int,
    cell: np.ndarray,
    periodic: np.ndarray,
    reach: float,
    order_key: np.ndarray | None = None,
    *,
    pairs: Lists = "half",
    receivers: np.ndarray | None = None,
) -> SystemList:
    """The list of all pairs within `reach`, images included, in an order that depends on the arguments alone.

    Args:
        points: float64, (n_owned + n_remote, 3), Å: owned atoms in canonical order, then remote ghosts.
        n_owned: number of owned atoms.
        cell: float64, (3, 3), lattice vectors as rows; vectors of axes that are not periodic may be zero.
        periodic: bool, (3,): axes along which images are made here (not those partitioned over ranks).
        reach: Å, cutoff + skin.
        order_key: int64, (n_owned + n_remote,): neighbours of an atom are sorted by the key of the atom they are (an
            image of), then by shift, then by row. Default: the row.
        pairs: "half": a pair of owned atoms (or images of them) stands once, a pair (owned, remote) once, at the
            owned atom, with each shift; pairs of two remote atoms do not appear. "full": every pair stands at each
            of its ends that receives. "none": no pairs, no images.
        receivers: bool, (n_remote,), for "full": remote atoms that have a list of their own, as all owned atoms do.
            Default: none of them.

    Raises:
        ValueError: positions that are not finite, a periodic axis without a lattice vector, reach not positive.
    """
    points = np.ascontiguousarray(points, dtype=np.float64).reshape(-1, 3)
    found, shifts = _find_pairs(points, cell, periodic, reach)
    n = len(points)
    if pairs == "none":
        found, shifts = found[:0], shifts[:0]
    i, j = found[:, 0], found[:, 1]
    if pairs == "full":
        i, j, shifts = np.concatenate([i, j]), np.concatenate([j, i]), np.concatenate([shifts, -shifts])
        receives = np.ones(n, dtype=bool)
        receives[n_owned:] = False if receivers is None else receivers
    else:
        # Pairs of owned atoms: the shift points to the upper side, so that half of the images are needed.
        upper = (shifts[:, 0] > 0) | (
            (shifts[:, 0] == 0) & ((shifts[:, 1] > 0) | ((shifts[:, 1] == 0) & (shifts[:, 2] > 0)))
        )
        flip = np.where((shifts == 0).all(axis=1), i > j, ~upper)
        flip = np.where((i < n_owned) == (j < n_owned), flip, j < n_owned)
        i, j, shifts = np.where(flip, j, i), np.where(flip, i, j), np.where(flip[:, None], -shifts, shifts)
        receives = np.arange(n) < n_owned
    kept = receives[i]
    return _canonical(i[kept], j[kept], shifts[kept], n, n_owned, order_key)


def _canonical(
    i: np.ndarray, j: np.ndarray, shifts: np.ndarray, n: int, n_owned: int, order_key: np.ndarray | None
) -> SystemList:
    """Sort and number directed pairs (i, j, shift)."""
    bound = np.abs(shifts).max(axis=0).astype(np.int64) if len(shifts) else np.zeros(3, dtype=np.int64)
    width = 2 * bound + 1
    codes = int(width.prod())
    # One integer per shift, in lexicographic order.
    zero = int((bound[0] * width[1] + bound[1]) * width[2] + bound[2])
    code = (shifts[:, 0] * width[1] + shifts[:, 1]) * width[2] + shifts[:, 2] + zero
    row_of_rank, rank = _ranks(n, order_key)
    i, j_rank, code = _sorted_pairs(i, rank[j], code, n, codes)

    neighbors = row_of_rank[j_rank]
    remote = np.bincount(i[neighbors >= n_owned], minlength=n)
    shifted = np.flatnonzero(code != zero)
    image_key = j_rank[shifted] * codes + code[shifted]
    images = np.unique(image_key)
    neighbors[shifted] = n + np.searchsorted(images, image_key)
    image_of, image_code = row_of_rank[images // codes], images % codes
    plane, s2 = np.divmod(image_code, width[2])
    s0, s1 = np.divmod(plane, width[1])
    count = np.bincount(i, minlength=n) if n else np.zeros(0, dtype=np.int64)
    return SystemList(
        n_owned=n_owned,
        n_remote=n - n_owned,
        image_of=image_of.astype(np.int32),
        image_shift=(np.stack([s0, s1, s2], axis=1) - bound).astype(np.int32),
        first=(np.cumsum(count) - count).astype(np.int32),
        count=count.astype(np.int32),
        neighbors=neighbors.astype(np.int32),
        boundary=(remote[:n_owned] > 0).astype(np.uint8),
    )


def _ranks(n: int, order_key: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the order of their keys (ties: by row), and each row's place in that order."""
    rows = np.arange(n, dtype=np.int64)
    if order_key is None or n == 0 or bool(np.all(order_key[1:] >= order_key[:-1])):
        return rows, rows
    row_of_rank = np.argsort(order_key, kind="stable").astype(np.int64)
    rank = np.empty(n, dtype=np.int64)
    rank[row_of_rank] = rows
    return row_of_rank, rank


def _sorted_pairs(
    i: np.ndarray, j_rank: np.ndarray, code: np.ndarray, n: int, codes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs sorted by (i, rank of j, shift)."""
    if n and n * n * codes < 2**63:
        # One packed key per pair: sorting integers themselves is many times faster than an indirect sort.
        key = np.sort((i * n + j_rank) * codes + code)
        rest, code = np.divmod(key, codes)
        i, j_rank = np.divmod(rest, n)
        return i, j_rank, code
    order = np.lexsort((code, j_rank, i))
    return i[order], j_rank[order], code[order]


def _find_pairs(
    points: np.ndarray, cell: np.ndarray, periodic: np.ndarray, reach: float
) -> tuple[np.ndarray, np.ndarray]:
    """All pairs within reach, once each: rows int64 (pairs, 2), shifts int64 (pairs, 3)."""
    if not reach > 0:
        raise ValueError(f"the reach of a neighbour list must be positive, got {reach}")
    if len(points) == 0:
        return np.zeros((0, 2), dtype=np.int64), np.zeros((0, 3), dtype=np.int64)
    if not np.isfinite(points).all():
        bad = np.flatnonzero(np.logical_not(np.isfinite(points).all(axis=1)))
        raise ValueError(f"positions must be finite, {len(bad)} of {len(points)} are not (first: atom {bad[0]})")
    periodic = np.asarray(periodic, dtype=bool)
    box = full_box(cell, periodic)
    if _too_thin_for_vesin(points, box, periodic, reach):
        return _pairs_by_tree(points, box, periodic, reach)

    from vesin import NeighborList

    finder = NeighborList(cutoff=reach, full_list=False, n_threads=1)
    if periodic.any() and not periodic.all():
        points, box = _padded(points, box, periodic, reach)
    # copy=False: the arrays are views into the finder, which lives until they have been converted.
    pairs, shifts = finder.compute(points, box, periodic=bool(periodic.any()), quantities="PS", copy=False)
    assert not shifts[:, ~periodic].any(), "a pair across the padding of a non-periodic axis"
    return pairs.astype(np.int64), shifts.astype(np.int64)


def _padded(points: np.ndarray, box: np.ndarray, periodic: np.ndarray, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """The same pairs with every axis periodic: non-periodic axes get more vacuum than the reach.

    vesin 0.6.2 takes 10 times as long where only some axes are periodic (30,000 atoms: 5 s, not 0.4 s).
    """
    box, points = box.copy(), points.copy()
    inverse = np.linalg.inv(box)
    for axis in np.flatnonzero(~periodic):
        normal = box[axis].copy()  # of unit length, see full_box
        along = points @ inverse[:, axis]
        extent = float(np.ptp(along))
        padding = 1.01 * reach + 1e-6 * extent
        points += np.outer(np.full(len(points), 0.5 * padding - float(along.min())), normal)
        box[axis] = normal * (extent + padding)
    return points, box


def _too_thin_for_vesin(points: np.ndarray, box: np.ndarray, periodic: np.ndarray, reach: float) -> bool:
    """Whether vesin 0.6.2 might divide by zero, which kills the process.

    It sorts atoms into at most 1e5 cells; if there would be more, it shrinks the three counts alike, and a thin axis
    (of a sheet, a wire, two far fragments) can be left with none.
    """
    extent = heights(box)
    if not periodic.all():
        extent = np.where(periodic, extent, np.ptp(points @ np.linalg.inv(box), axis=0) * extent)
    cells = np.maximum(extent / reach, 1.0)
    total, most = float(cells.prod()), 5e4  # half of vesin's limit, for margin
    return total > most and float(cells.min()) * (most / total) ** (1.0 / 3.0) < 1.3


def _pairs_by_tree(
    points: np.ndarray, box: np.ndarray, periodic: np.ndarray, reach: float
) -> tuple[np.ndarray, np.ndarray]:
    """As `_find_pairs`, by a k-d tree over explicit images: slower than vesin, indifferent to the shape."""
    from scipy.spatial import cKDTree

    fractional = points @ np.linalg.inv(box)
    offset = np.where(periodic, np.floor(fractional), 0.0).astype(np.int64)
    margin = np.where(periodic, reach / heights(box) * (1 + 1e-9), 0.0)
    rows, shifts = np.arange(len(points)), np.zeros((len(points), 3), dtype=np.int64)
    for axis in np.flatnonzero(periodic):
        copies = []
        for s in range(-int(np.ceil(margin[axis])), int(np.ceil(margin[axis])) + 1):
            place = fractional[rows, axis] - offset[rows, axis] + s
            kept = (place >= -margin[axis]) & (place <= 1.0 + margin[axis]) if s else np.ones(len(rows), dtype=bool)
            copies.append((rows[kept], shifts[kept] + s * np.eye(3, dtype=np.int64)[axis]))
        rows = np.concatenate([c[0] for c in copies])
        shifts = np.concatenate([c[1] for c in copies])
    tree = cKDTree(points[rows] + (shifts - offset[rows]) @ box)
    found = tree.query_pairs(reach, output_type="ndarray")
    # One end in the cell itself, put first; both directions of a pair come up, the canonical one is kept.
    inside = (shifts == 0).all(axis=1)
    found = np.concatenate([found[inside[found[:, 0]]], found[inside[found[:, 1]]][:, ::-1]])
    i, j, s = rows[found[:, 0]], rows[found[:, 1]], shifts[found[:, 1]]
    positive = (s[:, 0] > 0) | ((s[:, 0] == 0) & ((s[:, 1] > 0) | ((s[:, 1] == 0) & (s[:, 2] > 0))))
    kept = (i < j) | ((i == j) & positive)
    i, j, s = i[kept], j[kept], s[kept]
    return np.stack([i, j], axis=1), s + offset[i] - offset[j]


def full_box(cell: np.ndarray, periodic: np.ndarray) -> np.ndarray:
    """The cell with the vectors of its non-periodic axes replaced by unit vectors normal to the periodic ones.

    Raises:
        ValueError: periodic vectors that are zero, not finite, or linearly dependent.
    """
    box = np.array(cell, dtype=np.float64).reshape(3, 3)
    axes = np.flatnonzero(periodic)
    free = np.flatnonzero(~np.asarray(periodic, dtype=bool))
    if not np.isfinite(box[axes]).all():
        raise ValueError(f"lattice vectors of periodic axes must be finite, got {box[axes].tolist()}")
    lengths = np.linalg.norm(box[axes], axis=1)
    # Right singular vectors beyond the rank span what is normal to the periodic vectors.
    _, values, normal = (
        np.linalg.svd(box[axes] / np.where(lengths > 0, lengths, 1.0)[:, None])
        if len(axes)
        else (
            None,
            np.ones(0),
            np.eye(3),
        )
    )
    if (lengths <= 0).any() or (values < 1e-10).any():
        raise ValueError(f"lattice vectors of periodic axes must be independent and not zero, got {box[axes].tolist()}")
    box[free] = normal[len(axes) :]
    if np.linalg.det(box) < 0 and len(free):
        box[free[0]] = -box[free[0]]
    assert float(volume(box)) > 0
    return box


#: Å; with a shorter radius vesin's grid of cells is so fine that walking it costs more (26 ms) than the pairs do.
_SEARCH = 2.0


def _search_radius(points: np.ndarray, cell: np.ndarray, periodic: np.ndarray, threshold: float) -> float:
    """How far to look for atoms nearer than the threshold: about an atom's spacing, where that can be told."""
    size = float(abs(volume(np.asarray(cell, dtype=np.float64)))) if np.all(periodic) else 0.0
    spacing = (size / len(points)) ** (1 / 3) if len(points) and size > 0 else _SEARCH
    return max(threshold, min(spacing, _SEARCH))


def overlapping_pairs(
    points: np.ndarray, cell: np.ndarray, periodic: np.ndarray, threshold: float = 0.1
) -> list[tuple[int, int, float]]:
    """Pairs of atoms nearer than `threshold` Å, images included: (i, j, distance), nearest first.

    What an intake check calls 'two atoms at one site'; an atom nearer than the threshold to its own image (a lattice
    vector that short) appears as (i, i, distance).
    """
    points = np.ascontiguousarray(points, dtype=np.float64).reshape(-1, 3)
    pairs, shifts = _find_pairs(points, cell, periodic, _search_radius(points, cell, periodic, threshold))
    vectors = points[pairs[:, 1]] - points[pairs[:, 0]] + shifts @ full_box(cell, np.asarray(periodic, dtype=bool))
    distances = np.linalg.norm(vectors, axis=1)
    found = [
        (min(i, j), max(i, j), d) for (i, j), d in zip(pairs.tolist(), distances.tolist(), strict=True) if d < threshold
    ]
    return sorted(found, key=lambda pair: (pair[2], pair[0], pair[1]))
