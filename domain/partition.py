"""Who owns which atom: a grid of domains over one system, chosen from its shape, and the owners that follow.

Everything here is a pure function of the system's reference positions and cell and of the number of ranks, evaluated
alike on every rank: no rank ever has to be told. Coordinates are fractional, so triclinic cells are boxes here.
Along a periodic axis the domains tile [0, 1); along any other they cover the whole line, the outer ones open-ended.

The grid of a divided system is made anew at every rebuild of its lists: that is all the re-balancing it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .arrangement import Arranger, Dims, corners, cutting_order, most_domains, thinnest_allowed
from .cuts import descend, nested
from .frame import Frame

#: work on a remote ghost as a share of that on an own atom, if nobody says (see `Strategy.ghost_work`)
GHOST_WORK = 0.25


@dataclass(frozen=True)
class RankGrid:
    """A grid of domains over one system, its cuts nested: each slab has planes of its own, and each column in it.

    Attributes:
        dims: domains along each axis; domain (i, j, k) has number (i * dims[1] + j) * dims[2] + k.
        order: the axes in the order in which they are cut.
        planes: per level of that order, for each block there is, the planes that divide it: fractional, ascending,
            dims[axis] - 1 of them.
        periodic: (3,) which axes are periodic.
    """

    dims: Dims
    order: Dims
    planes: tuple[tuple[tuple[float, ...], ...], ...]
    periodic: tuple[bool, bool, bool]

    @property
    def n_domains(self) -> int:
        return self.dims[0] * self.dims[1] * self.dims[2]

    @property
    def split(self) -> tuple[bool, bool, bool]:
        """Axes with more than one domain."""
        return (self.dims[0] > 1, self.dims[1] > 1, self.dims[2] > 1)

    @cached_property
    def _levels(self) -> list[np.ndarray]:
        return [np.array(level, dtype=np.float64).reshape(len(level), -1) for level in self.planes]

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Number of each domain, in the order in which they are cut."""
        numbers = np.arange(self.n_domains, dtype=np.int32).reshape(self.dims)
        return numbers.transpose(self.order).ravel()

    @cached_property
    def _corners(self) -> tuple[np.ndarray, np.ndarray]:
        by_cut = corners(self._levels, self.order, np.array(self.periodic))
        at = np.argsort(self._numbers)
        return by_cut[0][at], by_cut[1][at]

    def owners(self, fractional: np.ndarray) -> np.ndarray:
        """Number of the domain of each atom, int32, from wrapped fractional coordinates (n, 3)."""
        block = np.zeros(len(fractional), dtype=np.int16)
        for axis, planes in zip(self.order, self._levels, strict=True):
            block = descend(block, planes, fractional[:, axis])
        return self._numbers[block]

    def bounds(self, domain: int) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper fractional bounds (3,) of a domain; infinite where nothing bounds it."""
        return self._corners[0][domain].copy(), self._corners[1][domain].copy()


WHOLE = RankGrid((1, 1, 1), (0, 1, 2), (((),), ((),), ((),)), (False, False, False))


def ranks_for(n_atoms: int, size: int, split_atoms: int) -> int:
    """How many ranks a system may use: at least `split_atoms` atoms each, else it stays whole."""
    return max(1, min(size, n_atoms // max(split_atoms, 1)))


@dataclass(frozen=True)
class Division:
    """A system, divided.

    Attributes:
        frame: its faces in the vacuum, if there is one and the system is in several domains.
        grid: the domains.
        fractional, image: (n, 3) each, wrapped coordinates in that frame, see `Frame.wrap`.
    """

    frame: Frame
    grid: RankGrid
    fractional: np.ndarray
    image: np.ndarray


def divide(
    frame: Frame,
    positions: np.ndarray,
    size: int,
    reach: float,
    *,
    split_atoms: int = 500,
    grid: Sequence[int] | None = None,
    ghost_work: float = GHOST_WORK,
    vacuum: float = 0.0,
) -> Division:
    """Choose the grid of one system, with faces of the cell moved into its vacuum.

    Args:
        frame: of its cell, `Frame.of`. positions: (n, 3), Å, anywhere. The rest: see `grid_for`.
        vacuum: Å; less than this (or than reach) between atoms is no vacuum.
    """
    fractional, image = frame.wrap(positions)
    clear = frame.clear_of(fractional, max(reach, vacuum))
    if clear is not frame:
        moved = clear.wrap(positions)
        cut = grid_for(clear, moved[0], size, reach, split_atoms=split_atoms, grid=grid, ghost_work=ghost_work)
        # A whole system has the same bits as one that never had a choice.
        return Division(clear, cut, *moved) if cut.n_domains > 1 else Division(frame, WHOLE, fractional, image)
    cut = grid_for(frame, fractional, size, reach, split_atoms=split_atoms, grid=grid, ghost_work=ghost_work)
    return Division(frame, cut, fractional, image)


def choose_grid(
    cell: np.ndarray,
    pbc: np.ndarray,
    size: int,
    reach: float,
    positions: np.ndarray,
    *,
    split_atoms: int = 500,
    grid: Sequence[int] | None = None,
) -> RankGrid:
    """The rank grid of one system: `grid_for` from its cell (3, 3), Å, pbc (3,) and positions (n, 3), Å, anywhere.

    Raises:
        ValueError: a cell that is none; a forced grid that makes no sense, see `check_grid`.
    """
    frame = Frame.of(cell, pbc)
    return grid_for(frame, frame.wrap(positions)[0], size, reach, split_atoms=split_atoms, grid=grid)


def grid_for(
    frame: Frame,
    fractional: np.ndarray,
    size: int,
    reach: float,
    *,
    split_atoms: int = 500,
    grid: Sequence[int] | None = None,
    ghost_work: float = GHOST_WORK,
) -> RankGrid:
    """The rank grid of one system.

    Of all arrangements the system has atoms for and its shape allows, the one whose fullest domain has the least to
    do: that may be one with fewer domains than there are ranks. No domain is thinner than `reach` along a periodic
    axis. Cut planes lie at quantiles of the atoms' coordinates, so that vacuum costs nobody work.

    Args:
        frame, fractional: cell and wrapped coordinates (n, 3) of the atoms.
        size: ranks there are. reach: Å, how far a domain sees.
        split_atoms: a rank is only added for every so many atoms.
        grid: domains per axis, if the caller wants to choose; reduced where they would be too thin.
        ghost_work: work on a remote ghost, as a share of that on an own atom.

    Raises:
        ValueError: a forced grid that is not three positive numbers or needs more ranks than there are.
    """
    n_atoms = len(fractional)
    if grid is not None:
        dims, most = check_grid(grid, size), most_domains(frame, reach, size)
        dims = min(dims[0], most[0]), min(dims[1], most[1]), min(dims[2], most[2])
    else:
        ranks = ranks_for(n_atoms, size, split_atoms)
        dims = Arranger(frame, fractional, reach, ghost_work).best(ranks) if ranks > 1 else (1, 1, 1)
    if dims == (1, 1, 1):
        return WHOLE
    order = cutting_order(dims)
    levels = nested(fractional, dims, order, thinnest_allowed(frame, reach))
    planes = tuple(tuple(tuple(row) for row in level.tolist()) for level in levels)
    p = frame.periodic
    return RankGrid(dims, order, planes, (bool(p[0]), bool(p[1]), bool(p[2])))


def check_grid(grid: Sequence[int], size: int) -> tuple[int, int, int]:
    """A forced grid as a triple; ValueError if it is none or needs more ranks than `size`."""
    dims = tuple(int(d) for d in grid)
    if len(dims) != 3 or min(dims) < 1:
        raise ValueError(f"grid must be three positive numbers of domains, is {tuple(grid)}")
    if dims[0] * dims[1] * dims[2] > size:
        raise ValueError(f"grid {dims} needs {dims[0] * dims[1] * dims[2]} ranks, the mesh has {size}")
    return dims[0], dims[1], dims[2]


__all__ = [
    "GHOST_WORK",
    "WHOLE",
    "Division",
    "Frame",
    "RankGrid",
    "check_grid",
    "choose_grid",
    "divide",
    "grid_for",
    "ranks_for",
]
