"""Models that do not keep to their phases are told so, in one sentence that names them."""

from __future__ import annotations

import pytest
from message_passing import MessagePassing
from parity import cases

import mattermill as mm
from mattermill.domain.models.base import Model, ModelError, ModelOutput


class Wrong(Model):
    """Lennard-Jones, misbehaving."""

    cutoff, pairs = 6.0, "half"
    species = frozenset({18, 36})

    def __init__(self, how):
        self.inner, self.how = cases.model(), how
        self.dtype = self.inner.dtype

    def identity(self):
        return {"name": f"wrong-{self.how}"}

    def compute(self, nb, *, energy=True, stress=True):
        return self.inner.compute(nb, energy=energy, stress=stress)

    def phases(self, nb, *, energy=True, stress=True):
        out = self.compute(nb, energy=energy, stress=stress)
        if self.how == "never":
            return out
        yield None
        if self.how == "once":
            return out
        if self.how == "short":
            out.forces = out.forces[:-1]
        if self.how == "silent":
            out.energies = None
        if self.how == "slack":
            out.virial = None
        yield {"nothing": None, "tuple": (out.forces,)}.get(self.how, out)
        if self.how == "thrice":
            yield out
        if self.how == "other":
            return ModelOutput(out.forces.clone(), out.energies, out.virial)
        return None if self.how == "empty" else out


WORDS = {
    "never": "never yields",
    "once": "yields once",
    "nothing": "NoneType at the second yield",
    "tuple": "tuple at the second yield",
    "short": "gives forces of shape",
    "thrice": "more than twice",
    "other": "other forces",
    "empty": "returns NoneType",
    "silent": "no energies",
    "slack": "no virial",
}


@pytest.mark.parametrize("how", WORDS)
def test_what_is_wrong_is_said(how):
    with mm.DomainParallel(Wrong(how), cases.propagator("nve")) as runner:
        runner.want(energy=True, stress=True)
        with pytest.raises(ModelError, match=f"model Wrong .*{WORDS[how]}"):
            runner.partition(cases.batch(["tiny"]))


def test_one_that_is_right_passes():
    with mm.DomainParallel(Wrong("not at all"), cases.propagator("nve")) as runner:
        runner.partition(cases.batch(["tiny"]))
        runner.run(3)


def test_an_optimizer_can_judge_before_its_first_step():
    from mattermill.stages.optimizers.fire import Fire

    with mm.DomainParallel(cases.model(), Fire(fmax=1e-3), skin=cases.SKIN) as runner:
        runner.partition(cases.batch(["tiny", "few"]))
        assert not runner.judge().any()


def test_energies_are_asked_for_before_a_hook_moves_atoms():
    from mattermill.domain.hooks import Hook, HookSet, Point

    seen = []

    def move(state):
        state.batch.positions += 0.01 * (state.batch.atom_id[:, None] % 3)

    hooks = [
        Hook(move, point="before_step"),
        Hook(lambda b: seen.append(float(b.energy[0])), point="before_step", scope="global", energy=True),
    ]
    with mm.DomainParallel(cases.model(), cases.propagator("nve"), hooks=hooks, skin=cases.SKIN) as runner:
        runner.partition(cases.batch(["tiny"]))
        expected = float(runner.gather().energy[0])
        runner.step()
    assert seen == [expected]
    with pytest.raises(ValueError, match="before_pre_update must not follow"):
        HookSet([hooks[0], Hook(print, point=Point.BEFORE_PRE_UPDATE, scope="lead", energy=True)])


class Forgetful(MessagePassing):
    """Says that it refreshes its ghosts, and does not."""

    def refreshed(self, nb, s, v, hop):
        return s, v


def _forgets(mesh):
    model = Forgetful(kind="refresh", cutoff=4.6)
    with mm.DomainParallel(model, cases.propagator("nve"), mesh, skin=0.5, grid=(2, 1, 1)) as runner:
        try:
            runner.partition(cases.batch(["cubic"]) if mesh.is_lead else None)
        except (ModelError, mm.RankFailed) as error:
            return str(error)
    return "nothing"


def test_a_model_that_forgets_to_refresh_is_told(ranks):
    assert all("Forgetful has never called nb.refresh" in text for text in ranks.run(_forgets, 2))


def _owned_only(mesh):
    class OwnedOnly(Wrong):
        def phases(self, nb, *, energy=True, stress=True):
            out = self.compute(nb, energy=energy, stress=stress)
            yield None
            out.forces = out.forces[: nb.n_owned]
            yield out
            return out

    with mm.DomainParallel(OwnedOnly(""), cases.propagator("nve"), mesh, skin=cases.SKIN, grid=(2, 1, 1)) as runner:
        try:
            runner.partition(cases.batch(["cubic"]) if mesh.is_lead else None)
        except (ModelError, mm.RankFailed) as error:
            return str(error)
    return "nothing"


def test_forces_on_owned_atoms_only_are_not_read_beyond_their_end(ranks):
    assert all("gives forces of shape" in text for text in ranks.run(_owned_only, 2))


def _unlike(mesh, what):
    options = {"steps": 3, "max_atoms": None, "dt": 1.0, what: {"steps": 3, "max_atoms": 5, "dt": 1.0}[what]}
    if mesh.rank == 1:
        options[what] = {"steps": 4, "max_atoms": 50, "dt": 2.0}[what]
    steps, dt = options.pop("steps"), options.pop("dt")
    try:
        mm.simulate(cases.model(), cases.batch(["few"]), mm.NVE(), steps, dt, mesh=mesh, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ["steps", "dt", "max_atoms"])
def test_what_ranks_act_on_alone_must_be_alike(ranks, what):
    name = "max_atoms" if what == "max_atoms" else "the stage"
    assert all(t.startswith(f"{name} must be the same on all ranks") for t in ranks.run(_unlike, 2, what))


def _lead_counts(mesh, atoms, others):
    try:
        return mm.simulate(cases.model(), atoms if mesh.is_lead else others, mm.NVE(), 2, mesh=mesh).ids
    except (ValueError, TypeError) as error:
        return type(error).__name__


def test_the_leads_structures_count(ranks):
    two = cases.batch(["few", "tiny"])
    for others in (None, cases.batch(["slab"]), two.select([0])):
        assert ranks.run(_lead_counts, 2, two, others) == [("few", "tiny")] * 2
    assert ranks.run(_lead_counts, 2, None, two) == ["TypeError"] * 2
    assert ranks.run(_lead_counts, 2, [], None) == ["ValueError"] * 2
