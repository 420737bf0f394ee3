"""Models whose ghosts feel forces: folded onto the atoms they are images of, and home to their owners."""

from __future__ import annotations

import pytest
import torch
from parity import cases

import mattermill as mm
from mattermill.domain.models import ModelOutput


class Autograd:
    """A Morse pair energy, half of it at each rank for a pair across a cut; forces -dE/dy, ghosts included."""

    cutoff, hops, dtype, folds_ghosts = 6.0, 1, torch.float64, True
    species = frozenset({18, 36})

    def identity(self):
        return {"name": "test-morse"}

    def compute(self, nb, *, energy=True, stress=True):
        y = nb.positions.clone().requires_grad_(True)
        count, first = nb.count.long(), nb.first.long()
        i = torch.repeat_interleave(torch.arange(nb.n_owned), count)
        j = nb.neighbors.long()[first[i] + torch.arange(len(i)) - (torch.cumsum(count, 0) - count)[i]]
        r = y[j] - y[i]
        d = r.norm(dim=1)
        inside = (d < self.cutoff).double() * (1 - (d / self.cutoff) ** 2) ** 3
        remote = nb.home[j] < 0
        pair = torch.where(remote, 0.5, 1.0) * inside * 0.01 * ((1 - torch.exp(-1.4 * (d - 3.8))) ** 2 - 1)
        total = pair.sum()
        forces = -torch.autograd.grad(total, y)[0]
        energies = torch.zeros(nb.n_owned, dtype=torch.float64)
        mine = pair.detach()
        energies.index_add_(0, i, torch.where(remote, mine, 0.5 * mine))
        local = ~remote
        energies.index_add_(0, nb.home.long()[j[local]], 0.5 * mine[local])
        return ModelOutput(forces, energies, torch.zeros(nb.n_systems, 3, 3, dtype=torch.float64))


def folded(mesh, names, grid, steps):
    kwargs = {"skin": cases.SKIN, "grid": grid, "split_atoms": 30}
    with mm.DomainParallel(Autograd(), cases.propagator("nve"), mesh, **kwargs) as runner:
        runner.partition(cases.batch(names) if runner.mesh.is_lead else None)
        runner.run(steps)
        return runner.gather()


def test_forces_are_minus_the_gradient_of_the_energy():
    """On one rank: a cell smaller than the cutoff, where an atom has several images; finite differences."""
    batch = cases.batch(["tiny"])
    whole = folded(None, ["tiny"], None, 0)
    step = 1e-5
    for atom, axis in ((0, 0), (2, 1), (3, 2)):
        energies = []
        for sign in (1.0, -1.0):
            moved = batch.clone()
            moved.positions[atom, axis] += sign * step
            with mm.DomainParallel(Autograd(), cases.propagator("nve"), skin=cases.SKIN) as runner:
                runner.partition(moved)
                energies.append(float(runner.gather().energy))
        slope = (energies[0] - energies[1]) / (2 * step)
        assert float(whole.forces[atom, axis]) == pytest.approx(-slope, abs=1e-8)


@pytest.mark.parametrize(("size", "grid"), [(2, (2, 1, 1)), (2, (1, 1, 2)), (4, (2, 2, 1))])
def test_folded_forces_are_those_of_one_rank(ranks, size, grid):
    names = ["cubic", "slab"] if grid[2] == 1 else ["cubic"]
    expected = folded(None, names, None, 30)
    found = cases.differences(ranks.run(folded, size, names, grid, 30)[0], expected)
    assert max(found.values()) < 1e-9, found


def _without_fold(mesh, names, grid, steps):
    from mattermill.domain.exchange import Exchange

    kept = Exchange.fold
    Exchange.fold = lambda self, forces: forces
    try:
        return folded(mesh, names, grid, steps)
    finally:
        Exchange.fold = kept


def test_a_skipped_fold_turns_it_red(ranks):
    expected = folded(None, ["cubic"], None, 30)
    got = ranks.run(_without_fold, 2, ["cubic"], (2, 1, 1), 30)[0]
    assert cases.worst(got, expected, "forces") > 1e-6
