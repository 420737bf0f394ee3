"""Residents: what the log says about their grids, and that a system in motion is balanced anew at every rebuild."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from ase import Atoms

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.domain.resident import Resident, Splitting, build_lists, lay_out
from mattermill.domain.runner import DomainParallel
from mattermill.domain.strategy import strategy_for
from mattermill.stages.integrators.verlet import VelocityVerlet

EYE = np.eye(3)


# --- what the log says ------------------------------------------------------------------------------------------


def _said(caplog, cell, n, size, reach, grid=None, forced=None, ghosts=False):
    """What is logged about a system on so many ranks, twice the same rebuild."""
    model = mm.models.noble_gases(cutoff=reach - 0.6, truncation="switch")
    strategy = strategy_for(model, 0.6)
    if ghosts:
        strategy = dataclasses.replace(strategy, name="wide", pairs="full", receivers=strategy.margin)
    splitting = Splitting(size, strategy, 100, grid)
    resident = Resident(
        "argon", np.arange(n), np.full(n, 18, dtype=np.int32), np.ones(3, dtype=bool), np.arange(n),
        tuple(range(size)), splitting.divisible(n) and forced != (1, 1, 1), np.zeros(n, dtype=np.int32), forced=forced,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, logger="mattermill"):
        for _ in range(2):
            layout = lay_out(resident, np.random.default_rng(0).random((n, 3)) @ cell, cell, splitting)
            resident.owners = layout.domains
            build_lists(resident, layout, splitting, 0)
    return [(r.levelname, r.getMessage()) for r in caplog.records]


def test_the_log_says_why_fewer_ranks_work(caplog):
    assert _said(caplog, 12.0 * EYE, 200, 2, 6.6) == [
        (
            "INFO",
            "system 'argon' uses 1 of 2 ranks, grid (1, 1, 1): domains must be at least 6.6 Å thick "
            "(pairs: cutoff 6 Å + skin 0.6 Å), its cell is 12 x 12 x 12 Å",
        )
    ]


def test_a_forced_grid_that_is_reduced_is_a_warning(caplog):
    (found,) = _said(caplog, np.diag([30.0, 12, 12]), 400, 8, 6.6, grid=(4, 2, 1))
    assert found[0] == "WARNING"
    assert "uses 4 of 8 ranks, grid (4, 1, 1): domains must be at least 6.6 Å thick" in found[1]


def test_the_log_says_that_more_would_not_pay(caplog):
    (found,) = _said(caplog, 30.0 * EYE, 900, 8, 7.0, ghosts=True)
    assert "ranks, grid" in found[1]
    assert "with more of them each would do more work on ghosts than they take off it" in found[1]


def test_the_log_says_that_memory_decided(caplog):
    assert _said(caplog, 40.0 * EYE, 900, 8, 6.6, forced=(2, 1, 1)) == [
        ("INFO", "system 'argon' is divided (2, 1, 1) so that it fits into memory")
    ]


def test_a_system_that_stays_whole_for_memory_is_told(caplog):
    """Two ranks would do less work each, if what they see of each other fitted."""
    assert _said(caplog, 30.0 * EYE, 400, 2, 6.6, forced=(1, 1, 1)) == [
        ("INFO", "system 'argon' stays whole so that it fits into memory")
    ]


def test_nothing_is_said_where_all_ranks_work(caplog):
    assert _said(caplog, 40.0 * EYE, 900, 4, 6.6) == []


# --- balance in a run -------------------------------------------------------------------------------------------

LENGTH = 70.0


def _droplet():
    """A hot droplet that flies apart and through the faces of its cell, 0.6 Å a step."""
    rng = np.random.default_rng(3)
    spots = 3.9 * np.stack(np.meshgrid(*[np.arange(-6, 7)] * 3), axis=-1).reshape(-1, 3)
    spots = spots[np.linalg.norm(spots, axis=1) < 17.5]
    atoms = Atoms(
        "Ar" * len(spots), spots + rng.normal(scale=0.05, size=spots.shape) + 10.0, cell=LENGTH * EYE, pbc=True
    )
    # ASE's unit of time is about 10 fs.
    atoms.set_velocities(10 * (rng.normal(scale=0.02, size=spots.shape) + np.array([0.15, 0.1, -0.08])))
    return Batch.from_atoms([atoms], ["droplet"]).with_fields(systems={"timestep": torch.tensor([4.0]).double()})


def _flown(mesh, steps):
    """Own atoms of this rank after every step."""
    model = mm.models.noble_gases(cutoff=6.0, truncation="switch")
    with DomainParallel(model, VelocityVerlet(), mesh, skin=1.5, split_atoms=50) as runner:
        runner.partition(_droplet() if mesh.is_lead else None)
        owned, held = [], set()
        for _ in range(steps):
            runner.step()
            owned.append(runner.state.n_owned)
            held |= set(runner.state.batch.atom_id.tolist())
        whole = runner.gather()
        return owned, len(held), runner.rebuilds, None if whole is None else whole.positions


@pytest.mark.parametrize("size", [4])
def test_a_droplet_in_flight_stays_balanced(ranks, size):
    done = ranks.run(_flown, size, 60)
    start, end = _droplet().positions, done[0][3]
    assert done[0][2] > 15, "it must have been divided anew many times"
    assert (end - start).mean(dim=0).abs().max() > 30, "it must have crossed a face"
    spread = (end - end.mean(dim=0)).norm(dim=1).max() / (start - start.mean(dim=0)).norm(dim=1).max()
    assert spread > 1.3, "it must have begun to fly apart"
    owned = np.array([rank[0] for rank in done])
    assert (owned.sum(axis=0) == len(start)).all()
    assert (owned.max(axis=0) <= 1.15 * owned.mean(axis=0)).all(), owned.max(axis=0) / owned.mean(axis=0)
    assert max(rank[1] for rank in done) > 1.05 * owned.max(), "atoms must have changed their rank"
