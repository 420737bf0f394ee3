"""The batch: what goes in comes out, whatever is joined, split, selected, pickled or sent."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mattermill.domain.batch import Batch, plain
from mattermill.domain.fields import FIELDS, BatchError, declare_field, fill_rows

SETTINGS = settings(max_examples=40, deadline=None)


def make(counts, seed=0, prefix="s", extra=()):
    """Systems of these sizes with random state; `extra` names fields of the user's own."""
    rng = np.random.default_rng(seed)
    n, s = sum(counts), len(counts)

    def floats(*shape):
        return torch.from_numpy(rng.normal(size=shape))

    atoms = {
        "positions": floats(n, 3),
        "velocities": floats(n, 3),
        "masses": torch.ones(n, dtype=torch.float64),
        "numbers": torch.from_numpy(rng.integers(1, 90, n)),
        "atom_id": torch.cat([torch.arange(c) for c in counts]) if counts else torch.zeros(0, dtype=torch.int64),
    }
    systems = {"cell": floats(s, 3, 3), "pbc": torch.ones(s, 3, dtype=torch.bool), "step": torch.arange(s)}
    for name in extra:
        target = atoms if name.startswith("a") else systems
        target[name] = floats(n if name.startswith("a") else s, 2)
    info = [{"k": k, "x": [1.5, None, "t"]} for k in range(s)]
    return Batch([f"{prefix}{k}" for k in range(s)], counts, atoms, systems, info)


counts = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@SETTINGS
@given(counts, st.integers(0, 99))
def test_split_and_concat_are_inverse(sizes, seed):
    batch = make(sizes, seed, extra=("a_charge", "s_field"))
    parts = batch.split()
    assert [p.ids[0] for p in parts] == list(batch.ids)
    assert Batch.concat(parts).equals(batch)


@SETTINGS
@given(counts, st.data())
def test_select_takes_systems_by_index_and_id(sizes, data):
    batch = make(sizes)
    which = data.draw(st.permutations(range(len(sizes))))[: data.draw(st.integers(0, len(sizes)))]
    chosen = batch.select(which)
    assert chosen.equals(batch.select([batch.ids[k] for k in which]))
    assert chosen.ids == tuple(batch.ids[k] for k in which)
    for row, k in enumerate(which):
        mine = batch.positions[batch.ptr[k] : batch.ptr[k + 1]]
        assert torch.equal(chosen.positions[chosen.ptr[row] : chosen.ptr[row + 1]], mine)
        assert torch.equal(chosen.cell[row], batch.cell[k])
        assert chosen.info[row] is batch.info[k]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda b: b.index("s9"), "must be one of this batch ('s0', 's1'), is 's9'"),
        (lambda b: b.select(["s1", "s9"]), "is 's9'"),
        (lambda b: b.select([0, 2]), r"must be in 0..1 (a batch of 2), is 2"),
        (lambda b: b.select([-1]), "is -1"),
        (lambda b: Batch.empty().index("s0"), "it is empty"),
        (lambda b: make([1] * 30).index("x"), "22 more"),
    ],
)
def test_a_system_that_is_not_there_is_named(act, words):
    with pytest.raises(BatchError, match=re.escape(words)):
        act(make([2, 3]))


@SETTINGS
@given(counts, counts)
def test_fields_that_one_lacks_are_filled_with_their_neutral_value(one, other):
    a = make(one, prefix="a", extra=("a_charge", "s_field")).with_fields(systems={"flag": torch.ones(len(one)) > 0})
    b = make(other, prefix="b")
    joined = Batch.concat([a, b])
    assert torch.equal(joined.a_charge[: a.n_atoms], a.a_charge)
    assert bool(joined.a_charge[a.n_atoms :].isnan().all())
    assert bool(joined.s_field[len(a) :].isnan().all())
    assert joined.flag.dtype == torch.bool
    assert not bool(joined.flag[len(a) :].any())


@SETTINGS
@given(counts, st.integers(2, 5))
def test_pickle_gives_the_same_batch(sizes, protocol):
    batch = make(sizes, extra=("a_charge",))
    back = pickle.loads(pickle.dumps(batch, protocol=protocol))
    assert back.equals(batch)
    back.positions.add_(1.0)  # writable, and no longer the same memory
    assert not back.equals(batch) or batch.n_atoms == 0


def test_out_of_band_buffers_are_the_tensors_themselves():
    batch = make([400, 600])
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 4000, "the data must not travel inside the pickle"
    for name in ("positions", "velocities", "cell"):
        tensor = getattr(batch, name).numpy()
        assert any(np.shares_memory(np.frombuffer(b.raw(), np.uint8), tensor) for b in buffers), name
    assert pickle.loads(head, buffers=buffers).equals(batch)
    # Buffers from a socket may be read-only: the tensors must be writable all the same.
    frozen = pickle.loads(head, buffers=[bytes(b.raw()) for b in buffers])
    frozen.positions.add_(1.0)


def test_split_shares_memory_with_the_batch():
    batch = make([3, 4, 5])
    batch.split()[1].positions.fill_(7.0)
    assert bool((batch.positions[3:7] == 7.0).all())


def test_the_sentinel():
    empty = Batch.empty()
    assert empty.is_sentinel
    assert not empty
    assert len(empty) == empty.n_atoms == 0
    assert empty.split() == []
    assert Batch.concat([]).is_sentinel
    assert Batch.concat([empty, make([2]), empty]).equals(make([2]))
    assert pickle.loads(pickle.dumps(empty)).is_sentinel
    assert make([2]).select([]).is_sentinel


def test_equals_sees_values_and_the_place_of_nan():
    batch = make([3])
    nan = batch.with_fields(atoms={"forces": torch.tensor([[0.0, float("nan"), 1.0]] * 3)})
    assert nan.equals(nan.clone())
    assert not nan.equals(nan.with_fields(atoms={"forces": torch.tensor([[float("nan"), 0.0, 1.0]] * 3)}))
    zero = nan.with_fields(atoms={"forces": torch.tensor([[0.0, 0.0, 1.0]] * 3)})
    assert not nan.equals(zero)
    assert not zero.equals(nan)
    assert zero.equals(zero.with_fields(atoms={"forces": torch.tensor([[-0.0, 0.0, 1.0]] * 3)}))
    infinite = batch.with_fields(systems={"energy": torch.tensor([float("inf")], dtype=torch.float64)})
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert not infinite.equals(batch.with_fields(systems={"energy": largest}))
    assert not batch.equals(batch.with_ids(["other"]))
    assert not batch.equals(batch.with_fields(info=[{"k": 1}]))
    assert not batch.equals(batch.without(["velocities"]))
    assert not batch.equals(batch.with_fields(systems={"step": batch.step.to(torch.int32)}))


def test_info_is_compared_by_value():
    one = make([1]).with_fields(info=[{"a": np.arange(3.0), "n": float("nan")}])
    assert one.equals(one.with_fields(info=[{"a": np.arange(3.0), "n": float("nan")}]))
    assert not one.equals(one.with_fields(info=[{"a": np.arange(4.0), "n": float("nan")}]))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: make([1, 1]).with_ids(["x", "x"]), "stand twice: x"),
        (lambda: Batch(["a"], [1, 2], {}, {}), "as many counts"),
        (lambda: Batch(["a"], [2], {"masses": torch.ones(3)}, {}), "'masses' must have 2 rows"),
        (lambda: Batch(["a"], [2], {}, {"cell": torch.ones(2, 3, 3)}), "'cell' must have 1 rows"),
        (lambda: Batch(["a"], [1], {"x": torch.ones(1)}, {"x": torch.ones(1)}), "both per atom and per system"),
        (lambda: Batch.concat([make([1], prefix="a"), make([1], prefix="a")]), "stand twice"),
    ],
)
def test_what_cannot_be_right_is_refused(build, words):
    with pytest.raises(BatchError, match=words):
        build()


def test_row_shapes_that_differ_are_refused():
    a = make([1], prefix="a").with_fields(atoms={"dipole": torch.ones(1)})
    b = make([1], prefix="b").with_fields(atoms={"dipole": torch.ones(1, 3)})
    with pytest.raises(BatchError, match="'dipole' has different row shapes"):
        Batch.concat([a, b])


def test_declared_fields():
    try:
        field = declare_field("test_spin", "atom", (2,), unit="muB", fill=0.5)
        assert declare_field("test_spin", "atom", (2,), unit="muB", fill=0.5) is field
        with pytest.raises(BatchError, match="already declared"):
            declare_field("test_spin", "system", (2,))
        a = make([2], prefix="a").with_fields(atoms={"test_spin": torch.zeros(2, 2, dtype=torch.float64)})
        joined = Batch.concat([a, make([1], prefix="b")])
        assert joined.test_spin.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.5, 0.5]]
        count = declare_field("test_count", "system", dtype=torch.int64)
        assert count.fill == 0.0
        assert fill_rows("test_count", 2, torch.ones(1, dtype=torch.int64)).tolist() == [0, 0]
    finally:
        FIELDS.pop("test_spin", None)
        FIELDS.pop("test_count", None)


def test_fields_read_as_attributes_and_names_that_are_none_say_so():
    batch = make([2])
    assert batch.positions is batch.atoms["positions"]
    assert "cell" in batch
    assert "nothing" not in batch
    with pytest.raises(AttributeError, match="no field 'nothing'"):
        _ = batch.nothing
    assert "2 systems" in repr(make([1, 2]))


def test_fields_are_changed_in_place():
    batch = make([2])
    positions = batch.positions
    before = positions.clone()
    batch.positions += 1.0
    batch.positions[0] *= 2.0
    assert batch.positions is positions
    assert torch.equal(positions[1], before[1] + 1)
    assert torch.equal(positions[0], 2 * (before[0] + 1))
    for name in ("positions", "nothing", "image"):
        with pytest.raises(AttributeError, match=rf"in place \(batch.{name}\[:\] = ...\) or put into a new batch"):
            setattr(batch, name, before)


def test_clone_and_to_share_nothing_they_should_not():
    batch = make([2])
    copy = batch.clone()
    copy.positions.zero_()
    copy.counts[0] = 9
    assert not bool((batch.positions == 0).all())
    assert batch.counts[0] == 2
    assert batch.to("cpu").equals(batch)


def test_dask_measures_a_batch_by_its_tensors():
    from dask.sizeof import sizeof

    batch = make([100_000])
    assert sizeof(batch) == pytest.approx(100_000 * 9 * 8, rel=0.1)


def test_plain_is_what_json_gives_back():
    import json

    value = {"a": np.arange(3), 2: (1, np.float32(0.5)), "t": torch.ones(2), "n": None, "s": {"x"}, "o": 1 + 2j}
    result = plain(value)
    assert json.loads(json.dumps(result)) == result
    assert result == {"a": [0, 1, 2], "2": [1, 0.5], "t": [1.0, 1.0], "n": None, "s": ["x"], "o": "(1+2j)"}
