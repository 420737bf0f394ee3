"""Hand-off files: what was written comes back to the bit, and no damage goes unseen."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mattermill.domain.batch import Batch
from mattermill.pipeline import handoff
from mattermill.pipeline.handoff import DamagedFile, read_batch, read_header, write_batch


def make(counts, seed=0):
    rng = np.random.default_rng(seed)
    n, s = sum(counts), len(counts)
    positions = torch.from_numpy(rng.normal(size=(n, 3)))
    forces = torch.full((n, 3), float("nan"), dtype=torch.float64)
    atoms = {"positions": positions, "forces": forces, "masses": torch.ones(n, dtype=torch.float64)}
    atoms |= {"numbers": torch.full((n,), 18), "atom_id": torch.arange(n), "own": positions.to(torch.float32)[:, 0]}
    systems = {"cell": torch.from_numpy(rng.normal(size=(s, 3, 3))), "pbc": torch.ones(s, 3, dtype=torch.bool)}
    systems |= {"step": torch.arange(s), "noise_key": torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, s))}
    info = [{"name": f"ä{k}", "values": [1.5, None, {"x": [True]}], "nan": float("nan")} for k in range(s)]
    return Batch([f"s/{k}" for k in range(s)], counts, atoms, systems, info)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=5))
def test_there_and_back_to_the_bit(tmp_path_factory, sizes):
    path = tmp_path_factory.mktemp("handoff") / "a" / "x.npz"
    batch = make(sizes) if sizes else Batch.empty()
    digest = write_batch(path, batch, sync=False)
    back = read_batch(path, expect=digest)
    assert back.equals(batch)
    for name, value in back.atoms.items():
        assert value.numpy().tobytes() == batch.atoms[name].numpy().tobytes()
    assert [p.name for p in path.parent.iterdir()] == ["x.npz"]
    assert write_batch(path, batch, sync=False) == digest, "the digest is a function of the content"


def test_single_systems_are_read_without_the_others(tmp_path):
    batch = make([3, 0, 5, 2])
    write_batch(tmp_path / "x.npz", batch)
    assert read_batch(tmp_path / "x.npz", ["s/3", "s/0"]).equals(batch.select(["s/3", "s/0"]))
    assert read_batch(tmp_path / "x.npz", []).is_sentinel
    with pytest.raises(KeyError, match="s/9"):
        read_batch(tmp_path / "x.npz", ["s/9"])
    header = read_header(tmp_path / "x.npz")
    assert header.ids == batch.ids
    assert header.counts.tolist() == [3, 0, 5, 2]


def test_damage_to_one_system_leaves_the_others_readable(tmp_path):
    batch = make([3, 4])
    path = tmp_path / "x.npz"
    write_batch(path, batch)
    data = bytearray(path.read_bytes())
    at = data.find(batch.positions[3:].numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert read_batch(path, ["s/0"]).equals(batch.select(["s/0"]))
    with pytest.raises(DamagedFile, match="data of system 's/1' do not match"):
        read_batch(path)


def test_numpy_opens_it_without_pickle(tmp_path):
    batch = make([2, 3])
    write_batch(tmp_path / "x.npz", batch)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as file:
        np.testing.assert_array_equal(file["atoms/positions"], batch.positions.numpy())
        assert json.loads(file["header.json"])["ids"] == list(batch.ids)


def test_no_flipped_byte_gives_other_data(tmp_path):
    """Any byte changed: the same batch, or `DamagedFile`; never other data, never another exception."""
    batch = make([2, 1])
    path = tmp_path / "x.npz"
    digest = write_batch(path, batch)
    good = path.read_bytes()
    chosen = random.Random(7).sample(range(len(good)), 400)
    seen = 0
    for at in chosen:
        bad = bytearray(good)
        bad[at] ^= 1 << (at % 8)
        path.write_bytes(bad)
        try:
            assert read_batch(path, expect=digest).equals(batch), at
        except DamagedFile:
            seen += 1
    assert seen > 200


def test_no_cut_gives_other_data(tmp_path):
    batch = make([2, 1])
    path = tmp_path / "x.npz"
    write_batch(path, batch)
    good = path.read_bytes()
    for length in [0, 1, 10, *range(100, len(good), 97), len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(DamagedFile):
            read_batch(path)


def test_missing_later_or_foreign_files_are_named(tmp_path):
    with pytest.raises(DamagedFile, match="missing"):
        read_batch(tmp_path / "none.npz")
    np.savez(tmp_path / "foreign.npz", x=np.ones(3))
    with pytest.raises(DamagedFile, match="not a hand-off file"):
        read_batch(tmp_path / "foreign.npz")
    write_batch(tmp_path / "a.npz", make([1]))
    with pytest.raises(DamagedFile, match=r"the ledger expects abc.*previous checkpoint"):
        read_batch(tmp_path / "a.npz", expect="abc")


def test_a_later_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(handoff, "VERSION", 99)
    write_batch(tmp_path / "a.npz", make([1]))
    monkeypatch.undo()
    with pytest.raises(DamagedFile, match=r"version 99.*use the version that wrote it"):
        read_batch(tmp_path / "a.npz")


def test_a_pickle_in_the_file_is_never_opened(tmp_path):
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(mark),))

    path = tmp_path / "a.npz"
    write_batch(path, make([1]))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        comment = archive.comment
    members["atoms/positions.npy"] = pickle.dumps(Evil())
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = comment
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(DamagedFile):
        read_batch(path)
    assert not mark.exists()


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    old = make([2])
    write_batch(path, old)

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_batch(path, make([3], seed=1))
    monkeypatch.undo()
    assert read_batch(path).equals(old)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


def test_the_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(DamagedFile("x.npz", "it is cut off")))
    assert (error.path, error.reason) == ("x.npz", "it is cut off")


def test_dask_sends_a_batch_as_its_own_buffers():
    """Frames that leave a worker are the memory of the tensors, not copies, and no list of numbers."""
    from distributed.protocol import deserialize, serialize

    batch = make([5000, 5000])
    header, frames = serialize(batch)
    big = [np.frombuffer(f, np.uint8) for f in frames if memoryview(f).nbytes > 50_000]
    for name in ("positions", "forces", "masses"):
        assert any(np.shares_memory(f, batch.atoms[name].numpy()) for f in big), name
    assert sum(memoryview(f).nbytes for f in frames) < 1.05 * batch.__sizeof__() + 10_000
    assert deserialize(header, [bytes(f) for f in frames]).equals(batch)
