"""Campaigns on a real cluster of two ranks: whole runs, what is refused, and what fails alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaigns import (
    Held,
    argon,
    assert_conserved,
    assert_same,
    broken_model,
    four_stages,
    produce,
    raises,
    recipe,
    slow,
    statuses,
    systems,
)
from typer.testing import CliRunner

import mattermill as mm
from mattermill.pipeline.cli import app
from mattermill.pipeline.errors import CampaignError
from mattermill.pipeline.events import GangFormed, SegmentEnded, VisitEnded
from mattermill.pipeline.folder import Folder, FolderError
from mattermill.pipeline.intake import begin, structures_of
from mattermill.pipeline.ledger import Ledger
from mattermill.pipeline.lock import Holder, LockedError
from mattermill.pipeline.program import SESSIONS
from mattermill.pipeline.work import Work
from mattermill.pipeline.worker import RankPlugin

QUICK: dict[str, Any] = {"segment_seconds": 1.0, "progress": False, "device": "cpu"}
LIMIT = 120.0


def run(made: mm.Recipe, structures: Any, out: Path, client: Any, **more: Any) -> mm.Campaign:
    return made.start(structures, out, client=client, **{**QUICK, **more}).wait(LIMIT)


def test_four_stages(client: Any, tmp_path: Path) -> None:
    made = recipe(four_stages())
    campaign = run(made, systems(5), tmp_path / "a.mill", client)
    assert_conserved(campaign, made, [f"ar-{k}" for k in range(5)])
    assert statuses(campaign, "relax") == {"converged": 5}
    assert statuses(campaign, "produce") == {"finished": 5}
    assert campaign.trajectory("ar-3", "produce").sizes["frame"] == 5
    assert np.all(campaign.summary["produce"]["steps"] == 40)
    assert (campaign.folder.summary).exists()
    # The handle still answers, another look at the folder says the same, and nobody holds it.
    assert mm.open_campaign(campaign.path).status() == campaign.status()
    assert not campaign.folder.lock.exists()


def test_fan_out_and_filter(client: Any, tmp_path: Path) -> None:
    graph = mm.Relax(fmax=0.05, max_steps=50) >> [
        mm.Filter("n_atoms > 40", name="big") >> produce("large"),
        mm.Filter("n_atoms <= 40", name="little") >> [produce("small-a"), produce("small-b")],
        mm.Filter(lambda results: results["no_such_result"] > 1, name="typo") >> produce("never"),
    ]
    made = recipe(graph)
    structures = [argon("big-0", 3), *systems(3)]
    campaign = run(made, structures, tmp_path / "a.mill", client)
    ids = ["big-0", "ar-0", "ar-1", "ar-2"]
    assert_conserved(campaign, made, ids)
    assert statuses(campaign, "big") == {"finished": 1, "filtered": 3}
    assert statuses(campaign, "little") == {"finished": 3, "filtered": 1}
    assert statuses(campaign, "typo") == {"failed": 4}
    assert "no_such_result" in str(campaign.summary["typo"]["reason"].values[0])
    assert statuses(campaign, "large") == {"finished": 1}
    # Siblings start from one state and share no noise.
    one, other = (campaign.structures(s) for s in ("small-a", "small-b"))
    assert one.ids == other.ids == ("ar-0", "ar-1", "ar-2")
    assert not np.allclose(one.positions, other.positions)


def test_two_ranks_beside_one(client: Any, tmp_path: Path) -> None:
    """CASES 31: two stages that both need all ranks take turns, with one-rank stages around them."""
    graph = mm.Relax(fmax=0.05, max_steps=30) >> produce("a", ranks=2) >> produce("b", ranks=2) >> produce("c")
    made = recipe(graph)
    formed: list[GangFormed] = []
    listen = lambda e: formed.append(e) if isinstance(e, GangFormed) else None  # noqa: E731
    campaign = run(made, systems(6), tmp_path / "a.mill", client, progress=listen, max_atoms=64)
    assert_conserved(campaign, made, [f"ar-{k}" for k in range(6)])
    assert {len(e.ranks) for e in formed if e.stage in ("a", "b")} == {2}
    assert all(len(set(e.ranks)) == len(e.ranks) for e in formed)


def test_company_and_cluster_change_nothing(client: Any, tmp_path: Path) -> None:
    """The same bits alone on one rank and in any company on two (DESIGN §6.2)."""
    made = recipe(four_stages())
    together = run(made, systems(4), tmp_path / "a.mill", client)
    apart = run(made, systems(4), tmp_path / "b.mill", client, ranks=1, max_atoms=33, segment_seconds=0.2)
    assert_same(together, apart, ["relax", "heat", "equilibrate", "produce"])


def test_a_stage_may_be_called_input(client: Any, tmp_path: Path) -> None:
    made = recipe(produce("input", steps=10) >> produce("b", steps=10))
    campaign = run(made, systems(2), tmp_path / "a.mill", client, max_atoms=33)
    assert_conserved(campaign, made, ["ar-0", "ar-1"])
    assert statuses(campaign, "b") == {"finished": 2}


def test_a_stage_may_keep_velocities_and_forces(client: Any, tmp_path: Path) -> None:
    made = recipe(produce("bare", steps=10) >> produce("all", steps=10, velocities=True, forces=True))
    campaign = run(made, systems(1), tmp_path / "a.mill", client)
    with campaign.trajectory("ar-0", "bare") as bare, campaign.trajectory("ar-0", "all") as kept:
        assert {"velocities", "forces"} & set(bare) == set()
        last = campaign.structures("all")
        assert np.allclose(kept["velocities"][-1], last.velocities * 1e3, rtol=1e-5, atol=1e-4)  # Å/fs -> Å/ps
        kcal = 4.184 / 96.48533212  # eV, from the Faraday constant
        assert np.allclose(kept["forces"][-1] * kcal, last.forces, rtol=1e-5, atol=1e-5)


def test_batches_move_peer_to_peer(client: Any, tmp_path: Path) -> None:
    made = recipe(mm.Relax(fmax=0.05, max_steps=30) >> produce())
    campaign = run(made, systems(4), tmp_path / "a.mill", client)
    assert campaign._program is not None
    assert campaign._program.pulled == 4


def test_bad_systems_fail_alone(client: Any, tmp_path: Path) -> None:
    overlapping = argon("overlapping")
    overlapping.positions[1] = overlapping.positions[0]
    unknown = argon("unknown")
    unknown.numbers[3] = 26
    nan = argon("nan")
    nan.positions[0, 0] = np.nan
    flat = argon("flat")
    flat.pbc, flat.cell = False, np.zeros((3, 3))
    (tmp_path / "empty.xyz").touch()
    structures = [*systems(4), overlapping, unknown, nan, flat, tmp_path / "empty.xyz", tmp_path / "missing.cif"]
    made = recipe(mm.Relax(fmax=0.05, max_steps=50, cell="isotropic") >> produce())
    campaign = run(made, structures, tmp_path / "a.mill", client)
    ids = [*(f"ar-{k}" for k in range(4)), *("overlapping", "unknown", "nan", "flat", "empty", "missing")]
    assert_conserved(campaign, made, ids)
    assert statuses(campaign, "relax") == {"converged": 4, "failed": 6}
    assert statuses(campaign, "produce") == {"finished": 4}
    reasons = campaign.failures()
    assert sorted(reasons) == sorted(ids[4:])
    assert "Fe" in reasons["unknown"]
    assert "finite" in reasons["nan"]
    assert "empty" in reasons["empty"]
    assert "no such file" in reasons["missing"]
    assert len(set(reasons.values())) == 6


def test_a_broken_model_stops_the_campaign(client: Any, tmp_path: Path) -> None:
    """CASES 30."""
    made = mm.Recipe("test", model=broken_model(), graph=produce())
    ended: list[VisitEnded] = []
    listen = lambda e: ended.append(e) if isinstance(e, VisitEnded) else None  # noqa: E731
    with pytest.raises(CampaignError, match=r"visits failed, more than max_failure_rate=0.5.*this model is broken"):
        run(made, systems(60), tmp_path / "a.mill", client, progress=listen, max_atoms=200)
    assert 20 <= len(ended) < 60
    counts = mm.open_campaign(tmp_path / "a.mill").status()["produce"]
    assert counts.get("failed", 0) == len(ended)
    assert sum(counts.values()) == 60


def test_errors_of_a_filter_function_fail_their_system(client: Any, tmp_path: Path) -> None:
    made = recipe(produce("a") >> mm.Filter(raises, name="own") >> produce("b"))
    campaign = run(made, systems(2), tmp_path / "a.mill", client)
    assert_conserved(campaign, made, ["ar-0", "ar-1"])
    assert statuses(campaign, "own") == {"failed": 2}


# --- refused before anything runs ----------------------------------------------------------------------------------


def test_a_folder_that_holds_a_campaign_is_refused(client: Any, tmp_path: Path) -> None:
    made = recipe(produce())
    run(made, systems(1), tmp_path / "a.mill", client)
    before = (tmp_path / "a.mill" / "recipe.json").read_bytes()
    with pytest.raises(FolderError, match="already holds a campaign"):
        run(made, systems(1), tmp_path / "a.mill", client)
    assert (tmp_path / "a.mill" / "recipe.json").read_bytes() == before


def test_more_ranks_than_there_are(client: Any, tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="asks for 3 ranks, there are 2"):
        recipe(produce(ranks=3)).start(systems(1), tmp_path / "a.mill", client=client)
    with pytest.raises(CampaignError, match="3 ranks asked, the cluster has 2"):
        recipe(produce()).start(systems(1), tmp_path / "a.mill", client=client, ranks=3)
    with pytest.raises(CampaignError, match="asks for 3 ranks, there are 2"):
        recipe(produce(ranks=3)).start(systems(1), tmp_path / "a.mill", ranks=2)
    assert not (tmp_path / "a.mill").exists()


def test_what_makes_no_sense_is_refused(client: Any, tmp_path: Path) -> None:
    made = recipe(produce())
    with pytest.raises(CampaignError, match="unknown option segment_second: there are segment_seconds"):
        made.start(systems(1), tmp_path / "a.mill", client=client, segment_second=3)
    with pytest.raises(CampaignError, match="no structures"):
        made.start([], tmp_path / "a.mill", client=client)
    with pytest.raises(CampaignError, match="checkpoint_seconds must be more than 0"):
        made.start(systems(1), tmp_path / "a.mill", client=client, checkpoint_seconds=0)


def test_workers_with_several_threads_are_refused(tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None) as several,
        Client(several) as own,
        pytest.raises(CampaignError, match="--nthreads 1"),
    ):
        recipe(produce()).start(systems(1), tmp_path / "a.mill", client=own)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as threads,
        Client(threads) as own,
        pytest.raises(CampaignError, match="processes=True"),
    ):
        recipe(produce()).start(systems(1), tmp_path / "a.mill", client=own)


# --- how it is held ------------------------------------------------------------------------------------------------


def test_start_status_stop_resume(client: Any, tmp_path: Path) -> None:
    """Stopped in good order, resumed in other company: the same bits as a run in peace."""
    made = recipe(mm.Relax(fmax=0.05, max_steps=30) >> slow(steps=100))
    peace = run(made, systems(3), tmp_path / "peace.mill", client)
    advanced = threading.Event()

    def listen(event: Any) -> None:
        if isinstance(event, SegmentEnded) and event.stage == "slow" and any(event.steps.values()):
            advanced.set()

    campaign = made.start(
        systems(3), tmp_path / "a.mill", client=client, **{**QUICK, "progress": listen, "segment_seconds": 0.2}
    )
    assert campaign.running
    assert advanced.wait(LIMIT)
    campaign.stop()
    assert not campaign.running
    campaign.wait(1)
    counts = campaign.status()["slow"]
    assert counts.get("pending", 0) > 0
    assert counts.get("running", 0) == 0
    steps = [v.steps for v in _pending(campaign)]
    assert max(steps) > 0
    again = mm.resume(campaign.path, made, client=client, ranks=1, max_atoms=33, **QUICK)
    assert_conserved(again, made, ["ar-0", "ar-1", "ar-2"])
    assert_same(peace, again, ["relax", "slow"])


def _pending(campaign: Any) -> list[Any]:
    from mattermill.pipeline.ledger import Ledger

    with Ledger.open_readonly(campaign.folder.ledger) as ledger:
        return ledger.pending()


def test_resume_of_what_has_ended_does_nothing(client: Any, tmp_path: Path) -> None:
    made = recipe(produce("first") >> produce())
    campaign = run(made, systems(2), tmp_path / "a.mill", client)
    before = campaign.summary["produce"]["ended"].values.tolist()
    files = sorted(campaign.folder.handoff.rglob("*.npz"))
    # What a gang wrote whose campaign was killed before it could record it.
    orphans = [campaign.folder.handoff_file("first", "dead-1"), campaign.folder.checkpoint_file("gone", "dead-2")]
    for orphan in orphans:
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"x")
    again = mm.resume(campaign.path, progress=False)
    assert again.summary["produce"]["ended"].values.tolist() == before
    assert not any(orphan.exists() for orphan in orphans)
    assert sorted(campaign.folder.handoff.rglob("*.npz")) == files
    assert again.structures("first").ids == again.structures("produce").ids == ("ar-0", "ar-1")


def test_a_lock_of_another_host_is_overcome_by_force(client: Any, tmp_path: Path) -> None:
    made = recipe(produce())
    campaign = run(made, systems(1), tmp_path / "a.mill", client)
    lock = campaign.folder.lock
    lock.write_text(json.dumps({**Holder.here().__dict__, "host": "node17"}))
    with pytest.raises(LockedError, match=r"node17.*`mattermill resume --force-lock .*a.mill`.*force=True"):
        mm.resume(campaign.path, progress=False)
    refused = CliRunner().invoke(app, ["resume", str(campaign.path), "--quiet"])
    assert refused.exit_code == 2
    again = mm.resume(campaign.path, progress=False, force=True)
    assert statuses(again, "produce") == {"finished": 1}
    assert not lock.exists()
    lock.write_text("{")
    taken = CliRunner().invoke(app, ["resume", "--force-lock", str(campaign.path), "--quiet"])
    assert taken.exit_code == 0, taken.output
    assert not lock.exists()


def test_resume_refuses_another_recipe(client: Any, tmp_path: Path) -> None:
    made = recipe(produce())
    run(made, systems(1), tmp_path / "a.mill", client)
    with pytest.raises(CampaignError, match=r"changed: produce.steps: 40 -> 41"):
        mm.resume(tmp_path / "a.mill", recipe(produce(steps=41)))
    with pytest.raises(CampaignError, match=r"seed: 1 -> 2"):
        mm.resume(tmp_path / "a.mill", recipe(produce(), seed=2))
    with pytest.raises(FolderError, match="not a folder"):
        mm.resume(tmp_path / "b.mill")


def test_from_a_running_event_loop(client: Any, tmp_path: Path) -> None:
    """As in a notebook: the loop stays responsive, and the campaign can be awaited."""
    made = recipe(produce(steps=200))

    async def main() -> int:
        campaign = made.start(systems(2), tmp_path / "a.mill", client=client, **QUICK)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        await asyncio.wait_for(campaign, LIMIT)
        ticking.cancel()
        return ticks

    assert asyncio.run(main()) > 10


def test_an_asynchronous_client_serves(cluster: Any, tmp_path: Path) -> None:
    from distributed import Client

    made = recipe(produce())

    async def main() -> Counter[str]:
        async with Client(cluster.scheduler_address, asynchronous=True) as own:
            campaign = made.start(systems(2), tmp_path / "a.mill", client=own, **QUICK)
            await asyncio.wait_for(campaign, LIMIT)
            return statuses(campaign, "produce")

    assert asyncio.run(main()) == {"finished": 2}


def test_a_call_that_would_block_its_own_client_is_refused(cluster: Any, tmp_path: Path) -> None:
    from distributed import Client

    made = recipe(produce())

    async def main() -> None:
        async with Client(cluster.scheduler_address, asynchronous=True) as own:
            with pytest.raises(mm.CampaignError, match=r"would block the event loop.*await recipe.start"):
                made.run(systems(1), tmp_path / "a.mill", client=own)
            with pytest.raises(mm.CampaignError, match="would block the event loop"):
                mm.resume(tmp_path / "a.mill", client=own)

    asyncio.run(main())
    assert not (tmp_path / "a.mill").exists()


def test_a_worker_that_goes_while_it_is_prepared_is_asked_again(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Client
    from distributed.comm import CommClosedError

    whole, asked = Client.register_plugin, []

    def register_plugin(self: Any, plugin: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(plugin, RankPlugin):
            return whole(self, plugin, *arguments, **options)
        asked.append(plugin)
        if len(asked) < 3:
            raise CommClosedError("in <TCP (closed) ConnectionPool.register_worker_plugin>: Stream is closed")
        return whole(self, plugin, *arguments, **options)

    monkeypatch.setattr(Client, "register_plugin", register_plugin)
    campaign = recipe(produce()).start(systems(2), tmp_path / "a.mill", client=client, **QUICK).wait(LIMIT)
    assert statuses(campaign, "produce") == {"finished": 2}
    assert len(asked) == 3


def test_nothing_stays_on_the_workers(client: Any, tmp_path: Path) -> None:
    run(recipe(produce(ranks=2)), systems(2), tmp_path / "a.mill", client)
    plugins = client.run(lambda dask_worker: [n for n in dask_worker.plugins if n.startswith("mattermill")])
    assert list(plugins.values()) == [[], []]
    left = client.run(lambda dask_worker: len(dask_worker.data))
    assert list(left.values()) == [0, 0]


def _plugins(client: Any) -> set[str]:
    found = client.run(lambda dask_worker: [n for n in dask_worker.plugins if n.startswith("mattermill")])
    return {name for names in found.values() for name in names}


def test_seats_of_a_campaign_that_was_killed_are_taken_away(client: Any, tmp_path: Path) -> None:
    """A process that was killed leaves its plugin on a cluster that outlives it, with a seat and a folder to write."""
    made = recipe(produce())
    folder = Folder.create(tmp_path / "a.mill")
    with folder.hold(), begin(folder, made, structures_of(systems(1))) as ledger:
        ledger.set_meta(SESSIONS, ["killed", "long-gone"])
    client.register_plugin(RankPlugin("killed", str(folder.path), Work.of(made).pickled(), "cpu"))
    client.register_plugin(RankPlugin("another", str(tmp_path / "b.mill"), Work.of(made).pickled(), "cpu"))
    assert _plugins(client) == {"mattermill-killed", "mattermill-another"}
    try:
        mm.resume(folder.path, client=client, **QUICK)
        assert _plugins(client) == {"mattermill-another"}
    finally:
        client.unregister_worker_plugin("mattermill-another")
    with Ledger.open_readonly(folder.ledger) as ledger:
        assert ledger.meta(SESSIONS) == []


def test_a_full_stream_holds_its_producer_back(client: Any, tmp_path: Path) -> None:
    """Back-pressure: no stage runs far ahead of the next, and nothing stands still for it."""
    made = recipe(produce("a", steps=10) >> produce("b", steps=10))
    waiting = Counter[str]()
    most = 0

    def listen(event: Any) -> None:
        nonlocal most
        if isinstance(event, VisitEnded):
            waiting["b"] += (event.stage == "a") - (event.stage == "b")
            most = max(most, waiting["b"])

    campaign = run(made, systems(12), tmp_path / "a.mill", client, progress=listen, capacity=2, max_atoms=33)
    assert_conserved(campaign, made, [f"ar-{k}" for k in range(12)])
    # Two may wait, two gangs have one each aboard when they are told, and as many are aboard behind.
    assert most <= 2 + 2 + 2


def test_a_worker_that_joins_is_used(tmp_path: Path) -> None:
    """CASES 35. The first rank is held in its first step until the second one has work."""
    from distributed import Client, LocalCluster

    second = tmp_path / "second"
    made = recipe(Held(mm.NVT(40), steps=10, dt=2.0, name="held", until=str(second)))
    began = threading.Event()
    ranks: set[str] = set()

    def listen(event: Any) -> None:
        if isinstance(event, GangFormed):
            ranks.update(event.ranks)
            began.set()
            if len(ranks) == 2:
                second.touch()

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as growing,
        Client(growing) as own,
    ):
        campaign = made.start(
            systems(4), tmp_path / "a.mill", client=own, **{**QUICK, "progress": listen, "max_atoms": 33}
        )
        assert began.wait(LIMIT)
        growing.scale(2)
        campaign.wait(LIMIT)
    assert len(ranks) == 2
    assert second.exists()
    assert_conserved(campaign, made, [f"ar-{k}" for k in range(4)])
