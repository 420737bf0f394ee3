"""When lists must be rebuilt: how far atoms may move, given how the cell has deformed since the last rebuild.

Lists hold every pair that was within cutoff + skin in the reference configuration, and halos every atom that was within
margin + skin of a domain. With F the deformation of the cell since then and s its smallest singular value, what was
farther than range + skin is now farther than s * (range + skin) - 2 d, where d is the largest displacement beyond the
deformation. Lists are whole while that is >= range, for every range that the strategy lives by.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .neighbors import full_box
from .refresh import BROKEN
from .strategy import Strategy


class Skin:
    """Per system: the deformation, and the scale that turns a squared displacement into a share of what is allowed.

    Attributes:
        deformation: float64, (systems, 3, 3): x_now = x_reference @ deformation for atoms that only follow the cell.
        scale: float64, (systems,), 1/Å²: d² * scale > 1 calls for a rebuild.
        start: (systems,), what the maximum starts from: 2 where a rebuild is due whatever the atoms did, inf where
            the cell is no cell any more, else 0.
    """

    def __init__(self, strategy: Strategy, device: torch.device) -> None:
        self.ranges, self.skin, self.device = strategy.ranges, strategy.skin, device
        self._seen: Tensor | None = None
        self.deformation = torch.zeros((0, 3, 3), dtype=torch.float64, device=device)
        self.scale = torch.zeros(0, dtype=torch.float64, device=device)
        self.start = torch.zeros(0, dtype=torch.float64, device=device)

    def forget(self) -> None:
        """Reference cells or systems have changed: look anew."""
        self._seen = None

    def update(self, cells: Tensor, reference_cells: Tensor, pbc: Tensor) -> None:
        """Follow the cells; costs next to nothing while they do not change."""
        if self._seen is not None and self._seen.shape == cells.shape and torch.equal(self._seen, cells):
            return
        h, h0, periodic = cells.cpu().numpy(), reference_cells.cpu().numpy(), pbc.cpu().numpy()
        n = len(h)
        deformation = np.broadcast_to(np.eye(3), (n, 3, 3)).copy()
        stretch, start = np.ones(n), np.zeros(n)
        for s in np.flatnonzero((h != h0).any(axis=(1, 2))):
            found = _deformation(h[s], h0[s], periodic[s])
            if found is None:
                start[s] = BROKEN
                continue
            deformation[s] = found
            stretch[s] = np.linalg.svd(found, compute_uv=False)[-1]
        allowed = 0.5 * np.min([(r + self.skin) * stretch - r for r in self.ranges], axis=0)
        start[(allowed < 0) & (start == 0)] = 2.0
        # Without a skin, lists serve the very configuration they were built in.
        scale = 1.0 / np.maximum(np.maximum(allowed, 0.0) ** 2, 1e-300)
        self.deformation = torch.from_numpy(deformation).to(self.device)
        self.scale = torch.from_numpy(scale).to(self.device)
        self.start = torch.from_numpy(start).to(self.device)
        self._seen = cells.clone()


def _deformation(cell: np.ndarray, reference: np.ndarray, periodic: np.ndarray) -> np.ndarray | None:
    """F with cell = reference @ F; None if the cell has become none."""
    if not periodic.any():
        return np.eye(3)
    try:
        found = np.linalg.solve(full_box(reference, periodic), full_box(cell, periodic))
    except ValueError:
        # full_box names what is wrong with a user's cell; here it means that the dynamics broke this one.
        return None
    return found if np.isfinite(found).all() else None


__all__ = ["Skin"]
