"""The cluster a campaign runs on: a user's, or one of its own on this machine's cores; and who is in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing.spawn
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import CampaignError

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

#: The interface of our own scheduler, workers and dashboard: nobody else on the network reaches them.
LOOPBACK = "127.0.0.1"

#: Seconds without another worker after which a cluster that has some counts as full.
GROWTH = 5.0


@dataclass(frozen=True)
class Address:
    """How to reach a scheduler, taken from a user's client: a campaign has a connection of its own."""

    scheduler: str
    security: Any = None

    @classmethod
    def of(cls, client: Client) -> Address:
        """Raises `CampaignError`: the client is not connected, or its workers are no processes."""
        scheduler = getattr(client, "scheduler", None)
        if scheduler is None or client.status in ("closed", "closing"):
            raise CampaignError(f"the client {client!r} is not connected: hand over one that is")
        if scheduler.address.startswith("inproc"):
            raise CampaignError(
                "this cluster runs its workers as threads of this process: make it with processes=True, "
                "threads_per_worker=1"
            )
        return cls(scheduler.address, client.security)


@dataclass(frozen=True)
class Member:
    """A worker as the scheduler sees it."""

    address: str
    host: str
    threads: int
    status: str
    name: str


def members(identity: dict[str, Any]) -> dict[str, Member]:
    """The workers in the answer of `scheduler.identity`."""
    return {
        address: Member(
            address, worker.get("host", ""), worker["nthreads"], worker.get("status", "running"), str(worker["name"])
        )
        for address, worker in identity["workers"].items()
    }


async def wait_for_members(
    identity: Callable[[], Awaitable[dict[str, Any]]], wanted: int, seconds: float
) -> dict[str, Member]:
    """Who is there, as soon as `wanted` are. A cluster that still fills is given time.

    One without any worker is waited for at most `seconds`; one that has some and has not grown for `GROWTH` seconds
    will not, as far as can be told from here.

    Args:
        identity: asks the scheduler.
        wanted: ranks.
        seconds: at most.
    """
    began = grown = time.monotonic()
    found: dict[str, Member] = {}
    while True:
        now = members(await identity())
        moment = time.monotonic()
        if len(now) > len(found):
            grown = moment
        found = now
        if len(found) >= wanted or any(m.threads != 1 for m in found.values()):
            return found
        if moment - began > seconds or (found and moment - grown > GROWTH):
            return found
        await asyncio.sleep(0.2)


def check_members(found: dict[str, Member], needed: int, asked: int | None) -> None:
    """Refuse a cluster that cannot run the campaign, before anything runs.

    Raises:
        CampaignError: workers with several threads; fewer ranks than a stage or the user asks for.
    """
    several = sorted(m.name for m in found.values() if m.threads != 1)
    if several:
        raise CampaignError(
            f"a rank is a worker with one thread, these have more: {', '.join(several[:5])}"
            f"{' …' if len(several) > 5 else ''}; start workers with --nthreads 1 (LocalCluster: threads_per_worker=1)"
        )
    waited = f"(no other worker has come for {GROWTH:g} s; if some will, call client.wait_for_workers(...) first)"
    if asked is not None and asked > len(found):
        raise CampaignError(
            f"{asked} ranks asked, the cluster has {len(found)}: ask for at most that, or add workers {waited}"
        )
    here = len(found) if asked is None else asked
    if needed > here:
        raise CampaignError(
            f"a stage of the recipe asks for {needed} ranks, there are {here}: give it ranks={here} or fewer, "
            f"or give the campaign more {waited if asked is None else ''}".rstrip()
        )


def default_ranks() -> int:
    """One rank a core that this process may use: by its affinity, and by the quota of its container."""
    from dask.system import CPU_COUNT

    return max(1, CPU_COUNT)


@contextlib.asynccontextmanager
async def own_cluster(ranks: int) -> AsyncIterator[Any]:
    """A LocalCluster of `ranks` processes with one thread each, on the loopback interface; closed at the end."""
    import dask
    from distributed import LocalCluster

    # 15 s after a worker has died, Dask looks whether its nanny has brought it back, and if it happens to be dead once
    # more in that instant, closes the nanny too: the rank would be lost for good.
    patient = dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"})
    with _main_left_alone(), patient:
        async with LocalCluster(
            n_workers=ranks,
            threads_per_worker=1,
            processes=True,
            host=LOOPBACK,
            dashboard_address=f"{LOOPBACK}:0",
            worker_dashboard_address=f"{LOOPBACK}:0",
            asynchronous=True,
            env={"OMP_NUM_THREADS": "1"},
        ) as cluster:
            yield cluster


@contextlib.contextmanager
def _main_left_alone() -> Iterator[None]:
    """Keep our workers from running the user's script a second time.

    A spawned process imports the script that started it, so every script would need an
    ``if __name__ == "__main__"``, and without one would start campaigns inside its own workers. Our tasks need
    nothing of the script: what it defines is pickled by value. Only processes that Dask starts are meant.
    """
    original = multiprocessing.spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        data = original(name)
        if name.startswith("Dask Worker process"):
            data.pop("init_main_from_path", None)
            data.pop("init_main_from_name", None)
        return data

    multiprocessing.spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        # Campaigns side by side: take away only what is ours.
        if multiprocessing.spawn.get_preparation_data is without_main:
            multiprocessing.spawn.get_preparation_data = original


__all__ = ["Address", "Member", "check_members", "default_ranks", "members", "own_cluster", "wait_for_members"]
