"""Cases that broke other codes, 12: ghosts dominate memory. Planned for before anything is allocated, on every rank."""

from __future__ import annotations

import re

import pytest
import torch
from brute import crystal, start
from message_passing import MessagePassing

import mattermill as mm

REFUSAL = re.compile(
    r"needs about ([\d.]+) (MiB|GiB) on .*\(([\d,]+) own atoms and ([\d,]+) ghosts\), .* are allowed: (.*)"
)


def deep(kind="refresh"):
    """Four layers: a domain sees 14.4 Å of ghosts if ghosts compute their own features, 3.6 Å if owners send them."""
    return MessagePassing(kind=kind, hops=4, cutoff=3.6)


def _admitted(mesh, batch, strategy, memory, grid=None):
    """The grid, forces on the lead; or what was said, after which the mesh and who is aboard must be whole."""
    small = start(crystal((3, 2, 2), seed=4), "small")
    options = {"split_atoms": 20, "skin": 0.5, "strategy": strategy, "memory": memory, "grid": grid}
    with mm.DomainParallel(deep(), mm.NVE().propagator(), mesh, **options) as runner:
        lead = runner.mesh.is_lead
        runner.admit(small if lead else None)
        try:
            runner.admit(batch if lead else None)
        except ValueError as error:
            runner.run(2)
            return str(error), runner.ids
        runner.run(2)
        return runner.grids["system"], runner.gather()


def megabytes(text):
    size, unit, owned, ghosts, remedy = REFUSAL.search(text).groups()
    return (
        float(size) * (1024 if unit == "GiB" else 1),
        int(owned.replace(",", "")),
        int(ghosts.replace(",", "")),
        remedy,
    )


def test_case_12_ghosts_that_do_not_fit_are_refused_with_numbers(ranks):
    """Deep message passing on four ranks: the ghosts are most of it, all ranks say so alike, and whoever is aboard
    goes on; with features from their owners it fits in the same memory."""
    batch = start(crystal((16, 4, 4), spacing=3.8, seed=1), dt=0.5)
    grid, tight = (4, 1, 1), 1.2 * 2**20
    refused = ranks.run(_admitted, 4, batch, "wide", tight, grid)
    for text, ids in refused:
        assert text == refused[0][0]
        assert "'system'" in text
        assert ids == ("small",)
    wide, owned, ghosts, remedy = megabytes(refused[0][0])
    assert ghosts > owned, "ghosts do not dominate: the case was not met"
    assert "strategy='refresh'" in remedy
    # A quarter of 60.8 Å and its atoms; 14.9 Å of ghosts on either side.
    assert owned == pytest.approx(64, rel=0.3)
    assert ghosts == pytest.approx(64 * 2 * 14.9 / 15.2, rel=0.3)
    assert wide > 1.2
    used, got = ranks.run(_admitted, 4, batch, "refresh", tight, grid)[0]
    assert used == grid
    expected = _admitted(None, batch, "refresh", None)[1]
    got, expected = got.select(["system"]), expected.select(["system"])
    torch.testing.assert_close(got.forces, expected.forces, rtol=1e-9, atol=1e-9)
