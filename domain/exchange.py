"""The exchange of every step: one packed message per peer, a header first, then the ghosts it needs to see.

The header says how far each system's atoms have moved since its last rebuild, so that when a message has arrived every
rank knows, before a ghost is used, which systems must be rebuilt in this very step. On the way home, forces on ghosts
are added to their owners'. Either way has two halves, begin and finish, between which a rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .features import Features
from .mesh import Mesh
from .refresh import add_home, collect, images_of_ghosts, pack, unpack
from .resident import Resident
from .tables import Tables


class Exchange:
    """The ghost exchange of all residents of a rank, for one state of its lists. Needs a mesh of more than one."""

    def __init__(self, mesh: Mesh, residents: Sequence[Resident], tables: Tables) -> None:
        self.mesh, self.tables = mesh, tables
        self.n_systems = len(residents)
        self.has_ghosts = any(r.halo.receives for r in residents)
        sources, nets, systems, places = [], [], [], []
        self.out: list[Tensor | None] = [None] * mesh.size
        self.into: list[Tensor | None] = [None] * mesh.size
        self.ghost_rows: list[Tensor | None] = [None] * mesh.size
        self.send_rows: list[Tensor | None] = [None] * mesh.size
        begin = 0
        spans = {}
        for peer in range(mesh.size):
            if peer == mesh.rank:
                continue
            at = begin + self.n_systems
            peer_rows = []
            for s, resident in enumerate(residents):
                if peer in resident.halo.sends:
                    rows, shifts = resident.halo.sends[peer]
                    peer_rows.append(rows + tables.owned_at[s])
                    nets.append(shifts - resident.image[rows])
                    systems.append(np.full(len(rows), s))
                    places.append(at + 3 * np.arange(len(rows)))
                    at += 3 * len(rows)
            sources += peer_rows
            spans[peer] = (begin, at)
            begin = at
            self.send_rows[peer] = self._index(peer_rows)
            self.ghost_rows[peer] = self._index(
                [
                    tables.ghost_rows(s, r.halo.receives[peer])
                    for s, r in enumerate(residents)
                    if peer in r.halo.receives
                ]
            )
        self._buffers(begin, spans)
        self.source, self.system = self._ints(sources, ()), self._ints(systems, ())
        self.net, self.place = self._ints(nets, (3,)), self._ints(places, ())

    def _buffers(self, total: int, spans: dict[int, tuple[int, int]]) -> None:
        device = self.tables.device
        self.outbox = torch.zeros(total, dtype=torch.float64, device=device)
        self.staging = self.outbox if device.type == "cpu" else torch.zeros(total, dtype=torch.float64)
        self.headers = [self.staging[b : b + self.n_systems].numpy() for b, _ in spans.values()]
        self.heard, places, at = [], [], 0
        ghosts = {peer: _count(self.ghost_rows[peer]) for peer in spans}
        self.inbox = torch.zeros(len(spans) * self.n_systems + 3 * sum(ghosts.values()), dtype=torch.float64)
        for peer, (begin, end) in spans.items():
            self.out[peer] = self.staging[begin:end]
            size = self.n_systems + 3 * ghosts[peer]
            self.into[peer] = self.inbox[at : at + size]
            self.heard.append(self.inbox[at : at + self.n_systems].numpy())
            places.append(at + self.n_systems + 3 * np.arange(ghosts[peer]))
            at += size
        self.ghosts, self.ghost_place = self._joined(self.ghost_rows), self._ints(places, ())
        self.sent = self._joined(self.send_rows)
        self._boxes: dict[int, _Boxes] = {}

    def _joined(self, parts: Sequence[Tensor | None]) -> Tensor:
        """The rows of all peers, one peer after another, int32."""
        return self._ints([part.cpu().numpy() for part in parts if part is not None], ())

    def _index(self, parts: Sequence[np.ndarray]) -> Tensor:
        rows = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return torch.as_tensor(rows, dtype=torch.int64).to(self.tables.device)

    def _ints(self, parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> Tensor:
        values = np.concatenate(parts) if parts else np.zeros((0, *shape))
        return torch.as_tensor(values, dtype=torch.int32).to(self.tables.device)

    def begin(self, positions: Tensor, cells: Tensor, header: np.ndarray) -> None:
        """Send this rank's header and what others see of its atoms; compute goes on while messages travel."""
        pack(positions, cells, self.system, self.source, self.net, self.place, self.outbox)
        if self.staging is not self.outbox:
            self.staging.copy_(self.outbox)  # waits for the device: the message must leave now
        for mine in self.headers:
            mine[:] = header
        self.mesh.begin(self.out, self.into)

    def finish(self, cells: Tensor, header: np.ndarray) -> np.ndarray:
        """Remote ghosts and their images arrive; returns each system's largest header value over all ranks."""
        self.mesh.finish()
        tables = self.tables
        y = tables.nb.positions
        if self.has_ghosts:
            unpack(self.inbox.to(y.device), self.ghosts, self.ghost_place, y)
            images_of_ghosts(tables.n_nodes, cells, tables.system, tables.source, tables.net, y)
        for theirs in self.heard:
            header = np.maximum(header, theirs)
        return header

    def begin_fold(self, forces: Tensor, energies: Tensor | None) -> None:
        """Send what stands on remote ghosts to their owners; rows of ghosts must be final, the others need not be.

        Args:
            forces: float64, (n_nodes, 3). energies: (n_nodes,), or None if they are not folded.
        """
        columns = 3 if energies is None else 4
        if columns not in self._boxes:
            self._boxes[columns] = _Boxes.of(columns, self.ghost_rows, self.send_rows)
        boxes = self._home = self._boxes[columns]
        if forces.device.type == "cpu":
            collect(self.ghosts, forces, energies, boxes.outbox)
        else:
            outbox = torch.empty(boxes.outbox.shape, dtype=torch.float64, device=forces.device)
            collect(self.ghosts, forces, energies, outbox)
            boxes.outbox.copy_(outbox)
        self.mesh.begin(boxes.out, boxes.into)

    def finish_fold(self, forces: Tensor, energies: Tensor | None) -> None:
        """Add what has come home to owned rows of the very tensors given to `begin_fold`, in peer order."""
        self.mesh.finish()
        add_home(self.sent, self._home.inbox.to(forces.device), forces, energies)

    def features(self) -> Features:
        """The exchange of features over the same plan."""
        return Features(self.mesh, self.tables.n_owned, self.send_rows, self.ghost_rows)


@dataclass(frozen=True)
class _Boxes:
    """Where messages home are put together and arrive, for so many numbers a row; by peer, views of either."""

    outbox: Tensor
    inbox: Tensor
    out: list[Tensor | None]
    into: list[Tensor | None]

    @classmethod
    def of(cls, columns: int, leaving: Sequence[Tensor | None], coming: Sequence[Tensor | None]) -> _Boxes:
        boxes = []
        for rows in (leaving, coming):
            counts = [columns * _count(part) for part in rows]
            box = torch.zeros(sum(counts), dtype=torch.float64)
            boxes.append((box, [part if part.numel() else None for part in box.split(counts)]))
        (outbox, out), (inbox, into) = boxes
        return cls(outbox, inbox, out, into)


def _count(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.shape[0]


__all__ = ["Exchange"]
