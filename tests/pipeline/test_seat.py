"""A seat plans with the memory that Dask allows its worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from pipeline.test_gang import Stand, produce

from mattermill.domain.mesh import Mesh
from mattermill.pipeline import worker as tasks
from mattermill.pipeline.folder import Folder
from mattermill.pipeline.seat import room, worker_limit


def _rooms(mesh: Mesh) -> tuple[float | None, ...]:
    return room(mesh, (4e9, 3e9)[mesh.rank]), room(mesh, (None, 5e9)[mesh.rank]), room(mesh, None)


def test_the_worker_with_least_decides(ranks: Any) -> None:
    """All ranks must plan alike, whatever their hosts."""
    for found in ranks.run(_rooms, 2):
        assert found == (pytest.approx(1.8e9), pytest.approx(3e9), None)


def test_outside_of_a_worker_there_is_no_limit() -> None:
    assert worker_limit() is None


@pytest.mark.parametrize(("limit", "allowed"), [("2 GB", 1.2e9), (0, None)])
def test_the_limit_of_the_worker_reaches_the_runner(tmp_path: Path, limit: Any, allowed: float | None) -> None:
    async def main() -> None:
        async with (
            LocalCluster(
                n_workers=1, threads_per_worker=1, processes=False, memory_limit=limit, asynchronous=True,
                dashboard_address=None,
            ) as cluster,
            Client(cluster, asynchronous=True, set_as_default=False) as client,
        ):  # fmt: skip
            stand = Stand(client, Folder.create(tmp_path / "x.mill"), "seat", produce())
            await stand.prepare()
            gang = stand.gang("produce")
            await gang.form()
            (worker,) = cluster.workers.values()
            found = worker.plugins[tasks.plugin_name("seat")].seat.run.runner._memory
            await gang.dissolve()
            assert found == allowed

    asyncio.run(asyncio.wait_for(main(), 60))
