"""The cluster before anything runs: one that fills is given time, one that is too small is refused in clear words."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import dask.system
import pytest
from campaigns import produce, recipe, systems

from mattermill.pipeline import cluster as module
from mattermill.pipeline.cluster import check_members, default_ranks, wait_for_members
from mattermill.pipeline.errors import CampaignError


class Filling:
    """A scheduler that has so many workers at each look, and then as many as at the last."""

    def __init__(self, *numbers: int, threads: int = 1) -> None:
        self.numbers, self.threads = list(numbers), threads

    async def __call__(self) -> dict[str, Any]:
        number = self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]
        worker = {"host": "h", "nthreads": self.threads, "name": "w", "status": "running"}
        return {"workers": {f"tcp://{k}": worker for k in range(number)}}


def wait(scheduler: Filling, wanted: int, seconds: float = 20.0) -> int:
    return len(asyncio.run(asyncio.wait_for(wait_for_members(scheduler, wanted, seconds), 20)))


def test_a_cluster_that_fills_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROWTH", 1.0)
    # It takes longer than GROWTH in all, and never so long from one to the next; before the first it may take longer.
    assert wait(Filling(0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3), 3) == 3


def test_a_cluster_that_is_full_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROWTH", 0.3)
    assert wait(Filling(2), 3) == 2
    assert wait(Filling(0), 3, seconds=0.5) == 0
    assert wait(Filling(1, threads=8), 3) == 1


def test_what_is_missing_is_said() -> None:
    found = module.members(asyncio.run(Filling(1)()))
    with pytest.raises(CampaignError, match=r"2 ranks asked, the cluster has 1.*no other worker has come for 5 s"):
        check_members(found, 1, 2)
    with pytest.raises(CampaignError, match=r"asks for 2 ranks, there are 1.*no other worker has come for 5 s"):
        check_members(found, 2, None)
    check_members(found, 1, None)


def test_a_cluster_without_workers_is_an_error_that_says_so(tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=0, threads_per_worker=1, processes=True, dashboard_address=None) as empty,
        Client(empty) as own,
        pytest.raises(CampaignError, match=r"no workers, and none has come within 0.5 s \(worker_seconds\).*resume"),
    ):
        recipe(produce()).run(systems(1), tmp_path / "a.mill", client=own, progress=False, worker_seconds=0.5)


def test_a_rank_for_each_core_that_the_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from mattermill.pipeline.doctor import devices

    monkeypatch.setattr(dask.system, "CPU_COUNT", 7)
    assert default_ranks() == 7
    assert any(check.detail.startswith("7 in a local run") for check in devices())
