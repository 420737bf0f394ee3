"""Balance between ranks: what systems cost, which rank takes which, and which whole systems move when it gets uneven.

Large systems divide themselves evenly at every rebuild (`partition.py`). Small ones lie whole on one rank each, and as
others come and leave, one rank may be left with most of them: some then move. Everything here is replicated: a pure
function of what every rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: largest load over mean load above which whole systems move
THRESHOLD = 1.25
# Work on an atom apart from its pairs, in pairs: integrator, packing, loops. Lennard-Jones on one core took 0.079 µs an
# atom and 0.0102 µs a pair of a half list, at 9 to 100 pairs an atom.
_ATOM = 10.0
# A move must take this share off the largest load, or it is not worth a rebuild of lists.
_WORTH = 0.02


def cost_of(n_atoms: int, neighbors: float) -> float:
    """Work of one step of a system, in pairs of a half list.

    Args:
        neighbors: mean number within cutoff + skin of an atom, see `mean_neighbors`.
    """
    return n_atoms * (0.5 * neighbors + _ATOM)


class Loads:
    """Work of each rank; float64, (ranks,)."""

    def __init__(self, size: int) -> None:
        self.work = np.zeros(size)

    def add(self, cost: float, owners: np.ndarray) -> None:
        """Count a system, by the rank of each of its atoms."""
        if len(owners):
            self.work += np.bincount(owners, minlength=len(self.work)) * (cost / len(owners))

    def order(self) -> tuple[int, ...]:
        """Ranks, least loaded first."""
        return tuple(np.argsort(self.work, kind="stable").tolist())


def plan_moves(
    costs: Sequence[float], places: Sequence[int], fixed: np.ndarray, threshold: float = THRESHOLD
) -> dict[int, int]:
    """Which whole systems move to which rank, so that the largest load is no more than `threshold` times the mean.

    As few as that takes, or as help: from the fullest rank to the emptiest, always the one that leaves the smaller
    maximum of the two. Nothing moves below the threshold.

    Args:
        costs, places: work and rank of each whole system.
        fixed: (ranks,), work of systems that do not move: those in several domains.

    Returns:
        The new rank of each system that moves, by its index.
    """
    cost, place = np.asarray(costs, dtype=np.float64), np.asarray(places, dtype=np.int64)
    before = fixed + np.bincount(place, weights=cost, minlength=len(fixed))
    goal = threshold * before.mean()
    load, moves = before.copy(), {}
    while load.max() > goal:
        full, empty = int(np.argmax(load)), int(np.argmin(load))
        here = np.flatnonzero(place == full)
        peaks = np.maximum(load[full] - cost[here], load[empty] + cost[here])
        if not len(here) or peaks.min() > (1 - _WORTH) * load[full]:
            break
        chosen = int(here[np.argmin(peaks)])
        load[full] -= cost[chosen]
        load[empty] += cost[chosen]
        place[chosen] = moves[chosen] = empty
    return _needed(moves, cost, places, load, goal)


def _needed(
    moves: dict[int, int], cost: np.ndarray, places: Sequence[int], load: np.ndarray, goal: float
) -> dict[int, int]:
    """The moves without those that came to nothing, or that others have made unnecessary: the cheapest first."""
    kept = {s: rank for s, rank in moves.items() if rank != places[s]}
    for s in sorted(kept, key=lambda s: (cost[s], s)):
        back = load.copy()
        back[kept[s]] -= cost[s]
        back[places[s]] += cost[s]
        if back.max() <= max(goal, load.max()):
            load = back
            del kept[s]
    return kept


__all__ = ["THRESHOLD", "Loads", "cost_of", "plan_moves"]
