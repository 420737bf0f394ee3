"""Ghosts: which atoms of others each rank needs to see, in which image, and who sends what to whom.

A plan is a pure function of a system's reference positions, grid and owners; every rank works out its own part of
it without asking. Between rebuilds it is only used: one packed message per peer and step (`exchange.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .frame import Frame
from .partition import RankGrid
from .strategy import Strategy


@dataclass(frozen=True)
class HaloPlan:
    """One rank's part of the ghost exchange of one system.

    Attributes:
        ghost_atoms: int64, (g,), the atoms (places in the system) seen as remote ghosts, ordered by (atom, shift).
        ghost_shifts: int32, (g, 3), lattice vectors added to the *wrapped* position of each.
        receives: per peer that owns ghosts of ours, the ghosts (places in the above) in the order it sends them.
        sends: per peer that sees atoms of ours, (owned rows, shifts) in the order it expects them.
        receivers: bool, (g,), ghosts that receive messages of their own (wide strategy).
    """

    ghost_atoms: np.ndarray
    ghost_shifts: np.ndarray
    receives: dict[int, np.ndarray]
    sends: dict[int, tuple[np.ndarray, np.ndarray]]
    receivers: np.ndarray


NO_HALO = HaloPlan(np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.int32), {}, {}, np.zeros(0, dtype=bool))


@dataclass(frozen=True)
class Sight:
    """What domains see of each other; fractional lengths.

    Attributes:
        margin: (3,), how far a domain sees beyond its bounds; None: all atoms of the system, unshifted.
        receivers: (3,), how far beyond its bounds ghosts receive messages; None: nowhere.
        one_sided: whether of two domains only one sees the other's atoms: that for which they lie at a shift that is
            lexicographically positive or, unshifted, in a domain of a higher number. Each pair across a cut is then
            seen once over all ranks, and each rank sees half as much.
    """

    margin: np.ndarray | None
    receivers: np.ndarray | None = None
    one_sided: bool = False


def sight_of(frame: Frame, strategy: Strategy) -> Sight:
    """What domains of a system see under a strategy."""
    if strategy.everything:
        return Sight(None)
    receivers = (strategy.receivers + strategy.skin) / frame.heights if strategy.receivers > 0 else None
    return Sight(strategy.reach / frame.heights, receivers, strategy.one_sided)


def plan_halo(
    grid: RankGrid, fractional: np.ndarray, domains: np.ndarray, sight: Sight, ranks: tuple[int, ...], rank: int
) -> HaloPlan:
    """The plan of one rank.

    Args:
        grid: the domains.
        fractional: (n, 3), wrapped coordinates of all atoms of the system.
        domains: int32, (n,), domain of each atom.
        sight: what domains see.
        ranks: the rank of each domain.
        rank: this rank; it may have no domain at all.

    A domain without atoms sees nothing.
    """
    if grid.n_domains == 1 or rank not in ranks:
        return NO_HALO
    me = ranks.index(rank)
    mine = np.flatnonzero(domains == me)
    if not len(mine):
        return NO_HALO
    atoms, shifts = ghosts(grid, fractional, domains, sight, me)
    source = domains[atoms]
    receives = {ranks[d]: np.flatnonzero(source == d) for d in np.unique(source).tolist()}
    sends = {}
    inhabited = np.bincount(domains, minlength=grid.n_domains) > 0
    for domain in np.flatnonzero(inhabited).tolist():
        if domain != me:
            rows, moved = ghosts(grid, fractional[mine], domains[mine], sight, domain)
            if len(rows):
                sends[ranks[domain]] = (rows, moved)
    return HaloPlan(atoms, shifts, receives, sends, receiving(grid, fractional[atoms] + shifts, sight, me))


def receiving(grid: RankGrid, place: np.ndarray, sight: Sight, domain: int) -> np.ndarray:
    """Which ghosts, by their shifted coordinates (g, 3), receive messages of their own: bool, (g,)."""
    if sight.receivers is None:
        return np.zeros(len(place), dtype=bool)
    low, high = _beyond(grid, domain, sight.receivers)
    return np.all((place >= low) & (place <= high), axis=1)


def _beyond(grid: RankGrid, domain: int, margin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = grid.bounds(domain)
    return low - margin * (1 + 1e-9), high + margin * (1 + 1e-9)


def ghosts(
    grid: RankGrid, fractional: np.ndarray, domains: np.ndarray, sight: Sight, domain: int
) -> tuple[np.ndarray, np.ndarray]:
    """Atoms of other domains, with their images along split periodic axes, that a domain sees.

    An own atom's image along a split axis is never that near: no domain there is thinner than the reach. Images along
    the other axes are made by the neighbour list.

    Returns:
        atoms int64 (g,) and shifts int32 (g, 3), ordered by (atom, shift).
    """
    others = np.flatnonzero(domains != domain)
    if sight.margin is None:
        return others, np.zeros((len(others), 3), dtype=np.int32)
    low, high = _beyond(grid, domain, sight.margin)
    place = fractional[others]
    found_atoms, found_shifts = [], []
    axes = [(-1, 0, 1) if s and p else (0,) for s, p in zip(grid.split, grid.periodic, strict=True)]
    # Axis by axis first: 9 comparisons instead of 81 where all three are divided.
    near = [
        {step: (x + step >= low[axis]) & (x + step <= high[axis]) for step in axes[axis]}
        for axis, x in enumerate(place.T)
        if grid.split[axis]
    ]
    split = [axis for axis in range(3) if grid.split[axis]]
    upper = domains[others] > domain
    for shift in itertools.product(*axes):
        if sight.one_sided and shift < (0, 0, 0):
            continue
        inside = upper if sight.one_sided and shift == (0, 0, 0) else np.ones(len(others), dtype=bool)
        for axis, masks in zip(split, near, strict=True):
            inside = inside & masks[shift[axis]]
        atoms = others[inside]
        found_atoms.append(atoms)
        found_shifts.append(np.broadcast_to(np.array(shift, dtype=np.int32), (len(atoms), 3)))
    atoms, shifts = np.concatenate(found_atoms), np.concatenate(found_shifts)
    # Shifts were walked in lexicographic order: a stable sort by atom leaves them so.
    order = np.argsort(atoms, kind="stable")
    return atoms[order], shifts[order]


__all__ = ["NO_HALO", "HaloPlan", "Sight", "ghosts", "plan_halo", "receiving", "sight_of"]
