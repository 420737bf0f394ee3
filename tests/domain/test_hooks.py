"""Hooks: nine points in order, how often, what each scope sees on one rank and three, and what asking leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.calculators.lj import LennardJones as AseLennardJones
from ase.units import fs
from parity import cases
from parity.cases import runner_of

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.domain.hooks import Hook, Scope
from mattermill.domain.models.base import Model
from mattermill.stages.optimizers.fire import Fire

BEFORE = ["before_step", "before_pre_update"]
BETWEEN = ["after_pre_update", "before_compute"]
AFTER = ["after_compute", "before_post_update", "after_post_update", "after_step"]
IN_STEP = [*BEFORE, *BETWEEN, *AFTER]
NAMES = ["cubic", "far", "tiny"]


def run(mesh, hooks, steps, names=NAMES, **kwargs):
    """A fresh run with these hooks; the final batch on the lead."""
    with runner_of(mesh, hooks, **kwargs) as runner:
        runner.partition(shuffled(names) if runner.mesh.is_lead else None)
        runner.run(steps)
        return runner.gather()


def shuffled(names=NAMES):
    """Atoms in an order of the caller's own: not that of their ids."""
    parts = []
    for single in cases.batch(names):
        order = torch.randperm(single.n_atoms, generator=torch.Generator().manual_seed(single.n_atoms))
        parts.append(single.with_fields(atoms={k: v[order] for k, v in single.atoms.items()}))
    return Batch.concat(parts)


# --- order and frequency -----------------------------------------------------------------------------------------


class Noting(Model):
    """A model that writes into a transcript when it computes."""

    pairs = "half"

    def __init__(self, transcript):
        self.inner, self.transcript = cases.model(), transcript
        self.cutoff, self.dtype = self.inner.cutoff, self.inner.dtype

    @property
    def species(self):
        return self.inner.species

    def identity(self):
        return self.inner.identity()

    def compute(self, nb, *, energy=True, stress=True):
        self.transcript.append("compute")
        return self.inner.compute(nb, energy=energy, stress=stress)


class NotingVerlet:
    """Verlet that writes into a transcript, and says that it has converged from step 4 on."""

    def __init__(self, transcript):
        self.inner, self.transcript = cases.propagator("nve"), transcript

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def pre_update(self, state):
        self.transcript.append("pre_update")
        self.inner.pre_update(state)

    def post_update(self, state):
        self.transcript.append("post_update")
        self.inner.post_update(state)

    def converged(self, state):
        return np.array([state.steps >= 4] * state.n_systems)


def _transcript(mesh, every):
    log = []
    hooks = [Hook(lambda s, p=p: log.append((p, s.steps)), point=p, every=every) for p in reversed(IN_STEP)]
    hooks.append(Hook(lambda s: log.append(("on_converge", s.steps)), point="on_converge"))
    with runner_of(mesh, hooks, NotingVerlet(log), Noting(log)) as runner:
        runner.partition(cases.batch(["tiny"]) if runner.mesh.is_lead else None)
        runner.run(9, until_converged=True)
    return log


def _expected(every):
    log = ["compute"]  # forces are there before the first step
    for step in (1, 2, 3, 4):

        def points(names, count, due=step % every == 0):
            return [(name, count) for name in names] if due else []

        log += [*points(BEFORE, step - 1), "pre_update", *points(BETWEEN, step - 1), "compute"]
        # The step counts as taken once velocities have followed.
        log += [*points(AFTER[:2], step - 1), "post_update", *points(AFTER[2:], step)]
    return [*log, ("on_converge", 4)]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_points_come_in_order_around_what_the_step_does(ranks, size, every):
    lead, *others = [_transcript(None, every)] if size == 1 else ranks.run(_transcript, size, every)
    assert lead == _expected(every)
    for log in others:  # these own nothing; their hooks run all the same
        assert [e for e in log if e != "compute"] == [e for e in lead if e != "compute"]


def test_hooks_of_one_point_run_in_the_order_given():
    log = []
    hooks = [Hook(lambda s, k=k: log.append(k), point="after_step") for k in (3, 1, 2)]
    run(None, [*hooks, lambda s: log.append("plain")], 2, ["tiny"])
    assert log == [3, 1, 2, "plain"] * 2


# --- what each scope sees at each point --------------------------------------------------------------------------


def _seen(mesh, steps=6, every=3):
    """Of each (point, scope): what every call saw."""
    seen = {}

    def note(point, scope):
        def local(state):
            rows = [(i, a) for i, n in zip(state.batch.ids, state.batch.counts, strict=True) for a in range(n)]
            assert len(rows) == state.n_owned
            name_of = [i for i, _ in rows]
            table = {
                (name, int(a)): x
                for name, a, x in zip(name_of, state.batch.atom_id, state.batch.positions.tolist(), strict=True)
            }
            seen.setdefault((point, scope), []).append(table)

        def whole(batch):
            seen.setdefault((point, scope), []).append(batch)

        return Hook(local if scope == "local" else whole, point=point, scope=scope, every=every)

    final = run(mesh, [note(p, s) for p in IN_STEP for s in Scope], steps)
    return seen, final


def _by_id(batch):
    """{(system, atom id): position}"""
    names = np.repeat(np.array(batch.ids), batch.counts)
    return {(str(s), int(a)): x for s, a, x in zip(names, batch.atom_id, batch.positions.tolist(), strict=True)}


def _closeness(got, expected):
    assert got.keys() == expected.keys()
    return max(np.abs(np.subtract(got[k], expected[k])).max() for k in got)


@pytest.fixture(scope="module")
def alone():
    return _seen(None)


@pytest.mark.parametrize("size", [1, 3])
def test_every_scope_at_every_point(ranks, alone, size):
    results = [alone] if size == 1 else ranks.run(_seen, size)
    came = shuffled()
    reference = alone[0]
    for point in IN_STEP:
        # LOCAL: every atom on exactly one rank.
        for call in range(2):
            tables = [seen[point, "local"][call] for seen, _ in results]
            merged = {k: x for table in tables for k, x in table.items()}
            assert sum(map(len, tables)) == len(merged) == came.n_atoms
            # Compared with one rank's own atoms at this point, unwrapped: one of the systems lies 3 boxes away.
            assert _closeness(merged, reference[point, "local"][call]) < 1e-9
            # GLOBAL: the same bits on every rank, in the order of arrival, and what LOCAL hooks see.
            batches = [seen[point, "global"][call] for seen, _ in results]
            for batch in batches:
                assert batch.ids == came.ids
                assert batch.counts.tolist() == came.counts.tolist()
                for name in ("atom_id", "numbers", "charge", "tag3", "label"):
                    assert torch.equal(getattr(batch, name), getattr(came, name)), name
                assert batch.equals(batches[0])
                assert _closeness(_by_id(batch), merged) == 0.0
            assert results[0][0][point, "lead"][call].equals(batches[0])
        # LEAD: nowhere else.
        assert [len(seen.get((point, "lead"), [])) for seen, _ in results] == [2] + [0] * (size - 1)


def test_positions_move_between_the_points_where_a_step_moves_them(alone):
    at = {point: _by_id(alone[0][point, "global"][0]) for point in IN_STEP}
    groups = [BEFORE, [*BETWEEN, *AFTER]]
    for group in groups:
        assert all(_closeness(at[group[0]], at[p]) == 0.0 for p in group)
    assert _closeness(at["before_step"], at["after_step"]) > 1e-3


# --- energies ----------------------------------------------------------------------------------------------------


def _energies(mesh):
    """What hooks that ask for energy and stress see, and what a fresh evaluation of the same positions gives."""
    seen = {}

    def hook(point, scope, every):
        def function(given):
            batch = given if isinstance(given, Batch) else given.batch
            kept = {n: batch.systems[n].clone() for n in ("energy", "stress")}
            seen.setdefault((point, scope, every), []).append((kept, given if isinstance(given, Batch) else None))

        return Hook(function, point=point, scope=scope, every=every, energy=True, stress=True)

    points = [*BEFORE, *AFTER]
    hooks = [hook(p, s, e) for p in points for s, e in (("local", 3), ("global", 3), ("global", 4))]
    final = run(mesh, hooks, 8)
    return seen, final


@pytest.mark.parametrize("size", [1, 3])
def test_a_hook_that_asks_gets_the_energy_of_the_positions_it_sees(ranks, size):
    results = [_energies(None)] if size == 1 else ranks.run(_energies, size)
    for seen, _ in results:
        for point in [*BEFORE, *AFTER]:
            assert len(seen[point, "global", 3]) == len(seen[point, "global", 4]) == 2
            for every in (3, 4):
                for kept, batch in seen[point, "global", every]:
                    fresh = mm.evaluate(cases.model(), batch)
                    for name in ("energy", "stress"):
                        assert cases.worst(batch, fresh, name) < 1e-9, (point, every, name)
                        assert torch.equal(kept[name], batch.systems[name])
            for (local, _), (kept, _) in zip(seen[point, "local", 3], seen[point, "global", 3], strict=True):
                assert torch.equal(local["energy"], kept["energy"])


def test_who_asks_for_nothing_gets_no_stale_energy():
    """Nor does one between the move and the forces, whoever asked before."""
    seen = {}
    quiet = [Hook(lambda b, p=p: seen.setdefault(p, []).append(b), point=p, scope="global") for p in IN_STEP]
    run(None, quiet, 2, ["tiny"])
    assert all(bool(torch.isnan(b.energy).all()) for p in IN_STEP for b in seen[p][1:])
    seen.clear()
    asked = Hook(lambda s: None, point="after_step", energy=True, stress=True)
    run(None, [*quiet, asked], 2, ["tiny"])
    for point in IN_STEP:
        blank = point in BETWEEN
        for batch in seen[point][1:]:
            assert bool(torch.isnan(batch.energy).all()) == blank, point
            assert bool(torch.isnan(batch.forces).any()) == blank, point
            if not blank:
                assert cases.worst(batch, mm.evaluate(cases.model(), batch), "energy") < 1e-9


def _watched(mesh):
    hooks = [Hook(lambda _: None, p, 3, s, energy=p not in BETWEEN) for p in IN_STEP for s in Scope]
    return run(mesh, hooks, 30), run(mesh, (), 30)


@pytest.mark.parametrize("size", [1, 3])
def test_looking_on_changes_nothing_to_the_bit(ranks, size):
    watched, alone = _watched(None) if size == 1 else ranks.run(_watched, size)[0]
    for name in (*alone.atoms, *alone.systems):
        a, b = getattr(watched, name), getattr(alone, name)
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), name


# --- hooks that change something ---------------------------------------------------------------------------------


def test_what_a_global_hook_gets_is_a_copy():
    def spoil(batch):
        for value in (*batch.atoms.values(), *batch.systems.values()):
            value.zero_()
        batch.info[0]["spoilt"] = True

    spoiling = [Hook(spoil, point=p, scope=s) for p in IN_STEP for s in ("global", "lead")]
    assert run(None, spoiling, 5).equals(run(None, (), 5))


def _push(state):
    state.batch.positions[state.batch.atom_id % 7 == 0] += torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)


def _pushed(mesh, point, steps=30):
    return run(mesh, [Hook(_push, point=point, every=10)], steps, ["cubic", "slab"])


@pytest.mark.parametrize("point", [*BEFORE, "after_pre_update"])
def test_a_hook_may_move_atoms_until_the_halo_is_refreshed(ranks, point):
    expected = _pushed(None, point)
    assert max(cases.differences(ranks.run(_pushed, 3, point)[0], expected).values()) < 1e-9
    assert cases.worst(run(None, (), 30, ["cubic", "slab"]), expected, "positions") > 1e-4, "the hook did nothing"


@pytest.mark.parametrize("point", [*BEFORE, "after_pre_update"])
def test_moving_atoms_in_a_hook_is_moving_them_by_hand(point):
    """Velocity Verlet written out over ASE's Lennard-Jones, atoms moved at the same place in the same step."""
    atoms = bulk("Ar", "fcc", 5.4, cubic=True) * (3, 3, 3)
    atoms.rattle(0.1, seed=4)
    atoms.calc = AseLennardJones(sigma=3.4, epsilon=0.0104, rc=7.0, smooth=False)
    model = mm.models.LennardJones(epsilon={"Ar": 0.0104}, sigma={"Ar": 3.4}, cutoff=7.0, truncation="shift")
    hook = Hook(_push, point=point, every=2)
    got = mm.simulate(model, atoms.copy(), mm.NVE(), steps=5, dt=4.0, hooks=[hook])
    moved = np.arange(len(atoms)) % 7 == 0
    x, v, f = atoms.get_positions(), np.zeros((len(atoms), 3)), atoms.get_forces()
    m, dt = atoms.get_masses()[:, None], 4.0 * fs
    for step in (1, 2, 3, 4, 5):
        if step % 2 == 0 and point in BEFORE:
            x[moved] += [0.3, -0.2, 0.1]
        v += 0.5 * dt * f / m
        x += dt * v
        if step % 2 == 0 and point not in BEFORE:
            x[moved] += [0.3, -0.2, 0.1]
        atoms.set_positions(x)
        f = atoms.get_forces()
        v += 0.5 * dt * f / m
    # ASE keeps older constants: nine digits agree.
    np.testing.assert_allclose(got.positions.numpy(), x, atol=1e-7)


def _kick(state):
    state.batch.velocities.mul_(0.9)


def _kicked(mesh, point):
    return run(mesh, [Hook(_kick, point=point, every=3)], 20, ["cubic"])


@pytest.mark.parametrize("point", ["before_step", "before_compute", "after_compute", "after_step"])
def test_a_hook_may_change_velocities_anywhere(ranks, point):
    expected = _kicked(None, point)
    assert max(cases.differences(ranks.run(_kicked, 3, point)[0], expected).values()) < 1e-9


def _strained(mesh):
    """A hook that strains the cell with all atoms in it, alike on all ranks."""
    m = torch.tensor([[1.04, 0, 0], [0.02, 0.97, 0], [0, 0.01, 1.01]], dtype=torch.float64)

    def strain(state):
        state.batch.positions.copy_(state.batch.positions @ m)
        state.batch.cell.copy_(state.batch.cell @ m)

    return run(mesh, [Hook(strain, point="before_step", every=9)], 20, ["triclinic"], grid=None)


def test_a_hook_may_change_the_cell(ranks):
    expected = _strained(None)
    assert max(cases.differences(ranks.run(_strained, 3)[0], expected).values()) < 1e-9


# --- convergence -------------------------------------------------------------------------------------------------


def _two_clusters(shake_left, shake_right, seed=0):
    """Two clusters far apart in one system: on two ranks each is one rank's own."""
    rng = np.random.default_rng(seed)
    left = bulk("Ar", "fcc", 5.3, cubic=True) * (2, 2, 2)
    right = left.copy()
    right.positions += [60.0, 0, 0]
    left.positions += rng.normal(scale=shake_left, size=left.positions.shape)
    right.positions += rng.normal(scale=shake_right, size=right.positions.shape)
    both = left + right
    both.pbc = False
    both.cell[:] = 0
    return both


def _relaxed_cluster():
    return mm.relax(cases.model(), _two_clusters(0, 0), fmax=1e-5, max_steps=5_000)


def _converging(mesh, start):
    calls = {scope: [] for scope in Scope}

    def local(state):
        names = [i for i, c in zip(state.batch.ids, state.converged, strict=True) if c]
        calls["local"].append((state.steps, names))

    def whole(scope):
        return lambda b: calls[scope].append((list(b.ids), b.step.tolist(), b))

    hooks = [Hook(local, "on_converge"), Hook(whole("global"), "on_converge", 1, "global", energy=True)]
    hooks.append(Hook(whole("lead"), "on_converge", scope="lead"))
    with runner_of(mesh, hooks, Fire(fmax=0.002), split_atoms=20) as runner:
        runner.partition(start if runner.mesh.is_lead else None)
        runner.propagator.primed(runner.state)
        owned = runner.state.n_owned
        converged = runner.run(3_000, until_converged=True)
        assert runner.state.converged is None
        return calls, converged.tolist(), runner.steps, owned, runner.gather()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_on_converge_comes_once_per_system_when_the_mesh_has_decided(ranks, size):
    structures = [_two_clusters(0, 0.3), _two_clusters(0.1, 0), cases.SHAPES["few"]()]
    start = Batch.from_atoms(structures, ["right", "left", "few"])
    results = [_converging(None, start)] if size == 1 else ranks.run(_converging, size, start)
    one = _converging(None, start) if size > 1 else results[0]
    first_steps = {}
    for calls, converged, steps, _, _ in results:
        assert converged == [True] * 3
        assert steps == one[2]
        seen = [name for _, names in calls["local"] for name in names]
        # Once each, unless it left again: FIRE may overshoot.
        assert set(seen) == set(start.ids)
        assert calls["local"] == one[0]["local"]
        assert [(ids, at) for ids, at, _ in calls["global"]] == [(ids, at) for ids, at, _ in one[0]["global"]]
        for (at, names), (ids, step, batch) in zip(calls["local"], calls["global"], strict=True):
            assert ids == names
            assert step == [at] * len(ids)
            fresh = mm.evaluate(cases.model(), batch)
            assert cases.worst(batch, fresh, "energy") < 1e-9
            # Converged it is, by an evaluation of its own.
            for single in fresh:
                assert float(single.forces.norm(dim=1).max()) < 0.002
                first_steps.setdefault(single.ids[0], at)
    assert len(set(first_steps.values())) == 3, "all converged in one step: nothing was tested"
    assert [len(calls["lead"]) > 0 for calls, *_ in results] == [True] + [False] * (size - 1)


def test_a_system_that_leaves_convergence_and_comes_back_is_told_twice():
    told = []

    class Wavering(NotingVerlet):
        def converged(self, state):
            return np.array([state.steps in (2, 3, 6), state.steps >= 3])

    hooks = [Hook(lambda b: told.append((list(b.ids), int(b.step[0]))), "on_converge", scope="lead")]
    with runner_of(None, hooks, Wavering([])) as runner:
        runner.partition(cases.batch(["tiny", "few"]))
        runner.run(8)
    assert told == [(["tiny"], 2), (["few"], 3), (["tiny"], 6)]


def test_a_broken_system_has_not_converged():
    """Its forces are zero and stay so; that is no convergence."""
    told = []
    with runner_of(
        None, [Hook(lambda b: told.extend(b.ids), "on_converge", scope="global")], Fire(fmax=0.01)
    ) as runner:
        runner.partition(cases.batch(["few", "tiny"]))
        runner.propagator.primed(runner.state)
        runner.state.batch.positions[0] = float("nan")
        runner.run(1_000, until_converged=True)
        assert set(runner.broken) == {"few"}
    assert told == ["tiny"]


def test_on_converge_by_hand():
    """`mm.relax` tells of every system that converges, one that had converged when it came included."""
    told = []
    start = Batch.concat([cases.batch(["few", "tiny"]), _relaxed_cluster().with_ids(["still"])])
    hook = Hook(lambda b: told.extend(b.ids), "on_converge", scope="lead")
    out = mm.relax(cases.model(), start, fmax=0.005, max_steps=2_000, hooks=[hook])
    assert [i["status"] for i in out.info] == ["converged"] * 3
    assert sorted(told) == ["few", "still", "tiny"]
