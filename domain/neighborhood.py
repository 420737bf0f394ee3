"""What a model sees on one rank: the atoms of all systems there, their ghosts, and the list of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .neighbors import SystemList, build_system_list, overlapping_pairs

if TYPE_CHECKING:
    from .features import Features
    from .strategy import Pairs

__all__ = [
    "Edges", "Neighborhood", "SystemList", "assemble", "build_system_list", "neighborhood_of", "overlapping_pairs",
]  # fmt: skip


@dataclass
class Neighborhood:
    """All systems of a rank, assembled; tensors on the rank's device.

    Rows are owned atoms, system after system; remote ghosts (atoms of other ranks); then periodic images of both. The
    first two kinds are *nodes*: atoms with a state of their own on this rank. Unused rows may lie between and behind
    ghosts and images: no pair refers to them. The vector of a pair is positions[j] - positions[i]: no shifts.

    Attributes:
        n_owned, n_nodes, n_total: owned atoms; owned atoms and remote ghosts; all rows.
        ptr: int64, (systems + 1,): system s owns rows ptr[s]:ptr[s+1].
        system: int32, (n_owned,), system of each owned atom.
        node_system: int32, (n_nodes,), system of each node, -1 for unused rows.
        numbers: int32, (n_total,), atomic numbers, also of ghosts and images.
        positions: float64, (n_total, 3), Å; refreshed in place every step.
        node: int32, (n_total,): the node each row is (an image of).
        first, count: int32, (n_nodes,): pairs of node i are neighbors[first[i] : first[i] + count[i]]. In a half list
            each pair stands once over all ranks; in a full list i receives from each of its neighbours.
        neighbors: int32, rows of `positions`.
        boundary: uint8, (n_owned,): 1 where an owned atom has a remote ghost, or an image of one, in its list.
        cells, pbc: float64, (systems, 3, 3), Å, as of this step, and bool, (systems, 3).
        split: whether some system here lies on several ranks.
        strategy: name of the strategy ("pairs", "wide", "refresh", "graph").
        cache: what models keep for this neighbourhood (tables, buffers); never part of the state; gone with the lists.
        features: how ghosts' features come from their owners, None where they need not.
    """

    n_owned: int
    n_nodes: int
    n_total: int
    ptr: Tensor
    system: Tensor
    node_system: Tensor
    numbers: Tensor
    positions: Tensor
    node: Tensor
    first: Tensor
    count: Tensor
    neighbors: Tensor
    boundary: Tensor
    cells: Tensor
    pbc: Tensor
    split: bool = False
    strategy: str = "pairs"
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    features: Features | None = field(default=None, repr=False, compare=False)

    @property
    def n_systems(self) -> int:
        return self.ptr.shape[0] - 1

    @property
    def n_pairs(self) -> int:
        return int(self.count.sum())

    def refresh(self, features: Tensor) -> Tensor:
        """Features of all nodes, those of ghosts replaced by what their owners have.

        Collective where the strategy refreshes (every rank calls it as often, with rows of one shape); the features as
        they are where ghosts compute their own, or where nothing is divided. Differentiable, twice: gradients on
        ghosts are added to the owners'.

        Args:
            features: (n_nodes, ...), any floating dtype.

        Raises:
            ValueError: another number of rows, on every rank that has it.
        """
        if features.shape[0] != self.n_nodes:
            raise ValueError(
                f"features must have a row for each of the {self.n_nodes} nodes (owned atoms and ghosts), have "
                f"{features.shape[0]}"
            )
        return features if self.features is None else self.features.spread(features)

    def edges(self) -> Edges:
        """The full list as edges between nodes; worked out once for as long as the lists last."""
        if "edges" not in self.cache:
            self.cache["edges"] = Edges.of(self)
        return self.cache["edges"]


@dataclass
class Edges:
    """Directed edges of a full list.

    Attributes:
        receivers, senders: int64, (edges,), nodes.
        rows: int64, (edges,), the row of `positions` where the sender (or its image) stands.
        nb: whose they are.
    """

    receivers: Tensor
    senders: Tensor
    rows: Tensor
    nb: Neighborhood

    @classmethod
    def of(cls, nb: Neighborhood) -> Edges:
        count, first = nb.count.long(), nb.first.long()
        receivers = torch.repeat_interleave(torch.arange(nb.n_nodes, device=count.device), count)
        within = torch.arange(receivers.shape[0], device=count.device) - (torch.cumsum(count, 0) - count)[receivers]
        rows = nb.neighbors[first[receivers] + within].long()
        return cls(receivers, nb.node[rows].long(), rows, nb)

    def vectors(self, positions: Tensor) -> Tensor:
        """Vectors from receiver to sender, Å, (edges, 3), differentiable with respect to the nodes' positions.

        Args:
            positions: (n_nodes, 3): `nb.positions[:n_nodes]`, as a leaf for autograd. Lattice offsets come from
                `nb.positions` itself. Pairs of the skin, beyond the cutoff, are among the edges.
        """
        y = self.nb.positions
        offsets = y[self.rows] - y[self.senders]
        return positions[self.senders] + offsets.to(positions.dtype) - positions[self.receivers]


def assemble(
    lists: Sequence[SystemList],
    positions: Sequence[np.ndarray],
    numbers: Sequence[np.ndarray],
    cells: Sequence[np.ndarray],
    pbc: Sequence[np.ndarray],
    device: torch.device | str = "cpu",
    strategy: str = "pairs",
) -> Neighborhood:
    """One `Neighborhood` from per-system lists; `positions` and `numbers` are those of owned then remote rows."""
    owned, remote, images = (
        np.array([size(one) for one in lists], dtype=np.int64)
        for size in (lambda o: o.n_owned, lambda o: o.n_remote, lambda o: len(o.image_of))
    )
    n_owned, n_nodes = int(owned.sum()), int(owned.sum() + remote.sum())
    total = n_nodes + int(images.sum())
    at = [np.cumsum(owned) - owned, n_owned + np.cumsum(remote) - remote, n_nodes + np.cumsum(images) - images]
    y = np.zeros((total, 3))
    z, node = np.zeros(total, dtype=np.int32), np.zeros(total, dtype=np.int32)
    system = np.zeros(n_nodes, dtype=np.int32)
    first, count = np.zeros(n_nodes, dtype=np.int32), np.zeros(n_nodes, dtype=np.int32)
    neighbors, pairs_at = [], 0
    for k, one in enumerate(lists):
        rows = np.concatenate([at[p][k] + np.arange(n[k]) for p, n in enumerate((owned, remote, images))])
        nodes = rows[: one.n_owned + one.n_remote]
        y[rows] = np.concatenate([positions[k], positions[k][one.image_of] + one.image_shift @ cells[k]])
        z[rows] = np.concatenate([numbers[k], numbers[k][one.image_of]])
        node[rows] = rows[one.node()]
        system[nodes] = k
        first[nodes], count[nodes] = one.first + pairs_at, one.count
        neighbors.append(rows[one.neighbors])
        pairs_at += len(one.neighbors)

    def put(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array).to(device=device, dtype=dtype)

    return Neighborhood(
        n_owned=n_owned,
        n_nodes=n_nodes,
        n_total=total,
        ptr=put(np.concatenate([[0], np.cumsum(owned)]), torch.int64),
        system=put(system[:n_owned], torch.int32),
        node_system=put(system, torch.int32),
        numbers=put(z, torch.int32),
        positions=put(y, torch.float64),
        node=put(node, torch.int32),
        first=put(first, torch.int32),
        count=put(count, torch.int32),
        neighbors=put(_joined(neighbors), torch.int32),
        boundary=put(_joined([one.boundary for one in lists]), torch.uint8),
        cells=put(np.array(cells).reshape(-1, 3, 3), torch.float64),
        pbc=put(np.array(pbc).reshape(-1, 3), torch.bool),
        strategy=strategy,
    )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def neighborhood_of(batch: Batch, reach: float, pairs: Pairs = "half") -> Neighborhood:
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
            one = build_system_list(x[span], int(batch.counts[k]), cell[k], pbc[k], reach, pairs=pairs)
        except ValueError as error:
            raise ValueError(f"system {system_id!r}: {error}") from error
        lists.append(one)
        positions.append(x[span])
        numbers.append(z[span])
        cells.append(cell[k])
    name = {"half": "pairs", "full": "wide", "none": "graph"}[pairs]
    return assemble(lists, positions, numbers, cells, list(pbc), batch.device, name)
