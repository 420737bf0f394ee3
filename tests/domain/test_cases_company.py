"""Cases that broke other codes: fields that must come through, systems that come and go.

Numbers are those of the project's list of cases; the rest are their siblings. The reference is brute force over all
images (`brute.py`), ASE, or the same thing done otherwise; each test can fail.
"""

from __future__ import annotations

import brute
import numpy as np
import pytest
import torch
from brute import crystal, start

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.stages.reporter import MemoryReporter
from mattermill.stages.run import StageRun

SKIN = 0.8


# --- 7: fields ----------------------------------------------------------------------------------------------------


def labelled(atoms, name):
    """Every field says which atom it belongs to."""
    batch = start(atoms, name, speed=0.02)
    n = batch.n_atoms
    identity = torch.arange(n, dtype=torch.float64)
    return batch.with_fields(
        atoms={
            "charge": torch.sin(identity),
            "spin": torch.stack([identity, -identity, identity**2], dim=1),
            "site": torch.arange(n, dtype=torch.int32) * 3,
            "fixed": torch.arange(n) % 5 == 0,
            "tensor": identity.reshape(n, 1, 1) * torch.arange(9, dtype=torch.float64).reshape(1, 3, 3),
        },
        systems={
            "total_charge": torch.tensor([float(n)], dtype=torch.float64),
            "field": torch.tensor([[0.1, 0.2, float(n)]], dtype=torch.float64),
            "kind": torch.tensor([n], dtype=torch.int64),
        },
        info=[{"origin": name, "list": [1, 2, {"a": n}]}],
    )


FIELDS = ("charge", "spin", "site", "fixed", "tensor")
PER_SYSTEM = ("total_charge", "field", "kind")


def assert_fields(batch, came):
    """All fields of all systems as they came, by atom id; nothing that was not there."""
    for single in came:
        got = batch.select(single.ids)
        assert got.info[0] == single.info[0]
        for name in PER_SYSTEM:
            assert torch.equal(getattr(got, name), getattr(single, name)), name
        assert torch.equal(got.atom_id, single.atom_id), "order after a gather is the order that came in"
        for name in (*FIELDS, "numbers", "masses"):
            assert getattr(got, name).dtype == getattr(single, name).dtype
            assert torch.equal(getattr(got, name), getattr(single, name)), name


def _through(mesh, batch, steps, stage):
    """Aboard, on the way, and as a checkpoint."""
    run = StageRun(stage, brute.model(), mesh, split_atoms=1, skin=SKIN)
    run.admit(batch if run.mesh.is_lead else None)
    seen = []
    moved = 0
    while run.runner.ids or not seen:
        own = run.runner.state.batch
        here = {i: s.atom_id.tolist() for i, s in zip(own.ids, own, strict=True)}
        for single in own:
            # Aboard a rank, in whatever order: each row still says whose it is.
            assert torch.equal(single.charge, torch.sin(single.atom_id.to(torch.float64)))
            assert torch.equal(single.site.to(torch.int64), 3 * single.atom_id)
            assert torch.equal(single.spin[:, 2], single.atom_id.to(torch.float64) ** 2)
        report = run.advance(steps=steps)
        after = {i: s.atom_id.tolist() for i, s in zip(run.runner.ids, run.runner.state.batch, strict=True)}
        moved += sum(here.get(i) != after[i] for i in after)
        seen.append(report.finished if report.idle else run.resident())
        if report.idle:
            break
    run.close()
    return seen, moved


def test_case_07_fields_survive_migration_gather_handoff_and_restart(ranks, tmp_path):
    from mattermill.pipeline.handoff import read_batch, write_batch

    came = Batch.concat([labelled(crystal((5, 4, 4), seed=1), "one"), labelled(crystal((4, 4, 5), seed=2), "two")])
    # The caller's order is not that of the ids.
    shuffled = []
    for single in came:
        order = torch.randperm(single.n_atoms, generator=torch.Generator().manual_seed(1))
        shuffled.append(single.with_fields(atoms={k: v[order] for k, v in single.atoms.items()}))
    came = Batch.concat(shuffled)
    stage = mm.Produce(mm.NVT(300, friction=50.0), steps=60, dt=4.0)
    results = ranks.run(_through, 3, came, 25, stage)
    assert all(moved > 0 for _, moved in results), "no atom ever changed its rank"
    states = results[0][0]
    assert len(states) == 3
    for state in states:
        assert_fields(state, came)
    # Restarted on another number of ranks from a file, as a gang does it.
    write_batch(tmp_path / "x.npz", states[0])
    again = ranks.run(_through, 2, read_batch(tmp_path / "x.npz"), 100, stage)[0][0][-1]
    assert_fields(again, came)
    whole = _through(None, came, 1000, stage)[0][-1]
    np.testing.assert_allclose(again.select(whole.ids).positions.numpy(), whole.positions.numpy(), atol=1e-7)
    # And out to ASE.
    for atoms, single in zip(again.select(came.ids).to_atoms(), came, strict=True):
        np.testing.assert_array_equal(atoms.arrays["spin"], single.spin.numpy())
        assert atoms.info["total_charge"] == float(single.total_charge)
        assert atoms.info["origin"] == single.ids[0]


def _mixed(mesh):
    """Systems with a field and without, together: filled, not mixed up; nobody else's rows."""
    bare = start(crystal((4, 3, 3), seed=9), "bare", speed=0.01)
    both = Batch.concat([labelled(crystal((5, 4, 4), seed=1), "own"), bare])
    out = mm.simulate(brute.model(), both, mm.NVE(), 20, dt=4.0, mesh=mesh, split_atoms=1)
    return out


@pytest.mark.parametrize("size", [1, 3])
def test_case_07_systems_with_and_without_a_field_share_a_batch(ranks, size):
    for out in [_mixed(None)] if size == 1 else ranks.run(_mixed, size):
        bare = out.select(["bare"])
        assert bool(torch.isnan(bare.charge).all())
        assert bool(torch.isnan(bare.tensor).all())
        assert bare.site.tolist() == [0] * bare.n_atoms
        assert torch.equal(out.select(["own"]).charge, torch.sin(torch.arange(80, dtype=torch.float64)))
        assert "charge" not in bare.to_atoms()[0].arrays


# --- 26, 27: refills ----------------------------------------------------------------------------------------------


def _two_slots(mesh, systems, stage, slots):
    reporter = MemoryReporter()
    run = StageRun(stage, brute.model(), mesh, reporter, max_systems=slots, split_atoms=20, skin=SKIN, seed=3)
    run.admit(systems if run.mesh.is_lead else None)
    aboard, reports = [], []
    while not reports or not reports[-1].idle:
        reports.append(run.advance(steps=1))
        aboard.append(reports[-1].progress)
    run.close()
    finished = Batch.concat([r.finished for r in reports])
    return finished, [o for r in reports for o in r.outcomes], aboard, {i: reporter.steps(i) for i in reporter.frames}


LENGTHS = {"long": 30, "short": 11, "mid": 17}


class Ragged(mm.Produce):
    """A visit whose length depends on the system."""

    def verdict(self, state, converged):
        steps = zip(state.batch.step.tolist(), state.batch.kind.tolist(), strict=True)
        return [mm.Status.finished if done >= kind else None for done, kind in steps]


def three_systems():
    systems = []
    for k, (name, length) in enumerate(LENGTHS.items()):
        one = labelled(crystal((4 + k % 2, 4, 4), seed=20 + k), name)
        systems.append(one.with_fields(systems={"kind": torch.tensor([length])}))
    return Batch.concat(systems)


@pytest.mark.parametrize("ensemble", [mm.NVE(), mm.NVT(150, friction=20.0)])
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_case_26_three_systems_through_two_slots(ranks, size, ensemble):
    came = three_systems()
    stage = Ragged(ensemble, steps=1000, dt=4.0, every=5)
    results = [_two_slots(None, came, stage, 2)] if size == 1 else ranks.run(_two_slots, size, came, stage, 2)
    finished, outcomes, aboard, frames = results[0]
    assert {o.id: o.steps for o in outcomes} == LENGTHS
    assert sorted(finished.ids) == sorted(LENGTHS)
    assert_fields(finished, came)
    assert all(len(a) <= 2 for a in aboard)
    # Counters go on one by one, each from its own start; the third boards in the step in which the second leaves.
    for name, length in LENGTHS.items():
        progress = [a[name] for a in aboard if name in a]
        assert progress == list(range(1 if name != "mid" else 0, length)), name
        assert frames[name] == list(range(0, length + 1, 5))
    for other in results[1:]:
        assert [(o.id, o.steps) for o in other[1]] == [(o.id, o.steps) for o in outcomes]
    # As if each had been alone: to the bit at an equal rank grid.
    for single in came:
        alone = (
            _two_slots(None, single, stage, 2)[0] if size == 1 else ranks.run(_two_slots, size, single, stage, 2)[0][0]
        )
        got = finished.select(single.ids)
        for name in ("positions", "velocities", "forces", "energy", "stress"):
            assert torch.equal(getattr(got, name), getattr(alone, name)), (single.ids[0], name)


def _visitors(mesh, systems, entries):
    """Steps with systems entering at given steps and leaving at others; finals by id, counters after each step."""
    out, counters = {}, {}
    with mm.DomainParallel(brute.model(), mm.NVE().propagator(), mesh, skin=SKIN, split_atoms=20) as runner:
        lead = runner.mesh.is_lead
        for step in range(60):
            for name, (enter, leave) in entries.items():
                if step == leave:
                    gone = runner.release([name])
                    out[name] = gone
                if step == enter:
                    runner.admit(systems.select([name]) if lead else None)
            runner.step()
            if runner.ids:
                for name, count in zip(runner.ids, runner.state.batch.step.tolist(), strict=True):
                    counters.setdefault(name, []).append(count)
        if lead:
            out.update((i, runner.gather([i])) for i in runner.ids)
        else:
            for i in runner.ids:
                runner.gather([i])
    return out, counters


ENTRIES = {"first": (0, 99), "second": (7, 30), "third": (8, 99), "fourth": (31, 45)}


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_case_27_who_enters_half_way_leaves_the_others_alone(ranks, size):
    """To the bit, on any number of ranks, whether the newcomer is large, small or divided; nobody skips a step."""
    shapes = {"first": (5, 4, 4), "second": (4, 4, 5), "third": (2, 2, 2), "fourth": (6, 4, 4)}
    systems = Batch.concat(
        [start(crystal(shape, seed=30 + k), name, speed=0.01, dt=3.0) for k, (name, shape) in enumerate(shapes.items())]
    )

    def play(entries):
        return _visitors(None, systems, entries) if size == 1 else ranks.run(_visitors, size, systems, entries)[0]

    together, counters = play(ENTRIES)
    for name, (enter, leave) in ENTRIES.items():
        taken = min(leave, 60) - enter
        assert counters[name] == list(range(1, taken + 1)), "a step was skipped, or counted twice"
        alone, _ = play({name: (enter, leave)})
        for field in ("positions", "velocities", "forces", "energy", "stress", "step"):
            assert torch.equal(getattr(together[name], field), getattr(alone[name], field)), (name, field)


def _refused(mesh, systems):
    """A newcomer that cannot come aboard: the others go on, to the bit."""
    bad = systems.select(["bad"]).clone()
    bad.positions[0] = float("nan")
    said = []
    with mm.DomainParallel(brute.model(), mm.NVE().propagator(), mesh, skin=SKIN, split_atoms=20) as runner:
        lead = runner.mesh.is_lead
        runner.admit(systems.select(["good"]) if lead else None)
        for step in range(30):
            if step in (5, 6):
                try:
                    runner.admit((bad if step == 5 else systems.select(["good"])) if lead else None)
                except ValueError as error:
                    said.append(str(error))
            runner.step()
        return runner.gather(), said


@pytest.mark.parametrize("size", [1, 3])
def test_case_27_who_is_refused_leaves_the_others_alone_too(ranks, size):
    systems = Batch.concat(
        [start(crystal((4, 4, 4), seed=40 + k), name, speed=0.01, dt=3.0) for k, name in enumerate(("good", "bad"))]
    )
    results = [_refused(None, systems)] if size == 1 else ranks.run(_refused, size, systems)
    for _, said in results:
        assert len(said) == 2
        assert "'bad' has positions that are not finite" in said[0]
        assert "already aboard: good" in said[1]
    good = systems.select(["good"])
    alone = _undisturbed(None, good) if size == 1 else ranks.run(_undisturbed, size, good)[0]
    for field in ("positions", "velocities", "forces", "energy", "step"):
        assert torch.equal(getattr(results[0][0], field), getattr(alone, field)), field


def _undisturbed(mesh, batch):
    with mm.DomainParallel(brute.model(), mm.NVE().propagator(), mesh, skin=SKIN, split_atoms=20) as runner:
        runner.admit(batch if runner.mesh.is_lead else None)
        runner.run(30)
        return runner.gather()
