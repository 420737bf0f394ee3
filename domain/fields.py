"""Fields: what a batch may hold per atom and per system, declared by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Per = Literal["atom", "system"]


class BatchError(ValueError):
    """A batch was built or combined in a way that cannot be right; the message says what to do."""


@dataclass(frozen=True)
class Field:
    """What a field is: per atom or per system, its dtype, the shape of one row, its unit and its neutral value.

    ``fill`` is what a system gets that never had the field, when it meets others that do.
    """

    name: str
    per: Per
    dtype: torch.dtype = torch.float64
    shape: tuple[int, ...] = ()
    unit: str = ""
    fill: float = 0.0


def _atom(name: str, shape: tuple[int, ...], unit: str, **kw: Any) -> Field:
    return Field(name, "atom", shape=shape, unit=unit, **kw)


def _system(name: str, shape: tuple[int, ...], unit: str, **kw: Any) -> Field:
    return Field(name, "system", shape=shape, unit=unit, **kw)


NAN = float("nan")

FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        _atom("positions", (3,), "angstrom"),
        _atom("velocities", (3,), "angstrom/fs"),
        _atom("forces", (3,), "eV/angstrom", fill=NAN),
        _atom("energies", (), "eV", fill=NAN),
        _atom("masses", (), "amu"),
        _atom("numbers", (), "", dtype=torch.int64),
        _atom("atom_id", (), "", dtype=torch.int64),
        _atom("reference", (3,), "angstrom", fill=NAN),
        _system("cell", (3, 3), "angstrom"),
        _system("pbc", (3,), "", dtype=torch.bool),
        _system("rotation", (3, 3), "", fill=NAN),
        _system("energy", (), "eV", fill=NAN),
        _system("stress", (3, 3), "eV/angstrom^3", fill=NAN),
        _system("step", (), "", dtype=torch.int64),
        _system("reference_cell", (3, 3), "angstrom", fill=NAN),
    )
}

# Names that the project keeps for itself: these, and what is declared by `declare_own_field`. A field that a user
# declares is the user's, although it stands in FIELDS, too.
_OWN_NAMES: set[str] = {*FIELDS, "ids", "counts", "info", "atoms", "systems"}

#: Fields that every non-empty batch carries.
REQUIRED = ("positions", "masses", "numbers", "atom_id", "cell", "pbc", "step")


def declare_field(
    name: str,
    per: Per,
    shape: tuple[int, ...] = (),
    *,
    dtype: torch.dtype = torch.float64,
    unit: str = "",
    fill: float = NAN,
) -> Field:
    """Declare a field for all batches of this process: documentation (unit) and the value where it is missing.

    Declaring is optional: a field handed to `Batch.with_fields` is carried along anyway. Declaring twice with
    other properties is a `BatchError`.
    """
    if dtype != torch.float64 and np.isnan(fill):
        fill = 0.0
    field = Field(name, per, dtype, tuple(shape), unit, fill)
    known = FIELDS.setdefault(name, field)
    # NaN differs from itself: compare what is printed.
    if repr(known) != repr(field):
        raise BatchError(f"field {name!r} is already declared as {known}, not {field}: choose another name")
    return known


def declare_own_field(
    name: str,
    per: Per,
    shape: tuple[int, ...] = (),
    *,
    dtype: torch.dtype = torch.float64,
    unit: str = "",
    fill: float = NAN,
) -> Field:
    """As `declare_field`, for a field that the package (or a stage) keeps itself: no array of a structure may use the
    name, see `is_own_name`."""
    field = declare_field(name, per, shape, dtype=dtype, unit=unit, fill=fill)
    _OWN_NAMES.add(name)
    return field


def is_own_name(name: str) -> bool:
    """Whether a name is kept for the project, and so no user's field."""
    return name in _OWN_NAMES


def fill_rows(name: str, n_rows: int, like: Tensor) -> Tensor:
    """`n_rows` neutral rows of a field: the declared fill, else NaN for floats and 0 for the rest."""
    declared = FIELDS.get(name)
    fill = declared.fill if declared is not None else (NAN if like.is_floating_point() else 0)
    if not like.is_floating_point() and np.isnan(fill):
        fill = 0
    return torch.full((n_rows, *like.shape[1:]), fill, dtype=like.dtype, device=like.device)


__all__ = [
    "FIELDS",
    "REQUIRED",
    "BatchError",
    "Field",
    "declare_field",
    "declare_own_field",
    "fill_rows",
    "is_own_name",
]
