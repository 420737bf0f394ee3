"""Gangs: tasks of a claim that is over do nothing, a dead rank ends every wait, survivors come free."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from campaigns import OneSided, produce, recipe, slow, systems

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.domain.mesh import MeshError, RankFailed
from mattermill.pipeline import worker as tasks
from mattermill.pipeline.claims import Claim
from mattermill.pipeline.errors import GangLost, StaleClaim
from mattermill.pipeline.folder import Folder
from mattermill.pipeline.gang import Gang, Limits, SourceGone
from mattermill.pipeline.handoff import DamagedFile, write_batch
from mattermill.pipeline.orders import Arrival, Order
from mattermill.pipeline.shift import _is_out_of_memory, _is_own_fault
from mattermill.pipeline.work import Work
from mattermill.pipeline.worker import RankPlugin

LIMIT = 90.0
Test = Callable[["Stand"], Awaitable[None]]


class Stand:
    """A folder with input, a plugin on the workers, and gangs on demand."""

    def __init__(self, client: Any, folder: Folder, session: str, graph: Any) -> None:
        self.client, self.folder, self.session, self.graph = client, folder, session, graph
        self.epoch = 0
        self.alive: list[str] = []

    async def prepare(self) -> None:
        work = Work.of(recipe(self.graph)).pickled()
        await self.client.register_plugin(RankPlugin(self.session, str(self.folder.path), work, "cpu"))
        identity = await self.client.scheduler.identity()
        self.alive = sorted(identity["workers"])
        batch = Batch.from_atoms(systems(2), ["ar-0", "ar-1"])
        path = self.folder.handoff_file("input", "input")
        self.arrival = Arrival(("ar-0", "ar-1"), self.folder.relative(path), write_batch(path, batch))

    def gang(self, stage: str, size: int = 1, **limits: float) -> Gang:
        self.epoch += 1
        claim = Claim(self.epoch, self.epoch, stage, tuple(self.alive[:size]))
        chosen = Limits(**{"form": 60.0, "peer": 20.0, "small": 30.0, "segment": 30.0, "free": 40.0, **limits})
        return Gang(self.client, self.session, claim, chosen, None, lambda: self.alive)

    async def ask(self, address: str, task: Any, *arguments: Any) -> Any:
        return await self.client.submit(task, self.session, *arguments, workers=[address], pure=False)


def play(address: str, tmp_path: Path, graph: Any, test: Test) -> None:
    """Run a test in a loop of its own, with a limit."""
    from distributed import Client

    async def main() -> None:
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            stand = Stand(client, Folder.create(tmp_path / "x.mill"), f"t{os.getpid()}{tmp_path.name[-30:]}", graph)
            await stand.prepare()
            try:
                await test(stand)
            finally:
                await client.unregister_worker_plugin(tasks.plugin_name(stand.session))

    asyncio.run(asyncio.wait_for(main(), LIMIT))


@pytest.mark.parametrize("size", [1, 2])
def test_form_advance_dissolve_and_form_again(cluster: Any, tmp_path: Path, size: int) -> None:
    async def test(stand: Stand) -> None:
        for _ in range(2):
            gang = stand.gang("produce", size)
            await gang.form()
            await gang.receive([stand.arrival], [None])
            report = await gang.advance(20.0, admits=True, checkpoint=False)
            assert sorted(o.id for o in report.outcomes) == ["ar-0", "ar-1"]
            assert report.finished is not None
            assert stand.folder.resolve(report.finished.file).exists()
            finished = await gang.collect(report.number)
            assert finished.ids == report.finished.ids
            assert await gang.dissolve() is None

    play(cluster.scheduler_address, tmp_path, produce(ranks=size), test)


def test_tasks_of_a_claim_that_is_over_do_nothing(cluster: Any, tmp_path: Path) -> None:
    async def test(stand: Stand) -> None:
        old = stand.gang("produce")
        await old.form()
        lead = old.claim.lead
        assert await old.abandon() == ()
        for task, more in (
            (tasks.advance, (Order(1, 1.0, False),)),
            (tasks.receive, ([], [])),
            (tasks.collect, (1,)),
            (tasks.dissolve, (False,)),
        ):
            with pytest.raises(StaleClaim):
                await stand.ask(lead, task, old.claim, *more)
        new = stand.gang("produce")
        await new.form()
        with pytest.raises(StaleClaim, match=f"at epoch {new.claim.epoch}"):
            await stand.ask(lead, tasks.advance, old.claim, Order(1, 1.0, False))
        # A late word of the old claim does not unseat the new one.
        await stand.ask(lead, tasks.abandon, old.claim)
        await new.receive([stand.arrival], [None])
        assert (await new.advance(20.0, admits=True, checkpoint=False)).outcomes
        await new.dissolve()

    play(cluster.scheduler_address, tmp_path, produce(), test)


def test_a_damaged_arrival_leaves_the_gang_well(cluster: Any, tmp_path: Path) -> None:
    async def test(stand: Stand) -> None:
        gang = stand.gang("produce")
        await gang.form()
        with pytest.raises(DamagedFile):
            await gang.receive([Arrival(("ar-0",), "handoff/input/none.npz", None)], [None])
        await gang.receive([stand.arrival], [None])
        assert (await gang.advance(20.0, admits=True, checkpoint=False)).outcomes
        await gang.dissolve()

    play(cluster.scheduler_address, tmp_path, produce(), test)


def test_the_store_listens_on_the_loopback_interface_only(cluster: Any, tmp_path: Path) -> None:
    def listening(dask_worker: Any) -> list[str]:
        return [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]

    async def test(stand: Stand) -> None:
        gang = stand.gang("produce", 2)
        await gang.form()
        found = await stand.client.run(listening)
        assert {ip for ips in found.values() for ip in ips} <= {"127.0.0.1", "::1"}
        await gang.dissolve()

    play(cluster.scheduler_address, tmp_path, produce(ranks=2), test)


def test_what_is_received_twice_is_aboard_once(cluster: Any, tmp_path: Path) -> None:
    async def test(stand: Stand) -> None:
        gang = stand.gang("produce")
        await gang.form()
        await gang.receive([stand.arrival], [None])
        await gang.receive([stand.arrival], [None])
        report = await gang.advance(20.0, admits=True, checkpoint=False)
        assert sorted(o.id for o in report.outcomes) == ["ar-0", "ar-1"]
        await gang.dissolve()

    play(cluster.scheduler_address, tmp_path, produce(), test)


def test_a_source_that_goes_after_the_arrival_does_not_matter() -> None:
    async def received() -> str:
        return "here"

    async def main() -> None:
        gang = Gang(None, "s", Claim(1, 1, "produce", ("a",)), Limits(), None, lambda: ["a"])  # type: ignore[arg-type]
        done = asyncio.ensure_future(received())
        await gang._settle("receiving", [done], 5.0, ["gone"])
        never = asyncio.ensure_future(asyncio.sleep(60))
        with pytest.raises(SourceGone):
            await gang._settle("receiving", [never], 5.0, ["gone"])
        never.cancel()

    asyncio.run(asyncio.wait_for(main(), LIMIT))


@pytest.mark.parametrize("rank", [0, 1], ids=["lead", "other"])
def test_an_error_on_one_rank_is_what_the_gang_says(cluster: Any, tmp_path: Path, rank: int) -> None:
    """Not the complaint of the other, which was only told of it."""

    async def test(stand: Stand) -> None:
        gang = stand.gang("one", 2)
        await gang.form()
        await gang.receive([stand.arrival], [None])
        with pytest.raises(ArithmeticError, match=f"only rank {rank} minds"):
            await gang.advance(20.0, admits=True, checkpoint=False)
        assert await gang.abandon() == ()
        # The ranks are free, and well.
        again = stand.gang("one", 1)
        await again.form()
        await again.dissolve()

    stage = OneSided(mm.NVT(40), steps=10, every=5, dt=2.0, name="one", ranks=2, rank=rank)
    play(cluster.scheduler_address, tmp_path, stage, test)


def test_the_cause_wins_over_what_it_led_to() -> None:
    """Also where the error itself cannot travel: then the words that its rank told the others stand for it."""
    lost, told = MeshError("rank 0 lost rank 2"), RankFailed("rank 2 failed: Odd: its words")
    own, gone = ValueError("of a rank"), GangLost("advancing", "no answer")

    async def cause(*errors: Exception) -> BaseException:
        gang = Gang(None, "s", Claim(1, 1, "produce", ("a",)), Limits(), None, lambda: ["a"])  # type: ignore[arg-type]
        results = [asyncio.ensure_future(_raise(e)) for e in errors]
        with pytest.raises(Exception, match=r"\w") as caught:
            await gang._settle("advancing", results, 5.0, [])
        await asyncio.gather(*results, return_exceptions=True)
        return caught.value

    assert asyncio.run(cause(lost, told, own)) is own
    assert asyncio.run(cause(lost, told)) is told
    assert asyncio.run(cause(gone, told, lost)) is told
    assert asyncio.run(cause(lost, lost)) is lost
    # A system that makes a rank fail has failed; one that lost its rank has not.
    assert [_is_own_fault(e) for e in (own, told, lost, gone)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (RankFailed("rank 1 failed: MemoryError: "), True),
        (RankFailed("rank 1 failed: _ArrayMemoryError: Unable to allocate 8 GiB for an array"), True),
        (RuntimeError("Unable to allocate 8.00 GiB for an array with shape (1,)"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("Warp error: Out of memory"), True),
        (RankFailed("rank 1 failed: ValueError: the memory of this is short"), False),
    ],
)
def test_what_a_rank_says_when_its_memory_is_full(error: Exception, memory: bool) -> None:
    assert _is_out_of_memory(error) is memory


async def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("member", [0, 1], ids=["lead", "other"])
def test_a_dead_rank_ends_the_wait_and_frees_the_survivor(tmp_path: Path, member: int) -> None:
    """CASES 32, without the help of the watch: whoever tells of the death, nobody waits for the dead."""
    from distributed import LocalCluster

    async def test(stand: Stand) -> None:
        loop = asyncio.get_running_loop()
        gang = stand.gang("slow", 2)
        await gang.form()
        await gang.receive([stand.arrival], [None])
        pids = await stand.client.run(os.getpid)
        victim = gang.claim.ranks[member]
        advancing = asyncio.create_task(gang.advance(60.0, admits=True, checkpoint=False))
        await _computes(stand, gang, tmp_path)
        os.kill(pids[victim], signal.SIGKILL)
        began = loop.time()
        gang.lose(victim)
        with pytest.raises(GangLost, match="advancing") as caught:
            await advancing
        assert caught.value.dead == (victim,)
        assert await gang.abandon() == ()
        assert loop.time() - began < 20
        survivor = next(a for a in stand.alive if a != victim)
        stand.alive = [survivor]
        again = stand.gang("slow", 1)
        await again.form()
        await again.dissolve()

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as mortal:
        play(mortal.scheduler_address, tmp_path, slow(steps=2000, every=5, ranks=2), test)


async def _computes(stand: Stand, gang: Gang, tmp_path: Path) -> None:
    """The gang is in the middle of its steps: it has written a frame."""
    path = stand.folder.trajectory_file("ar-0", gang.claim.stage)
    while not path.exists():
        await asyncio.sleep(0.05)


def test_a_wait_without_an_answer_ends(cluster: Any, tmp_path: Path) -> None:
    """Half a gang waits for the other half, which never comes."""

    async def test(stand: Stand) -> None:
        gang = stand.gang("slow", 1, segment=0.1)
        await gang.form()
        await gang.receive([stand.arrival], [None])
        with pytest.raises(GangLost, match=r"advancing: no answer within"):
            await asyncio.gather(gang.advance(0.1, admits=True, checkpoint=False), return_exceptions=False)
        # The task that runs already cannot be taken away; the rank is free when it has ended.
        assert await gang.abandon() == ()

    play(cluster.scheduler_address, tmp_path, slow(steps=10, pause=0.5), test)
