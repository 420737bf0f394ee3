"""Who owns which atom: a grid of domains over one system, chosen from its shape, and the owners that follow.

Everything here is a pure function of the system's reference positions and cell and of the number of ranks, evaluated
alike on every rank: no rank ever has to be told. Coordinates are fractional, so triclinic cells are boxes here.
Along a periodic axis the domains tile [0, 1); along any other they cover the whole line, the outer ones open-ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .neighbors import full_box
from .units import heights

# Cuts within this share of a domain's atoms are as good as the exact quantile: the widest gap among them is taken.
_CUT_WINDOW = 0.02


@dataclass(frozen=True)
class Frame:
    """Fractional coordinates of one reference cell.

    Attributes:
        box: (3, 3), Å, lattice vectors as rows; unit vectors along axes that are not periodic.
        inverse: (3, 3), its inverse.
        heights: (3,), Å, thickness of the cell along each axis.
        periodic: (3,) bool.
    """

    box: np.ndarray
    inverse: np.ndarray
    heights: np.ndarray
    periodic: np.ndarray

    @classmethod
    def of(cls, cell: np.ndarray, periodic: np.ndarray) -> Frame:
        """Raises ValueError for periodic axes whose vectors are zero, dependent or not finite."""
        periodic = np.asarray(periodic, dtype=bool)
        box = full_box(np.asarray(cell, dtype=np.float64), periodic)
        return cls(box, _inverse(box), heights(box), periodic)

    def fractional(self, positions: np.ndarray) -> np.ndarray:
        """(n, 3) Å -> (n, 3). In plain products and sums: every rank must get the same bits, BLAS promises none."""
        x, m = positions, self.inverse
        return np.stack([x[:, 0] * m[0, a] + x[:, 1] * m[1, a] + x[:, 2] * m[2, a] for a in range(3)], axis=1)

    def wrap(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fractional coordinates in [0, 1) along periodic axes, and the image each atom sits in.

        Returns:
            fractional (n, 3) and image int32 (n, 3): positions = (fractional + image) @ box.
        """
        fractional = self.fractional(positions)
        image = np.floor(fractional)
        image[:, ~self.periodic] = 0.0
        fractional = fractional - image
        # -1e-17 lies in image -1 at a fraction that rounds to 1: it belongs to the start of image 0.
        over = self.periodic & (fractional >= 1.0)
        image[over] += 1.0
        fractional[over] = 0.0
        return fractional, image.astype(np.int32)


def _inverse(m: np.ndarray) -> np.ndarray:
    rows = [[float(v) for v in row] for row in m]
    (a, b, c), (d, e, f), (g, h, i) = rows
    adjugate = [
        [e * i - f * h, c * h - b * i, b * f - c * e],
        [f * g - d * i, a * i - c * g, c * d - a * f],
        [d * h - e * g, b * g - a * h, a * e - b * d],
    ]
    determinant = a * adjugate[0][0] + b * adjugate[1][0] + c * adjugate[2][0]
    return np.array([[v / determinant for v in row] for row in adjugate])


@dataclass(frozen=True)
class RankGrid:
    """A grid of domains over one system.

    Attributes:
        dims: domains along each axis; domain (i, j, k) has number (i * dims[1] + j) * dims[2] + k.
        cuts: the planes between domains along each axis, fractional, ascending, dims[axis] - 1 of them.
        periodic: (3,) which axes are periodic.
    """

    dims: tuple[int, int, int]
    cuts: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    periodic: tuple[bool, bool, bool]

    @property
    def n_domains(self) -> int:
        return self.dims[0] * self.dims[1] * self.dims[2]

    @property
    def split(self) -> tuple[bool, bool, bool]:
        """Axes with more than one domain."""
        return (self.dims[0] > 1, self.dims[1] > 1, self.dims[2] > 1)

    def owners(self, fractional: np.ndarray) -> np.ndarray:
        """Number of the domain of each atom, int32, from wrapped fractional coordinates (n, 3)."""
        number = np.zeros(len(fractional), dtype=np.int32)
        for axis in range(3):
            number *= self.dims[axis]
            if self.dims[axis] > 1:
                # side="right": an atom exactly on a plane belongs to the domain above it.
                number += np.searchsorted(self.cuts[axis], fractional[:, axis], side="right").astype(np.int32)
        return number

    def bounds(self, domain: int) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper fractional bounds (3,) of a domain; infinite where nothing bounds it."""
        low, high = np.full(3, -np.inf), np.full(3, np.inf)
        for axis in (2, 1, 0):
            domain, place = divmod(domain, self.dims[axis])
            if self.dims[axis] == 1:
                continue
            open_end = 0.0 if self.periodic[axis] else np.inf
            edges = (-open_end, *self.cuts[axis], 1.0 + open_end)
            low[axis], high[axis] = edges[place], edges[place + 1]
        return low, high


WHOLE = RankGrid((1, 1, 1), ((), (), ()), (False, False, False))


def ranks_for(n_atoms: int, size: int, split_atoms: int) -> int:
    """How many ranks a system may use: at least `split_atoms` atoms each, else it stays whole."""
    return max(1, min(size, n_atoms // max(split_atoms, 1)))


def choose_grid(
    cell: np.ndarray,
    pbc: np.ndarray,
    n_atoms: int,
    size: int,
    reach: float,
    positions: np.ndarray,
    *,
    split_atoms: int = 500,
    grid: Sequence[int] | None = None,
) -> RankGrid:
    """The rank grid of one system.

    As many ranks as the system has atoms for and as its shape allows, in the arrangement with the fewest ghosts.
    No domain is thinner than `reach` along a periodic axis. Cut planes lie at quantiles of the atoms' coordinates,
    so that vacuum costs nobody work.

    Args:
        cell: (3, 3), Å. pbc: (3,) bool. positions: (n, 3), Å, anywhere.
        size: ranks there are. reach: Å, cutoff + skin.
        split_atoms: a rank is only added for every so many atoms.
        grid: domains per axis, if the caller wants to choose; reduced where they would be too thin.

    Raises:
        ValueError: a forced grid that is not three positive numbers or needs more ranks than there are.
    """
    frame = Frame.of(cell, pbc)
    fractional, _ = frame.wrap(positions)
    return grid_for(frame, fractional, size, reach, split_atoms=split_atoms, grid=grid)


def grid_for(
    frame: Frame,
    fractional: np.ndarray,
    size: int,
    reach: float,
    *,
    split_atoms: int = 500,
    grid: Sequence[int] | None = None,
) -> RankGrid:
    """`choose_grid` for coordinates that are wrapped already."""
    n_atoms = len(fractional)
    if grid is not None:
        dims = _allowed(check_grid(grid, size), frame, reach)
    else:
        ranks = ranks_for(n_atoms, size, split_atoms)
        if ranks == 1:
            return WHOLE
        dims = _best(_occupied(frame, fractional, reach), reach, ranks)
    if dims == (1, 1, 1):
        return WHOLE
    thinnest = [reach / h * (1 + 1e-9) for h in frame.heights]
    cuts = [_cuts(fractional[:, a], dims[a], thinnest[a], bool(frame.periodic[a])) for a in range(3)]
    p = frame.periodic
    return RankGrid(dims, (cuts[0], cuts[1], cuts[2]), (bool(p[0]), bool(p[1]), bool(p[2])))


def check_grid(grid: Sequence[int], size: int) -> tuple[int, int, int]:
    """A forced grid as a triple; ValueError if it is none or needs more ranks than `size`."""
    dims = tuple(int(d) for d in grid)
    if len(dims) != 3 or min(dims) < 1:
        raise ValueError(f"grid must be three positive numbers of domains, is {tuple(grid)}")
    if dims[0] * dims[1] * dims[2] > size:
        raise ValueError(f"grid {dims} needs {dims[0] * dims[1] * dims[2]} ranks, the mesh has {size}")
    return dims[0], dims[1], dims[2]


def _allowed(dims: tuple[int, int, int], frame: Frame, reach: float) -> tuple[int, int, int]:
    """The forced grid, reduced along periodic axes where its domains would be thinner than reach."""
    most = [_fits(h, reach) if p else d for h, p, d in zip(frame.heights, frame.periodic, dims, strict=True)]
    return min(dims[0], most[0]), min(dims[1], most[1]), min(dims[2], most[2])


def _fits(length: float, reach: float) -> int:
    return max(1, int(length / (reach * (1 + 1e-9))))


def _occupied(frame: Frame, fractional: np.ndarray, reach: float) -> np.ndarray:
    """Length along each axis in which there are atoms, (3,), Å: the cell less its largest vacuum."""
    lengths = np.zeros(3)
    for axis in range(3):
        values = np.sort(fractional[:, axis])
        extent = (values[-1] - values[0]) if len(values) else 0.0
        if frame.periodic[axis]:
            inner = float(np.diff(values).max()) if len(values) > 1 else 0.0
            vacuum = max(inner, 1.0 - extent)
            extent = 1.0 if vacuum * frame.heights[axis] < reach else 1.0 - vacuum
        lengths[axis] = extent * frame.heights[axis]
    return lengths


def _best(lengths: np.ndarray, reach: float, ranks: int) -> tuple[int, int, int]:
    """Of all grids that use the most ranks, the one whose domains have the least volume with their ghosts."""
    most = [_fits(length, reach) for length in lengths]
    choices = [
        dims
        for dims in itertools.product(*(range(1, min(m, ranks) + 1) for m in most))
        if dims[0] * dims[1] * dims[2] <= ranks
    ]

    def cost(dims: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        sides = [max(x, reach) / d + (2 * reach if d > 1 else 0.0) for x, d in zip(lengths, dims, strict=True)]
        # Rounded, so that equal grids of a cube are told apart by the rule, not by round-off.
        return (-float(np.prod(dims)), round(float(np.prod(sides)), 6), dims)

    best = min(choices, key=cost)
    return best[0], best[1], best[2]


def _cuts(values: np.ndarray, parts: int, thinnest: float, periodic: bool) -> tuple[float, ...]:
    """Planes that divide the atoms evenly, in gaps between them where there are gaps, never too close together."""
    if parts == 1:
        return ()
    ordered = np.sort(values)
    cuts: list[float] = []
    for k in range(1, parts):
        cut = _gap(ordered, k, parts) if len(ordered) > 1 else k / parts
        if periodic:
            cut = min(cut, 1.0 - (parts - k) * thinnest)
            cut = max(cut, k * thinnest)
        if cuts:
            cut = max(cut, cuts[-1] + thinnest)
        cuts.append(cut)
    return tuple(cuts)


def _gap(ordered: np.ndarray, k: int, parts: int) -> float:
    """A plane near the k-th of `parts` quantiles, in the middle of the widest gap there."""
    n = len(ordered)
    middle = min(max(round(k * n / parts), 1), n - 1)
    window = int(_CUT_WINDOW * n / parts)
    low, high = max(1, middle - window), min(n - 1, middle + window)
    gaps = ordered[low : high + 1] - ordered[low - 1 : high]
    widest = gaps.max()
    near = np.flatnonzero(gaps >= widest * (1 - 1e-9)) + low
    best = int(near[np.argmin(np.abs(near - middle))])
    return float(0.5 * (ordered[best - 1] + ordered[best]))


__all__ = ["WHOLE", "Frame", "RankGrid", "check_grid", "choose_grid", "grid_for", "ranks_for"]
