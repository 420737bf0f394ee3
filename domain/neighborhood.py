"""What a model sees on one rank: the atoms of all systems there, their ghosts, and the half list of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .neighbors import SystemList, build_system_list, overlapping_pairs

__all__ = ["Neighborhood", "SystemList", "assemble", "build_system_list", "neighborhood_of", "overlapping_pairs"]


@dataclass
class Neighborhood:
    """All systems of a rank, assembled; tensors on the rank's device.

    Owned atoms come first, system after system, then ghosts in any order; rows that no pair refers to may lie between
    and behind them. The vector of a pair is positions[j] - positions[i]: no shifts.

    Attributes:
        n_owned, n_total: owned atoms; rows of `positions`.
        ptr: int64, (systems + 1,): system s owns rows ptr[s]:ptr[s+1].
        system: int32, (n_owned,), system of each owned atom.
        numbers: int32, (n_total,), atomic numbers, also of ghosts.
        positions: float64, (n_total, 3), Å; refreshed in place every step.
        home: int32, (n_total,): the owned row this is (an image of); -1 for remote ghosts and images of them.
        first, count: int32, (n_owned,): pairs of atom i are neighbors[first[i] : first[i] + count[i]].
        neighbors: int32, rows of `positions`.
        cache: what models keep for this neighbourhood (tables, buffers); never part of the state.
    """

    n_owned: int
    n_total: int
    ptr: Tensor
    system: Tensor
    numbers: Tensor
    positions: Tensor
    home: Tensor
    first: Tensor
    count: Tensor
    neighbors: Tensor
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def n_systems(self) -> int:
        return self.ptr.shape[0] - 1

    @property
    def n_pairs(self) -> int:
        return int(self.count.sum())


def assemble(
    lists: Sequence[SystemList],
    positions: Sequence[np.ndarray],
    numbers: Sequence[np.ndarray],
    cells: Sequence[np.ndarray],
    device: torch.device | str = "cpu",
) -> Neighborhood:
    """One `Neighborhood` from per-system lists; `positions` and `numbers` are those of owned then remote rows."""
    owned = np.array([one.n_owned for one in lists], dtype=np.int64)
    ghosts = np.array([one.n_total - one.n_owned for one in lists], dtype=np.int64)
    n_owned = int(owned.sum())
    owned_at = np.cumsum(owned) - owned
    ghost_at = n_owned + np.cumsum(ghosts) - ghosts
    total = n_owned + int(ghosts.sum())
    y = np.zeros((total, 3))
    z, home = np.zeros(total, dtype=np.int32), np.full(total, -1, dtype=np.int32)
    first, neighbors, pairs_at = [], [], 0
    for k, one in enumerate(lists):
        rows = np.concatenate([owned_at[k] + np.arange(one.n_owned), ghost_at[k] + np.arange(ghosts[k])])
        images = positions[k][one.image_of] + one.image_shift @ cells[k]
        y[rows] = np.concatenate([positions[k], images])
        z[rows] = np.concatenate([numbers[k], numbers[k][one.image_of]])
        local = one.home()
        home[rows] = np.where(local >= 0, local + owned_at[k], -1)
        first.append(one.first[: one.n_owned] + pairs_at)
        neighbors.append(rows[one.neighbors])
        pairs_at += len(one.neighbors)

    def put(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array).to(device=device, dtype=dtype)

    return Neighborhood(
        n_owned=n_owned,
        n_total=total,
        ptr=put(np.concatenate([[0], np.cumsum(owned)]), torch.int64),
        system=put(np.repeat(np.arange(len(lists)), owned), torch.int32),
        numbers=put(z, torch.int32),
        positions=put(y, torch.float64),
        home=put(home, torch.int32),
        first=put(_joined(first), torch.int32),
        count=put(_joined([one.count[: one.n_owned] for one in lists]), torch.int32),
        neighbors=put(_joined(neighbors), torch.int32),
    )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def neighborhood_of(batch: Batch, reach: float) -> Neighborhood:
    """The neighbourhood of a whole batch on one rank, at its present positions; `reach` in Å.

    Atoms keep the batch's order. Positions may lie anywhere: images are found for them as they are.

    Raises:
        ValueError: positions that are not finite, or a periodic axis without a lattice vector; names the system.
    """
    lists, positions, numbers, cells = [], [], [], []
    x, z, ptr = batch.positions.cpu().numpy(), batch.numbers.cpu().numpy(), batch.ptr
    cell, pbc = batch.cell.cpu().numpy(), batch.pbc.cpu().numpy()
    for k, system_id in enumerate(batch.ids):
        span = slice(ptr[k], ptr[k + 1])
        try:
            one = build_system_list(x[span], int(batch.counts[k]), cell[k], pbc[k], reach)
        except ValueError as error:
            raise ValueError(f"system {system_id!r}: {error}") from error
        lists.append(one)
        positions.append(x[span])
        numbers.append(z[span])
        cells.append(cell[k])
    return assemble(lists, positions, numbers, cells, batch.device)
