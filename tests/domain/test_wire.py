"""The wire of one host: rings that wrap, messages larger than them, ranks out of step, what is left behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import resource
import time

import pytest
import torch

import mattermill as mm
from mattermill.domain import ring
from mattermill.domain.local import LocalTransport
from mattermill.domain.ring import Ring


def ring_pair(capacity):
    descriptor = Ring.create(capacity)
    ends = Ring(descriptor), Ring(descriptor)
    os.close(descriptor)
    return ends


@pytest.mark.parametrize("ordered", [True, False], ids=["x86", "others"])
def test_a_ring_carries_bytes_in_order_whatever_the_pieces(monkeypatch, ordered):
    monkeypatch.setattr(ring, "_ORDERED", ordered)
    draw = random.Random(7)
    for capacity in (16, 48, 4096):
        source, sink = ring_pair(capacity)
        sent = draw.randbytes(20 * capacity)
        given, got = 0, bytearray()
        while len(got) < len(sent):
            given += source.put(sent[given : given + draw.randrange(1, 2 * capacity)])
            if draw.random() < 0.5:
                source.publish()
            room = memoryview(bytearray(draw.randrange(1, 2 * capacity)))
            ready = sink.ready
            n = sink.take(room)
            assert n == min(ready, len(room))
            assert given - len(got) - n <= capacity
            got += room[:n]
        assert bytes(got) == sent


def test_what_is_not_published_is_not_seen():
    source, sink = ring_pair(64)
    source.put(b"half")
    assert sink.ready == 0
    source.publish()
    assert sink.ready == 4


def test_last_words_are_read_after_their_end():
    source, sink = ring_pair(64)
    assert sink.told() == b""
    source.tell("é".encode() * 10_000)
    del source
    assert sink.told().startswith("éé".encode())


class Pair:
    """Two ranks in this process, each driven by a thread of its own."""

    def __init__(self, timeout=20.0):
        from torch.distributed import HashStore

        store = HashStore()
        self.pool = concurrent.futures.ThreadPoolExecutor(2)
        self.ranks = list(self.pool.map(lambda r: LocalTransport(store, r, 2, timeout), (0, 1)))

    def swap(self, out, into):
        def one(rank):
            self.ranks[rank].begin(self.to_peer(rank, out[rank]), self.to_peer(rank, into[rank]))
            self.ranks[rank].finish()

        list(self.pool.map(one, (0, 1)))

    @staticmethod
    def to_peer(rank, tensor):
        return [tensor, None] if rank else [None, tensor]

    def close(self):
        for rank in self.ranks:
            rank.close()
        self.pool.shutdown()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()


def test_messages_of_any_size_cross(pair):
    """Empty ones, odd ones, ones that fill a ring to the byte or need many rounds of it; unequal in the two ways."""
    capacity = pair.ranks[0].rings_out[1].capacity
    sizes = [0, 1, 7, 16, 17, 1000, capacity - 16, capacity - 15, capacity, capacity + 1, 3 * capacity + 5]
    draw = torch.Generator().manual_seed(3)
    for k in range(len(sizes)):
        n = sizes[k], sizes[-1 - k]
        out = [torch.randint(0, 256, (m,), dtype=torch.uint8, generator=draw) for m in n]
        into = [torch.zeros(m, dtype=torch.uint8) for m in reversed(n)]
        pair.swap(out, into)
        assert torch.equal(into[1], out[0])
        assert torch.equal(into[0], out[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)], ids=["no axes", "empty", "rows"])
def test_messages_of_any_type_and_shape_cross(pair, dtype, shape):
    out = [torch.full(shape, k, dtype=dtype, requires_grad=dtype is torch.bfloat16) for k in (1, 2)]
    into = [torch.zeros(shape, dtype=dtype) for _ in out]
    pair.swap(out, into)
    assert torch.equal(into[1], out[0])
    assert torch.equal(into[0], out[1])


def test_a_message_that_fits_is_under_way_when_begin_returns(pair):
    """Nobody listens, and begin returns; even after its sender has left, the message comes."""
    sent = torch.arange(100_000, dtype=torch.float64)
    got = torch.zeros_like(sent)
    start = time.monotonic()
    pair.ranks[0].begin([None, sent], [None, None])
    pair.ranks[0].finish()
    pair.ranks[0].close()
    assert time.monotonic() - start < 5.0
    pair.ranks[1].begin([None, None], [got, None])
    pair.ranks[1].finish()
    assert torch.equal(got, sent)


def test_a_stream_in_one_direction_is_held_back_not_lost(pair):
    """More than the ring holds, all sent before the other looks."""
    n, rounds = 300_000, 8
    assert 8 * n * rounds > 2 * pair.ranks[0].rings_out[1].capacity

    def source():
        for k in range(rounds):
            pair.ranks[0].begin([None, torch.full((n,), float(k), dtype=torch.float64)], [None, None])
            pair.ranks[0].finish()

    sending = pair.pool.submit(source)
    time.sleep(0.3)
    assert not sending.done()
    seen = []
    for _ in range(rounds):
        got = torch.zeros(n, dtype=torch.float64)
        pair.ranks[1].begin([None, None], [got, None])
        pair.ranks[1].finish()
        seen.append((float(got[0]), float(got[-1])))
    sending.result(10)
    assert seen == [(float(k), float(k)) for k in range(rounds)]


@contextlib.contextmanager
def many_files():
    """New descriptors are 1024 and above: select() refuses them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"at most {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = []
    try:
        while not opened or opened[-1] < 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_open_files_do_not_matter():
    with many_files():
        pair = Pair()
        try:
            assert pair.ranks[0].sockets[1].fileno() > 1024
            n = 700_000  # more than a ring: both must wait for each other
            got = [torch.zeros(n, dtype=torch.float64) for _ in range(2)]
            pair.swap([torch.arange(n, dtype=torch.float64) + r for r in (0, 1)], got)
            assert [float(t[0]) for t in got] == [1.0, 0.0]
            # A peer that is silent is missed after the timeout, one that is gone at once.
            pair.ranks[0].timeout = 0.3
            with pytest.raises(mm.MeshError, match=r"waited 0[.]3 s for ranks \[1\]"):
                _receive(pair.ranks[0], got[0])
            pair.ranks[0].timeout = 20.0
            pair.ranks[1].close()
            start = time.monotonic()
            with pytest.raises(mm.MeshError, match="closed its connection"):
                _receive(pair.ranks[0], got[0])
            assert time.monotonic() - start < 5.0
        finally:
            pair.close()


def _receive(transport, tensor):
    transport.begin([None, None], [None, tensor])
    transport.finish()


def test_nothing_is_left_open():
    def count():
        return len(os.listdir("/proc/self/fd"))

    Pair().close()
    before = count()
    for _ in range(5):
        Pair().close()
    assert count() == before


def _out_of_step(mesh, kind):
    other = 1 - mesh.rank
    n = 10 if kind == "number" else 10 + (1 if kind == "more" else -1) * mesh.rank
    if kind == "number" and mesh.rank == 1:
        mesh.begin([None, None], [None, None])
        mesh.finish()
    out = [torch.ones(n, dtype=torch.float64) if p == other else None for p in range(2)]
    into = [torch.zeros(10, dtype=torch.float64) if p == other else None for p in range(2)]
    start = time.monotonic()
    try:
        with mesh.guard():
            mesh.swap(out, into)
            mesh.barrier()
    except mm.MeshError as error:
        return str(error), time.monotonic() - start
    return "nobody noticed", float(into[other].sum())


@pytest.mark.parametrize("kind", ["more", "fewer", "number"])
def test_ranks_out_of_step_are_told_at_once(ranks, kind):
    for text, seconds in ranks.run(_out_of_step, 2, kind, wire="local", mesh_timeout=15.0):
        assert "out of step" in text
        assert seconds < 5.0


@pytest.mark.parametrize("kind", ["more", "fewer", "number"])
def test_ranks_out_of_step_end_with_the_timeout_over_gloo(ranks, kind):
    for text, seconds in ranks.run(_out_of_step, 2, kind, wire="gloo", mesh_timeout=2.0):
        assert "rank" in text
        assert "nobody noticed" not in text
        assert seconds < 10.0
