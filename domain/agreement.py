"""Whether all ranks were given the same: who differs would hang the others, or spoil their numbers."""

from __future__ import annotations

import numpy as np
import torch

from .mesh import Mesh


def agree(mesh: Mesh, what: str, mine: str) -> None:
    """Collective: that a description is the same on every rank.

    Args:
        what: that must be the same, for the message. mine: this rank's.

    Raises:
        ValueError: on every rank, the mesh staying whole; says which rank has what.
    """
    if mesh.size == 1:
        return
    rows = mesh.all_gather_rows(torch.from_numpy(np.frombuffer(mine.encode() or b" ", dtype=np.uint8).copy()))
    texts = [bytes(row.tolist()).decode().strip() for row in rows]
    for rank, text in enumerate(texts):
        if text != texts[0]:
            mesh.broadcast_object(
                ValueError(f"{what} must be the same on all ranks: rank 0 has [{texts[0]}], rank {rank} has [{text}]")
            )


__all__ = ["agree"]
