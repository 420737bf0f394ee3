"""Launches on torch tensors, sums with a fixed order, images of ghosts."""

from __future__ import annotations

import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from mattermill.domain import kernels
from mattermill.domain.refresh import images_of_ghosts


def test_segment_sum_is_the_sequential_sum() -> None:
    values = torch.randn(40, 3, dtype=torch.float64)
    ptr = torch.tensor([0, 0, 13, 14, 40, 40])
    got = kernels.segment_sum(values, ptr).numpy()
    for s in range(5):
        expected = np.zeros(3)
        for row in values[ptr[s] : ptr[s + 1]].numpy():
            expected = expected + row
        assert (got[s] == expected).all()
    flat = kernels.segment_sum(values[:, 1].contiguous(), ptr)
    assert flat.shape == (5,)
    assert (flat.numpy() == got[:, 1]).all()


def test_segment_sum_has_the_same_bits_at_any_offset() -> None:
    rows = torch.randn(101, 2, dtype=torch.float64)
    alone = kernels.segment_sum(rows, torch.tensor([0, 101]))
    for before in (1, 2, 3, 5, 8):
        values = torch.cat([torch.randn(before, 2, dtype=torch.float64), rows, rows[:7]])
        shared = kernels.segment_sum(values, torch.tensor([0, before, before + 101, before + 108]))
        assert torch.equal(shared[1], alone[0])


def test_segment_max_is_the_maximum_and_nan_wins() -> None:
    values = torch.randn(40, 3, dtype=torch.float64)
    values[20, 1] = torch.nan
    ptr = torch.tensor([0, 0, 13, 14, 40])
    got = kernels.segment_max(values, ptr)
    assert got[0].tolist() == [-np.inf] * 3
    for s in range(1, 4):
        np.testing.assert_array_equal(got[s].numpy(), np.max(values[ptr[s] : ptr[s + 1]].numpy(), axis=0))
    np.testing.assert_array_equal(kernels.segment_max(values[:, 1].contiguous(), ptr).numpy(), got[:, 1].numpy())
    assert kernels.segment_max(torch.zeros((0, 2), dtype=torch.float64), torch.tensor([0, 0])).shape == (1, 2)


def test_segment_sum_of_nothing() -> None:
    assert kernels.segment_sum(torch.zeros(0, 3, dtype=torch.float64), torch.tensor([0, 0])).tolist() == [[0, 0, 0]]
    assert kernels.segment_sum(torch.zeros(0, dtype=torch.float64), torch.tensor([0])).shape == (0,)


def test_a_launch_sees_new_tensors_and_new_contents() -> None:
    ptr = torch.tensor([0, 4])
    for trial in range(20):
        values = torch.full((4, 2), float(trial), dtype=torch.float64)
        assert kernels.segment_sum(values, ptr).tolist() == [[4.0 * trial] * 2]
    values[0, 0] = 100.0
    assert kernels.segment_sum(values, ptr)[0, 0] == 100.0 + 3 * 19
    ptr = torch.tensor([0, 1, 4])
    assert kernels.segment_sum(values, ptr).shape == (2, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 3, dtype=torch.float32),
        torch.zeros(3, 4, dtype=torch.float64).t(),
        torch.zeros(4, 2, dtype=torch.float64),
        torch.zeros(12, dtype=torch.float64),
    ],
)
def test_a_launch_refuses_what_does_not_fit(wrong: torch.Tensor) -> None:
    index = torch.zeros(1, dtype=torch.int32)
    args = (torch.eye(3, dtype=torch.float64)[None], index, index, torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"y\).*must be a contiguous"):
        images_of_ghosts(0, *args, wrong)


def test_images_of_ghosts_are_moved_by_whole_lattice_vectors() -> None:
    rng = np.random.default_rng(0)
    cells = rng.normal(size=(2, 3, 3))
    y = torch.from_numpy(rng.normal(size=(5, 3)))
    shift = np.array([[0, 0, 0], [0, 0, 0], [0, 0, 0], [1, -2, 0], [0, 0, 3]], dtype=np.int32)
    before = y.numpy().copy()
    system = torch.tensor([0, 0, 1, 0, 1], dtype=torch.int32)
    source = torch.tensor([-1, -1, -1, -2 - 0, -2 - 2], dtype=torch.int32)
    images_of_ghosts(3, torch.from_numpy(cells), system, source, torch.from_numpy(shift), y)
    assert (y[:3].numpy() == before[:3]).all()
    assert y[3].numpy() == pytest.approx(before[0] + shift[3] @ cells[0], abs=1e-14)
    assert y[4].numpy() == pytest.approx(before[2] + shift[4] @ cells[1], abs=1e-14)


def test_models_and_neighbourhoods_do_not_load_warp() -> None:
    code = (
        "import sys; from mattermill.domain import neighborhood, units; from mattermill.domain import models;"
        "models.noble_gases();"
        "print([m for m in ('warp', 'vesin', 'scipy', 'pandas', 'dask') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_initialising_warp_prints_nothing() -> None:
    code = "import mattermill.domain.kernels as k; k.warm()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_launch_follows_a_tensor_whose_memory_is_exchanged() -> None:
    ptr = torch.tensor([0, 4])
    values = torch.ones(4, 2, dtype=torch.float64)
    assert kernels.segment_sum(values, ptr).tolist() == [[4.0] * 2]
    values.data = torch.full((5, 2), 3.0, dtype=torch.float64)
    assert kernels.segment_sum(values, torch.tensor([0, 5])).tolist() == [[15.0] * 2]


def test_a_launch_keeps_nothing_alive() -> None:
    values = torch.ones(4, 2, dtype=torch.float64)
    kernels.segment_sum(values, torch.tensor([0, 4]))
    gone = weakref.ref(values)
    del values
    assert gone() is None
