"""Who is there: ranks that come, pause, retire, and cannot be started again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mattermill.pipeline import membership as module
from mattermill.pipeline.claims import Claims
from mattermill.pipeline.cluster import Member
from mattermill.pipeline.membership import Membership
from mattermill.pipeline.program import Program


def watch(told: list[tuple[str, str]]) -> Membership:
    return Membership(
        None,  # type: ignore[arg-type]
        Claims(),
        None,
        on_loss=lambda address, claim: told.append(("loss", address)),
        on_pause=lambda address: told.append(("pause", address)),
        on_leave=lambda address: told.append(("leave", address)),
        on_change=lambda: None,
    )


def found(**status: str) -> dict[str, Member]:
    return {name: Member(name, "host", 1, value, name) for name, value in status.items()}


def play(membership: Membership, *looks: dict[str, Member]) -> None:
    async def main() -> None:
        for look in looks:
            membership.update(look)

    asyncio.run(main())


def test_who_retires_gets_no_claim_and_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_LIMIT", -1.0)
    told: list[tuple[str, str]] = []
    membership = watch(told)
    play(membership, found(a="running", b="running"), found(a="closing_gracefully", b="paused"))
    assert told == [("leave", "a"), ("pause", "b")]
    assert membership.claims.size == 0
    assert "a" in membership.claims.addresses  # what it runs may still come to its end
    play(membership, found(b="running"))
    assert told[-1] == ("loss", "a")


def test_who_cannot_be_started_again_is_not_taken_in_again() -> None:
    told: list[tuple[str, str]] = []
    membership = watch(told)
    play(membership, found(a="running", b="running"))
    membership.exclude("a")
    play(membership, found(a="running", b="running"))
    assert membership.claims.addresses == {"b"}
    # Its address may be given to a new process once it is gone.
    play(membership, found(b="running"), found(a="running", b="running"))
    assert membership.claims.addresses == {"a", "b"}


@pytest.mark.parametrize("raises", [None, ValueError("no nanny")])
def test_restart_leaves_out_who_did_not_come_back(raises: Exception | None) -> None:
    membership = watch([])
    play(membership, found(ok="running", late="running"))

    async def restart_workers(addresses: list[str], **options: Any) -> dict[str, str]:
        if raises is not None:
            raise raises
        return {"ok": "OK", "late": "timed out"}

    program: Any = SimpleNamespace(client=SimpleNamespace(restart_workers=restart_workers), membership=membership)
    asyncio.run(Program.restart(program, ["ok", "late"]))
    assert membership.claims.addresses == ({"ok"} if raises is None else set())
    play(membership, found(late="running"))
    assert "late" not in membership.claims.addresses
