"""Claims without Dask: all or nothing, nearest the end first, nobody starves, nothing is held twice or lost."""

from __future__ import annotations

import random

from mattermill.pipeline.claims import Claim, Claims


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def claims(*ranks: str, patience: float = 10.0) -> tuple[Claims, Clock]:
    """Ranks are written host:number."""
    clock = Clock()
    made = Claims(patience, clock)
    for rank in ranks:
        made.join(rank, rank.partition(":")[0])
    return made, clock


def grant(made: Claims) -> list[Claim]:
    return [claim for _, claim in made.grant()]


def test_all_or_nothing() -> None:
    made, _ = claims("a:1", "a:2", "a:3")
    made.request("one", 2, 0)
    made.request("two", 2, 0)
    (first,) = grant(made)
    assert first.stage == "one"
    assert len(first.ranks) == 2
    assert grant(made) == []
    made.release(first)
    (second,) = grant(made)
    assert second.stage == "two"
    assert made.n_free == 1


def test_nearest_the_end_first() -> None:
    made, _ = claims("a:1")
    made.request("start", 1, 3)
    made.request("end", 1, 0)
    made.request("middle", 1, 1)
    order = []
    for _ in range(3):
        (claim,) = grant(made)
        order.append(claim.stage)
        made.release(claim)
    assert order == ["end", "middle", "start"]


def test_two_large_ones_take_turns() -> None:
    """CASES 31."""
    made, clock = claims("a:1", "a:2")
    made.request("a", 2, 0)
    made.request("b", 2, 0)
    order = []
    for _ in range(6):
        (claim,) = grant(made)
        order.append(claim.stage)
        clock.now += 20
        made.request(claim.stage, 2, 0)
        made.release(claim)
    assert order == ["a", "b"] * 3


def test_a_large_one_is_not_starved_by_small_ones() -> None:
    made, clock = claims("a:1", "a:2")
    made.request("small", 1, 1)
    made.request("small", 1, 1)
    one, other = grant(made)
    made.request("large", 2, 0)
    assert not made.wanted(1)
    clock.now = 11
    # Patience is over: gangs of stages further from the end take nothing in, and what comes free is kept.
    assert made.wanted(1)
    assert made.wanted(0)
    assert not made.wanted(0, "large")
    made.release(one)
    made.request("small", 1, 1)
    assert grant(made) == []
    made.release(other)
    assert [c.stage for c in grant(made)] == ["large"]


def test_before_its_patience_is_over_others_pass() -> None:
    made, _ = claims("a:1", "a:2")
    made.request("small", 1, 1)
    (one,) = grant(made)
    made.request("large", 2, 0)
    made.request("small", 1, 1)
    (other,) = grant(made)
    assert other.stage == "small"
    assert set(one.ranks) != set(other.ranks)


def test_what_can_never_be_met_holds_nobody_up() -> None:
    made, clock = claims("a:1", "a:2")
    made.request("huge", 3, 0)
    clock.now = 100
    made.request("small", 1, 1)
    assert [c.stage for c in grant(made)] == ["small"]
    assert not made.wanted(1)


def test_one_host_where_there_is_room() -> None:
    made, _ = claims("a:1", "b:1", "b:2", "c:1", "c:2", "c:3")
    made.request("pair", 2, 0)
    (pair,) = grant(made)
    assert set(pair.ranks) == {"b:1", "b:2"}
    made.request("four", 4, 0)
    (four,) = grant(made)
    assert four.ranks[:3] == ("c:1", "c:2", "c:3")


def test_ranks_that_leave_take_their_claim_down() -> None:
    made, _ = claims("a:1", "a:2")
    made.request("pair", 2, 0)
    (pair,) = grant(made)
    assert made.is_current(pair)
    assert made.leave("a:2") == pair
    assert not made.is_current(pair)
    made.revoke(pair)
    assert made.n_free == 0
    made.release(pair)
    made.release(pair)
    assert made.n_free == 1
    made.join("a:3", "a")
    made.request("pair", 2, 0)
    (again,) = grant(made)
    assert again.epoch > pair.epoch
    # A late release of the old claim must not free the ranks of the new one.
    made.release(pair)
    assert made.n_free == 0


def test_paused_ranks_get_nothing_new() -> None:
    made, _ = claims("a:1", "a:2")
    made.pause("a:1")
    made.request("pair", 2, 0)
    made.request("one", 1, 1)
    (one,) = grant(made)
    assert one.ranks == ("a:2",)
    made.unpause("a:1")
    made.release(one)
    assert [c.stage for c in grant(made)] == ["pair"]


def test_withdrawn_requests_are_not_granted() -> None:
    made, _ = claims("a:1")
    request = made.request("one", 1, 0)
    made.withdraw(request)
    made.withdraw(request)
    assert grant(made) == []


def test_random_histories_never_hold_a_rank_twice() -> None:
    """1,000 random events: every rank is held by at most one claim, whole claims only, and everybody gets a turn."""
    rng = random.Random(5)
    made, clock = claims("a:1", "a:2", "b:1", "b:2")
    held: list[Claim] = []
    got: set[str] = set()
    for number in range(1_000):
        clock.now += rng.random() * 5
        action = rng.randrange(5)
        if action == 0 and len(made.requests) < 6:
            size = rng.choice([1, 1, 1, 2, 4])
            made.request(f"s{size}", size, rng.randrange(3))
        elif action == 1 and held:
            made.release(held.pop(rng.randrange(len(held))))
        elif action == 2 and rng.random() < 0.1 and len(made.addresses) > 2:
            made.leave(rng.choice(sorted(made.addresses)))
        elif action == 3 and len(made.addresses) < 4:
            made.join(f"b:{number}", "b")
        for request, claim in made.grant():
            assert len(set(claim.ranks)) == request.size
            held.append(claim)
            got.add(claim.stage)
        ranks = [r for claim in held for r in claim.ranks]
        assert len(ranks) == len(set(ranks))
    assert got == {"s1", "s2", "s4"}
    for claim in held:
        made.release(claim)
    assert made.n_free == len(made.addresses)
