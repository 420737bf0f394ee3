"""How many domains along which axis: the arrangement whose fullest domain has the least to do.

Where atoms fill the cell evenly, that follows from its shape; anything else is tried out on a sample of the atoms.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from .cuts import descend, nested
from .frame import Frame, sample, vacuum

Dims = tuple[int, int, int]

# Arrangements within this share of the best count as equally good: what decides then does not change as atoms move.
# First where costs follow from the shape of the cell, then where they are those of a sample.
_TIE, _SAMPLED_TIE = 0.04, 0.05
# Arrangements tried out per number of domains, and over all; and how far a guess may be off.
_PER_COUNT, _MOST, _DOUBT = 2, 5, 1.5


def thinnest_allowed(frame: Frame, reach: float) -> np.ndarray:
    """Least thickness of a domain along each axis, fractional, (3,); 0 along axes that are not periodic."""
    return np.where(frame.periodic, reach / frame.heights * (1 + 1e-9), 0.0)


def most_domains(frame: Frame, reach: float, ranks: int) -> Dims:
    """The most domains along each axis: those of periodic ones must not be thinner than reach."""
    most = [min(ranks, int(1.0 / t)) if t > 1e-9 else ranks for t in thinnest_allowed(frame, reach).tolist()]
    return max(1, most[0]), max(1, most[1]), max(1, most[2])


def possible(frame: Frame, reach: float, ranks: int) -> list[Dims]:
    """All arrangements of at most so many domains, none thinner than reach along a periodic axis."""
    every = itertools.product(*(range(1, m + 1) for m in most_domains(frame, reach, ranks)))
    return [(a, b, c) for a, b, c in every if a * b * c <= ranks]


def cutting_order(dims: Sequence[int]) -> Dims:
    """The axes in the order in which they are cut: first the one with the most domains, mostly the longest.

    Its planes go through the whole system, those of later ones only through a slab or a column of it.
    """
    order = sorted(range(3), key=lambda axis: (-dims[axis], axis))
    return order[0], order[1], order[2]


class Arranger:
    """Predicts what an arrangement costs, in the atoms of its fullest domain.

    Args:
        frame, fractional: the system, (n, 3), wrapped.
        reach: Å, how far a domain sees.
        ghost_work: work on a remote ghost, as a share of that on an own atom.
    """

    def __init__(self, frame: Frame, fractional: np.ndarray, reach: float, ghost_work: float) -> None:
        self.frame, self.reach, self.ghost_work = frame, reach, ghost_work
        self.n_atoms = len(fractional)
        self.points = fractional[sample(self.n_atoms)]
        self.margin, self.thinnest = reach / frame.heights, thinnest_allowed(frame, reach)
        lengths, self.even = self._shape()
        self.ring = frame.periodic & (lengths == frame.heights)
        # In steps of 4 %: a cell that breathes must not change its arrangement all the time.
        self.lengths = reach * np.exp(np.round(np.log(np.maximum(lengths / max(reach, 1e-9), 1e-9)) * 25) / 25)

    def _shape(self) -> tuple[np.ndarray, bool]:
        """Length along each axis in which there are atoms, (3,), Å; and whether they fill the cell evenly."""
        lengths, even = self.frame.heights.copy(), True
        for axis in range(3):
            values = self.points[:, axis]
            low, high = (0.0, 1.0) if self.frame.periodic[axis] else (float(values.min()), float(values.max()))
            if self.frame.periodic[axis]:
                _, empty = vacuum(values)
                if empty * lengths[axis] >= self.reach:
                    high, even = 1.0 - empty, False
                    lengths[axis] *= high
                    continue
            lengths[axis] *= high - low
            counts = np.bincount(((values - low) * (8 / max(high - low, 1e-300))).astype(np.int64).clip(0, 7))
            even &= counts.min() > 0.5 * counts.mean() and counts.max() < 1.5 * counts.mean()
        return lengths, even

    def best(self, ranks: int) -> Dims:
        """The arrangement of at most `ranks` domains that costs least."""
        guesses = {dims: self.guess(dims) for dims in possible(self.frame, self.reach, ranks)}
        return _preferred(guesses, _TIE) if self.even else _preferred(self._tried(guesses), _SAMPLED_TIE)

    def _tried(self, guesses: dict[Dims, float]) -> dict[Dims, float]:
        """Costs of the most promising arrangements."""
        costs: dict[Dims, float] = {}
        per_count: dict[int, int] = {}
        for dims in sorted(guesses, key=lambda dims: (guesses[dims], dims)):
            count = dims[0] * dims[1] * dims[2]
            per_count[count] = per_count.get(count, 0) + 1
            hopeless = costs and max(self.n_atoms / count, guesses[dims] / _DOUBT) > min(costs.values())
            if per_count[count] <= _PER_COUNT and len(costs) < _MOST and not hopeless:
                owned, ghosts = self.occupants(dims)
                costs[dims] = float((owned + self.ghost_work * ghosts).max())
        return costs

    def guess(self, dims: Sequence[int]) -> float:
        """Cost of an arrangement if atoms were spread evenly over where they are."""
        share, seen = float(self.n_atoms), 1.0
        for axis, parts in enumerate(dims):
            if parts > 1:
                # At the ends of what is no ring nothing is seen beyond.
                sides = 2 if self.ring[axis] else min(2, parts - 1)
                share /= parts
                seen *= 1.0 + sides * parts * (self.reach / self.lengths[axis] if self.reach else 0.0)
        return round(share * (1.0 + self.ghost_work * (seen - 1.0)), 6)

    def occupants(self, dims: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Owned atoms and remote ghosts of each domain, (domains,), as the sample has them; domains as they are cut."""
        order = cutting_order(dims)
        levels = nested(self.points, dims, order, self.thinnest, window=0.0)
        block = np.zeros(len(self.points), dtype=np.int16)
        for axis, planes in zip(order, levels, strict=True):
            block = descend(block, planes, self.points[:, axis])
        low, high = corners(levels, order, self.frame.periodic)
        owned = np.bincount(block, minlength=len(low))
        seen = within(self.points, low, high, self.margin, self.frame.periodic)
        scale = self.n_atoms / max(len(self.points), 1)
        return owned * scale, np.where(owned > 0, seen - owned, 0) * scale


def _preferred(costs: dict[Dims, float], tie: float) -> Dims:
    """The cheapest; of those about as cheap the one with the fewest domains, of those the one whose domains are the
    least thin (more of their atoms see no ghost), of those the first."""
    limit = min(costs.values()) * (1 + tie)

    def rule(dims: Dims) -> tuple[int, int, Dims]:
        return dims[0] * dims[1] * dims[2], max(dims), dims

    return min((dims for dims, cost in costs.items() if cost <= limit), key=rule)


def corners(levels: Sequence[np.ndarray], order: Sequence[int], periodic: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds (domains, 3) of nested domains, in the order in which they are cut; infinite where nothing bounds them."""
    low, high = np.full((1, 3), -np.inf), np.full((1, 3), np.inf)
    for axis, planes in zip(order, levels, strict=True):
        parts = planes.shape[1] + 1
        if parts == 1:
            continue
        first, last = (0.0, 1.0) if periodic[axis] else (-np.inf, np.inf)
        low, high = np.repeat(low, parts, axis=0), np.repeat(high, parts, axis=0)
        ends = np.ones((len(planes), 1))
        edges = np.hstack([first * ends, planes, last * ends])
        low[:, axis], high[:, axis] = edges[:, :-1].ravel(), edges[:, 1:].ravel()
    return low, high


def within(
    points: np.ndarray, low: np.ndarray, high: np.ndarray, margin: np.ndarray, periodic: np.ndarray
) -> np.ndarray:
    """How many atoms, every image along bounded periodic axes counted, lie within a margin of each box; (boxes,)."""
    times = np.ones((len(low), len(points)))
    for axis in range(3):
        begin, end = low[:, axis, None] - margin[axis], high[:, axis, None] + margin[axis]
        if not np.isfinite(begin).any() and not np.isfinite(end).any():
            continue
        x = points[:, axis]
        if periodic[axis]:
            times *= np.maximum(np.floor(end - x) - np.ceil(begin - x) + 1.0, 0.0)
        else:
            times *= (x >= begin) & (x <= end)
    return times.sum(axis=1)


__all__ = ["Arranger", "Dims", "corners", "cutting_order", "most_domains", "possible", "thinnest_allowed", "within"]
