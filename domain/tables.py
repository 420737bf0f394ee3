"""The rank's neighbourhood, kept in place: every system has its stretch of ghosts and of pairs, with some room.

When one system's lists are rebuilt only its own stretch is written; all is laid out anew only when a system comes,
goes, changes its number of owned atoms here, or outgrows its room.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .neighborhood import Neighborhood
from .resident import Resident

# Room beyond what is needed at layout: lists of one system vary by a few per cent from one rebuild to the next.
_ROOM, _SPARE = 1.08, 16


class Tables:
    """`Neighborhood` of all residents on a rank, plus how its positions follow from the state.

    Attributes:
        nb: what the model sees. A new object after every change, so that what models cache about it goes.
        system: int32, (n_total,), system of every row.
        source: int32, (n_total,): owned row a row derives from; -2 - row for images of remote ghosts; else -1.
        net: int32, (n_total, 3): lattice vectors added to the source.
    """

    def __init__(self, residents: Sequence[Resident], rank: int, device: torch.device | str) -> None:
        self.rank, self.device = rank, torch.device(device)
        lists = [r.list for r in residents]
        self.owned = np.array([one.n_owned for one in lists], dtype=np.int64)
        self.owned_at = np.cumsum(self.owned) - self.owned
        self.ghost_room = _roomy([one.n_total - one.n_owned for one in lists])
        self.pair_room = _roomy([len(one.neighbors) for one in lists])
        self.n_owned = int(self.owned.sum())
        self.ghost_at = self.n_owned + np.cumsum(self.ghost_room) - self.ghost_room
        self.pairs_at = np.cumsum(self.pair_room) - self.pair_room
        n_total = self.n_owned + int(self.ghost_room.sum())
        rows = np.arange(len(lists))
        of_row = np.concatenate([np.repeat(rows, self.owned), np.repeat(rows, self.ghost_room)])

        def full(shape: tuple[int, ...] | int, fill: float, dtype: torch.dtype) -> Tensor:
            return torch.full((shape,) if isinstance(shape, int) else shape, fill, dtype=dtype, device=self.device)

        self.system = torch.as_tensor(of_row, dtype=torch.int32).to(self.device)
        self.source = full(n_total, -1, torch.int32)
        self.net = full((n_total, 3), 0, torch.int32)
        self.nb = Neighborhood(
            n_owned=self.n_owned,
            n_total=n_total,
            ptr=torch.as_tensor(np.concatenate([[0], np.cumsum(self.owned)]), dtype=torch.int64).to(self.device),
            system=self.system[: self.n_owned],
            numbers=full(n_total, 1, torch.int32),
            positions=full((n_total, 3), 0.0, torch.float64),
            home=full(n_total, -1, torch.int32),
            first=full(self.n_owned, 0, torch.int32),
            count=full(self.n_owned, 0, torch.int32),
            neighbors=full(int(self.pair_room.sum()), 0, torch.int32),
        )
        for s, resident in enumerate(residents):
            fits = self.write(s, resident)
            assert fits

    def write(self, s: int, resident: Resident) -> bool:
        """Put one system's lists into its stretch; False if they do not fit and all must be laid out anew."""
        one = resident.list
        n_ghosts, n_pairs = one.n_total - one.n_owned, len(one.neighbors)
        if one.n_owned != self.owned[s] or n_ghosts > self.ghost_room[s] or n_pairs > self.pair_room[s]:
            return False
        if one.n_owned == 0:
            return True
        a, g, p = int(self.owned_at[s]), int(self.ghost_at[s]), int(self.pairs_at[s])
        # The rows of the system are owned ones from a and ghosts from g: local -> global is one offset for either.
        lift = g - one.n_owned
        source, net = _sources(resident, a, lift)
        places = np.concatenate([resident.held(self.rank), resident.halo.ghost_atoms])
        numbers = resident.numbers[places]
        # Rows of the unused room keep a number that the model knows.
        spare = np.full(self.ghost_room[s] - n_ghosts, numbers[0], dtype=np.int32)
        home = one.home()
        home[home >= 0] += a
        nb = self.nb
        self._put(self.source, a, g, one.n_owned, source, np.full(len(spare), -1, dtype=np.int32))
        self._put(self.net, a, g, one.n_owned, net, np.zeros((len(spare), 3), dtype=np.int32))
        self._put(nb.numbers, a, g, one.n_owned, np.concatenate([numbers, numbers[one.image_of]]), spare)
        self._put(nb.home, a, g, one.n_owned, home, np.full(len(spare), -1, dtype=np.int32))
        _copy(nb.first, a, one.first[: one.n_owned] + np.int32(p))
        _copy(nb.count, a, one.count[: one.n_owned])
        lifted = one.neighbors + np.where(one.neighbors < one.n_owned, np.int32(a), np.int32(lift))
        _copy(nb.neighbors, p, lifted.astype(np.int32, copy=False))
        return True

    def _put(self, target: Tensor, a: int, g: int, n_owned: int, values: np.ndarray, spare: np.ndarray) -> None:
        _copy(target, a, values[:n_owned])
        _copy(target, g, np.concatenate([values[n_owned:], spare]))

    def renew(self) -> None:
        """A new `Neighborhood` object over the same memory, with nothing cached: the lists in it have changed."""
        old = self.nb
        self.nb = Neighborhood(
            old.n_owned, old.n_total, old.ptr, old.system, old.numbers, old.positions, old.home, old.first, old.count,
            old.neighbors,
        )  # fmt: skip

    def ghost_rows(self, s: int, ghosts: np.ndarray) -> np.ndarray:
        """Rows of these remote ghosts of a system."""
        return ghosts + self.ghost_at[s]


def _sources(resident: Resident, owned_at: int, lift: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and net shift of every row of one system: owned, remote ghosts, images."""
    one = resident.list
    n, remote = one.n_owned, one.n_remote
    source = np.concatenate([np.arange(n) + owned_at, np.full(remote, -1)])
    net = np.concatenate([-resident.image, np.zeros((remote, 3), dtype=np.int32)])
    of_owned = one.image_of < n
    image_source = np.where(of_owned, one.image_of + owned_at, -2 - (one.image_of + lift))
    # Images of owned atoms come straight from the state; those of remote ghosts from the ghost that arrived.
    image_net = one.image_shift + np.where(of_owned[:, None], net[one.image_of], 0)
    return np.concatenate([source, image_source]).astype(np.int32), np.concatenate([net, image_net]).astype(np.int32)


def _roomy(used: Sequence[int]) -> np.ndarray:
    needed = np.asarray(used, dtype=np.int64)
    return np.where(needed > 0, (needed * _ROOM).astype(np.int64) + _SPARE, 0)


def _copy(target: Tensor, at: int, values: np.ndarray) -> None:
    target[at : at + len(values)].copy_(torch.from_numpy(np.ascontiguousarray(values)))


__all__ = ["Tables"]
