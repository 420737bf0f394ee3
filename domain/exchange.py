"""The exchange of every step: one packed message per peer, a header first, then the ghosts it needs to see.

The header says how far each system's atoms have moved since its last rebuild, so that when a message has arrived every
rank knows, before a ghost is used, which systems must be rebuilt in this very step. On the way home, forces on ghosts
are added to their owners'. Either way has two halves, begin and finish, between which a rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .features import Features
from .mesh import Mesh
from .refresh import images_of_ghosts, pack
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
        self.heard = []
        for peer, (begin, end) in spans.items():
            self.out[peer] = self.staging[begin:end]
            ghosts = self.ghost_rows[peer]
            assert ghosts is not None
            into = torch.zeros(self.n_systems + 3 * len(ghosts), dtype=torch.float64)
            self.into[peer] = into
            self.heard.append(into[: self.n_systems].numpy())

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
        for rows, into in zip(self.ghost_rows, self.into, strict=True):
            if rows is not None and into is not None and rows.shape[0]:
                y.index_copy_(0, rows, into[self.n_systems :].view(-1, 3).to(y.device))
        if self.has_ghosts:
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
        out: list[Tensor | None] = [None] * self.mesh.size
        self._home: list[Tensor | None] = [None] * self.mesh.size
        for peer, (ghosts, rows) in enumerate(zip(self.ghost_rows, self.send_rows, strict=True)):
            if ghosts is not None and ghosts.shape[0]:
                part = forces[ghosts]
                if energies is not None:
                    part = torch.cat([part, energies[ghosts].unsqueeze(1)], dim=1)
                out[peer] = part.cpu()
            if rows is not None and rows.shape[0]:
                self._home[peer] = torch.empty((rows.shape[0], columns), dtype=torch.float64)
        self.mesh.begin(out, self._home)

    def finish_fold(self, forces: Tensor, energies: Tensor | None) -> None:
        """Add what has come home to owned rows of the very tensors given to `begin_fold`, in peer order."""
        self.mesh.finish()
        for rows, part in zip(self.send_rows, self._home, strict=True):
            if rows is not None and part is not None:
                part = part.to(forces.device)
                # index_add_ walks its index in order on the CPU; an atom seen twice by a peer gets both.
                forces.index_add_(0, rows, part[:, :3])
                if energies is not None:
                    energies.index_add_(0, rows, part[:, 3])

    def features(self) -> Features:
        """The exchange of features over the same plan."""
        return Features(self.mesh, self.tables.n_owned, self.send_rows, self.ghost_rows)


__all__ = ["Exchange"]
