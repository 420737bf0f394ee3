"""The rank's neighbourhood, kept in place: every system has its stretch of ghosts, of images and of pairs, with room.

When one system's lists are rebuilt only its own stretches are written; all is laid out anew only when a system comes,
goes, changes its number of owned atoms here, or outgrows its room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .neighborhood import Neighborhood
from .resident import Resident

# Room beyond what is needed at layout: lists of one system vary by a few per cent from one rebuild to the next.
_ROOM, _SPARE = 1.08, 16
#: Rows, and places of pairs, are numbered in 32 bits.
_MOST = 2**31 - 1


class Tables:
    """`Neighborhood` of all residents on a rank, plus how its positions follow from the state.

    Attributes:
        nb: what the model sees. A new object after every change, so that what models cache about it goes.
        system: int32, (n_total,), system of every row, used or not.
        source: int32, (n_total,): owned row a row derives from; -2 - row for images of remote ghosts; else -1.
        net: int32, (n_total, 3): lattice vectors added to the source.

    Raises:
        ValueError: all systems together have more rows or pairs on this rank than can be numbered.
    """

    def __init__(
        self, residents: Sequence[Resident], rank: int, device: torch.device | str, strategy: str = "pairs"
    ) -> None:
        self.rank, self.device = rank, torch.device(device)
        lists = [r.list for r in residents]
        self.owned = np.array([one.n_owned for one in lists], dtype=np.int64)
        self.ghost_room = _roomy([one.n_remote for one in lists])
        self.image_room = _roomy([len(one.image_of) for one in lists])
        self.pair_room = _roomy([len(one.neighbors) for one in lists])
        self.n_owned = int(self.owned.sum())
        self.n_nodes = self.n_owned + int(self.ghost_room.sum())
        self.n_total = self.n_nodes + int(self.image_room.sum())
        for what, number in (("rows", self.n_total), ("pairs", int(self.pair_room.sum()))):
            if number > _MOST:
                raise ValueError(
                    f"the systems of a rank may have at most {_MOST} {what} together, with room to grow, and "
                    f"{len(lists)} systems of {self.n_owned} atoms on rank {rank} have {number}: take fewer systems at "
                    "a time (max_atoms=) or more ranks"
                )
        self.owned_at = np.cumsum(self.owned) - self.owned
        self.ghost_at = self.n_owned + np.cumsum(self.ghost_room) - self.ghost_room
        self.image_at = self.n_nodes + np.cumsum(self.image_room) - self.image_room
        self.pairs_at = np.cumsum(self.pair_room) - self.pair_room
        rows = np.arange(len(lists))
        of_row = np.concatenate([np.repeat(rows, n) for n in (self.owned, self.ghost_room, self.image_room)])
        self.system = torch.as_tensor(of_row, dtype=torch.int32).to(self.device)
        self.source = self._full(self.n_total, -1, torch.int32)
        self.net = self._full((self.n_total, 3), 0, torch.int32)
        self.nb = self._empty(strategy)
        for s, resident in enumerate(residents):
            fits = self.write(s, resident)
            assert fits

    def _full(self, shape: tuple[int, ...] | int, fill: float, dtype: torch.dtype) -> Tensor:
        return torch.full((shape,) if isinstance(shape, int) else shape, fill, dtype=dtype, device=self.device)

    def _empty(self, strategy: str) -> Neighborhood:
        n_systems = len(self.owned)
        node_system = self.system[: self.n_nodes].clone()
        node_system[self.n_owned :] = -1
        return Neighborhood(
            n_owned=self.n_owned,
            n_nodes=self.n_nodes,
            n_total=self.n_total,
            ptr=torch.as_tensor(np.concatenate([[0], np.cumsum(self.owned)]), dtype=torch.int64).to(self.device),
            system=self.system[: self.n_owned],
            node_system=node_system,
            numbers=self._full(self.n_total, 1, torch.int32),
            positions=self._full((self.n_total, 3), 0.0, torch.float64),
            node=self._full(self.n_total, 0, torch.int32),
            first=self._full(self.n_nodes, 0, torch.int32),
            count=self._full(self.n_nodes, 0, torch.int32),
            neighbors=self._full(int(self.pair_room.sum()), 0, torch.int32),
            boundary=self._full(self.n_owned, 0, torch.uint8),
            cells=self._full((n_systems, 3, 3), 0.0, torch.float64),
            pbc=self._full((n_systems, 3), False, torch.bool),
            strategy=strategy,
        )

    def write(self, s: int, resident: Resident) -> bool:
        """Put one system's lists into its stretches; False if they do not fit and all must be laid out anew."""
        one = resident.list
        if (
            one.n_owned != self.owned[s]
            or one.n_remote > self.ghost_room[s]
            or len(one.image_of) > self.image_room[s]
            or len(one.neighbors) > self.pair_room[s]
        ):
            return False
        if one.n_owned == 0:
            return True
        a, g, p = int(self.owned_at[s]), int(self.ghost_at[s]), int(self.pairs_at[s])
        nb, nodes = self.nb, one.n_owned + one.n_remote
        source, net = self._sources(s, resident)
        numbers = resident.numbers[np.concatenate([resident.held(self.rank), resident.halo.ghost_atoms])]
        system = np.concatenate([np.full(one.n_owned, s), np.full(one.n_remote, s)]).astype(np.int32)
        first = np.where(one.count > 0, one.first + np.int32(p), np.int32(0)).astype(np.int32)
        self._put(self.source, s, one.n_owned, nodes, source, -1)
        self._put(self.net, s, one.n_owned, nodes, net, 0)
        # Unused rows keep a number that the model knows.
        self._put(nb.numbers, s, one.n_owned, nodes, np.concatenate([numbers, numbers[one.image_of]]), numbers[0])
        self._put(nb.node, s, one.n_owned, nodes, self._lifted(s, one.node(), one.n_owned, nodes), 0)
        self._put(nb.first, s, one.n_owned, nodes, first, 0, images=False)
        self._put(nb.count, s, one.n_owned, nodes, one.count, 0, images=False)
        self._put(nb.node_system, s, one.n_owned, nodes, system, -1, images=False)
        _copy(nb.neighbors, p, self._lifted(s, one.neighbors, one.n_owned, nodes))
        _copy(nb.boundary, a, one.boundary)
        assert g >= self.n_owned
        return True

    def _put(
        self, target: Tensor, s: int, n_owned: int, nodes: int, values: np.ndarray, spare: int, images: bool = True
    ) -> None:
        """Values of owned rows, ghosts and images into their stretches, `spare` into the rest of the room."""
        _copy(target, int(self.owned_at[s]), values[:n_owned])
        _fill(target, int(self.ghost_at[s]), int(self.ghost_room[s]), values[n_owned:nodes], spare)
        if images:
            _fill(target, int(self.image_at[s]), int(self.image_room[s]), values[nodes:], spare)

    def _lifted(self, s: int, rows: np.ndarray, n_owned: int, nodes: int) -> np.ndarray:
        """Rows of a system's own numbering in that of the tables."""
        by = (int(self.owned_at[s]), int(self.ghost_at[s]) - n_owned, int(self.image_at[s]) - nodes)
        if by == (0, 0, 0):
            return rows
        lifted = rows + np.int32(by[2])
        if nodes > n_owned:
            lifted = np.where(rows < nodes, rows + np.int32(by[1]), lifted)
        return np.where(rows < n_owned, rows + np.int32(by[0]), lifted)

    def _sources(self, s: int, resident: Resident) -> tuple[np.ndarray, np.ndarray]:
        """Source and net shift of every row of one system: owned, remote ghosts, images."""
        one = resident.list
        n, a = one.n_owned, int(self.owned_at[s])
        source = np.concatenate([np.arange(n) + a, np.full(one.n_remote, -1)])
        net = np.concatenate([-resident.image, np.zeros((one.n_remote, 3), dtype=np.int32)])
        of_owned = one.image_of < n
        image_source = np.where(of_owned, one.image_of + a, -2 - (one.image_of + int(self.ghost_at[s]) - n))
        # Images of owned atoms come straight from the state; those of remote ghosts from the ghost that arrived.
        image_net = one.image_shift + np.where(of_owned[:, None], net[one.image_of], 0)
        sources = np.concatenate([source, image_source]).astype(np.int32)
        return sources, np.concatenate([net, image_net]).astype(np.int32)

    def renew(self) -> None:
        """A new `Neighborhood` object over the same memory, with nothing cached: the lists in it have changed."""
        self.nb = dataclasses.replace(self.nb, cache={}, features=None)

    def ghost_rows(self, s: int, ghosts: np.ndarray) -> np.ndarray:
        """Rows of these remote ghosts of a system."""
        return ghosts + self.ghost_at[s]


def _roomy(used: Sequence[int]) -> np.ndarray:
    needed = np.asarray(used, dtype=np.int64)
    return np.where(needed > 0, (needed * _ROOM).astype(np.int64) + _SPARE, 0)


def _copy(target: Tensor, at: int, values: np.ndarray) -> None:
    target[at : at + len(values)].copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _fill(target: Tensor, at: int, room: int, values: np.ndarray, spare: int) -> None:
    _copy(target, at, values)
    target[at + len(values) : at + room] = int(spare)


__all__ = ["Tables"]
