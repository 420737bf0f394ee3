"""Deaths: of workers in mid-stage, of the campaign's own process, of a checkpoint. Nothing is lost, or done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from campaigns import Deadly, assert_conserved, assert_same, recipe, slow, statuses, systems, wait_until

import mattermill as mm
from mattermill.pipeline.events import GangEnded, SegmentEnded
from mattermill.pipeline.ledger import Ledger, LedgerError

QUICK: dict[str, Any] = {"segment_seconds": 0.3, "checkpoint_seconds": 1.0, "progress": False, "device": "cpu"}
LIMIT = 200.0


@pytest.fixture(scope="module")
def mortal() -> Iterator[Any]:
    """A client of two ranks that may be killed: their nannies start them again."""
    import dask
    from distributed import Client, LocalCluster

    with (
        # See pipeline/cluster.py: else Dask closes a nanny whose worker is dead 15 s after an earlier death.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def client(mortal: Any) -> Any:
    mortal.wait_for_workers(2, timeout=60)
    return mortal


class Killer:
    """Kills a rank of the gang that has just ended a segment of `stage`, in its next one; `times` times in all."""

    def __init__(self, client: Any, stage: str, times: int, member: int = 0) -> None:
        self.pids = lambda: client.run(os.getpid)
        self.stage, self.times, self.member = stage, times, member
        self.claims: dict[str, tuple[str, ...]] = {}
        self.killed: list[str] = []
        self.lost: list[GangEnded] = []

    def __call__(self, event: Any) -> None:
        if isinstance(event, GangEnded) and event.lost:
            self.lost.append(event)
        if type(event).__name__ == "GangFormed":
            self.claims[event.claim] = event.ranks
        if (
            isinstance(event, SegmentEnded)
            and event.stage == self.stage
            and any(event.steps.values())
            and len(self.killed) < self.times
            and event.claim not in self.killed
        ):
            self.killed.append(event.claim)
            # Off the campaign's thread: it must go on while this one asks for process ids.
            threading.Thread(target=self.strike, args=(self.claims[event.claim][self.member],)).start()

    def strike(self, address: str) -> None:
        pid = self.pids().get(address)
        if pid:
            os.kill(pid, signal.SIGKILL)


def test_a_worker_killed_twice_in_mid_stage(client: Any, tmp_path: Path) -> None:
    """Time is lost, systems are not, and the results are the same bits."""
    made = recipe(mm.Relax(fmax=0.05, max_steps=30) >> slow(steps=150) >> slow("after", steps=20))
    structures = systems(4)
    peace = made.start(structures, tmp_path / "peace.mill", client=client, **QUICK).wait(LIMIT)
    killer = Killer(client, "slow", times=2)
    campaign = made.start(structures, tmp_path / "a.mill", client=client, **{**QUICK, "progress": killer})
    campaign.wait(LIMIT)
    assert len(killer.killed) == 2
    assert len(killer.lost) >= 2
    assert_conserved(campaign, made, [f"ar-{k}" for k in range(4)])
    assert statuses(campaign, "after") == {"finished": 4}
    assert_same(peace, campaign, ["relax", "slow", "after"])
    deaths = campaign.summary["slow"]["deaths"].values
    assert deaths.sum() >= 2
    assert deaths.max() <= 3


@pytest.mark.parametrize("member", [0, 1], ids=["lead", "other"])
def test_a_rank_of_a_pair_killed(client: Any, tmp_path: Path, member: int) -> None:
    """CASES 32: the survivor is free within seconds, and the pair forms again."""
    made = recipe(slow(steps=100, ranks=2))
    peace = made.start(systems(2), tmp_path / "peace.mill", client=client, **QUICK).wait(LIMIT)
    killer = Killer(client, "slow", times=1, member=member)
    campaign = made.start(systems(2), tmp_path / "a.mill", client=client, **{**QUICK, "progress": killer})
    campaign.wait(LIMIT)
    assert len(killer.lost) == 1
    assert_conserved(campaign, made, ["ar-0", "ar-1"])
    assert_same(peace, campaign, ["slow"])


@pytest.mark.slow
def test_a_system_that_kills_is_tried_alone_then_quarantined(client: Any, tmp_path: Path) -> None:
    stage = Deadly(mm.NVT(40), steps=20, every=10, dt=2.0, name="deadly", victim="ar-1")
    made = recipe(stage)
    campaign = made.start(systems(3), tmp_path / "a.mill", client=client, **QUICK).wait(LIMIT)
    assert_conserved(campaign, made, ["ar-0", "ar-1", "ar-2"])
    assert statuses(campaign, "deadly") == {"finished": 2, "quarantined": 1}
    group = campaign.summary["deadly"].to_dataset().set_index(system="system").sel(system="ar-1")
    assert str(group["status"].values) == "quarantined"
    assert "4 gangs died" in str(group["reason"].values)
    assert int(group["deaths"]) == 4


SCRIPT_STEPS = 300
SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    import mattermill as mm
    from campaigns import recipe, slow, systems
    made = recipe(mm.Relax(fmax=0.05, max_steps=30) >> slow(steps={steps}))
    made.run(systems(3), {out!r}, ranks=2, **{options!r})
"""


def scripted() -> mm.Recipe:
    """What `SCRIPT` runs."""
    return recipe(mm.Relax(fmax=0.05, max_steps=30) >> slow(steps=SCRIPT_STEPS))


def test_the_campaign_killed_and_resumed(client: Any, tmp_path: Path) -> None:
    """CASES 34: SIGKILL of the process that runs a campaign on a cluster of its own, from a script without a guard.

    Resumed on another cluster, where two ranks are killed, it still equals the one left in peace to the last bit.
    """
    made = scripted()
    peace = made.start(systems(3), tmp_path / "peace.mill", client=client, **QUICK).wait(LIMIT)
    out = tmp_path / "a.mill"
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(textwrap.dedent(SCRIPT.format(tests=tests, steps=SCRIPT_STEPS, out=str(out), options=QUICK)))
    process = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path)
    children: list[psutil.Process] = []
    try:
        wait_until(lambda: _has_checkpoint(out, "slow") or process.poll() is not None, LIMIT, "a checkpoint")
        assert process.poll() is None, "the campaign ended before it could be killed"
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    view = mm.open_campaign(out)
    assert view.status()["relax"] == {"converged": 3}
    relaxed = view.summary["relax"]["ended"].values.tolist()
    # Its workers notice by themselves that nobody is left to work for.
    wait_until(
        lambda: not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children), 60, "their end"
    )
    killer = Killer(client, "slow", times=2)
    campaign = mm.resume(out, made, client=client, **{**QUICK, "progress": killer})
    assert len(killer.killed) == 2
    assert_conserved(campaign, made, ["ar-0", "ar-1", "ar-2"])
    assert statuses(campaign, "slow") == {"finished": 3}
    assert_same(peace, campaign, ["relax", "slow"])
    assert campaign.summary["relax"]["ended"].values.tolist() == relaxed, "finished visits are not done again"
    assert int(campaign.summary["slow"]["attempts"].min()) >= 1


def _has_checkpoint(out: Path, stage: str) -> bool:
    try:
        with Ledger.open_readonly(out / "ledger.sqlite") as ledger:
            return bool(ledger.all_checkpoints(stage))
    except LedgerError:
        return False  # not there yet


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_checkpoint_costs_time_only(client: Any, tmp_path: Path, damage: str) -> None:
    made = recipe(slow(steps=400))
    peace = made.start(systems(2), tmp_path / "peace.mill", client=client, **QUICK).wait(LIMIT)
    advanced = threading.Event()

    def listen(event: Any) -> None:
        if isinstance(event, SegmentEnded) and any(event.steps.values()):
            advanced.set()

    campaign = made.start(systems(2), tmp_path / "a.mill", client=client, **{**QUICK, "progress": listen})
    assert advanced.wait(LIMIT)
    campaign.stop()
    with Ledger.open_readonly(campaign.folder.ledger) as ledger:
        newest = {campaign.folder.resolve(c[0].file) for c in ledger.all_checkpoints().values()}
    assert newest
    for file in newest:
        if damage == "missing":
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0xFF
            file.write_bytes(bytes(content))
    again = mm.resume(campaign.path, made, client=client, **QUICK)
    assert_conserved(again, made, ["ar-0", "ar-1"])
    assert_same(peace, again, ["slow"])


def test_ctrl_c_drains(client: Any, tmp_path: Path) -> None:
    """SIGINT to the whole foreground group, as a terminal sends it: checkpoints are written, and nothing is lost."""
    out, script = tmp_path / "a.mill", tmp_path / "script.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(textwrap.dedent(SCRIPT.format(tests=tests, steps=SCRIPT_STEPS, out=str(out), options=QUICK)))
    process = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: _has_checkpoint(out, "slow") or process.poll() is not None, LIMIT, "a checkpoint")
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, None)
    assert f"interrupted: go on with `mattermill resume {out}`" in said
    with Ledger.open_readonly(out / "ledger.sqlite") as ledger:
        pending = ledger.pending("slow")
        assert len(pending) == 3
        assert all(v.steps > 0 and v.deaths == 0 and not v.is_running for v in pending)
    made = scripted()
    campaign = mm.resume(out, made, client=client, **QUICK)
    assert_conserved(campaign, made, ["ar-0", "ar-1", "ar-2"])
