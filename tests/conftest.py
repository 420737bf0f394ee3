"""What all tests share: one thread per process, Warp kernels warmed once, the rank pool, a small Dask cluster."""

from __future__ import annotations

import os

# Before torch is imported anywhere: a rank computes on one core, and its children inherit this.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")

import time
from collections.abc import Iterator

import psutil
import pytest
import torch

torch.set_num_threads(1)

from ranks import ranks  # noqa: E402, F401 (a fixture: the pool of processes that play ranks)


@pytest.fixture(scope="session", autouse=True)
def warm_kernels() -> None:
    """Compile the Warp kernels before the first test's clock runs; later processes find them in Warp's cache."""
    from mattermill.domain import kernels

    kernels.warm()


@pytest.fixture(scope="session")
def cluster() -> Iterator[object]:
    """A LocalCluster of two single-threaded worker processes, shared by tests that leave its workers alive."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as local:
        yield local


@pytest.fixture
def client(cluster: object) -> Iterator[object]:
    """A synchronous client of `cluster`."""
    from distributed import Client

    with Client(cluster) as connected:
        yield connected


def _children() -> list[psutil.Process]:
    """Living descendants, less Python's own helper that unlinks shared memory at exit."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            helper = "resource_tracker" in " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not helper:
                living.append(process)
        except psutil.NoSuchProcess:
            continue  # it ended while we looked
    return living


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A suite that leaves processes behind has failed: a user's machine would fill up the same way."""
    deadline = time.monotonic() + 10
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        lines = [f"  {p.pid} {' '.join(p.cmdline())[:120]}" for p in left if p.is_running()]
        print("\nprocesses left behind by the tests:", *lines, sep="\n")
        for process in left:
            process.kill()
        if exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
