"""The answer is a function of state: the same bits in any company and however often a run was interrupted."""

from __future__ import annotations

import functools

import pytest
import torch
from parity import cases

import mattermill as mm
from mattermill.domain.batch import Batch

STEPS = 60


def _runner(mesh, ensemble):
    return mm.DomainParallel(cases.model(), cases.propagator(ensemble), mesh, skin=cases.SKIN, split_atoms=100)


def _same(got: Batch, expected: Batch) -> None:
    """Every field of every system, to the last bit."""
    for one in expected:
        other = got.select([one.ids[0]])
        for name in (*one.atoms, *one.systems):
            a, b = getattr(other, name), getattr(one, name)
            assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), (one.ids[0], name)


def whole(mesh, names, ensemble, steps=STEPS):
    """Uninterrupted, in one batch."""
    with _runner(mesh, ensemble) as runner:
        runner.partition(cases.batch(names) if runner.mesh.is_lead else None)
        runner.run(steps)
        return runner.gather(), runner.rebuilds


def interrupted(mesh, names, ensemble, at, company):
    """Killed after each of some numbers of steps; resumed each time in other company and another order."""
    batch, done = cases.batch(names), 0
    for k, stop in enumerate((*at, STEPS)):
        with _runner(mesh, ensemble) as runner:
            lead = runner.mesh.is_lead
            if k % 2:
                # Strangers are half way when the system comes aboard, and leave before it does.
                runner.partition(cases.batch(company) if lead else None)
                runner.run(3)
            runner.admit(batch.select(list(reversed(batch.ids))) if lead else None)
            assert runner.ids[-1] == names[0]
            runner.run((stop - done) // 2)
            if k % 2:
                runner.release(company[:1])
            runner.run(stop - done - (stop - done) // 2)
            done = stop
            # A checkpoint: what a process would find on disk.
            batch = runner.mesh.broadcast_object(runner.gather(names))
    return batch


@functools.cache
def _whole_alone(names, ensemble):
    return whole(None, list(names), ensemble)


@pytest.mark.parametrize("ensemble", ["nve", "langevin"])
def test_interruption_on_one_rank(ensemble):
    names = ["cubic", "slab", "tiny"]
    expected, rebuilds = _whole_alone(tuple(names), ensemble)
    assert rebuilds > 3
    # One by one, so that some interruption falls between two rebuilds of every system.
    _same(interrupted(None, names, ensemble, (1, 17, 30, 31, 44), ["wire", "few"]), expected)


@pytest.mark.parametrize("size", [2, 4])
def test_interruption_on_several_ranks(ranks, size):
    names = ["cubic", "slab", "tiny"]
    expected = ranks.run(whole, size, names, "langevin")[0][0]
    got = ranks.run(interrupted, size, names, "langevin", (13, 30), ["wire", "few"])[0]
    _same(got, expected)


def test_company_on_one_rank():
    expected = _whole_alone(("cubic", "slab", "tiny"), "nve")[0]
    for name in ("cubic", "slab", "tiny"):
        _same(expected, cases_alone(name))


def cases_alone(name):
    # Parameters differ by place in the batch: take the system out of the same one.
    with _runner(None, "nve") as runner:
        runner.partition(cases.batch(["cubic", "slab", "tiny"]).select([name]))
        runner.run(STEPS)
        return runner.gather()


def _refilled(mesh):
    """Two slots, five systems: as one leaves the next comes aboard; each makes 20 steps."""
    names = ["few", "cubic", "tiny", "slab", "wire"]
    waiting = cases.batch(names).split()
    finished = []
    with _runner(mesh, "nve") as runner:
        lead = runner.mesh.is_lead
        for batch in waiting[:2]:
            runner.admit(batch if lead else None)
            runner.run(5)
        waiting = waiting[2:]
        while runner.ids:
            runner.step()
            done = [i for i, n in zip(runner.ids, runner.state.batch.step.tolist(), strict=True) if n == 20]
            if done:
                finished.append(runner.release(done))
                for batch in waiting[: len(done)]:
                    runner.admit(batch if lead else None)
                waiting = waiting[len(done) :]
    return Batch.concat([b for b in finished if b]) if lead else None


def _solo(name):
    with _runner(None, "nve") as runner:
        runner.partition(cases.batch(["few", "cubic", "tiny", "slab", "wire"]).select([name]))
        runner.run(20)
        return runner.gather()


def test_refill_while_others_are_half_way():
    got = _refilled(None)
    assert sorted(got.ids) == ["cubic", "few", "slab", "tiny", "wire"]
    for name in got.ids:
        _same(got, _solo(name))


def test_refill_on_two_ranks(ranks):
    got = ranks.run(_refilled, 2)[0]
    assert sorted(got.ids) == ["cubic", "few", "slab", "tiny", "wire"]
    for name in got.ids:
        expected = _solo(name)
        found = {n: cases.worst(got.select([name]), expected, n) for n in cases.COMPARED}
        assert max(found.values()) < 1e-9, (name, found)


@pytest.mark.parametrize("wire", ["gloo", "local"])
def test_the_wire_does_not_matter(ranks, wire):
    expected = ranks.run(whole, 2, ["cubic"], "nve", 20)[0][0]
    _same(ranks.run(whole, 2, ["cubic"], "nve", 20, wire=wire)[0][0], expected)
