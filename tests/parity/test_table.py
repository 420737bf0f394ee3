"""The parity table: a sample in which any two of its values meet, and, marked `parity`, the whole of it.

The whole takes long. With MATTERMILL_PARITY_LOG=FILE rows that pass are noted there, and skipped the next time while
the sources stay as they are: so it can be interrupted, and spread over sittings.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from parity import table
from parity.table import Case

STEPS = 100


def check(ranks, case: Case) -> None:
    if case.ranks == 1:
        results = [(table.undivided(case, STEPS), None)]
    else:
        results = ranks.run(table.run, case.ranks, case, STEPS, timeout=280)
    found = table.compare(results[0][0], case, STEPS)
    assert max(found.values()) < table.TOLERANCES[case.dtype], found


@pytest.mark.parametrize("case", table.sample(), ids=lambda c: c.name)
def test_sample(ranks, case):
    check(ranks, case)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("case", table.whole(), ids=lambda c: c.name)
def test_whole(ranks, case):
    log = os.environ.get("MATTERMILL_PARITY_LOG")
    if log and case.name in passed(log):
        pytest.skip("passed before, by the same sources")
    check(ranks, case)
    if log:
        with Path(log).open("a") as file:
            file.write(f"{sources()} {case.name}\n")


@functools.cache
def passed(log: str) -> frozenset[str]:
    """Rows that the present sources have passed before."""
    lines = Path(log).read_text().splitlines() if Path(log).exists() else []
    noted = (line.partition(" ") for line in lines)
    return frozenset(name for digest, _, name in noted if digest == sources())


@functools.cache
def sources() -> str:
    """A digest of all that a row depends on."""
    tests = Path(__file__).resolve().parents[1]
    files = [f for folder in ("domain", "stages") for f in sorted((tests.parent / folder).rglob("*.py"))]
    files += [*sorted(tests.glob("parity/*.py")), tests / "message_passing.py", tests / "dense.py"]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


# --- the table itself ----------------------------------------------------------------------------------------------


def test_the_sample_is_small_and_of_the_table():
    rows = table.sample()
    assert set(rows) <= set(table.whole())
    assert len(table.whole()) == len(table.MODELS) * len(table.ENSEMBLES) * 7 * 5 * 2 * 2
    assert len(rows) <= 45


def test_a_noted_row_counts_for_these_sources_only(tmp_path):
    log = tmp_path / "log"
    log.write_text(f"{sources()} one\n0123456789abcdef two\n")
    assert passed(str(log)) == {"one"}


def layouts(mesh, chosen):
    """How these rows' systems lie on the ranks at the start."""
    return {case: table.run(mesh, case, 1)[1] for case in chosen}


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_systems_are_divided(ranks, size):
    """In at least three shapes of every model the system under test lies on all ranks."""
    chosen = [Case(model, "nve", shape, 1, "float64", size) for model in table.MODELS for shape in table.SHAPES]
    seen = ranks.run(layouts, size, chosen)
    full: collections.Counter[str] = collections.Counter()
    for case in chosen:
        grid = seen[0][case].grids[case.shape]
        owned = [one[case].owned[0] for one in seen]
        full[case.model] += np.prod(grid) == size and min(owned) > 0
    assert min(full[model] for model in table.MODELS) >= 3, full
    if size == 8:
        grids = {one.grids[case.shape] for case, one in seen[0].items()}
        assert (2, 2, 2) in grids
        assert (1, 1, 8) in grids
