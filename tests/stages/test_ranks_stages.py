"""Stages on several ranks: the same answers, the same decisions, and bits that survive an interruption."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from stages.systems import MODEL, argon, assert_same_bits, batch, cut_up, final, finish, results

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.stages.reporter import MemoryReporter
from mattermill.stages.run import StageRun

# Large enough for two domains wider than 7 Å + skin; divided because split_atoms says so.
SPLIT = {"split_atoms": 30, "skin": 0.4}


def systems() -> Batch:
    return Batch.concat([Batch.from_atoms([argon(4, a=5.5)], ids=["big"]), batch("krypton", "cluster")])


STAGES = {
    "relax": mm.Relax(fmax=1e-2, max_steps=200),
    "cell": mm.Relax(fmax=1e-2, smax=1e-2, cell="isotropic", max_steps=200),
    "heat": mm.Heat(start=40, stop=200, steps=40, dt=2.0, friction=10.0, every=10),
    "nve": mm.Equilibrate(mm.NVE(), steps=40, dt=2.0),
}


def chosen(kind: str) -> Batch:
    return systems().select(["big", "krypton"]) if kind == "cell" else systems()


def run(mesh, kind):
    reporter = MemoryReporter()
    report = finish(STAGES[kind], chosen(kind), mesh=mesh, reporter=reporter, max_systems=2, **SPLIT)
    return report, {i: reporter.steps(i) for i in reporter.frames}


@pytest.mark.parametrize(("size", "kind"), [(2, "relax"), (3, "cell"), (2, "heat"), (3, "heat"), (2, "nve")])
def test_several_ranks_equal_one(ranks, size: int, kind: str) -> None:
    one, _ = run(None, kind)
    lead, *others = ranks.run(run, size, kind)
    many, frames = lead
    assert sorted(many.finished.ids) == sorted(one.finished.ids)
    a = {o.id: o for o in one.outcomes}
    for outcome in many.outcomes:
        assert (outcome.status, outcome.steps) == (a[outcome.id].status, a[outcome.id].steps)
        for name, value in a[outcome.id].results.items():
            # forces of zero are zero within 1e-9 eV/Å; energies and the rest relative to their size
            np.testing.assert_allclose(outcome.results[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
    x, y = one.finished, many.finished.select(one.finished.ids)
    for name in ("positions", "velocities", "cell"):
        torch.testing.assert_close(getattr(y, name), getattr(x, name), rtol=1e-9, atol=1e-9)
    assert set(frames) == (set(chosen(kind).ids) if kind == "heat" else set())
    for report, kept in others:
        assert [(o.id, o.status, o.steps) for o in report.outcomes] == [
            (o.id, o.status, o.steps) for o in many.outcomes
        ]
        assert not report.finished
        assert not kept


def whole_and_cut(mesh, kind):
    first = systems().select(["big"])
    company = [batch("krypton"), batch("cluster"), batch("dimer")]
    whole = finish(STAGES[kind], first, mesh=mesh, **SPLIT)
    pieces = cut_up(STAGES[kind], first, [9, 14], company, mesh=mesh, **SPLIT)
    return whole, pieces


@pytest.mark.parametrize("kind", ["heat", "relax"])
def test_interrupted_on_two_ranks_equals_uninterrupted(ranks, kind: str) -> None:
    (whole, pieces), _ = ranks.run(whole_and_cut, 2, kind)
    assert_same_bits(whole.finished, final(pieces), ["big"])
    np.testing.assert_equal(results([whole])["big"], results(pieces)["big"])


def stop_by_clock(mesh):
    run = StageRun(mm.Equilibrate(mm.NVT(50), steps=100_000), MODEL, mesh, **SPLIT)
    run.admit(systems() if mesh.is_lead else None)
    # only the lead's clock and question count
    timed = run.advance(seconds=0.4 if mesh.is_lead else 1e9)
    asked = run.advance(should_stop=(lambda: True) if mesh.is_lead else None)
    return timed.steps, asked.steps, timed.seconds


def test_the_leads_clock_stops_all_ranks_in_the_same_step(ranks) -> None:
    lead, other = ranks.run(stop_by_clock, 2)
    assert lead[:2] == other[:2]
    assert 0.3 < lead[2] < 10


def bad_ones(mesh):
    atoms = argon()
    atoms.positions[0] = np.nan
    mixed = Batch.concat([Batch.from_atoms([atoms], ids=["bad"]), systems()])
    return finish(mm.Equilibrate(mm.NVT(50), steps=2), mixed, mesh=mesh, **SPLIT).outcomes


def test_all_ranks_know_who_failed(ranks) -> None:
    lead, other = ranks.run(bad_ones, 2)
    assert {o.id: str(o.status) for o in lead} == {o.id: str(o.status) for o in other}
    assert next(o for o in other if o.id == "bad").status == "failed"


def twice(mesh):
    run = StageRun(mm.Equilibrate(mm.NVT(50), steps=2), MODEL, mesh)
    run.admit(batch("dimer") if mesh.is_lead else None)
    with pytest.raises(ValueError, match="dimer"):
        run.admit(batch("dimer") if mesh.is_lead else None)
    return len(run.advance().outcomes)


def test_an_error_on_the_lead_is_raised_on_every_rank(ranks) -> None:
    assert ranks.run(twice, 2) == [1, 1]


@dataclass(frozen=True, kw_only=True)
class Wrong(mm.Equilibrate):
    """Raises in one of its methods, on one rank; `rank` of a reporter and of `results` is the lead."""

    rank: int = 0
    where: str = ""

    def _fail(self, where: str, state: Any) -> None:
        if where == self.where and state.mesh.rank == self.rank and state.steps >= 3:
            raise ArithmeticError(f"{where} of rank {self.rank}")

    def before_step(self, state: Any) -> None:
        super().before_step(state)
        self._fail("before_step", state)

    def verdict(self, state: Any, converged: Any) -> Any:
        self._fail("verdict", state)
        return super().verdict(state, converged)


class Full(MemoryReporter):
    """A reporter whose disk is full at the second frame."""

    def frame(self, batch: Batch) -> None:
        if batch.step.max() > 0:
            raise OSError(28, "no space left")
        super().frame(batch)


def goes_wrong(mesh, where, rank):
    def hook(state):
        if state.mesh.rank == rank and state.steps >= 3:
            raise ArithmeticError(f"hook of rank {rank}")

    stage = Wrong(mm.NVT(50), steps=20, every=5, thermo_every=2, where=where, rank=rank)
    hooks = [hook] if where == "hook" else []
    reporter = Full() if where == "frame" else None

    def should_stop():
        raise ArithmeticError("question of rank 0")

    run = StageRun(stage, MODEL, mesh, reporter, hooks=hooks, **SPLIT)
    start = time.monotonic()
    try:
        run.admit(systems() if mesh.is_lead else None)
        run.advance(should_stop=should_stop if where == "question" else None)
    except (ArithmeticError, OSError, mm.MeshError) as error:
        seconds = time.monotonic() - start
        run.close()
        run.close()
        with pytest.raises(mm.MeshError):
            run.admit(None)
        return type(error).__name__, str(error), seconds
    return "nothing", "", 0.0


@pytest.mark.parametrize(
    ("where", "rank"),
    [("before_step", 1), ("before_step", 0), ("verdict", 2), ("hook", 1), ("frame", 0), ("question", 0)],
)
def test_an_error_on_one_rank_is_raised_on_every_rank_with_its_text(ranks, where: str, rank: int) -> None:
    told = ranks.run(goes_wrong, 3, where, rank, mesh_timeout=60.0)
    kind, text = ("OSError", "[Errno 28] no space left") if where == "frame" else ("ArithmeticError", f"{where} of ")
    assert told[rank][0] == kind
    assert told[rank][1].startswith(text)
    for other in {0, 1, 2} - {rank}:
        assert told[other][:2] == ("RankFailed", f"rank {rank} failed: {kind}: {told[rank][1]}")
    # Long before the mesh's timeout.
    assert max(seconds for _, _, seconds in told) < 30.0


def by_hand(mesh):
    energy = float(mm.evaluate(MODEL, argon(3), mesh=mesh).energy[0])
    out = mm.relax(MODEL, [argon(3)], fmax=5e-3, mesh=mesh, split_atoms=30)
    out = mm.simulate(MODEL, out, mm.NVT(60), steps=10, dt=2.0, mesh=mesh, split_atoms=30)
    return energy, out.positions, out.info[0]["status"]


def test_by_hand_under_torchrun_gives_every_rank_the_result(ranks) -> None:
    one = by_hand(None)
    for energy, positions, status in ranks.run(by_hand, 2):
        assert energy == pytest.approx(one[0], rel=1e-12)
        assert status == "finished"
        torch.testing.assert_close(positions, one[1], rtol=1e-9, atol=1e-9)
