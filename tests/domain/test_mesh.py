"""Mesh: collectives over either transport, sub-meshes, dead and silent peers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import mattermill as mm
from mattermill.domain.mesh import Mesh

WIRES = ("gloo", "local")


def _collectives(mesh):
    rank, size = mesh.rank, mesh.size
    # Summed in rank order: 1e16 + 1 - 1e16 depends on the order.
    part = torch.tensor([[1e16, 1.0, -1e16, 3.0][rank]], dtype=torch.float64)
    rows = torch.full((rank, 2), float(rank))
    out = [None if p == rank else torch.full((p + 1,), 10.0 * rank + p, dtype=torch.float64) for p in range(size)]
    got = mesh.exchange(out)
    return {
        "sum": float(mesh.sum(part)),
        "max": float(mesh.max(torch.tensor([float(rank)], dtype=torch.float64))),
        "all": (mesh.all(True), mesh.all(rank != 0)),
        "any": (mesh.any(False), mesh.any(rank == size - 1)),
        "rows": [t.tolist() for t in mesh.all_gather_rows(rows)],
        "exchange": [t.tolist() for t in got],
        "broadcast": mesh.broadcast(torch.arange(5) if rank == size - 1 else None, src=size - 1).tolist(),
        "object": mesh.broadcast_object({"a": np.arange(3)} if mesh.is_lead else None)["a"].tolist(),
        "wire": mesh.wire,
    }


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives(ranks, wire, size):
    results = ranks.run(_collectives, size, wire=wire)
    expected = 0.0
    for part in [1e16, 1.0, -1e16, 3.0][:size]:
        expected += part
    for rank, got in enumerate(results):
        assert got["wire"] == wire
        assert got["sum"] == expected
        assert got["max"] == size - 1
        assert got["all"] == (True, False)
        assert got["any"] == (False, True)
        assert got["rows"] == [[[float(r)] * 2] * r for r in range(size)]
        assert got["exchange"] == [[10.0 * p + rank] * (rank + 1) if p != rank else [] for p in range(size)]
        assert got["broadcast"] == [0, 1, 2, 3, 4]
        assert got["object"] == [0, 1, 2]


def test_mesh_of_one_is_identities():
    mesh = Mesh.single()
    value = torch.arange(3.0)
    assert torch.equal(mesh.sum(value), value)
    assert torch.equal(mesh.max(value), value)
    assert mesh.all(True)
    assert not mesh.all(False)
    assert not mesh.any(False)
    assert [t.tolist() for t in mesh.all_gather_rows(value)] == [[0.0, 1.0, 2.0]]
    assert mesh.broadcast_object("x") == "x"
    assert mesh.broadcast(value).tolist() == [0.0, 1.0, 2.0]
    mesh.close()
    mesh.close()


def _big(mesh):
    # More than any socket buffer, both ways at once.
    n = 4_000_000
    mine = torch.arange(n, dtype=torch.float64) + mesh.rank
    other = mesh.exchange([mine if p != mesh.rank else None for p in range(mesh.size)], [n] * mesh.size)
    return [float(t[-1]) for p, t in enumerate(other) if p != mesh.rank]


@pytest.mark.parametrize("wire", WIRES)
def test_large_messages_cross(ranks, wire):
    assert ranks.run(_big, 2, wire=wire) == [[4_000_000.0], [3_999_999.0]]


def _two_halves(mesh):
    n, peers = 500_000, [p for p in range(mesh.size) if p != mesh.rank]
    seen = []
    for k in range(3):
        out = [torch.full((n,), 10.0 * mesh.rank + p + k) if p in peers else None for p in range(mesh.size)]
        into = [torch.zeros(n) if p in peers else None for p in range(mesh.size)]
        mesh.begin(out, into)
        for other in (mesh.barrier, partial(mesh.begin, out, into), partial(mesh.sum, torch.ones(1))):
            with pytest.raises(mm.MeshError, match="finish it before any other collective"):
                other()
        mesh.finish()
        seen.append([float(into[p].min()) for p in peers] + [float(into[p].max()) for p in peers])
    mesh.barrier()
    return seen


@pytest.mark.parametrize("wire", WIRES)
def test_a_swap_in_two_halves(ranks, wire):
    for rank, seen in enumerate(ranks.run(_two_halves, 3, wire=wire)):
        expected = [10.0 * p + rank for p in range(3) if p != rank]
        assert seen == [[e + k for e in expected] * 2 for k in range(3)]


def _raise_everywhere(mesh):
    try:
        mesh.broadcast_object(ValueError("positions are not finite") if mesh.is_lead else None)
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_an_error_of_the_lead_reaches_all(ranks):
    assert ranks.run(_raise_everywhere, 3) == ["positions are not finite"] * 3


class TwoArguments(Exception):
    """Pickles, but does not unpickle: it is called with the one argument that Exception keeps."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


def _foreign(kind):
    if kind == "two arguments":
        return TwoArguments("bad", "home")
    if kind == "unpicklable":
        error = ValueError("holds a lock")
        error.lock = threading.Lock()
        return error
    # Its module is known to this process alone, as a class of a script or of a by-value module is.
    module = types.ModuleType("only_here")
    exec("class Mine(ValueError): pass\nMine.__module__ = 'only_here'", module.__dict__)
    sys.modules["only_here"] = module
    return module.Mine("of a script")


def _raise_foreign(mesh, kind):
    error = _foreign(kind) if mesh.is_lead else None
    try:
        mesh.broadcast_object(error)
    except Exception as raised:
        mesh.barrier()  # the mesh is whole
        return type(raised).__name__, str(raised), raised is error
    finally:
        sys.modules.pop("only_here", None)
    return None


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("two arguments", "TwoArguments", "bad at home"),
        ("unpicklable", "ValueError", "holds a lock"),
        ("of a script", "Mine", "of a script"),
    ],
)
def test_an_error_that_does_not_travel_is_told_by_name(ranks, kind, name, text):
    lead, other = ranks.run(_raise_foreign, 2, kind)
    assert lead == (name, text, True)
    assert other == ("RuntimeError", f"{name}: {text}", False)


def _die(mesh, victim):
    mesh.barrier()
    if mesh.rank == victim:
        os._exit(9)
    start = time.monotonic()
    try:
        for _ in range(1000):
            mesh.sum(torch.ones(1, dtype=torch.float64))
    except mm.MeshError as error:
        first = str(error)
    else:
        return "nobody missed it", 0.0
    try:
        mesh.barrier()
    except mm.MeshError as error:
        return f"{first}; then {error}", time.monotonic() - start
    return "the second call went through", 0.0


@pytest.mark.parametrize("wire", WIRES)
def test_a_dead_rank_is_a_mesh_error_on_the_others(ranks, wire):
    results = ranks.run(_die, 3, 1, wire=wire, may_die=(1,), mesh_timeout=20.0, timeout=60.0)
    for rank in (0, 2):
        message, seconds = results[rank]
        assert "lost" in message
        assert "broke before" in message
        assert seconds < 15.0


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


def _sub(mesh):
    pair = mesh.sub([3, 1])
    one = mesh.sub([2])
    return (
        None if pair is None else (pair.rank, float(pair.sum(torch.tensor([float(mesh.rank)], dtype=torch.float64)))),
        None if one is None else one.size,
    )


def test_sub_meshes_need_not_start_at_rank_0(ranks):
    assert ranks.run(_sub, 4) == [(None, None), ((1, 4.0), None), (None, 1), ((0, 4.0), None)]


def test_nobody_comes():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for wire in ("auto", *WIRES):
        start = time.monotonic()
        with pytest.raises(mm.MeshError):
            Mesh.join(store, 0, 2, timeout=1.0, wire=wire)
        assert time.monotonic() - start < 5.0


def test_bad_rank():
    with pytest.raises(ValueError, match="rank must be in"):
        Mesh.join(None, 2, 2)


SCRIPT = """
import torch, mattermill as mm
mesh = mm.Mesh.from_env()
total = float(mesh.sum(torch.tensor([mesh.rank + 1.0], dtype=torch.float64)))
print(f"sum {mesh.size} {total}\\n", end="", flush=True)
mesh.close()
"""


def test_from_env_under_torchrun(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2 3.0") == 2


def test_from_env_alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Mesh.from_env("cpu").size == 1
