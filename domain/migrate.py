"""Rows of atoms on the move: every per-atom field of a batch in one packed message per peer.

Whatever the fields and dtypes, rows travel bit for bit: as bytes, each field padded to eight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .mesh import Mesh


def row_bytes(like: Mapping[str, Tensor]) -> int:
    """Bytes of one packed row."""
    return sum(_width(value) for value in like.values())


def _width(value: Tensor) -> int:
    bytes_ = value.element_size() * int(np.prod(value.shape[1:], dtype=np.int64))
    return -(-bytes_ // 8) * 8


def pack_rows(fields: Mapping[str, Tensor], rows: Tensor | slice) -> Tensor:
    """These rows of all fields, in the order of the field names: uint8, (rows, row_bytes), on the CPU."""
    picked = {name: fields[name][rows].cpu() for name in sorted(fields)}
    n = next(iter(picked.values())).shape[0]
    out = torch.zeros((n, row_bytes(fields)), dtype=torch.uint8)
    at = 0
    for value in picked.values():
        raw = value.contiguous().reshape(n, -1).view(torch.uint8).reshape(n, -1) if n else out[:, :0]
        out[:, at : at + raw.shape[1]] = raw
        at += _width(value)
    return out


def unpack_rows(packed: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fields of packed rows; `like` gives names, dtypes, row shapes and device."""
    n, at = packed.shape[0], 0
    fields = {}
    for name in sorted(like):
        model = like[name]
        size = model.element_size() * int(np.prod(model.shape[1:], dtype=np.int64))
        raw = packed[:, at : at + size].contiguous()
        value = raw.view(model.dtype) if size else torch.empty((n, 0), dtype=model.dtype)
        fields[name] = value.reshape(n, *model.shape[1:]).to(model.device)
        at += _width(model)
    return {name: fields[name] for name in like}


def migrate_rows(mesh: Mesh, fields: Mapping[str, Tensor], before: np.ndarray, after: np.ndarray) -> dict[str, Tensor]:
    """Move one system's atoms to their new owners. Collective.

    Args:
        fields: this rank's rows of the system, in the order of the atoms' places.
        before, after: int, (n,), owning rank of every atom of the system, known to all.

    Returns:
        This rank's new rows, in the order of the atoms' places.
    """
    rank = mesh.rank
    held = np.flatnonzero(before == rank)
    sends = [torch.as_tensor(np.flatnonzero(after[held] == p)) for p in range(mesh.size)]
    width = row_bytes(fields)
    out: list[Tensor | None] = []
    into: list[Tensor | None] = []
    for peer in range(mesh.size):
        coming = int(np.count_nonzero((before == peer) & (after == rank)))
        out.append(None if peer == rank else pack_rows(fields, sends[peer]))
        into.append(None if peer == rank else torch.empty((coming, width), dtype=torch.uint8))
    mesh.swap(out, into)
    pieces = [pack_rows(fields, sends[rank]) if p is None else p for p in into]
    kept = np.flatnonzero(after == rank)
    # Pieces lie peer after peer, each in the order of places: sort them together.
    source = before[kept]
    order = np.argsort(source, kind="stable")
    packed = torch.empty((len(kept), width), dtype=torch.uint8)
    packed[torch.as_tensor(order)] = torch.cat(pieces)
    return unpack_rows(packed, fields)


def gather_system(
    mesh: Mesh, fields: Mapping[str, Tensor], owners: np.ndarray, dst: int = 0
) -> dict[str, Tensor] | None:
    """One system's rows on rank `dst`, in the order of places; None elsewhere. Collective."""
    counts = np.bincount(owners, minlength=mesh.size)
    parts = mesh.gather_rows(pack_rows(fields, slice(None)), counts.tolist(), dst)
    if parts is None:
        return None
    packed = torch.empty((len(owners), row_bytes(fields)), dtype=torch.uint8)
    packed[torch.as_tensor(np.argsort(owners, kind="stable"))] = torch.cat(parts)
    return unpack_rows(packed, fields)


def take_rows(fields: Mapping[str, Tensor], rows: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
    """These rows of all fields."""
    index = torch.as_tensor(np.asarray(rows, dtype=np.int64))
    return {name: value[index.to(value.device)] for name, value in fields.items()}


__all__ = ["gather_system", "migrate_rows", "pack_rows", "row_bytes", "take_rows", "unpack_rows"]
