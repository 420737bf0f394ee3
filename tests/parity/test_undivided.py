"""The message-passing model itself: on one rank it is what brute force says, and it is hard to divide."""

from __future__ import annotations

import pickle

import dense
import numpy as np
import pytest
import torch
from ase import Atoms
from message_passing import MessagePassing
from parity import cases, shapes

import mattermill as mm
from mattermill.stages.integrators.still import Still


def run(model, structures, strategy):
    with mm.DomainParallel(model, Still(), strategy=strategy, skin=0.4) as runner:
        runner.partition(cases.with_fields(structures))
        return runner.gather()


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["wide", "refresh", "graph"])
def test_energies_forces_and_stress(kind, hops):
    model = MessagePassing(kind=kind, hops=hops)
    strategy = kind if hops > 1 else "auto"
    for one in run(model, {name: make(7.6) for name, make in shapes.SHAPES.items()}, strategy):
        found = dense.evaluate(
            dense.message_passing(model, one.numbers, one.pbc[0].numpy()), one.positions, one.cell[0]
        )
        assert cases.difference(one.energies, found.energies, "energies") < 1e-12
        assert cases.difference(one.forces, found.forces, "forces") < 1e-12
        size = torch.linalg.det(one.cell[0]).abs()
        if size > 0:
            assert cases.difference(one.stress[0], -found.virial / size, "stress") < 1e-11
        assert 1e-3 < float(found.forces.abs().max()) < 2.0


def test_single_precision():
    structures = {"cubic": shapes.cubic(0.0)}
    for kind in ("wide", "refresh", "graph"):
        expected = run(MessagePassing(kind=kind), structures, kind)
        got = run(MessagePassing(kind=kind, dtype=torch.float32), structures, kind)
        found = max(cases.differences(got, expected).values())
        assert 1e-9 < found < 1e-5


@pytest.mark.parametrize("hops", [2, 3, 4])
def test_energies_reach_as_far_as_hops_say(hops):
    """In a row of atoms each sees its neighbours only: what moves `hops` bonds away is felt, farther is not."""
    x = np.zeros((7, 3))
    x[:, 0] = 2.4 * np.arange(7)
    x[:, 1] = [0.0, 0.3, -0.2, 0.25, -0.3, 0.1, 0.2]

    def first(moved):
        y = x.copy()
        y[moved, 1] += 0.1
        atoms = Atoms("Ar7", y, pbc=False)
        return float(run(MessagePassing(kind="wide", hops=hops), {"row": atoms}, "wide").energies[0])

    still = first([])
    assert abs(first([hops]) - still) > 1e-9
    assert first([hops + 1]) == still


def test_directions_matter():
    """An angle changes the energy of its centre's neighbours though no distance within the cutoff does."""
    angles = {}
    for degrees in (180.0, 90.0):
        end = 3.0 * np.array([np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees)), 0.0])
        atoms = Atoms("ArArAr", [[3.0, 0, 0], [0, 0, 0], end], pbc=False)
        angles[degrees] = run(MessagePassing(hops=2), {"bend": atoms}, "wide").energies
    assert float((angles[180.0] - angles[90.0]).abs().max()) > 1e-6


def test_it_is_a_value():
    model = MessagePassing(kind="graph", hops=3)
    assert pickle.loads(pickle.dumps(model)) == model
    assert model != MessagePassing(kind="graph", hops=2)
    assert hash(model) == hash(MessagePassing(kind="graph", hops=3))
