"""Systems coming aboard and going ashore: checks, records, and the rows each rank keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .fields import FIELDS, fill_rows
from .frame import Frame
from .migrate import take_rows
from .resident import Resident, Splitting

# What every system aboard has, with the declared fill where it came without.
_ABOARD = ("velocities", "forces", "energies", "reference", "energy", "stress", "reference_cell")


def check_arrivals(batch: Batch, aboard: Sequence[str]) -> None:
    """ValueError that names what is wrong with systems that ask to come aboard."""
    twice = sorted(set(batch.ids) & set(aboard))
    if twice:
        raise ValueError(f"already aboard: {', '.join(twice)}; release them first or give the new ones other ids")
    ptr = batch.ptr
    positions, atom_ids = batch.positions.cpu().numpy(), batch.atom_id.cpu().numpy()
    cells, pbc = batch.cell.cpu().numpy(), batch.pbc.cpu().numpy()
    for s, name in enumerate(batch.ids):
        span = slice(ptr[s], ptr[s + 1])
        if not np.isfinite(positions[span]).all():
            raise ValueError(f"system {name!r} has positions that are not finite")
        if len(np.unique(atom_ids[span])) != batch.counts[s]:
            raise ValueError(f"system {name!r}: atom_id must be unique within a system")
        try:
            Frame.of(cells[s], pbc[s]).wrap(positions[span])
        except ValueError as error:
            raise ValueError(f"system {name!r}: {error}") from error


def complete(batch: Batch) -> Batch:
    """The batch with every field the runner keeps; without a whole reference, the present state becomes it."""
    atoms: dict[str, Tensor] = {}
    systems: dict[str, Tensor] = {}
    for name in _ABOARD:
        if name not in batch:
            field = FIELDS[name]
            like = torch.empty((0, *field.shape), dtype=field.dtype, device=batch.device)
            store, rows = (atoms, batch.n_atoms) if field.per == "atom" else (systems, len(batch))
            store[name] = fill_rows(name, rows, like)
    for name, store in (("reference", atoms), ("reference_cell", systems)):
        if name in batch:
            store[name] = getattr(batch, name).clone()  # written to below, and the caller's
    full = batch.with_fields(atoms=atoms, systems=systems)
    known = torch.isfinite(full.reference).all(dim=1).cpu().numpy()
    ptr = full.ptr
    cells_known = torch.isfinite(full.reference_cell).reshape(len(full), 9).all(dim=1).cpu().numpy()
    for s in range(len(full)):
        span = slice(int(ptr[s]), int(ptr[s + 1]))
        if not (known[span].all() and cells_known[s]):
            full.reference[span] = full.positions[span]
            full.reference_cell[s] = full.cell[s]
    return full


def new_resident(batch: Batch, s: int, splitting: Splitting) -> Resident:
    """The record of system `s` of a batch that comes aboard; ranks and owners follow once its layout is known."""
    span = slice(int(batch.ptr[s]), int(batch.ptr[s + 1]))
    atom_ids = batch.atom_id[span].cpu().numpy()
    order = np.argsort(atom_ids, kind="stable")
    n = len(order)
    return Resident(
        id=batch.ids[s],
        atom_ids=atom_ids[order],
        numbers=batch.numbers[span].cpu().numpy()[order].astype(np.int32),
        pbc=batch.pbc[s].cpu().numpy(),
        order=order,
        ranks=tuple(range(splitting.size)),
        divisible=splitting.divisible(n),
        owners=np.zeros(n, dtype=np.int32),
    )


def keep_rows(batch: Batch, residents: Sequence[Resident], rank: int) -> Batch:
    """Of whole systems, what this rank owns: rows in order of places, per-system fields in full; shares no memory."""
    ptr = batch.ptr
    held = [ptr[s] + r.order[r.held(rank)] for s, r in enumerate(residents)]
    rows = np.concatenate(held) if held else np.zeros(0, dtype=np.int64)
    atoms = take_rows(batch.atoms, rows)
    systems = {k: v.clone() for k, v in batch.systems.items()}
    return Batch(batch.ids, [len(h) for h in held], atoms, systems, [dict(i) for i in batch.info])


def in_order_of_arrival(atoms: dict[str, Tensor], residents: Sequence[Resident]) -> dict[str, Tensor]:
    """Rows of whole systems from the order of places back to the order in which they came in."""
    parts, at = [], 0
    for resident in residents:
        place = np.empty(resident.n_atoms, dtype=np.int64)
        place[resident.order] = np.arange(resident.n_atoms)
        parts.append(at + place)
        at += resident.n_atoms
    rows = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return take_rows(atoms, rows)


__all__ = ["check_arrivals", "complete", "in_order_of_arrival", "keep_rows", "new_resident"]
