"""The sample of the parity table misses no pair of values, and is small."""

from __future__ import annotations

import itertools

import pytest
from parity.covering import covering, pairs_of

TABLES = [
    ((1, 2), (1, 2)),
    ((1, 2), (1, 2), (1, 2)),
    (("a", "b", "c"), (None,), (0.5, 1.5)),
    (range(7), range(5), range(5), range(3), range(2), range(2)),
    (range(3),) * 13,
]


@pytest.mark.parametrize("factors", TABLES, ids=lambda f: "x".join(str(len(v)) for v in f))
def test_every_pair_is_there(factors):
    rows = covering(*factors)
    wanted = {
        pair
        for (a, b) in itertools.combinations(range(len(factors)), 2)
        for pair in itertools.product([(a, v) for v in factors[a]], [(b, v) for v in factors[b]])
    }
    assert set().union(*map(pairs_of, rows)) == wanted
    assert len(rows) == len(set(rows))
    # No fewer than the two largest factors need, and not many more.
    least = len(max(factors, key=len)) * sorted(len(f) for f in factors)[-2]
    assert least <= len(rows) <= 1.4 * least + 12
    assert rows == covering(*factors)
