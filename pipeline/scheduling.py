"""Who gets how much: decisions of the campaign as functions of numbers, apart from everything that runs.

Work is shared by atoms. A gang is given no more than half of its even share of what waits and what is aboard, so that
what is left evens out the differences between gangs; small shares are not split further, as a step of few atoms
costs little less than a step of more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Below so many atoms a step costs mostly its overhead: no smaller share is made on purpose.
SMALL_SHARE = 1_000

#: A gang is handed so many times what it has room for, so that it refills inside a segment without asking.
HAND_OUT = 1.5

#: A gang takes more in when less than this part of its aim is aboard.
REFILL_BELOW = 0.5


@dataclass(frozen=True)
class Load:
    """A stage at one moment.

    Args:
        waiting: atoms of the tickets that wait.
        aboard: atoms aboard all of its gangs.
        servers: gangs between which the work is shared: those at work and those that ranks could come free for.
    """

    waiting: int
    aboard: int
    servers: int


def aim(load: Load, max_atoms: float) -> float:
    """How many atoms one gang that has room for `max_atoms` should have aboard or at hand."""
    most = HAND_OUT * max_atoms
    if load.servers == 1:
        return most
    even = (load.waiting + load.aboard) / load.servers
    return min(most, max(even / 2, SMALL_SHARE))


def room(load: Load, aboard: int, max_atoms: float) -> float:
    """How many atoms a gang that has `aboard` (or at hand) should take in now; 0 for none.

    A gang that is nearly empty refills to its aim; one that is half full waits, so that others find work. Where there
    is enough for all, it refills as soon as it has nothing at hand.
    """
    goal = aim(load, max_atoms)
    if aboard and load.servers > 1 and aboard > (max_atoms if goal > max_atoms else REFILL_BELOW * goal):
        return 0.0
    return max(0.0, goal - aboard)


def checkpoint_is_due(now: float, last: float, every: float, started: float) -> bool:
    """Whether the coming segment should end in a checkpoint.

    A gang's first checkpoint comes early (a tenth of the period), as its systems may be long under way already in
    nobody's file but their stage's input.
    """
    return now - max(last, started) >= (every if last > started else every / 10)


def estimate(done: int, total: int, seconds: float) -> float:
    """Seconds until the rest of `total` visits has ended, at the rate so far; NaN when nothing has yet."""
    if done <= 0 or seconds <= 0:
        return math.nan
    return (total - done) * seconds / done


__all__ = ["Load", "aim", "checkpoint_is_due", "estimate", "room"]
