"""Pairwise covering samples: few rows of a large table in which every two values of different factors meet.

Greedy, as in D. M. Cohen, S. R. Dalal, M. L. Fredman & G. C. Patton, IEEE Trans. Softw. Eng. 23, 437 (1997), without
its random choices: the same table always gives the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

Pair = tuple[tuple[int, Hashable], tuple[int, Hashable]]


def pairs_of(row: Sequence[Hashable]) -> set[Pair]:
    """All pairs of (factor, value) in a row."""
    return set(itertools.combinations(enumerate(row), 2))  # type: ignore[arg-type]


def covering(*factors: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    """Rows such that each pair of values of two factors stands in at least one; deterministic.

    Args:
        factors: the values of each factor, at least two factors of at least one value each.
    """
    places = [[(k, value) for value in values] for k, values in enumerate(factors)]
    wanted = {pair: None for a, b in itertools.combinations(places, 2) for pair in itertools.product(a, b)}
    used = {place: 0 for one in places for place in one}
    rows = []
    while wanted:
        row: dict[int, Hashable] = dict(next(iter(wanted)))
        # Factors of many values first: they have the most to cover.
        for k in sorted(range(len(factors)), key=lambda k: (-len(factors[k]), k)):
            if k in row:
                continue
            # Most new pairs wins; then the value that was used least.
            row[k] = max(places[k], key=lambda p: (_gain(p, row, wanted), -used[p]))[1]
        rows.append(tuple(row[k] for k in range(len(factors))))
        for place in row.items():
            used[place] += 1
        for pair in pairs_of(rows[-1]):
            wanted.pop(pair, None)
    return rows


def _gain(place: tuple[int, Hashable], row: dict[int, Hashable], wanted: dict[Pair, None]) -> int:
    """How many wanted pairs a value makes with those that are in the row already."""
    return sum(((place, other) if place[0] < other[0] else (other, place)) in wanted for other in row.items())
