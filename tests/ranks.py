"""A pool of rank processes for tests: spawned once per session, each waiting for functions to run as part of a mesh.

`ranks.run(function, size, *args)` runs a module-level function ``function(mesh, *args)`` on `size` ranks and returns
what each returned, in rank order. Every wait has a limit; what a rank raises comes home with its text; a rank that has
died is replaced, and the whole pool if it was left in an unknown state (a timeout).
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

TESTS = Path(__file__).resolve().parent
MOST = 8

#: Seconds that a process may take to start, on a machine that does other things as well.
START = 120.0


class RankFailure(AssertionError):
    """A function failed on a rank; carries the traceback of every rank that failed."""


class Lost:
    """What a rank that was killed on purpose returned."""


def _serve(connection: Any) -> None:
    """Life of a rank: receive a call, meet the others, run it, send back what it returned or raised."""
    # Never outlive the session: the parent's death closes the pipe.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    import mattermill.domain.mesh  # noqa: F401 (the time that this takes belongs to no test)

    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            reply = (True, _run(call))
        except BaseException as error:  # told to the parent, whatever it was
            reply = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        try:
            payload = cloudpickle.dumps(reply)
        except Exception as error:  # told to the parent instead
            payload = cloudpickle.dumps((False, f"result cannot be pickled: {error}"))
        connection.send_bytes(payload)


def _run(call: bytes) -> Any:
    from torch.distributed import PrefixStore, TCPStore

    from mattermill.domain.mesh import Mesh

    function, args, kwargs, (port, prefix, rank, size, members, timeout, wire) = cloudpickle.loads(call)
    store = PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout)))
    with Mesh.join(store, rank, size, "cpu", timeout, wire=wire) as world:
        if members is None:
            return function(world, *args, **kwargs)
        mesh = world.sub(members, wire=wire)
        if mesh is None:
            return None
        with mesh:
            return function(mesh, *args, **kwargs)


class RankPool:
    """Up to `MOST` rank processes. Use the fixture `ranks`."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Any]] = []
        self._starting: list[Any] = []
        self._numbers = itertools.count()
        self._store: Any = None

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout: float = 120.0,
        mesh_timeout: float = 30.0,
        wire: str = "auto",
        members: tuple[int, ...] | None = None,
        may_die: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(mesh, *args, **kwargs)`` on `size` ranks; their results in rank order.

        Args:
            timeout: seconds for the whole call. mesh_timeout: the mesh's own.
            wire: transport of the mesh: auto, gloo or local.
            members: run on the sub-mesh of these ranks of the `size`, in this order; results in this order, too.
            may_die: ranks (of the `size`) whose process may end; their result is `Lost`.

        Raises:
            RankFailure: a rank raised, died, or did not answer in time.
        """
        if not 1 <= size <= MOST:
            raise ValueError(f"size must be 1..{MOST}, is {size}")
        self._grow(size)
        prefix = f"run-{next(self._numbers)}"
        _by_value(function)
        for rank in range(size):
            place = (self._store.port, prefix, rank, size, members, mesh_timeout, wire)
            self._workers[rank][1].send_bytes(cloudpickle.dumps((function, args, kwargs, place)))
        results = self._collect(size, timeout, may_die)
        return results if members is None else [results[rank] for rank in members]

    def _grow(self, size: int) -> None:
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._workers) < size:
            self._workers.append(self._spawn())
        for process, connection in self._workers:
            if process in self._starting:
                if not connection.poll(START):
                    raise RankFailure(f"a rank process was not ready within {START:g} s")
                connection.recv_bytes()
                self._starting.remove(process)

    def _spawn(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._starting.append(process)
        return process, ours

    def _collect(self, size: int, timeout: float, may_die: tuple[int, ...]) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * size
        failures, dirty, dead = [], False, []
        for rank in range(size):
            process, connection = self._workers[rank]
            try:
                if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                    failures.append(f"rank {rank} did not answer within {timeout:g} s")
                    dirty = True
                    continue
                good, value = cloudpickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                dead.append(rank)
                if rank in may_die:
                    results[rank] = Lost()
                else:
                    failures.append(f"rank {rank} died (exit code {process.exitcode})")
                continue
            if good:
                results[rank] = value
            else:
                failures.append(f"rank {rank}: {value}")
        for rank in dead:
            _end(*self._workers[rank])
            self._workers[rank] = self._spawn()
        if dirty:
            self.close()
        if failures:
            raise RankFailure("\n".join(failures))
        return results

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            _end(process, connection)
        self._workers, self._starting = [], []


def _end(process: Any, connection: Any) -> None:
    connection.close()
    if process.is_alive() and process.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.join(10)


def _by_value(function: Callable[..., Any]) -> None:
    """Test modules can't be imported by name in another process: send them, and helpers among them, by value."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(TESTS) and module.__name__ != __name__:
            with contextlib.suppress(ValueError):
                cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool of rank processes."""
    pool = RankPool()
    yield pool
    pool.close()
