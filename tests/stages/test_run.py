"""What a stage run does with good and bad systems: every one that comes leaves once, with a status and a reason."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from stages.systems import MODEL, argon, batch, cluster, dimer, finish, krypton

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.stages.fields import VISIT_FIELDS
from mattermill.stages.reporter import MemoryReporter
from mattermill.stages.run import StageRun
from mattermill.stages.status import Status

QUICK = mm.Equilibrate(mm.NVT(50), steps=5)


def with_nan() -> Atoms:
    atoms = argon()
    atoms.positions[3, 1] = np.nan
    return atoms


def on_one_site() -> Atoms:
    atoms = argon()
    atoms.positions[5] = atoms.positions[9] + atoms.cell[0]  # through the boundary
    return atoms


def helium() -> Atoms:
    return Atoms("ArHe", positions=[[0, 0, 0], [4, 0, 0]])


def flat() -> Atoms:
    return Atoms("Ar2", positions=[[0, 0, 0], [4, 0, 0]], cell=[5, 0, 0], pbc=True)


def massless() -> Atoms:
    atoms = dimer()
    atoms.set_masses([0.0, 40.0])
    return atoms


BAD = {
    "nan": (with_nan, "positions must be finite.*atom 3"),
    "site": (on_one_site, "atoms 5 and 9 share a site"),
    "helium": (helium, "does not know He"),
    "flat": (flat, "lattice vectors"),
    "massless": (massless, "masses"),
    "nothing": (lambda: Atoms(cell=[5, 5, 5], pbc=True), "no atoms"),
}


def test_bad_systems_fail_by_name_and_the_rest_goes_on() -> None:
    good = [argon(), krypton(), cluster(), dimer()]
    atoms = good[:2] + [make() for make, _ in BAD.values()] + good[2:]
    ids = ["a", "b", *BAD, "c", "d"]
    report = finish(QUICK, Batch.from_atoms(atoms, ids=ids), max_systems=2)
    ends = {o.id: o for o in report.outcomes}
    assert sorted(ends) == sorted(ids)
    assert len(report.outcomes) == len(ids)
    assert {i for i in ids if ends[i].status is Status.finished} == {"a", "b", "c", "d"}
    for name, (_, reason) in BAD.items():
        assert ends[name].status is Status.failed
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(ends[name].reason)
    assert sorted(report.failed.ids) == sorted(BAD)
    assert sorted(report.finished.ids) == ["a", "b", "c", "d"]


def test_a_cell_that_is_to_relax_must_be_there() -> None:
    slab = argon()
    slab.pbc = (True, True, False)
    systems = Batch.from_atoms([cluster(), slab, argon()], ids=["free", "slab", "bulk"])
    report = finish(mm.Relax(cell="isotropic", max_steps=3), systems)
    ends = {o.id: o for o in report.outcomes}
    assert "volume is 0" in ends["free"].reason
    assert "three periodic axes" in ends["slab"].reason
    assert ends["bulk"].status is Status.unconverged


def test_a_system_that_goes_non_finite_in_flight_leaves_with_its_last_good_state() -> None:
    """A time step of 10 ps throws atoms far and then nowhere."""
    bad = mm.Produce(mm.NVE(), steps=50, dt=1e7, every=0)
    systems = Batch.from_atoms([argon(), argon(seed=5)], ids=["first", "second"])
    run = StageRun(bad, MODEL)
    run.admit(systems)
    report = run.advance()
    assert {o.status for o in report.outcomes} == {Status.failed}
    assert all(o.reason for o in report.outcomes)
    assert bool(torch.isfinite(report.failed.positions).all())
    # and beside a sound one (per-system time steps), that one is not touched
    good = mm.Produce(mm.NVE(), steps=50, dt=1.0, every=0)
    alone = finish(good, systems.select(["second"])).finished
    run = StageRun(good, MODEL)
    run.admit(systems)
    run.advance(steps=10)
    state = run.runner.state.batch
    state.systems["timestep"][state.ids.index("first")] = 1e7
    report = run.advance()
    assert {o.id: str(o.status) for o in report.outcomes} == {"first": "failed", "second": "finished"}
    assert report.finished.positions.equal(alone.positions)


def test_max_steps_of_one_is_unconverged_and_says_so() -> None:
    for cell in ("fixed", "isotropic"):
        report = finish(mm.Relax(fmax=1e-6, cell=cell, max_steps=1), Batch.from_atoms([argon()], ids=["x"]))
        (outcome,) = report.outcomes
        assert (outcome.status, outcome.steps) == (Status.unconverged, 1)
        assert "after 1 steps" in outcome.reason
        assert report.finished.ids == ("x",)


def test_what_is_at_its_minimum_already_is_not_moved() -> None:
    relaxed = finish(mm.Relax(fmax=1e-3), batch("argon", "cluster")).finished
    again = finish(mm.Relax(fmax=1e-2), relaxed)
    assert [(o.status, o.steps) for o in again.outcomes] == [(Status.converged, 0)] * 2
    assert again.finished.select(relaxed.ids).positions.equal(relaxed.positions)


def test_forces_may_be_zero_by_symmetry_and_the_cell_still_counts() -> None:
    report = finish(mm.Relax(fmax=0.01, cell="isotropic", max_steps=1), Batch.from_atoms([krypton()], ids=["kr"]))
    assert report.outcomes[0].status is Status.unconverged
    assert report.outcomes[0].results["max_force"] < 1e-10


def test_one_atom_and_no_degrees_of_freedom() -> None:
    lone = Batch.from_atoms([Atoms("Ar"), Atoms("Ar", cell=[20, 20, 20], pbc=True)], ids=["free", "boxed"])
    relaxed = finish(mm.Relax(), lone)
    assert {o.status for o in relaxed.outcomes} == {Status.converged}
    heated = finish(mm.Heat(start=50, stop=50, steps=20), relaxed.finished)
    for outcome in heated.outcomes:
        assert outcome.results["temperature"] > 0  # three degrees of freedom under Langevin
        assert outcome.results["energy"] == 0.0
    flown = finish(mm.Produce(mm.NVE(), steps=20, thermo_every=5), heated.finished)
    for outcome in flown.outcomes:
        assert outcome.results["temperature"] == outcome.results["temperature_mean"] == 0.0
        assert outcome.results["energy"] == 0.0
    assert np.isnan({o.id: o for o in flown.outcomes}["free"].results["pressure"])


def test_frames_come_at_the_systems_own_steps_and_frame_0_is_the_input() -> None:
    reporter = MemoryReporter()
    systems = batch("argon", "cluster", "dimer")
    stage = mm.Produce(mm.NVT(60), steps=10, every=4)
    report = finish(stage, systems, reporter=reporter, max_systems=2)
    for system_id in systems.ids:
        assert reporter.steps(system_id) == [0, 4, 8]
        first = reporter.frames[system_id][0]
        assert first.positions.equal(systems.select([system_id]).positions)
        assert bool(torch.isfinite(first.energy).all())
        assert float(first.kinetic_temperature[0]) > 0
    assert sorted(reporter.closed) == sorted(systems.ids)
    assert report.frames == 9


def test_the_report_adds_up() -> None:
    systems = batch("argon", "cluster")
    run = StageRun(mm.Equilibrate(mm.NVT(60), steps=30, thermo_every=10), MODEL)
    run.admit(systems)
    first = run.advance(steps=12)
    assert first.resident == ("argon", "cluster")
    assert first.progress == {"argon": 12, "cluster": 12}
    assert (first.steps, first.atom_steps) == (12, 12 * (32 + 8))
    second = run.advance()
    assert second.idle
    assert second.atom_steps == 18 * 40
    steps = {i: [] for i in systems.ids}
    for report in (first, second):
        for k, step in zip(report.thermo["system"], report.thermo["step"], strict=True):
            steps[report.thermo_ids[k]].append(int(step))
    assert steps == {i: [0, 10, 20, 30] for i in systems.ids}
    assert not (VISIT_FIELDS & {*second.finished.atoms, *second.finished.systems})
    for outcome in second.outcomes:
        assert outcome.seconds > 0
        assert outcome.results["steps"] == outcome.steps == 30


def test_the_seconds_of_a_visit_survive_a_checkpoint() -> None:
    """As the gang does it: a checkpoint, another process, the rest; and one that waits in the inbox keeps its own."""
    stage = mm.Equilibrate(mm.NVT(60), steps=30)
    first = StageRun(stage, MODEL)
    first.admit(batch("argon", "cluster"))
    first.advance(steps=29)
    kept = pickle.loads(pickle.dumps(first.resident()))
    spent = dict(zip(kept.ids, kept.visit_seconds.tolist(), strict=True))
    assert min(spent.values()) > 0
    again = StageRun(stage, MODEL, max_systems=1)
    again.admit(kept.with_fields(systems={"visit_seconds": kept.visit_seconds + 1000.0}))
    assert again.advance(steps=0).waiting == ("cluster",)
    twice = again.resident()
    assert twice.visit_seconds.tolist() == [spent[i] + 1000.0 for i in twice.ids]
    report = finish(stage, twice)
    for outcome in report.outcomes:
        assert spent[outcome.id] + 1000.0 < outcome.seconds < spent[outcome.id] + 1100.0
    assert "visit_seconds" not in report.finished
    # A fresh visit starts at zero.
    assert all(o.seconds < 100.0 for o in finish(mm.Produce(mm.NVE(), steps=1), report.finished).outcomes)


def test_time_ends_a_segment_after_at_least_one_step() -> None:
    run = StageRun(mm.Equilibrate(mm.NVT(60), steps=10_000), MODEL)
    run.admit(batch("argon"))
    assert run.advance(seconds=0.0).steps == 1
    stopped = run.advance(should_stop=lambda: True)
    assert 1 <= stopped.steps <= 10
    timed = run.advance(seconds=0.3)
    assert 0.25 < timed.seconds < 2.0
    assert run.advance(steps=4).steps == 4


def test_what_waits_is_in_the_checkpoint() -> None:
    run = StageRun(QUICK, MODEL, max_systems=1)
    systems = batch("argon", "cluster", "dimer")
    run.admit(systems)
    report = run.advance(steps=2)
    assert (report.resident, report.waiting) == (("argon",), ("cluster", "dimer"))
    kept = run.resident()
    assert kept is not None
    rest = finish(QUICK, kept)
    whole = finish(QUICK, systems)
    for system_id in systems.ids:
        a, b = rest.finished.select([system_id]), whole.finished.select([system_id])
        assert a.positions.equal(b.positions)
        assert a.velocities.equal(b.velocities)


def test_an_id_stands_for_one_system() -> None:
    run = StageRun(QUICK, MODEL, max_systems=1)
    run.admit(batch("argon", "cluster"))
    run.advance(steps=1)
    for name in ("argon", "cluster"):
        with pytest.raises(ValueError, match=name):
            run.admit(batch(name))


def test_fields_of_a_users_own_come_out_as_they_went_in() -> None:
    atoms = argon()
    atoms.set_array("charge_of_mine", np.arange(32.0))
    systems = Batch.from_atoms([krypton(), atoms], ids=["kr", "ar"]).with_fields(
        systems={"label": torch.tensor([7, 9])}
    )
    out = finish(QUICK, systems, max_systems=1).finished
    assert out.select(["ar"]).charge_of_mine.tolist() == list(range(32))
    assert out.select(["kr"]).label.tolist() == [7]


def test_by_hand_failures_are_in_the_info_and_warned_about() -> None:
    with pytest.warns(UserWarning, match="does not know He"):
        out = mm.simulate(MODEL, [argon(), helium()], mm.NVT(50), steps=3)
    assert [i["status"] for i in out.info] == ["finished", "failed"]
    with pytest.raises(ValueError, match="does not know He"):
        mm.evaluate(MODEL, [argon(), helium()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = mm.relax(MODEL, argon(), fmax=1e-3)
    assert out.info[0]["status"] == "converged"
    with pytest.raises(TypeError, match=r"mm\.read"):
        mm.evaluate(MODEL, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no structure"):
        mm.evaluate(MODEL, [])


def test_a_cell_that_is_not_finite_fails_its_system_only() -> None:
    bad = argon()
    bad.set_cell(bad.cell.array * np.nan)
    with pytest.warns(UserWarning, match="1 of 2 systems failed: system-1: the cell is not finite"):
        relaxed = mm.relax(MODEL, [argon(), bad], max_steps=2)
    assert [info["status"] for info in relaxed.info] == ["unconverged", "failed"]


def test_a_warning_of_many_failures_stays_readable() -> None:
    with pytest.warns(UserWarning, match="40 of 40 systems failed") as caught:
        mm.relax(MODEL, [helium() for _ in range(40)])
    assert len(str(caught[0].message)) < 1_000
    assert "and 35 more" in str(caught[0].message)


@pytest.mark.parametrize("seed", [-1, 1.5, "0"])
def test_a_seed_that_is_none_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be a whole number"):
        mm.simulate(MODEL, argon(), mm.NVT(10), steps=1, seed=seed)  # type: ignore[arg-type]


def test_results_that_raise_fail_their_system_only() -> None:
    from mattermill.stages.equilibrate import Equilibrate

    class Fussy(Equilibrate):
        def results(self, batch):  # type: ignore[no-untyped-def]
            if batch.n_atoms == 2:
                raise KeyError("no dimers")
            return super().results(batch)

    report = finish(Fussy(mm.NVT(50), steps=2), batch("argon", "dimer"))
    ends = {o.id: o for o in report.outcomes}
    assert ends["argon"].status is Status.finished
    assert ends["dimer"].status is Status.failed
    assert "no dimers" in ends["dimer"].reason
    assert report.failed.ids == ("dimer",)


def test_a_stage_of_ones_own_runs_like_ours() -> None:
    """A user's ramp of the friction, with its own field, results and end."""
    from dataclasses import dataclass

    from mattermill.stages.dynamics import Dynamics

    @dataclass(frozen=True, kw_only=True)
    class Brake(Dynamics):
        def sampled(self):  # type: ignore[no-untyped-def]
            return mm.NVT(0.0, friction=0.0)

        def length(self) -> int:
            return 40

        def before_step(self, state) -> None:  # type: ignore[no-untyped-def]
            state.batch.friction.copy_(state.batch.step * 2.0)

        def results(self, batch):  # type: ignore[no-untyped-def]
            return {"speed": np.array([float(v.velocities.abs().max()) for v in batch.split()])}

    warm = finish(mm.Heat(start=100, stop=100, steps=1), batch("argon")).finished
    report = finish(Brake(), warm)
    assert report.outcomes[0].status is Status.finished
    assert report.outcomes[0].results["speed"] < 0.5 * float(warm.velocities.abs().max())


def test_who_could_not_board_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is common to all ranks loses nobody: not in preparing, and not in admission."""
    run = StageRun(QUICK, MODEL)
    run.admit(batch("argon", "dimer"))

    def refuse(*_: object) -> None:
        raise run.mesh.broadcast_object(ValueError("not today"))

    for owner, name in ((type(run.stage), "prepare"), (run.runner, "_checked")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(ValueError, match="not today"):
                run.advance()
        state = run.resident()
        assert state is not None
        assert sorted(state.ids) == ["argon", "dimer"]
    report = run.advance()
    assert sorted(report.finished.ids) == ["argon", "dimer"]


def test_a_system_under_way_with_a_cell_that_is_none_fails_alone() -> None:
    first = StageRun(QUICK, MODEL)
    first.admit(batch("argon", "krypton"))
    first.advance(steps=2)
    state = first.resident()
    assert state is not None
    state.reference_cell[0] = state.cell[0] = 0.0
    second = StageRun(QUICK, MODEL, memory=1e9)
    second.admit(state)
    ends = {o.id: o.status for o in second.advance().outcomes}
    assert ends == {"argon": Status.failed, "krypton": Status.finished}
