"""What goes wrong on one rank reaches all of them: with its text where it failed, in time where it died or is mute."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import mattermill as mm
from mattermill.domain.mesh import Mesh, RankFailed

WIRES = ("gloo", "local")


def _messages(mesh, n=1000):
    peers = [p for p in range(mesh.size) if p != mesh.rank]
    out = [torch.ones(n, dtype=torch.float64) if p in peers else None for p in range(mesh.size)]
    into = [torch.zeros(n, dtype=torch.float64) if p in peers else None for p in range(mesh.size)]
    return out, into


def _outcome(mesh, work):
    """What `work` raised here, and the seconds it took; then the mesh is of no more use, at once."""
    start = time.monotonic()
    try:
        with mesh.guard():
            mesh.barrier()  # who fails right after it can end the others' wait in it
            work()
    except (ValueError, mm.MeshError) as error:
        raised = error
    else:
        return "nothing", "", 0.0
    seconds = time.monotonic() - start
    with pytest.raises(mm.MeshError, match="broke before"):
        mesh.barrier()
    assert time.monotonic() - start - seconds < 1.0
    mesh.close()
    mesh.close()
    return type(raised).__name__, str(raised), seconds


# --- errors ----------------------------------------------------------------------------------------------------------


def _fails(mesh, who, phase):
    out, into = _messages(mesh)

    def work():
        if phase == "between":
            mesh.begin(out, into)
        if mesh.rank in who:
            raise ValueError(f"the hook of rank {mesh.rank} is wrong")
        if phase == "between":
            mesh.finish()
        if phase == "late":
            time.sleep(1.0)  # whoever failed has long gone
        for _ in range(1000):
            mesh.sum(torch.ones(1, dtype=torch.float64))

    return _outcome(mesh, work)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("phase", ["before", "between", "late"])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 2)], ids=["lead", "other", "two"])
def test_an_error_on_one_rank_reaches_all_with_its_text(ranks, wire, phase, who):
    results = ranks.run(_fails, 4, who, phase, wire=wire, mesh_timeout=20.0, timeout=60.0)
    for rank, (kind, text, seconds) in enumerate(results):
        # Of two that fail at once, one may hear of the other before it gets there.
        if rank in who and (len(who) == 1 or kind == "ValueError"):
            assert (kind, text) == ("ValueError", f"the hook of rank {rank} is wrong")
        else:
            assert kind == "RankFailed"
            assert text in [f"rank {r} failed: ValueError: the hook of rank {r} is wrong" for r in who]
        assert seconds < 8.0


def _relayed(mesh):
    """Rank 2 fails; rank 0 only ever listens to rank 1, which is told of it and leaves."""
    data, into = torch.ones(4), torch.zeros(4)

    def work():
        if mesh.rank == 2:
            raise ValueError("told to rank 1 only in time")
        while True:
            if mesh.rank == 0:
                mesh.swap([None, None, None], [None, into, None])
            else:
                mesh.swap([data, None, None], [None, None, into])

    return _outcome(mesh, work)


@pytest.mark.parametrize("wire", WIRES)
def test_the_text_reaches_a_rank_that_waits_for_another(ranks, wire):
    first, second, _ = ranks.run(_relayed, 3, wire=wire, mesh_timeout=20.0, timeout=60.0)
    for kind, text, seconds in (first, second):
        assert (kind, text) == ("RankFailed", "rank 2 failed: ValueError: told to rank 1 only in time")
        assert seconds < 8.0


def _lingers(mesh):
    """Rank 2 dies; rank 1 waits for it, and holds its error for a while; rank 0 waits for rank 1 only."""
    data, into = torch.ones(4), torch.zeros(4)
    if mesh.rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        with mesh.guard():
            if mesh.rank == 0:
                mesh.swap([None] * 3, [None, into, None])
            else:
                mesh.swap([data, None, None], [None, None, into])
                mesh.swap([data, None, None], [None, None, into])
            mesh.swap([None] * 3, [None, into, None])
    except mm.MeshError as error:
        seconds = time.monotonic() - start
        if mesh.rank == 1:
            time.sleep(6.0)
        return str(error), seconds
    return "nothing", 0.0


@pytest.mark.parametrize("wire", WIRES)
def test_who_keeps_an_error_keeps_nobody_waiting(ranks, wire):
    first, second, _ = ranks.run(_lingers, 3, wire=wire, may_die=(2,), mesh_timeout=20.0, timeout=60.0)
    for text, seconds in (first, second):
        assert "rank 1 lost rank 2" in text
        assert seconds < 5.0


class Mute(Exception):
    def __str__(self):
        raise TypeError("cannot be printed")


def _odd(mesh, kind):
    error = {"mute": Mute(), "long": ValueError("é" * 100_000), "exit": SystemExit(3)}[kind]
    try:
        with mesh.guard():
            mesh.barrier()
            if mesh.rank == 1:
                raise error
            mesh.barrier()
    except RankFailed as told:
        return str(told)[:60]
    except BaseException as own:
        return type(own).__name__
    return "nothing"


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("kind", "name"), [("mute", "Mute"), ("long", "ValueError"), ("exit", "SystemExit")])
def test_errors_of_any_sort_are_told(ranks, wire, kind, name):
    told, own = ranks.run(_odd, 2, kind, wire=wire)
    assert own == name
    assert told.startswith(f"rank 1 failed: {name}")


def _scripted(mesh):
    """What a script does: the mesh is a context, and its own code fails on one rank."""
    with mesh:
        if mesh.rank == 1:
            raise ValueError("in the script")
        mesh.barrier()


@pytest.mark.parametrize("wire", WIRES)
def test_a_mesh_that_is_left_with_an_error_tells_it(ranks, wire):
    with pytest.raises(AssertionError) as caught:
        ranks.run(_scripted, 3, wire=wire)
    for rank in (0, 2):
        assert f"rank {rank}: RankFailed: rank 1 failed: ValueError: in the script" in str(caught.value)


def _common(mesh):
    for _ in range(2):
        with pytest.raises(ValueError, match="known to all"), mesh.guard(), mesh.guard():
            mesh.broadcast_object(ValueError("known to all") if mesh.is_lead else None)
    return float(mesh.sum(torch.ones(1)))


@pytest.mark.parametrize("wire", WIRES)
def test_an_error_that_all_raise_together_leaves_the_mesh_whole(ranks, wire):
    assert ranks.run(_common, 3, wire=wire) == [3.0] * 3


def _closed_generator(mesh):
    def phases():
        with mesh.guard():
            yield

    generator = phases()
    next(generator)
    generator.close()
    return float(mesh.sum(torch.ones(1)))


def test_a_generator_that_is_closed_has_not_failed(ranks):
    assert ranks.run(_closed_generator, 2) == [2.0, 2.0]


def test_a_guard_on_one_rank_lets_everything_pass():
    mesh = Mesh.single()
    with pytest.raises(ZeroDivisionError), mesh.guard():
        _ = 1 / 0
    assert float(mesh.sum(torch.ones(1))) == 1.0


def _sub_fails(mesh):
    """The world's guard is around the work of a sub-mesh; rank 0 is not in it, and waits for the world."""
    sub = mesh.sub([3, 1, 2])

    def work():
        if mesh.rank == 1:
            raise ValueError("in the sub-mesh")
        for _ in range(1000):
            (mesh if sub is None else sub).barrier() if mesh.rank else mesh.swap([None] * 4, [None, torch.ones(1)] * 2)

    kind, text, seconds = _outcome(mesh, work)
    return kind, text, seconds


def test_sub_meshes_fail_along_with_the_whole(ranks):
    results = ranks.run(_sub_fails, 4, mesh_timeout=20.0)
    for rank, (kind, text, seconds) in enumerate(results):
        assert "ValueError: in the sub-mesh" in text or (rank == 1 and text == "in the sub-mesh")
        assert kind == ("ValueError" if rank == 1 else "RankFailed")
        assert seconds < 8.0


LAST = """
import os, sys
from datetime import timedelta
import torch
from torch.distributed import TCPStore
import mattermill as mm
rank, port, wire = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=30))
if rank == 0:
    print(store.port, flush=True)
mesh = mm.Mesh.join(store, rank, 3, timeout=20.0, wire=wire)
try:
    with mesh.guard():
        mesh.barrier()
        if rank == 0:
            raise ValueError("the lead's last words")
        while True:
            mesh.barrier()
except mm.MeshError as error:
    print(error, flush=True)
except ValueError:
    os._exit(7)  # and its store with it
"""


@pytest.mark.parametrize("wire", WIRES)
def test_the_words_of_a_lead_that_ends_at_once_with_its_store(tmp_path: Path, wire):
    script = tmp_path / "last.py"
    script.write_text(LAST)

    def start(rank, port):
        command = [sys.executable, str(script), str(rank), port, wire]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)

    ranks = [start(0, "0")]
    try:
        port = ranks[0].stdout.readline().strip()
        ranks += [start(rank, port) for rank in (1, 2)]
        printed = [process.communicate(timeout=60)[0].strip() for process in ranks]
        assert printed[1:] == ["rank 0 failed: ValueError: the lead's last words"] * 2
        assert ranks[0].returncode == 7
    finally:
        for process in ranks:
            process.kill()
            process.wait()


# --- deaths ----------------------------------------------------------------------------------------------------------


def _dies(mesh, victim, phase):
    out, into = _messages(mesh)

    def die():
        if phase == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if phase == "within":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        mesh.begin(out, into)
        if phase == "between":
            os.kill(os.getpid(), signal.SIGKILL)
        mesh.finish()  # never comes to an end: the others are late

    def work():
        if mesh.rank == victim:
            die()
        elif phase == "within":
            time.sleep(1.5)
        for _ in range(1000):
            mesh.begin(out, into)
            mesh.finish()

    return _outcome(mesh, work)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("phase", "victim"), [("before", 1), ("between", 1), ("within", 1), ("between", 0), ("within", 2)]
)
def test_a_dead_rank_is_missed_at_once(ranks, wire, phase, victim):
    results = ranks.run(_dies, 3, victim, phase, wire=wire, may_die=(victim,), mesh_timeout=20.0, timeout=60.0)
    for rank in {0, 1, 2} - {victim}:
        kind, text, seconds = results[rank]
        assert kind == "MeshError"
        assert "lost" in text
        assert f"rank {victim}" in text
        assert seconds < 8.0


def _stopped(mesh, seconds):
    """Rank 1 stands still for longer than the timeout, then wakes up in a mesh that has gone."""

    def work():
        pids = [int(t[0]) for t in mesh.all_gather_rows(torch.tensor([os.getpid()]))]
        if mesh.rank == 0:
            time.sleep(0.5)  # rank 1 may still have to help others on
            os.kill(pids[1], signal.SIGSTOP)
            threading.Timer(seconds, os.kill, (pids[1], signal.SIGCONT)).start()
        while True:
            mesh.sum(torch.ones(1000))

    kind, text, waited = _outcome(mesh, work)
    if mesh.rank == 0:
        time.sleep(max(seconds - waited, 0.0))
    return kind, text, waited


@pytest.mark.parametrize("wire", WIRES)
def test_a_rank_that_stands_still_is_given_up_after_the_timeout(ranks, wire):
    results = ranks.run(_stopped, 3, 4.0, wire=wire, mesh_timeout=1.5, timeout=60.0)
    for kind, text, _ in results:
        assert kind == "MeshError"
        assert "rank" in text
    for rank in (0, 2):
        assert 1.0 < results[rank][2] < 3.9
    assert "waited 1.5 s for rank" in results[0][1] + results[2][1]


def _left(mesh):
    """Rank 1 closes with an exchange pending; the others still have what was on its way."""
    out, into = _messages(mesh)
    start = time.monotonic()
    mesh.begin(out, into)
    if mesh.rank == 1:
        mesh.close()
        mesh.close()
        with pytest.raises(mm.MeshError, match="closed"):
            mesh.finish()
        return time.monotonic() - start
    try:
        for _ in range(1000):
            mesh.finish()
            mesh.begin(out, into)
    except mm.MeshError:
        return time.monotonic() - start
    return float("inf")


@pytest.mark.parametrize("wire", WIRES)
def test_closing_with_an_exchange_pending_hangs_nobody(ranks, wire):
    assert max(ranks.run(_left, 3, wire=wire, mesh_timeout=20.0)) < 8.0


def _silent(mesh):
    if mesh.rank == 1:
        time.sleep(4.0)
        return None
    start = time.monotonic()
    try:
        mesh.barrier()
    except mm.MeshError:
        return time.monotonic() - start
    return None


@pytest.mark.parametrize("wire", WIRES)
def test_a_silent_rank_is_a_mesh_error_after_the_timeout(ranks, wire):
    waited = ranks.run(_silent, 2, wire=wire, mesh_timeout=1.5)[0]
    assert waited is not None
    assert 1.0 < waited < 3.9
