"""Models that do not keep to their phases are told so, in one sentence that names them."""

from __future__ import annotations

import pytest
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
