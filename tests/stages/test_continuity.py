"""The answer is a function of the system alone: not of company, refills, interruptions. Compared to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from stages.systems import KINDS, MODEL, argon, assert_same_bits, batch, cut_up, final, finish, krypton, results

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.stages.reporter import MemoryReporter
from mattermill.stages.run import StageRun

STAGES = {
    "relax": mm.Relax(fmax=1e-3, cell="fixed", max_steps=60),
    "heat": mm.Heat(start=40, stop=140, steps=60, dt=2.0, friction=5.0),
    "nvt": mm.Produce(mm.NVT(90), steps=60, dt=2.0, every=7),
    "nve": mm.Equilibrate(mm.NVE(), steps=60, dt=2.0),
}
CELL = mm.Relax(fmax=1e-3, smax=1e-3, cell="isotropic", max_steps=60)


def prepared(*names: str) -> Batch:
    """Warm systems: with velocities."""
    return finish(mm.Heat(start=60, stop=60, steps=5, dt=2.0, name="warm"), batch(*names)).finished


@pytest.mark.parametrize("kind", STAGES)
def test_batched_equals_solo(kind: str) -> None:
    stage, systems = STAGES[kind], prepared(*KINDS)
    together = finish(stage, systems)
    assert len(together.finished) == len(KINDS)
    for single in systems.split():
        alone = finish(stage, single)
        assert_same_bits(alone.finished, together.finished)
        same = results([alone])[single.ids[0]], results([together])[single.ids[0]]
        np.testing.assert_equal(*same)


def test_cell_relaxation_batched_equals_solo() -> None:
    systems = batch("argon", "krypton")
    together = finish(CELL, systems)
    for single in systems.split():
        assert_same_bits(finish(CELL, single).finished, together.finished)


@pytest.mark.parametrize("kind", ["relax", "heat", "nve"])
def test_refill_leaves_the_others_alone(kind: str) -> None:
    """Five systems through two places, and one at a time by atoms: ids, order of atoms and bits survive."""
    stage, systems = STAGES[kind], prepared(*KINDS)
    together = finish(stage, systems)
    for limits in ({"max_systems": 2}, {"max_atoms": 40}):
        tight = finish(stage, systems, **limits)
        assert sorted(tight.finished.ids) == sorted(KINDS)
        assert_same_bits(together.finished, tight.finished)
        assert sorted(o.id for o in tight.outcomes) == sorted(KINDS)  # each once


def test_entering_while_others_are_half_way() -> None:
    stage = STAGES["heat"]
    systems = batch("argon", "slab")
    alone = finish(stage, systems.select(["argon"]))
    run = StageRun(stage, MODEL)
    run.admit(systems.select(["argon"]))
    run.advance(steps=23)
    run.admit(systems.select(["slab"]))
    report = run.advance()
    assert_same_bits(alone.finished, report.finished, ["argon"])
    assert_same_bits(finish(stage, systems.select(["slab"])).finished, report.finished, ["slab"])


@pytest.mark.parametrize("kind", STAGES)
def test_interrupted_equals_uninterrupted(kind: str) -> None:
    """Cut at odd steps, between rebuilds, each time with more company: state, results and means are the same."""
    stage, systems = STAGES[kind], prepared("argon", "cluster")
    whole = finish(stage, systems)
    company = [batch("krypton"), batch("slab"), batch("dimer")]
    pieces = cut_up(stage, systems, [11, 26], company)
    assert_same_bits(whole.finished, final(pieces), systems.ids)
    for system_id in systems.ids:
        np.testing.assert_equal(results([whole])[system_id], results(pieces)[system_id])


def test_interrupted_cell_relaxation() -> None:
    systems = Batch.from_atoms([argon(a=5.6)], ids=["argon"])
    pieces = cut_up(CELL, systems, [3, 10, 20], [Batch.empty(), batch("krypton")])
    assert_same_bits(finish(CELL, systems).finished, final(pieces), ["argon"])


def test_a_list_is_rebuilt_on_the_way() -> None:
    """What the tests above rest on: that the cuts lie between two rebuilds of a moving system."""
    stage = mm.Heat(start=60, stop=400, steps=90, dt=3.0, friction=20.0)
    systems = Batch.from_atoms([argon(3)], ids=["hot"])
    run = StageRun(stage, MODEL, skin=0.3)
    run.admit(systems)
    whole = run.advance().finished
    rebuilds = run.runner.rebuilds
    assert rebuilds >= 2
    pieces = cut_up(stage, systems, [13, 17], [batch("slab"), batch("krypton")], skin=0.3)
    assert_same_bits(whole, final(pieces), ["hot"])


def test_frames_and_series_do_not_notice_an_interruption() -> None:
    stage = STAGES["nvt"]
    systems = prepared("argon")
    whole, pieces = MemoryReporter(), MemoryReporter()
    one = finish(stage, systems, reporter=whole)
    parts = cut_up(stage, systems, [14, 6], [Batch.empty(), batch("slab")], reporter=pieces)
    assert whole.steps("argon") == pieces.steps("argon") == list(range(0, 61, 7))
    for a, b in zip(whole.frames["argon"], pieces.frames["argon"], strict=True):
        assert a.positions.equal(b.positions)
        assert a.kinetic_temperature.equal(b.kinetic_temperature)
        assert a.pressure.equal(b.pressure)
    rows = {}
    for report in parts:
        for row in zip(report.thermo["system"], report.thermo["step"], report.thermo["temperature"], strict=True):
            rows.setdefault(report.thermo_ids[row[0]], []).append(row[1:])
    expected = list(zip(one.thermo["step"], one.thermo["temperature"], strict=True))
    assert rows["argon"] == expected


def test_sixteen_copies_equal_one_alone() -> None:
    """Without noise, copies of one system stay copies, to the last bit, wherever they stand in the arrays."""
    start = prepared("cluster")
    copies = Batch.concat([start.with_ids([f"copy-{k}"]) for k in range(16)])
    stage = STAGES["nve"]
    alone = finish(stage, start).finished
    together = finish(stage, copies).finished
    for k in range(16):
        assert_same_bits(alone, together.select([k]).with_ids(["cluster"]))


def test_noise_differs_between_siblings_stages_and_seeds() -> None:
    twins = Batch.from_atoms([krypton(), krypton()], ids=["a", "b"])
    stage = mm.Produce(mm.NVT(50), steps=3)
    first = finish(stage, twins)
    assert not first.finished.select(["a"]).velocities.equal(first.finished.select(["b"]).velocities)
    again = finish(stage, twins, seed=1).finished
    other = finish(mm.Produce(mm.NVT(50), steps=3, name="other"), twins).finished
    for changed in (again, other):
        assert not first.finished.velocities.equal(changed.velocities)
    assert_same_bits(first.finished, finish(stage, twins.select(["b", "a"])).finished)
