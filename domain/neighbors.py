"""Neighbour lists of one system on one rank, in canonical order, over explicit ghosts.

Every periodic image within reach becomes a ghost of its own, so that a kernel needs no lattice shifts: the vector of
a pair is y[j] - y[i]. The order of atoms, images and pairs depends on the system alone (atom ids and shifts), so
sums over a list have the same bits wherever and whenever it is built from the same positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .units import heights, volume


@dataclass
class SystemList:
    """The half neighbour list of one system on one rank. Indices are local to the system.

    Rows of the system's positions: owned atoms 0..n_owned-1, remote ghosts up to n_owned+n_remote-1, then the local
    periodic images of both. A pair of owned atoms (or their images) stands once, at the atom that comes first; a pair
    (owned, remote) stands once, at the owned atom; pairs of two remote atoms do not appear.

    Attributes:
        image_of: int32, (m,), row below n_owned+n_remote that each image is an image of; sorted with `image_shift`
            by (order key, shift).
        image_shift: int32, (m, 3): y[image] = y[image_of] + image_shift @ cell.
        first, count: int32, (n_owned,): the neighbours of atom i are neighbors[first[i] : first[i] + count[i]].
        neighbors: int32, (pairs,), rows; sorted by (i, order key of j, shift).
    """

    n_owned: int
    n_remote: int
    image_of: np.ndarray
    image_shift: np.ndarray
    first: np.ndarray
    count: np.ndarray
    neighbors: np.ndarray

    @property
    def n_total(self) -> int:
        return self.n_owned + self.n_remote + len(self.image_of)

    def home(self) -> np.ndarray:
        """int32, (n_total,): the owned atom each row is (an image of), -1 for remote ghosts and their images."""
        base = np.arange(self.n_owned + self.n_remote, dtype=np.int32)
        base[self.n_owned :] = -1
        return np.concatenate([base, base[self.image_of]])


def build_system_list(
    points: np.ndarray,
    n_owned: int,
    cell: np.ndarray,
    periodic: np.ndarray,
    reach: float,
    order_key: np.ndarray | None = None,
) -> SystemList:
    """The canonical half list of all pairs within `reach` that involve an owned atom.

    Args:
        points: float64, (n_owned + n_remote, 3), Å: owned atoms in canonical order, then remote ghosts.
        n_owned: number of owned atoms.
        cell: float64, (3, 3), lattice vectors as rows; vectors of axes that are not periodic may be zero.
        periodic: bool, (3,): axes along which images are made here (not those partitioned over ranks).
        reach: Å, cutoff + skin.
        order_key: int64, (n_owned + n_remote,): neighbours of an atom are sorted by the key of the atom they are (an
            image of), then by shift, then by row. Default: the row.

    Raises:
        ValueError: positions that are not finite, a periodic axis without a lattice vector, reach not positive.
    """
    points = np.ascontiguousarray(points, dtype=np.float64).reshape(-1, 3)
    pairs, shifts = _find_pairs(points, cell, periodic, reach)
    return _canonical(pairs[:, 0], pairs[:, 1], shifts, len(points), n_owned, order_key)


def _canonical(
    i: np.ndarray, j: np.ndarray, shifts: np.ndarray, n: int, n_owned: int, order_key: np.ndarray | None
) -> SystemList:
    """Orient, sort and number pairs (i, j, shift), each of which stands once in either direction."""
    bound = np.abs(shifts).max(axis=0).astype(np.int64) if len(shifts) else np.zeros(3, dtype=np.int64)
    width = 2 * bound + 1
    codes = int(width.prod())
    # One integer per shift, in lexicographic order; that of -shift is 2 * zero - code.
    zero = int((bound[0] * width[1] + bound[1]) * width[2] + bound[2])
    code = (shifts[:, 0] * width[1] + shifts[:, 1]) * width[2] + shifts[:, 2] + zero
    # Owned rows come before remote ones: the smaller row is the owned one of a mixed pair.
    flip = (i > j) | ((i == j) & (code < zero))
    i, j, code = np.where(flip, j, i), np.where(flip, i, j), np.where(flip, 2 * zero - code, code)
    if n_owned < n:
        mine = i < n_owned
        i, j, code = i[mine], j[mine], code[mine]

    row_of_rank, rank = _ranks(n, order_key)
    i, j_rank, code = _sorted_pairs(i, rank[j], code, n, codes)

    neighbors = row_of_rank[j_rank]
    shifted = np.flatnonzero(code != zero)
    image_key = j_rank[shifted] * codes + code[shifted]
    images = np.unique(image_key)
    neighbors[shifted] = n + np.searchsorted(images, image_key)
    image_of, image_code = row_of_rank[images // codes], images % codes
    plane, s2 = np.divmod(image_code, width[2])
    s0, s1 = np.divmod(plane, width[1])
    count = np.bincount(i, minlength=n_owned)[:n_owned] if n_owned else np.zeros(0, dtype=np.int64)
    return SystemList(
        n_owned=n_owned,
        n_remote=n - n_owned,
        image_of=image_of.astype(np.int32),
        image_shift=(np.stack([s0, s1, s2], axis=1) - bound).astype(np.int32),
        first=(np.cumsum(count) - count).astype(np.int32),
        count=count.astype(np.int32),
        neighbors=neighbors.astype(np.int32),
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
        bad = np.flatnonzero(~np.isfinite(points).all(axis=1))
        raise ValueError(f"positions must be finite, {len(bad)} of {len(points)} are not (first: atom {bad[0]})")
    periodic = np.asarray(periodic, dtype=bool)
    box = full_box(cell, periodic)
    gathered = _close_gaps(points, box, periodic, reach)
    cutoff = _safe_cutoff(gathered, box, periodic, reach)

    from vesin import NeighborList

    finder = NeighborList(cutoff=cutoff, full_list=False, n_threads=1)
    # copy=False: the arrays are views into the finder, which lives until they have been converted.
    pairs, shifts, distances = finder.compute(gathered, box, periodic=periodic, quantities="PSd", copy=False)
    if cutoff > reach:
        near = distances < reach
        pairs, shifts = pairs[near], shifts[near]
    return pairs.astype(np.int64), shifts.astype(np.int64)


# vesin 0.6.2 sorts atoms into at most this many cells; when a thin axis is left with none it divides by zero, which
# kills the process.
_VESIN_CELLS = 1e5


def _close_gaps(points: np.ndarray, box: np.ndarray, periodic: np.ndarray, reach: float) -> np.ndarray:
    """Points with empty stretches along non-periodic axes shortened to twice the reach: the same pairs, fewer cells."""
    free = np.flatnonzero(~periodic)
    if not len(free):
        return points
    inverse = np.linalg.inv(box)
    moved = points
    for axis in free:
        # Å along the axis' unit normal; planes of constant coordinate are spanned by the other two axes.
        scale = 1.0 / np.linalg.norm(inverse[:, axis])
        along = points @ inverse[:, axis] * scale
        order = np.argsort(along, kind="stable")
        gaps = np.diff(along[order])
        excess = np.where(gaps > 4.0 * reach, gaps - 2.0 * reach, 0.0)
        if excess.any():
            back = np.zeros(len(points))
            back[order[1:]] = np.cumsum(excess)
            moved = moved - np.outer(back / scale, box[axis])
    return moved


def _safe_cutoff(points: np.ndarray, box: np.ndarray, periodic: np.ndarray, reach: float) -> float:
    """The reach, or as much more as keeps vesin from running out of cells along a thin axis."""
    extent = heights(box)
    if not periodic.all():
        fractional = points @ np.linalg.inv(box)
        extent = np.where(periodic, extent, np.ptp(fractional, axis=0) * extent)
    cutoff = reach
    while True:
        cells = np.maximum(extent / cutoff, 1.0)
        total = float(cells.prod())
        if total < 0.5 * _VESIN_CELLS or cells.min() * (0.5 * _VESIN_CELLS / total) ** (1.0 / 3.0) > 2.0:
            return cutoff
        if cutoff > 8.0 * reach:
            raise ValueError(
                f"the system is too long and thin for a neighbour list: {np.round(extent, 1).tolist()} Å at a reach of "
                f"{reach} Å; give it a smaller cell"
            )
        cutoff *= 1.2


def full_box(cell: np.ndarray, periodic: np.ndarray) -> np.ndarray:
    """The cell with the vectors of its non-periodic axes replaced by unit vectors normal to the periodic ones.

    Raises:
        ValueError: periodic vectors that are zero, not finite, or linearly dependent.
    """
    box = np.array(cell, dtype=np.float64).reshape(3, 3)
    axes = np.flatnonzero(periodic)
    free = np.flatnonzero(~np.asarray(periodic, dtype=bool))
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
    if not np.isfinite(box[axes]).all() or (lengths <= 0).any() or (values < 1e-10).any():
        raise ValueError(f"lattice vectors of periodic axes must be independent and not zero, got {box[axes].tolist()}")
    box[free] = normal[len(axes) :]
    if np.linalg.det(box) < 0 and len(free):
        box[free[0]] = -box[free[0]]
    assert float(volume(box)) > 0
    return box


def overlapping_pairs(
    points: np.ndarray, cell: np.ndarray, periodic: np.ndarray, threshold: float = 0.1
) -> list[tuple[int, int, float]]:
    """Pairs of atoms nearer than `threshold` Å, images included: (i, j, distance), nearest first.

    What an intake check calls 'two atoms at one site'; an atom nearer than the threshold to its own image (a lattice
    vector that short) appears as (i, i, distance).
    """
    points = np.ascontiguousarray(points, dtype=np.float64).reshape(-1, 3)
    pairs, shifts = _find_pairs(points, cell, periodic, threshold)
    vectors = points[pairs[:, 1]] - points[pairs[:, 0]] + shifts @ full_box(cell, np.asarray(periodic, dtype=bool))
    distances = np.linalg.norm(vectors, axis=1)
    found = [
        (min(i, j), max(i, j), d) for (i, j), d in zip(pairs.tolist(), distances.tolist(), strict=True) if d < threshold
    ]
    return sorted(found, key=lambda pair: (pair[2], pair[0], pair[1]))
