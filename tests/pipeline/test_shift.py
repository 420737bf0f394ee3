"""What a shift decides when its gang has gone wrong, without a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from campaigns import produce, recipe

from mattermill.pipeline.books import Books
from mattermill.pipeline.claims import Claim, Claims
from mattermill.pipeline.errors import GangLost
from mattermill.pipeline.folder import Folder
from mattermill.pipeline.handoff import DamagedFile
from mattermill.pipeline.ledger import Finished
from mattermill.pipeline.line import build_lines
from mattermill.pipeline.options import Options
from mattermill.pipeline.shift import Shift
from mattermill.pipeline.stream import MAX_DEATHS, Parcel, Ticket

INPUT, CHECKPOINT = Parcel("handoff/input/a.npz", "one"), Parcel("checkpoints/produce/b.npz", "two")


@pytest.fixture
def shift(tmp_path: Path) -> Shift:
    plan = recipe(produce()).plan
    recorded: list[Any] = []

    async def record(entries: Any) -> None:
        recorded.extend(entries)

    program: Any = SimpleNamespace(
        client=None,
        session="s",
        options=Options(),
        membership=SimpleNamespace(alive=frozenset()),
        claims=Claims(),
        folder=Folder(tmp_path),
        books=Books(plan, "s"),
        record=record,
        recorded=recorded,
        note=lambda ended: None,
    )
    line = build_lines(plan, capacity=10, max_atoms=1_000)["produce"]
    return Shift(program, line, Claim(1, 1, "produce", ("tcp://a:1",)))


def take(shift: Shift, *tickets: Ticket) -> list[Ticket]:
    shift.aboard = {t.system: t for t in tickets}
    return list(tickets)


def damage(shift: Shift, parcel: Parcel) -> DamagedFile:
    return DamagedFile(shift.program.folder.resolve(parcel.file), "it is cut off")


def finished(shift: Shift) -> list[Finished]:
    return [e for e in shift.program.recorded if isinstance(e, Finished)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", ["", "ValueError: no"])
def test_who_ends_alone_keeps_the_last_good_state(shift: Shift, fault: str) -> None:
    take(shift, Ticket("a", 10, CHECKPOINT, (INPUT,), deaths=MAX_DEATHS))
    shift.alone = True
    asyncio.run(shift._give_back(died=not fault, fault=fault))
    (ended,) = finished(shift)
    assert ended.status == ("failed" if fault else "quarantined")
    assert (ended.file, ended.digest) == (CHECKPOINT.file, CHECKPOINT.digest)
    assert not shift.aboard
    assert shift.line.stream.is_full is False


def test_damage_of_a_strange_file_leaves_all_aboard(shift: Shift) -> None:
    tickets = take(shift, Ticket("a", 10, CHECKPOINT, (INPUT,)), Ticket("b", 10, INPUT))
    with pytest.raises(DamagedFile):
        asyncio.run(shift._without_damage(tickets, damage(shift, Parcel("handoff/other.npz", None))))
    assert list(shift.aboard) == ["a", "b"]
    assert not shift.program.recorded  # type: ignore[attr-defined]


def test_damage_costs_a_checkpoint_and_then_the_system(shift: Shift) -> None:
    tickets = take(shift, Ticket("a", 10, CHECKPOINT, (INPUT,)), Ticket("b", 10, INPUT))
    again = asyncio.run(shift._without_damage(tickets, damage(shift, CHECKPOINT)))
    assert [(t.system, t.parcel, t.fallbacks) for t in again] == [("a", INPUT, ()), ("b", INPUT, ())]
    take(shift, *again)
    assert asyncio.run(shift._without_damage(again, damage(shift, INPUT))) == []
    assert [(e.system, e.status, e.file) for e in finished(shift)] == [("a", "failed", None), ("b", "failed", None)]
    assert "its state is lost" in finished(shift)[0].reason


def test_a_rank_that_retires_is_no_death_of_its_systems(shift: Shift) -> None:
    async def main() -> None:
        async def free() -> tuple[str, ...]:
            return ()

        shift.gang.abandon = free  # type: ignore[method-assign]
        shift.formed = shift.leaving = True
        await shift._fail(GangLost("leaving", "a rank retires"))

    take(shift, Ticket("a", 10, CHECKPOINT))
    asyncio.run(main())
    (ticket,) = shift.line.stream.take(100)
    assert ticket.deaths == 0
