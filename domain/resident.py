"""A resident: what every rank knows about one system aboard, and this rank's lists for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np

from .arrangement import possible
from .halo import NO_HALO, HaloPlan, plan_halo, sight_of
from .neighbors import SystemList, build_system_list
from .partition import WHOLE, Division, Frame, RankGrid, divide, ranks_for
from .strategy import Strategy

log = logging.getLogger(__name__)

_NO_LIST = SystemList(
    0, 0, np.zeros(0, np.int32), np.zeros((0, 3), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32),
    np.zeros(0, np.int32),
)  # fmt: skip


@dataclass(frozen=True)
class Splitting:
    """How systems may be divided over ranks.

    Attributes:
        size: ranks there are.
        strategy: what domains need of each other.
        split_atoms: a rank is only added for every so many atoms.
        grid: domains per axis for every system, or None to choose.
    """

    size: int
    strategy: Strategy
    split_atoms: int = 500
    grid: tuple[int, int, int] | None = None

    @property
    def reach(self) -> float:
        """Å: how far a domain sees, skin included, and its least thickness along a periodic axis."""
        return self.strategy.reach

    def divisible(self, n_atoms: int) -> bool:
        """Whether a system of so many atoms may ever lie on more than one rank."""
        if self.size == 1:
            return False
        return self.wanted(n_atoms) > 1

    def wanted(self, n_atoms: int) -> int:
        """Ranks that a system of so many atoms would use if its shape allowed it."""
        if self.grid is not None:
            return self.grid[0] * self.grid[1] * self.grid[2]
        return ranks_for(n_atoms, self.size, self.split_atoms)


@dataclass
class Resident:
    """One system aboard. Atoms are numbered by their place: ascending atom id.

    Attributes:
        id: the system's id.
        atom_ids: int64, (n,), ascending.
        numbers: int32, (n,), atomic numbers by place.
        pbc: (3,) bool.
        order: int64, (n,): place of each atom in the order in which the system came in.
        ranks: ranks in the order in which this system takes them; company decides it, the results do not feel it.
        divisible: whether it may lie on several ranks; if not it stays on ranks[0].
        owners: int32, (n,), owning rank by place.
        grid, image, halo, list: as of the last rebuild; image int32 (owned here, 3).
        said: what was last logged about its grid.
        cost: work of a step, see `balance.cost_of`; as of when it came aboard.
        forced: domains per axis, where others would not have fitted into memory when it came aboard.
    """

    id: str
    atom_ids: np.ndarray
    numbers: np.ndarray
    pbc: np.ndarray
    order: np.ndarray
    ranks: tuple[int, ...]
    divisible: bool
    owners: np.ndarray
    grid: RankGrid = WHOLE
    image: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int32))
    halo: HaloPlan = NO_HALO
    list: SystemList = field(default_factory=lambda: _NO_LIST)
    said: str = ""
    cost: float = 0.0
    forced: tuple[int, int, int] | None = None

    @property
    def n_atoms(self) -> int:
        return len(self.atom_ids)

    def held(self, rank: int) -> np.ndarray:
        """Places of the atoms a rank owns, ascending."""
        return np.flatnonzero(self.owners == rank)

    def domain_ranks(self, n_domains: int) -> tuple[int, ...]:
        """The rank of each domain, ascending: sums over ranks then run in the order of the domains."""
        return tuple(sorted(self.ranks[:n_domains]))


@dataclass(frozen=True)
class Layout:
    """Where the atoms of a system belong, from its reference: a pure function, the same on every rank."""

    frame: Frame
    grid: RankGrid
    fractional: np.ndarray
    image: np.ndarray
    domains: np.ndarray
    wrapped: np.ndarray


def lay_out(resident: Resident, reference: np.ndarray, cell: np.ndarray, splitting: Splitting) -> Layout:
    """Grid, owners' domains and wrapped positions of all atoms in `reference` (n, 3), ordered by place."""
    frame = Frame.of(cell, resident.pbc)
    if resident.divisible:
        done = divide(
            frame, reference, splitting.size, splitting.reach,
            split_atoms=splitting.split_atoms, grid=resident.forced or splitting.grid,
            ghost_work=splitting.strategy.ghost_work, vacuum=splitting.strategy.cutoff + splitting.strategy.skin,
        )  # fmt: skip
    else:
        done = Division(frame, WHOLE, *frame.wrap(reference))
    domains = done.grid.owners(done.fractional)
    wrapped = shifted(reference, -done.image, done.frame.box)
    return Layout(done.frame, done.grid, done.fractional, done.image, domains, wrapped)


def shifted(positions: np.ndarray, shift: np.ndarray, box: np.ndarray) -> np.ndarray:
    """positions + shift @ box, in plain products and sums as in the kernels."""
    moved = positions
    for axis in range(3):
        moved = moved + shift[:, axis, None] * box[axis]
    return moved


def build_lists(resident: Resident, layout: Layout, splitting: Splitting, rank: int) -> None:
    """Halo plan and neighbour list of one rank, for owners that are in place already."""
    grid, box = layout.grid, layout.frame.box
    ranks = resident.domain_ranks(grid.n_domains)
    held = resident.held(rank)
    if rank == 0 and (resident.divisible or resident.forced is not None):
        _say(resident, layout, splitting)
    resident.grid, resident.image = grid, layout.image[held]
    strategy = splitting.strategy
    halo = plan_halo(grid, layout.fractional, layout.domains, sight_of(layout.frame, strategy), ranks, rank)
    resident.halo = halo
    ghosts = shifted(layout.wrapped[halo.ghost_atoms], halo.ghost_shifts, box)
    resident.list = build_system_list(
        np.concatenate([layout.wrapped[held], ghosts]),
        len(held),
        box,
        layout.frame.periodic & ~np.array(grid.split),
        strategy.cutoff + strategy.skin,
        pairs=strategy.pairs,
        receivers=halo.receivers,
    )


def _say(resident: Resident, layout: Layout, splitting: Splitting) -> None:
    """Log, once per change, that a system is not divided as one might expect, and why."""
    wanted, dims = splitting.wanted(resident.n_atoms), layout.grid.dims
    news, level = "", logging.INFO
    if resident.forced is not None:
        how = f"is divided {dims}" if resident.divisible else "stays whole"
        news = f"{how} so that it fits into memory"
    elif layout.grid.n_domains < wanted:
        news = f"uses {layout.grid.n_domains} of {wanted} ranks, grid {dims}"
        level = logging.INFO if splitting.grid is None else logging.WARNING
    if news and news != resident.said:
        why = "" if resident.forced is not None else f": {_why_fewer(layout, splitting, wanted)}"
        log.log(level, "system %r %s%s", resident.id, news, why)
    resident.said = news


def _why_fewer(layout: Layout, splitting: Splitting, wanted: int) -> str:
    frame = layout.frame
    room = max(a * b * c for a, b, c in possible(frame, splitting.reach, wanted))
    if splitting.grid is None and layout.grid.n_domains < room:
        return "with more of them each would do more work on ghosts than they take off it"
    thick = [f"{h:.4g}" if p else "open" for h, p in zip(frame.heights, frame.periodic, strict=True)]
    return (
        f"domains must be at least {splitting.reach:.4g} Å thick ({splitting.strategy}), its cell is "
        f"{' x '.join(thick)} Å"
    )


def drop_lists(resident: Resident) -> None:
    """Of a whole system on a rank that is not its: nothing."""
    resident.image, resident.halo, resident.list = np.zeros((0, 3), dtype=np.int32), NO_HALO, _NO_LIST


__all__ = ["Layout", "Resident", "Splitting", "build_lists", "drop_lists", "lay_out", "shifted"]
