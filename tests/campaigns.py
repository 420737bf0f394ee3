"""What the tests of campaigns share: small argon systems, a slow stage, and what must hold of every campaign."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
from ase import Atoms
from ase.build import bulk

import mattermill as mm

#: Workers cannot import this file: what it defines goes to them by value, as a recipe file's classes do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def argon(name: str, n: int = 2, a: float = 5.4, seed: int = 1) -> Atoms:
    """n x n x n fcc cells, a little disturbed: 4 n^3 atoms."""
    atoms = bulk("Ar", "fcc", a=a, cubic=True).repeat((n, n, n))
    atoms.rattle(0.05, seed=seed)
    atoms.info["id"] = name
    return atoms


def systems(number: int, n: int = 2) -> list[Atoms]:
    return [argon(f"ar-{k}", n, a=5.3 + 0.02 * k, seed=k) for k in range(number)]


@dataclass(frozen=True, kw_only=True)
class Slow(mm.Produce):
    """A produce stage whose steps take at least `pause` seconds each: time for a test to strike."""

    pause: float = 0.005

    def before_step(self, state: Any) -> None:
        super().before_step(state)
        time.sleep(self.pause)


class Broken(mm.models.LennardJones):
    """A model that raises whatever it is given."""

    def compute(self, *arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError("this model is broken")


def broken_model() -> Broken:
    return Broken(epsilon={"Ar": 0.01}, sigma={"Ar": 3.4}, cutoff=8.0)


def raises(results: Any) -> bool:
    raise RuntimeError("own filter")


@dataclass(frozen=True, kw_only=True)
class Held(mm.Produce):
    """A produce stage that takes no step before a file is there (or two minutes have passed)."""

    until: str = ""

    def before_step(self, state: Any) -> None:
        super().before_step(state)
        deadline = time.monotonic() + 120
        while not os.path.exists(self.until) and time.monotonic() < deadline:
            time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Deadly(mm.Produce):
    """A produce stage in which one system takes its process down."""

    victim: str = ""

    def before_step(self, state: Any) -> None:
        super().before_step(state)
        if self.victim in state.batch.ids:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class OneSided(mm.Produce):
    """A produce stage that raises in its third step, on one rank only."""

    rank: int = 1

    def before_step(self, state: Any) -> None:
        super().before_step(state)
        if state.mesh.rank == self.rank and state.steps == 2:
            raise ArithmeticError(f"only rank {self.rank} minds")


def produce(name: str = "produce", steps: int = 40, every: int = 10, **more: Any) -> mm.Produce:
    return mm.Produce(mm.NVT(40), steps=steps, every=every, dt=2.0, name=name, **more)


def slow(name: str = "slow", steps: int = 200, every: int = 20, **more: Any) -> Slow:
    return Slow(mm.NVT(40), steps=steps, every=every, dt=2.0, name=name, **more)


def recipe(graph: Any, seed: int = 1) -> mm.Recipe:
    return mm.Recipe("test", model=mm.models.noble_gases(), graph=graph, seed=seed)


def four_stages() -> Any:
    return (
        mm.Relax(fmax=0.02, max_steps=50)
        >> mm.Heat(start=5, stop=40, steps=40, dt=2.0)
        >> mm.Equilibrate(mm.NVT(40), steps=40, dt=2.0)
        >> produce()
    )


def statuses(campaign: Any, stage: str) -> Counter[str]:
    group = campaign.summary[stage]
    return Counter(str(s) for s in group["status"].values)


def assert_conserved(campaign: Any, recipe: mm.Recipe, ids: list[str]) -> None:
    """Every system entered at every head, left each stage exactly once, and went on exactly where it should."""
    plan = recipe.plan
    visited: dict[str, dict[str, str]] = {}
    for name in plan.nodes:
        if name in campaign.summary:
            group = campaign.summary[name]
            found = [str(s) for s in group["system"].values]
            assert len(found) == len(set(found)), f"{name}: {found}"
            visited[name] = dict(zip(found, map(str, group["status"].values), strict=True))
        else:
            visited[name] = {}
        assert not set(visited[name].values()) & {"pending", "running"}, visited[name]
    for head in plan.heads:
        assert sorted(visited[head]) == sorted(ids)
    for name in plan.nodes:
        went_on = {s for s, status in visited[name].items() if status not in ("failed", "filtered", "quarantined")}
        for target in plan.targets[name]:
            assert set(visited[target]) == went_on, f"{name} -> {target}"


def assert_same(one: Any, other: Any, stages: list[str]) -> None:
    """Final states, results and trajectories agree to the last bit."""
    for stage in stages:
        a, b = one.structures(stage), other.structures(stage)
        assert a.ids == b.ids
        assert a.equals(b), f"states after {stage} differ"
        for name in ("energy_per_atom", "temperature", "pressure"):
            assert np.array_equal(one.summary[stage][name], other.summary[stage][name], equal_nan=True), name
        for system in a.ids:
            mine, theirs = (c.folder.trajectory_file(system, stage) for c in (one, other))
            assert mine.exists() == theirs.exists()
            if mine.exists():
                assert mine.read_bytes() == theirs.read_bytes(), f"trajectories of {system} in {stage} differ"


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, what: str = "condition") -> None:
    """Poll with a limit; for what has no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds} s"
        time.sleep(0.02)
