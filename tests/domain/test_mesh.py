"""Mesh: collectives over either transport, sub-meshes, dead and silent peers."""

from __future__ import annotations

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


def exchange(mesh, out, n):
    """A message of its own to every peer, n float64 from each; this rank's own part stays."""
    into = [None if p == mesh.rank else torch.empty(n, dtype=torch.float64) for p in range(mesh.size)]
    mesh.swap([None if p == mesh.rank else t for p, t in enumerate(out)], into)
    return [out[mesh.rank] if t is None else t for t in into]


def _collectives(mesh):
    rank, size = mesh.rank, mesh.size
    # Summed in rank order: 1e16 + 1 - 1e16 depends on the order.
    part = torch.tensor([[1e16, 1.0, -1e16, 3.0][rank]], dtype=torch.float64)
    rows = torch.full((rank, 2), float(rank))
    out = [torch.full((p + 1,), 10.0 * rank + p, dtype=torch.float64) for p in range(size)]
    got = exchange(mesh, out, rank + 1)
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
        assert got["exchange"] == [[10.0 * p + rank] * (rank + 1) for p in range(size)]
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


def _closed(mesh):
    mesh.barrier()
    mesh.close()
    with pytest.raises(mm.MeshError, match="this mesh is closed: join a new one"):
        mesh.barrier()
    return True


def test_who_calls_a_closed_mesh_is_told_what_to_do(ranks):
    assert all(ranks.run(_closed, 2))


def _big(mesh):
    # More than any socket buffer, both ways at once.
    n = 4_000_000
    mine = torch.arange(n, dtype=torch.float64) + mesh.rank
    other = exchange(mesh, [mine] * mesh.size, n)
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


def _numbers(mesh):
    """What a mesh needs to be one: who is who, sums in its own order, messages that arrive where they should."""
    out = [torch.tensor([10.0 * mesh.rank + p], dtype=torch.float64) for p in range(mesh.size)]
    got = [float(t[0]) for t in exchange(mesh, out, 1)]
    assert got == [10.0 * p + mesh.rank for p in range(mesh.size)]
    return mesh.rank, mesh.size, float(mesh.sum(torch.tensor([1.0 + mesh.rank], dtype=torch.float64)))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("members", [(1, 3), (3, 0, 2), (2, 1)])
def test_a_sub_mesh_of_any_ranks_in_any_order(ranks, wire, members):
    n = len(members)
    got = ranks.run(_numbers, 4, wire=wire, members=members)
    assert got == [(r, n, n * (n + 1) / 2) for r in range(n)]


def _side_by_side(mesh, wire):
    """Two groups formed in one call, at work at the same time as the whole; then a third across them."""
    group = mesh.sub([2, 0] if mesh.rank in (0, 2) else [1, 3, 4], wire=wire)
    outside = mesh.sub([1], wire=wire)
    across = mesh.sub([4, 0, 1], wire=wire)
    seen = [_numbers(group)]
    value = torch.tensor([float(mesh.rank)], dtype=torch.float64)
    group.begin(*_to_all(group, value))
    seen.append(_numbers(mesh))
    group.finish()
    if across is not None:
        seen.append(_numbers(across))
    group.close()
    mesh.barrier()
    return group.wire, seen, None if outside is None else outside.size


def _to_all(mesh, value):
    peers = [p for p in range(mesh.size) if p != mesh.rank]
    return [[make(value) if p in peers else None for p in range(mesh.size)] for make in (torch.clone, torch.empty_like)]


@pytest.mark.parametrize("wire", WIRES)
def test_sub_meshes_side_by_side(ranks, wire):
    place = {2: (0, 2, 3.0), 0: (1, 2, 3.0), 1: (0, 3, 6.0), 3: (1, 3, 6.0), 4: (2, 3, 6.0)}
    third = {4: [(0, 3, 6.0)], 0: [(1, 3, 6.0)], 1: [(2, 3, 6.0)]}
    for rank, (got, seen, outside) in enumerate(ranks.run(_side_by_side, 5, wire, wire=wire)):
        assert got == wire
        assert seen == [place[rank], (rank, 5, 15.0), *third.get(rank, [])]
        assert outside == (1 if rank == 1 else None)


def _sub_of_sub(mesh, wire):
    upper = mesh.sub([5, 4, 3, 2], wire=wire)
    mesh.close()  # the world is not needed any more
    if upper is None:
        return None
    inner = upper.sub([3, 1], wire=wire)  # ranks 2 and 4 of the world
    again = upper.sub([3, 1], wire=wire)  # the same ranks once more: another mesh
    if inner is None:
        return _numbers(upper.sub([0, 2], wire=wire))
    assert upper.sub([0, 2], wire=wire) is None
    inner.begin(*_to_all(inner, torch.ones(3)))
    assert _numbers(again)[1] == 2
    inner.finish()
    return _numbers(inner)


@pytest.mark.parametrize("wire", WIRES)
def test_a_sub_mesh_of_a_sub_mesh(ranks, wire):
    got = ranks.run(_sub_of_sub, 6, wire, wire=wire)
    assert got == [None, None, (0, 2, 3.0), (1, 2, 3.0), (1, 2, 3.0), (0, 2, 3.0)]


def test_a_sub_mesh_of_one_is_alone(ranks):
    assert ranks.run(_numbers, 3, members=(2,)) == [(0, 1, 1.0)]
    assert Mesh.single().sub([0]).size == 1


@pytest.mark.parametrize("wrong", [[], [0, 0], [1], [-1]])
def test_ranks_of_a_sub_mesh_must_be_there(wrong):
    with pytest.raises(ValueError, match=r"distinct and in 0[.][.]0"):
        Mesh.single().sub(wrong)


def _counts(mesh):
    before = mesh.messages, mesh.bytes_sent, mesh.collectives
    mesh.sum(torch.ones(5, dtype=torch.float64))
    mesh.swap([None] * mesh.size, [None] * mesh.size)
    mesh.gather_rows(torch.ones((2, 3)), [2] * mesh.size)
    return tuple(a - b for a, b in zip((mesh.messages, mesh.bytes_sent, mesh.collectives), before, strict=True))


@pytest.mark.parametrize("wire", WIRES)
def test_messages_and_bytes_are_counted(ranks, wire):
    """What was asked to be sent; headers of the wire's own do not count."""
    assert ranks.run(_counts, 3, wire=wire) == [(2, 80, 3), (3, 104, 3), (3, 104, 3)]


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


def _torchrun(tmp_path: Path, text: str, ranks: int) -> str:
    script = tmp_path / "script.py"
    script.write_text(text)
    module = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    done = subprocess.run([*module, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_env_under_torchrun(tmp_path: Path):
    assert _torchrun(tmp_path, SCRIPT, 2).count("sum 2 3.0") == 2


PART = """
import torch, mattermill as mm
with mm.Mesh.from_env() as world:
    mesh = world.sub([2, 1])
    if mesh is not None:
        total = float(mesh.sum(torch.tensor([world.rank + 1.0], dtype=torch.float64)))
        print(f"rank {world.rank} is {mesh.rank} of {mesh.size}: {total}\\n", end="", flush=True)
        mesh.close()
"""


def test_more_ranks_under_torchrun_than_are_used(tmp_path: Path):
    """Those that are not needed leave at once, the one with torchrun's number 0 among them."""
    printed = _torchrun(tmp_path, PART, 3)
    assert sorted(printed.split("\n"))[-2:] == ["rank 1 is 1 of 2: 5.0", "rank 2 is 0 of 2: 5.0"]


def test_from_env_alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Mesh.from_env("cpu").size == 1
