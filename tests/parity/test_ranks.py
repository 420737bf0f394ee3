"""Lennard-Jones systems on one to eight ranks give one answer: shapes, grids and company that the table leaves out."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from parity import cases
from parity.journey import travel

TOLERANCE = 1e-9


def go(mesh, names, ensemble, steps=100, grid=None, split_atoms=30):
    return travel(
        mesh,
        cases.model(),
        cases.batch(list(names)),
        cases.propagator(ensemble),
        steps=steps,
        grid=grid,
        split_atoms=split_atoms,
        skin=cases.SKIN,
    )


@functools.cache
def alone(names, ensemble):
    return go(None, names, ensemble)[0]


def check(ranks, names, ensemble, size, **kwargs):
    results = ranks.run(go, size, tuple(names), ensemble, **kwargs)
    found = cases.differences(results[0][0], alone(tuple(names), ensemble))
    assert max(found.values()) < TOLERANCE, found
    return [seen for _, seen in results]


ONE_SYSTEM = [
    # shape, ensemble, ranks, grid (None: as chosen)
    ("cubic", "langevin", 2, None),
    ("cubic", "nve", 8, (4, 2, 1)),
    ("triclinic", "nve", 2, None),
    ("triclinic", "langevin", 3, (3, 1, 1)),
    ("skewed", "nve", 2, (1, 2, 1)),
    ("skewed", "langevin", 2, (1, 1, 2)),
    ("slab", "nve", 3, (1, 1, 3)),
    ("wrapped_slab", "nve", 2, None),
    ("wrapped_slab", "langevin", 3, (1, 1, 3)),
    ("wrapped_slab", "nve", 8, (2, 2, 2)),
    ("wire", "nve", 8, (2, 1, 4)),
    ("cluster", "nve", 8, (8, 1, 1)),
    ("thin", "langevin", 4, (2, 2, 1)),
    ("far", "nve", 2, None),
    ("far", "langevin", 4, None),
    ("far", "nve", 8, (3, 2, 1)),
    ("tiny", "nve", 2, (2, 1, 1)),
    ("few", "langevin", 3, None),
]


@pytest.mark.parametrize(("shape", "ensemble", "size", "grid"), ONE_SYSTEM)
def test_one_system(ranks, shape, ensemble, size, grid):
    seen = check(ranks, [shape], ensemble, size, grid=grid)
    if grid is not None and shape != "tiny":
        assert seen[0].grids[shape] == grid
    if shape in ("cubic", "far", "triclinic"):
        assert seen[0].rebuilds > 2, "atoms never moved far enough to test migration"
        assert any(s.came for s in seen), "no atom ever changed its rank"


@pytest.mark.parametrize(("ensemble", "size"), [("nve", 2), ("langevin", 3), ("nve", 4), ("langevin", 8)])
def test_several_systems(ranks, size, ensemble):
    names = ["few", "cubic", "tiny", "slab", "cluster", "triclinic"]
    seen = check(ranks, names, ensemble, size, split_atoms=60)
    assert any(np.prod(g) > 1 for g in seen[0].grids.values())
    assert any(np.prod(g) == 1 for g in seen[0].grids.values())


def test_four_ranks_for_a_system_that_fits_one(ranks):
    """A tiny cell on four ranks, of which three can only watch."""
    seen = check(ranks, ["tiny"], "nve", 4, grid=(2, 2, 1))
    assert sorted(max(s.owned) for s in seen) == [0, 0, 0, 4]
