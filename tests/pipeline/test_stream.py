"""Streams and shares: order, bounds, sentinels, suspects, and how work is split between gangs."""

from __future__ import annotations

import pytest
from campaigns import produce, recipe

from mattermill.pipeline.line import INPUT, build_lines
from mattermill.pipeline.scheduling import SMALL_SHARE, Load, aim, checkpoint_is_due, room
from mattermill.pipeline.stream import MAX_DEATHS, Parcel, Stream, Ticket

PARCEL = Parcel("handoff/x.npz", None)


def ticket(name: str, n_atoms: int = 10, **more: object) -> Ticket:
    return Ticket(name, n_atoms, PARCEL, **more)  # type: ignore[arg-type]


def names(tickets: list[Ticket]) -> list[str]:
    return [t.system for t in tickets]


def test_first_in_first_out_by_atoms() -> None:
    stream = Stream("heat", ["relax"])
    stream.put([ticket("a", 10), ticket("b", 20), ticket("c", 30), ticket("d", 5)], "relax")
    assert stream.n_atoms == 65
    assert names(stream.take(30)) == ["a", "b"]
    # The next does not fit, but a gang that has nothing takes at least one.
    assert names(stream.take(1)) == ["c"]
    assert stream.n_atoms == 5
    assert names(stream.take(100)) == ["d"]
    assert stream.take(100) == []


def test_the_sentinel_of_every_producer_ends_it() -> None:
    stream = Stream("heat", ["one", "two"])
    stream.put([ticket("a")], "one")
    stream.end("one")
    assert not stream.is_ended
    stream.end("two")
    stream.end("two")
    assert not stream.is_ended
    stream.take(100)
    assert stream.is_ended
    with pytest.raises(AssertionError, match="after its sentinel"):
        stream.put([ticket("b")], "one")


def test_what_comes_back_goes_first_and_reopens_the_stream() -> None:
    stream = Stream("heat", ["relax"])
    stream.put([ticket("a"), ticket("b"), ticket("c")], "relax")
    stream.end("relax")
    taken = stream.take(20)
    stream.take(100)
    assert stream.is_ended
    stream.put_back([t.died() for t in taken])
    assert not stream.is_ended
    assert names(stream.take(100)) == ["a", "b"]


def test_suspects_wait_apart() -> None:
    stream = Stream("heat", ["relax"])
    stream.put([ticket("a")], "relax")
    stream.put_back([ticket("killer", deaths=MAX_DEATHS), ticket("raiser", fault="ValueError"), ticket("b", deaths=2)])
    assert names(stream.take(1_000)) == ["b", "a"]
    assert stream.has_suspects
    assert names(stream.take_alone()) == ["killer"]
    assert names(stream.take_alone()) == ["raiser"]
    assert stream.take_alone() == []
    assert stream.n_atoms == 0


def test_a_stage_called_input_feeds_its_child_to_the_end() -> None:
    plan = recipe(produce("input") >> produce("b")).plan
    lines = build_lines(plan, capacity=10, max_atoms=1_000)
    lines["input"].stream.end(INPUT)
    assert lines["input"].is_over
    lines["b"].stream.end(INPUT)
    assert not lines["b"].is_over
    lines["b"].stream.end("input")
    assert lines["b"].is_over


def test_full_from_its_capacity_on() -> None:
    stream = Stream("heat", ["relax"], capacity=2)
    stream.put([ticket("a")], "relax")
    assert not stream.is_full
    stream.put([ticket("b")], "relax")
    assert stream.is_full


def test_a_lone_gang_takes_all_it_has_room_for_and_some_at_hand() -> None:
    assert room(Load(waiting=90_000, aboard=0, servers=1), 0, 50_000) == 75_000
    assert room(Load(waiting=90_000, aboard=49_000, servers=1), 49_000, 50_000) == 26_000


def test_where_there_is_enough_for_all_everybody_has_some_at_hand() -> None:
    load = Load(waiting=1_000_000, aboard=0, servers=4)
    assert room(load, 0, 50_000) == 75_000
    # Full, with something at hand: nothing. Nothing at hand any more: it is handed some.
    assert room(load, 60_000, 50_000) == 0
    assert room(load, 45_000, 50_000) == 30_000


def test_what_is_at_hand_is_never_taken_from_another() -> None:
    """Four gangs, and hardly more work than they have room for: nobody gets more than half an even share."""
    load = Load(waiting=200_000, aboard=0, servers=4)
    assert room(load, 0, 50_000) == 25_000


def test_shares_leave_something_for_others() -> None:
    load = Load(waiting=40_000, aboard=0, servers=4)
    assert aim(load, 50_000) == 5_000
    # Nobody refills while half full, so what waits goes to who is empty.
    later = Load(waiting=20_000, aboard=20_000, servers=4)
    assert room(later, 4_000, 50_000) == 0
    assert room(later, 1_000, 50_000) > 0


def test_small_work_is_not_split_for_nothing() -> None:
    assert aim(Load(waiting=400, aboard=0, servers=4), 50_000) == SMALL_SHARE


def test_shares_end_in_all_work_done() -> None:
    """Four gangs, always the fastest served first: everything is taken, and no gang gets more than half its share."""
    stream = Stream("heat", ["relax"])
    stream.put([ticket(str(k), 500) for k in range(100)], "relax")
    first = None
    while len(stream):
        load = Load(stream.n_atoms, 0, 4)
        taken = stream.take(room(load, 0, 50_000))
        assert taken
        first = first or sum(t.n_atoms for t in taken)
    assert first is not None
    assert first <= 50_000 / 4 / 2


def test_the_first_checkpoint_comes_early() -> None:
    assert not checkpoint_is_due(now=5.0, last=0.0, every=60.0, started=0.0)
    assert checkpoint_is_due(now=6.0, last=0.0, every=60.0, started=0.0)
    assert not checkpoint_is_due(now=60.0, last=6.0, every=60.0, started=0.0)
    assert checkpoint_is_due(now=66.0, last=6.0, every=60.0, started=0.0)
