"""Models whose ghosts feel forces: folded onto the atoms they are images of, and home to their owners."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from parity import cases

import mattermill as mm
from mattermill.domain.models import Model, ModelOutput


@dataclass(frozen=True)
class Morse(Model):
    """A Morse pair energy over the half list; forces by autograd stand on owned atoms and on ghosts alike.

    Each pair stands once over all ranks: its whole energy is given here, half to either end, wherever that lives.
    """

    cutoff: float = 6.0
    dtype: torch.dtype = torch.float64
    pairs = "half"

    @property
    def species(self):
        return frozenset({18, 36})

    def identity(self):
        return {"name": "test-morse"}

    def compute(self, nb, *, energy=True, stress=True):
        y = nb.positions.clone().requires_grad_(True)
        count, first, node = nb.count.long(), nb.first.long(), nb.node.long()
        i = torch.repeat_interleave(torch.arange(nb.n_nodes), count)
        j = nb.neighbors.long()[first[i] + torch.arange(len(i)) - (torch.cumsum(count, 0) - count)[i]]
        r = y[j] - y[i]
        d = r.norm(dim=1)
        fade = (1 - (d / self.cutoff) ** 2).clamp(min=0.0) ** 3
        unlike = torch.where(nb.numbers[i] == nb.numbers[j], 1.0, 1.3)
        pair = unlike * fade * 0.01 * ((1 - torch.exp(-1.4 * (d - 3.8))) ** 2 - 1)
        by_y, by_r = torch.autograd.grad(pair.sum(), [y, r])
        forces = torch.zeros((nb.n_nodes, 3), dtype=torch.float64).index_add_(0, node, -by_y)
        half = 0.5 * pair.detach()
        energies = torch.zeros(nb.n_nodes, dtype=torch.float64).index_add_(0, i, half).index_add_(0, node[j], half)
        products = (r.detach()[:, :, None] * by_r[:, None, :]).reshape(-1, 9)
        virial = torch.zeros((nb.n_systems, 9), dtype=torch.float64)
        virial.index_add_(0, nb.node_system.long()[i], -products)
        return ModelOutput(forces, energies, virial.reshape(-1, 3, 3))


def folded(mesh, names, grid, steps):
    kwargs = {"skin": cases.SKIN, "grid": grid, "split_atoms": 30}
    with mm.DomainParallel(Morse(), cases.propagator("nve"), mesh, **kwargs) as runner:
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
            with mm.DomainParallel(Morse(), cases.propagator("nve"), skin=cases.SKIN) as runner:
                runner.partition(moved)
                energies.append(float(runner.gather().energy))
        slope = (energies[0] - energies[1]) / (2 * step)
        assert float(whole.forces[atom, axis]) == pytest.approx(-slope, abs=1e-8)


@pytest.mark.parametrize(
    ("size", "grid"), [(2, (2, 1, 1)), (2, (1, 1, 2)), (3, (3, 1, 1)), (4, (2, 2, 1)), (8, (2, 2, 2))]
)
def test_folded_forces_are_those_of_one_rank(ranks, size, grid):
    names = ["cubic", "slab"] if grid[2] == 1 else ["cubic"]
    expected = folded(None, names, None, 30)
    found = cases.differences(ranks.run(folded, size, names, grid, 30)[0], expected)
    assert max(found.values()) < 1e-9, found
    # What a ghost feels is felt by somebody.
    assert float(expected.forces.sum(dim=0).abs().max()) < 1e-10


def _without_fold(mesh, names, grid, steps):
    from mattermill.domain.exchange import Exchange

    kept = Exchange.finish_fold
    Exchange.finish_fold = lambda self, forces, energies: self.mesh.finish()
    try:
        return folded(mesh, names, grid, steps)
    finally:
        Exchange.finish_fold = kept


def test_a_skipped_fold_turns_it_red(ranks):
    expected = folded(None, ["cubic"], None, 30)
    got = ranks.run(_without_fold, 2, ["cubic"], (2, 1, 1), 30)[0]
    assert cases.worst(got, expected, "forces") > 1e-6
