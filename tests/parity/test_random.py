"""Boxes, places and velocities that nobody would think of: split still equals undivided.

Boxes are triclinic and thin, axes periodic or not; atoms sit on faces, edges and corners (0, L, L - ε, either side of
round-off), several cells away, and cross a domain, or the whole cell, in one step. Atoms keep their distances: each
moves by the same vector but for whole lattice vectors and a little noise, so that no step is a collision.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.units import fs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import cases, table
from parity.journey import travel

from mattermill.stages.integrators.verlet import VelocityVerlet

STEPS = 4
#: fs; the batch's `timestep`, see `cases.with_fields`
TIMESTEP = 4.0
#: what an atom on the face of a cell may have as its fractional coordinate
FACES = (0.0, -0.0, 1.0, np.nextafter(1.0, 0.0), np.nextafter(1.0, 2.0), -1e-17, 1e-17, 1.0 - 1e-12, -5e-13)


@st.composite
def structures(draw, spacing):
    """A sheared lattice of that spacing, Å, with all that can be odd about it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    repeat = np.array(
        draw(st.sampled_from([(6, 2, 2), (4, 4, 1), (3, 3, 3), (8, 1, 2), (1, 7, 3), (2, 1, 9), (5, 2, 3)]))
    )
    pbc = np.array(draw(st.tuples(st.booleans(), st.booleans(), st.booleans())))
    cell = np.diag(repeat * spacing * draw(st.floats(0.97, 1.1)))
    shears = draw(st.tuples(*[st.sampled_from([0.0, 0.3, -0.5, 0.9, -1.2])] * 3))
    cell[1, 0], cell[2, 0], cell[2, 1] = shears[0] * cell[0, 0], shears[1] * cell[0, 0], shears[2] * cell[1, 1]
    places = np.stack(np.meshgrid(*[np.arange(n) for n in repeat], indexing="ij"), axis=-1).reshape(-1, 3)
    fractional = places / repeat
    jitter = draw(st.sampled_from([0.0, 0.04]))
    fractional = fractional + rng.normal(scale=jitter, size=fractional.shape) / repeat
    # Atoms of the first layers sit exactly on faces, edges and corners: here, there, or a hair beside.
    on_face = (places == 0) & (rng.random(places.shape) < draw(st.sampled_from([0.0, 0.7, 1.0])))
    # A face that is not periodic has no other side: 0 and 1 are a whole cell apart there.
    beside = np.where(pbc, rng.choice(FACES, size=places.shape), rng.choice([0.0, -1e-17, 1e-17], size=places.shape))
    fractional = np.where(on_face, beside, fractional)
    cells_away = draw(st.sampled_from([0, 0, 1, 3]))
    fractional = fractional + np.where(pbc, rng.integers(-cells_away, cells_away + 1, size=places.shape), 0)
    jumps = draw(st.sampled_from([0, 0, 1, 2]))
    leaps = np.where(pbc, rng.integers(-jumps, jumps + 1, size=places.shape), 0) @ cell
    drift = np.array(draw(st.tuples(*[st.sampled_from([0.0, 0.01, 2.3, -9.7])] * 3)))
    velocities = (leaps + drift) / TIMESTEP + rng.normal(scale=2e-3, size=places.shape)
    numbers = np.where(rng.random(len(places)) < 0.4, 36, 18)
    atoms = Atoms(numbers, fractional @ cell, cell=cell, pbc=pbc)
    atoms.set_velocities(velocities / fs)
    return atoms


def few_steps(mesh, name, atoms, grid):
    kind = table.MODELS[name]
    whole = cases.with_fields({"drawn": atoms})
    model = kind.make(torch.float64)
    return travel(
        mesh,
        model,
        whole,
        VelocityVerlet(),
        steps=STEPS,
        strategy=kind.strategy,
        skin=kind.skin,
        grid=grid,
        split_atoms=4,
    )


GRIDS = {2: (None, (2, 1, 1), (1, 1, 2)), 3: (None, (1, 3, 1)), 4: (None, (2, 2, 1), (1, 1, 4))}


def drawn(examples):
    """How the examples of a test are drawn: always the same ones."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def check(ranks, name, data):
    atoms = data.draw(structures(3.9 if name.startswith("lj") else 3.1))
    size = data.draw(st.sampled_from([2, 3, 4]))
    grid = data.draw(st.sampled_from(GRIDS[size]))
    expected, _ = few_steps(None, name, atoms, None)
    got, seen = ranks.run(few_steps, size, name, atoms, grid)[0]
    found = cases.differences(got, expected)
    assert max(found.values()) < 1e-9, (seen.grids, found)


@given(data=st.data())
@drawn(60)
def test_lennard_jones(ranks, data):
    check(ranks, "lj-switch", data)


@pytest.mark.parametrize("name", ["mp-wide", "mp-refresh", "mp-graph"])
def test_message_passing(ranks, name):
    @given(data=st.data())
    @drawn(20)
    def examples(data):
        check(ranks, name, data)

    examples()
