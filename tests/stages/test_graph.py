"""Graph pieces are values; joining makes new ones."""

from __future__ import annotations

import pickle

import pytest

import mattermill as mm
from mattermill.stages.graph import piece

RELAX, HEAT = mm.Relax(), mm.Heat(start=10, stop=20, steps=10)
COLD, HOT = mm.Produce(mm.NVE(), steps=5, name="cold"), mm.Produce(mm.NVT(90), steps=5, name="hot")


def test_chain_and_fan_out() -> None:
    graph = RELAX >> HEAT >> [COLD, HOT]
    assert graph.names == ("relax", "heat", "cold", "hot")
    assert graph.edges == ((0, 1), (1, 2), (1, 3))
    assert graph.heads == (0,)
    assert graph.tails == (2, 3)
    assert graph.sources(2) == (1,)
    assert graph.targets(1) == (2, 3)


def test_pieces_join_to_the_same_whatever_the_brackets() -> None:
    assert (RELAX >> HEAT) >> COLD == RELAX >> (HEAT >> COLD)
    first, second = RELAX >> HEAT, HEAT >> COLD
    joined = first >> [COLD, HOT]
    assert first.names == ("relax", "heat")  # not mutated
    assert second.names == ("heat", "cold")
    assert joined != first


def test_a_list_in_front_and_behind() -> None:
    graph = [COLD, HOT] >> RELAX
    assert graph.edges == ((0, 2), (1, 2))
    fan = RELAX >> [HEAT >> COLD, HOT]
    assert fan.names == ("relax", "heat", "cold", "hot")
    assert fan.edges == ((0, 1), (0, 3), (1, 2))
    assert fan.tails == (2, 3)


def test_equal_nodes_are_one_node() -> None:
    cycle = RELAX >> HEAT >> mm.Relax()
    assert cycle.names == ("relax", "heat")
    assert cycle.edges == ((0, 1), (1, 0))
    meet = RELAX >> [HEAT >> COLD, HOT >> COLD]
    assert meet.names.count("cold") == 1
    assert len(meet.sources(meet.names.index("cold"))) == 2
    # one name, two different nodes: both stay, for the recipe to refuse
    assert (RELAX >> HEAT >> mm.Relax(fmax=0.5)).names == ("relax", "heat", "relax")


def test_a_piece_is_pickled_as_a_value() -> None:
    graph = RELAX >> HEAT >> [COLD, HOT]
    assert pickle.loads(pickle.dumps(graph)) == graph


@pytest.mark.parametrize("wrong", [3, None, "relax", []])
def test_what_is_no_stage_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError):
        piece(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        RELAX >> wrong  # type: ignore[operator]
