"""Gradients of scalar losses, by weights and by positions, through every strategy: split equals undivided.

The losses live in a model of their own: what it hands the runner as forces is -d(loss)/d(positions), so that the
runner's own fold brings the gradients home; what is summed over ranks by weight it leaves on its `Desk`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import dense
import pytest
import torch
from message_passing import BASIS, WIDTH, MessagePassing, weights
from parity import cases, shapes

import mattermill as mm
from mattermill.domain.models import ModelOutput
from mattermill.stages.integrators.still import Still

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
#: eV/Å: directions, by species, along which forces are weighed
DIRECTIONS = torch.tensor([[0.7, -0.2, 0.4], [-0.5, 0.9, 0.3]], dtype=torch.float64)


class Desk(dict):
    """Where a model leaves what it found."""


@dataclass(frozen=True, kw_only=True)
class Loss(MessagePassing):
    """A loss of energies or forces in place of the energy.

    Args:
        loss: "energies": Σ E_i². "forces": Σ c(Z_i)·F_i. "squares": Σ F_i², whose forces are complete on their owners
            because positions themselves pass through a refresh (not in the wide strategy).
    """

    loss: str = "energies"
    desk: Desk = field(default_factory=Desk, hash=False, compare=False)

    def compute(self, nb: Any, *, energy: bool = True, stress: bool = True) -> ModelOutput:
        theta = weights(self.seed, self.hops).clone().requires_grad_(True)
        start = nb.positions[: nb.n_nodes].detach().clone()
        moves = torch.zeros_like(start).requires_grad_(True)
        x = start + (nb.refresh(moves) if self.loss == "squares" else moves)
        e, _, _ = self.energies(nb, x, theta)
        if self.loss == "energies":
            value = (e * e).sum()
        else:
            forces = -torch.autograd.grad(e.sum(), moves, create_graph=True)[0]
            if self.loss == "squares":
                value = (forces[: nb.n_owned] ** 2).sum()
            else:
                value = (DIRECTIONS[(nb.numbers[: nb.n_nodes] == 36).long()] * forces).sum()
        by_theta, by_x = torch.autograd.grad(value, [theta, moves])
        self.desk["theta"], self.desk["loss"] = by_theta.detach(), value.detach()
        zero = torch.zeros(len(nb.cells), 3, 3, dtype=torch.float64)
        return ModelOutput(-by_x.detach(), e.detach() if energy else None, zero if stress else None)


def batch_of(names):
    return cases.with_fields({name: shapes.SHAPES[name](0.0) for name in names})


def gradients(mesh, kind, loss, hops, names, grid):
    """The loss, its gradient by weights, and by positions in the order of arrival, over all ranks."""
    model = Loss(kind=kind, loss=loss, hops=hops)
    kwargs = {"strategy": kind, "skin": 0.4, "grid": grid, "split_atoms": 8}
    with mm.DomainParallel(model, Still(), mesh, **kwargs) as runner:
        runner.partition(batch_of(names) if runner.mesh.is_lead else None)
        theta = runner.mesh.sum(model.desk["theta"])
        value = runner.mesh.sum(model.desk["loss"][None])
        whole = runner.gather(fields=["forces"], refresh=False)
        return value, theta, None if whole is None else -whole.forces, runner.grids


@functools.cache
def undivided(loss, hops, names):
    """The same by brute force, system by system."""
    model = MessagePassing(hops=hops)
    value, theta, by_x = 0.0, 0.0, []
    for one in batch_of(names):
        t = weights(model.seed, hops).clone().requires_grad_(True)
        x = one.positions.clone().requires_grad_(True)
        e = dense.message_passing(model, one.numbers, one.pbc[0].numpy(), t)(x, one.cell[0])
        if loss == "energies":
            total = (e**2).sum()
        else:
            (slope,) = torch.autograd.grad(e.sum(), x, create_graph=True)
            if loss == "squares":
                total = (slope**2).sum()
            else:
                total = -torch.einsum("ix,ix->", DIRECTIONS[(one.numbers == 36).long()], slope)
        gt, gx = torch.autograd.grad(total, [t, x])
        value, theta = value + total.detach(), theta + gt
        by_x.append(gx)
    return value[None], theta, torch.cat(by_x)


def relative(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


LOSSES = [
    ("wide", "energies", 2),
    ("wide", "forces", 2),
    ("refresh", "energies", 3),
    ("refresh", "forces", 3),
    ("refresh", "squares", 2),
    ("graph", "energies", 2),
    ("graph", "forces", 3),
    ("graph", "squares", 4),
]


@pytest.mark.parametrize(("size", "grid"), [(1, None), (2, (2, 1, 1)), SLOW(3, (1, 3, 1)), (8, (2, 2, 2))])
@pytest.mark.parametrize(("kind", "loss", "hops"), LOSSES)
def test_gradients_of_a_loss(ranks, kind, loss, hops, size, grid):
    names = ("flake", "cubic", "few")
    results = ranks.run(gradients, size, kind, loss, hops, names, grid)
    expected = undivided(loss, hops, names)
    if size in (2, 8):
        assert results[0][3]["cubic"] == grid
    for got, want in zip(results[0][:3], expected, strict=True):
        assert relative(got, want) < 1e-10
    # Every weight matters, but for those of vectors in the first layer: there are none yet.
    assert int((expected[1] == 0).sum()) == 2 * BASIS * WIDTH


@dataclass(frozen=True, kw_only=True)
class OneWay(Loss):
    """Refreshes whose gradients do not go home."""

    def refreshed(self, nb, s, v, hop):
        s, v = super().refreshed(nb, s, v, hop)
        mine = torch.arange(len(s))[:, None] < nb.n_owned
        return torch.where(mine, s, s.detach()), torch.where(mine[:, :, None], v, v.detach())


def without_adjoint(mesh, kind, hops, names):
    model = OneWay(kind=kind, hops=hops)
    with mm.DomainParallel(model, Still(), mesh, strategy=kind, skin=0.4, grid=(2, 1, 1)) as runner:
        runner.partition(batch_of(names) if runner.mesh.is_lead else None)
        theta = runner.mesh.sum(model.desk["theta"])
        whole = runner.gather(fields=["forces"], refresh=False)
        return theta, None if whole is None else -whole.forces


@pytest.mark.parametrize("kind", ["refresh", "graph"])
def test_a_skipped_adjoint_turns_it_red(ranks, kind):
    _, theta, by_x = undivided("energies", 2, ("cubic",))
    got = ranks.run(without_adjoint, 2, kind, 2, ("cubic",))[0]
    assert relative(got[0], theta) > 1e-6
    assert relative(got[1], by_x) > 1e-6
