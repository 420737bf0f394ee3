"""Recipes: what is refused and how, what a graph comes to, JSON there and back without importing anything."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

import mattermill as mm
from mattermill.pipeline.recipe_json import differences


def model() -> Any:
    return mm.models.noble_gases()


def relax(**more: Any) -> mm.Relax:
    return mm.Relax(fmax=0.01, **more)


def heat(**more: Any) -> mm.Heat:
    return mm.Heat(start=10, stop=50, steps=100, **more)


def produce(**more: Any) -> mm.Produce:
    return mm.Produce(mm.NVE(), steps=100, **more)


def recipe(graph: Any, **more: Any) -> mm.Recipe:
    return mm.Recipe("test", model=more.pop("model", model()), graph=graph, **more)


def test_fan_out_and_filter_make_a_plan() -> None:
    plan = recipe(relax() >> mm.Filter("energy < 0", name="bound") >> heat() >> [produce(), produce(name="hot")]).plan
    assert list(plan.stages) == ["relax", "heat", "produce", "hot"]
    assert plan.heads == ("relax",)
    assert plan.stages_behind("relax") == ("heat",)
    assert plan.targets["relax"] == ("bound",)
    assert plan.producers("hot") == ("heat",)
    assert [plan.height(n) for n in ("relax", "bound", "heat", "hot")] == [2, 2, 1, 0]
    assert [s.filter.name for s in plan.sieves_behind("relax")] == ["bound"]


def test_filters_in_a_row_are_nested() -> None:
    plan = recipe(relax() >> mm.Filter("energy < 0", name="a") >> mm.Filter("n_atoms > 3", name="b") >> heat()).plan
    (sieve,) = plan.sieves_behind("relax")
    assert sieve.filter.name == "a"
    assert [s.filter.name for s in sieve.behind] == ["b"]
    assert plan.stages_behind("relax") == ("heat",)


REFUSED = [
    (lambda: (a := relax()) >> heat() >> a, "relax >> heat >> relax is a cycle.*name='relax-2'"),
    (lambda: relax() >> relax(), "relax >> relax is a cycle"),
    (lambda: relax() >> heat() >> mm.Heat(start=1, stop=2, steps=3), "'heat' is used twice.*name='heat-2'"),
    (lambda: relax() >> [heat(), heat(name="b")] >> produce(), "'produce' follows both 'heat' and 'b'"),
    (lambda: mm.Filter("energy < 0") >> relax(), "before any stage"),
    (list, "has no stages"),
    (lambda: "relax", "made of stages"),
    (lambda: [relax(), 3], "not of int"),
]


@pytest.mark.parametrize(("graph", "message"), REFUSED)
def test_refused_graphs_say_what_to_change(graph: Any, message: str) -> None:
    with pytest.raises(mm.RecipeError, match=message):
        recipe(graph())


def test_refused_values_say_what_to_change() -> None:
    with pytest.raises(mm.RecipeError, match="'relax' has no model"):
        mm.Recipe("test", graph=relax())
    with pytest.raises(mm.RecipeError, match="must be a mattermill model"):
        mm.Recipe("test", model="lj", graph=relax())  # type: ignore[arg-type]
    with pytest.raises(mm.RecipeError, match="seed"):
        recipe(relax(), seed=-1)
    with pytest.raises(mm.RecipeError, match="name"):
        mm.Recipe("", model=model(), graph=relax())
    with pytest.raises(mm.RecipeError, match=r"a/b.*cannot name"):
        recipe(relax() >> mm.Filter("energy < 0", name="a/b"))


@dataclass(frozen=True)
class Measured(mm.Produce):
    """A stage with results of its own."""

    def results(self, batch: Any) -> Any:
        return {**super().results(batch), "hardness": 1.0}


def test_a_filter_that_cannot_be_answered_is_refused_when_the_recipe_is_built() -> None:
    with pytest.raises(mm.RecipeError, match=r"'energy_per_atm', which stage 'relax' .*mean 'energy_per_atom'"):
        recipe(relax() >> mm.Filter("energy_per_atm < 0", name="bound") >> heat())
    with pytest.raises(mm.RecipeError, match=r"'hardness', which stage 'relax' does not give: there are cell_a"):
        recipe(relax() >> mm.Filter("n_atoms > 1") >> mm.Filter("hardness > 0", name="hard") >> heat())
    # What somebody else's stage gives is not known before it has run; nor what a function asks for.
    recipe(Measured(mm.NVE(), steps=100, name="own") >> mm.Filter("hardness > 0", name="hard") >> heat())
    recipe(relax() >> mm.Filter(lambda results: results["hardness"] > 0, name="hard") >> heat())


def test_a_stage_may_bring_its_own_model() -> None:
    assert mm.Recipe("test", graph=relax(model=model())).plan.heads == ("relax",)


def test_recipe_is_a_value() -> None:
    one, other = (recipe(relax() >> heat(), seed=3) for _ in range(2))
    assert one == other
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != recipe(relax() >> heat(), seed=4)


def test_json_there_and_back() -> None:
    before = recipe(
        relax() >> mm.Filter("energy_per_atom < 0", name="bound") >> heat() >> [produce(ranks=2), produce(name="b")],
        seed=7,
    )
    text = json.dumps(before.to_json())
    after = mm.Recipe.from_json(json.loads(text))
    assert after == before
    assert json.dumps(after.to_json()) == text


def own_predicate(results: Any) -> bool:
    return results["n_atoms"] > 3


@dataclass(frozen=True, kw_only=True)
class OwnStage(mm.Stage):
    wait: float = 1.0


@pytest.mark.parametrize(
    "graph", [lambda: relax() >> mm.Filter(own_predicate), lambda: relax() >> OwnStage(wait=2.0)], ids=["func", "stage"]
)
def test_code_of_the_users_is_named_and_never_imported(graph: Any) -> None:
    document = json.loads(json.dumps(recipe(graph()).to_json()))
    assert "own_predicate" in str(document) or "OwnStage" in str(document)
    with pytest.raises(mm.RecipeError, match=r"never imported.*resume FOLDER --recipe"):
        mm.Recipe.from_json(document)


@pytest.mark.parametrize(
    "node",
    [
        {"name": "x", "type": "Path", "fields": {}},
        {"name": "x", "type": "os:system", "fields": {"command": "true"}},
        {"name": "x", "type": "Relax", "fields": {"unknown": 1}},
        {"name": "x", "strange": 1},
        {},
    ],
)
def test_a_document_can_name_nothing_else(node: Any) -> None:
    document = recipe(relax()).to_json()
    document["nodes"] = [node]
    with pytest.raises(mm.RecipeError):
        mm.Recipe.from_json(document)


def test_differences_are_named() -> None:
    old = recipe(relax() >> heat()).to_json()
    assert differences(old, recipe(relax() >> heat()).to_json()) == []
    changed = recipe(relax() >> mm.Heat(start=10, stop=60, steps=100) >> produce(), seed=1).to_json()
    found = differences(old, changed)
    assert "seed: 0 -> 1" in found
    assert "produce is new" in found
    assert "heat.stop: 50 -> 60" in found
