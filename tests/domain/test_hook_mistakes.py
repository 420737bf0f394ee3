"""Hooks given by hand or by mistake: what is refused, and what all ranks hear of one that raises."""

from __future__ import annotations

import ase
import numpy as np
import pytest
from parity import cases
from parity.cases import runner_of

import mattermill as mm
from mattermill.domain.agreement import agree
from mattermill.domain.hooks import Hook, HookSet, Point, Scope
from mattermill.stages.optimizers.fire import Fire

IN_STEP = [str(point) for point in Point if point is not Point.ON_CONVERGE]


# --- hooks by hand, and mistakes ---------------------------------------------------------------------------------


def _simulated(mesh):
    seen = []
    hook = Hook(lambda b: seen.append(b.step.tolist()), every=5, scope="global")
    mm.simulate(cases.model(), cases.batch(["cubic", "tiny"]), mm.NVE(), steps=10, mesh=mesh, hooks=[hook])
    return seen


def test_hooks_of_a_simulation(ranks):
    assert [_simulated(None), *ranks.run(_simulated, 2)] == [[[5, 5], [10, 10]]] * 3


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Hook(print, point="nowhere"), "point must be one of before_step, .*, on_converge; is 'nowhere'"),
        (lambda: Hook(print, point=3), "point must be one of before_step"),
        (lambda: Hook(print, scope="mine"), "scope must be one of local, global, lead; is 'mine'"),
        (lambda: Hook(print, every=0), "`every` must be a whole number of at least 1, is 0"),
        (lambda: Hook(print, every=-3), "is -3"),
        (lambda: Hook(print, every=2.5), "is 2.5"),
        (lambda: Hook(print, every=True), "is True"),
        (lambda: Hook("after_step"), "function must be callable, is 'after_step'"),
        (lambda: Hook(print, point="on_converge", every=10), "leave out every=10"),
        (lambda: Hook(print, point="before_compute", energy=True), "at before_compute no energy"),
        (lambda: Hook(print, point="after_pre_update", stress=True), "use after_compute or a later point"),
        (lambda: HookSet(print), "hooks must be a list"),
        (lambda: HookSet(Hook(print)), "hooks must be a list"),
        (lambda: HookSet([3]), "function must be callable, is 3"),
        (lambda: runner_of(None, Hook(print)), "hooks must be a list"),
        (lambda: mm.simulate(cases.model(), ase.Atoms("Ar"), mm.NVE(), 1, hooks=["x"]), "must be callable"),
    ],
)
def test_a_hook_that_makes_no_sense(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_points_and_scopes_may_be_given_by_name():
    assert [str(p) for p in Point] == [*IN_STEP, "on_converge"]
    hook = Hook(print, point="after_compute", scope="lead", every=np.int64(4))
    assert (hook.point, hook.scope) == (Point.AFTER_COMPUTE, Scope.LEAD)
    assert Hook(print) == Hook(print, Point.AFTER_STEP, 1, Scope.LOCAL)


def _disagree(mesh, kind):
    hooks = {
        "lead only": [Hook(print, scope="lead")] if mesh.is_lead else [],
        "other every": [Hook(print, scope="global", every=2 + mesh.rank)],
        "energy": [Hook(print, energy=mesh.rank == 1)],
        "local": [Hook(print)] * mesh.rank,
        "alike": [Hook(print, scope="lead"), Hook(print, energy=True)],
    }[kind]
    try:
        agree(mesh, {"hooks": HookSet(hooks).shared()})
    except ValueError as error:
        mesh.barrier()  # the mesh is whole
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("lead only", r"rank 0 has \[lead after_step every 1\], rank 1 has \[\]"),
        ("other every", r"rank 0 has \[global after_step every 2\], rank 1 has \[global after_step every 3\]"),
        ("energy", r"rank 0 has \[\], rank 1 has \[local after_step every 1 energy\]"),
        ("local", "^$"),
        ("alike", "^$"),
    ],
)
def test_ranks_must_have_the_hooks_that_all_run_together(ranks, kind, words):
    for text in ranks.run(_disagree, 3, kind):
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(text)


def _lead_only(mesh):
    hooks = [Hook(print, scope="lead")] if mesh.is_lead else []
    with runner_of(mesh, hooks) as runner:
        try:
            runner.partition(cases.batch(["tiny"]) if mesh.is_lead else None)
        except ValueError as error:
            return str(error)
    return "nothing"


def test_a_lead_hook_on_the_lead_only_is_told_at_once(ranks):
    for text in ranks.run(_lead_only, 2, mesh_timeout=5.0):
        assert "must be the same on all ranks" in text
        assert text.endswith("give every rank the same arguments")


# --- a hook that raises ------------------------------------------------------------------------------------------


def _raises(mesh, point, scope, where):
    def fail(given):
        if mesh.rank == where:
            raise ZeroDivisionError("the user's own words")

    converges = point == "on_converge"
    hook = Hook(fail, point=point, scope=scope, every=1 if converges else 3)
    try:
        with mesh, runner_of(mesh, [hook], Fire(fmax=1e6) if converges else None) as runner:
            runner.partition(cases.batch(["cubic"]) if mesh.is_lead else None)
            runner.run(100)
    except (ZeroDivisionError, mm.MeshError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("point", [*IN_STEP, "on_converge"])
def test_a_hook_that_raises_on_one_rank_is_told_on_all(ranks, point):
    results = ranks.run(_raises, 3, point, "local", 1, mesh_timeout=10.0)
    assert results[1] == ("ZeroDivisionError", "the user's own words")
    for rank in (0, 2):
        assert results[rank][0] == "RankFailed"
        assert "rank 1 failed: ZeroDivisionError: the user's own words" in results[rank][1]


@pytest.mark.parametrize(("scope", "where"), [("lead", 0), ("global", 2)])
def test_so_does_one_of_another_scope(ranks, scope, where):
    results = ranks.run(_raises, 3, "after_step", scope, where, mesh_timeout=10.0)
    for rank, (kind, text) in enumerate(results):
        assert kind == ("ZeroDivisionError" if rank == where else "RankFailed")
        assert "the user's own words" in text
