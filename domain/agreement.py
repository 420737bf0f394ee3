"""Whether all ranks were given the same: who differs would hang the others, or spoil their numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch

from .mesh import Mesh

#: Characters of a setting that a message shows: a model may have many parameters.
_SHOWN = 300


def agree(mesh: Mesh, settings: Mapping[str, object]) -> None:
    """Collective: that settings are the same on every rank, by what they print.

    Args:
        settings: this rank's, by name; the names are the same on every rank.

    Raises:
        ValueError: on every rank, the mesh staying whole; names the first setting that differs, and who has what.
    """
    if mesh.size == 1:
        return
    mine = json.dumps({name: str(value) for name, value in settings.items()})
    rows = mesh.all_gather_rows(torch.from_numpy(np.frombuffer(mine.encode(), dtype=np.uint8).copy()))
    given = [json.loads(bytes(row.tolist())) for row in rows]
    for name, expected in given[0].items():
        for rank, theirs in enumerate(given):
            if theirs.get(name) != expected:
                error = ValueError(
                    f"{name} must be the same on all ranks: rank 0 has [{expected[:_SHOWN]}], rank {rank} has "
                    f"[{str(theirs.get(name))[:_SHOWN]}]; give every rank the same arguments"
                )
                mesh.broadcast_object(error)


__all__ = ["agree"]
