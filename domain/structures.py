"""Batches from ASE Atoms and back.

Cells are turned to lower-triangular at intake (positions and velocities with them); the rotation is kept per
system and undone on the way out, so that a user gets back the orientation that went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .batch import Batch, plain
from .fields import FIELDS, BatchError, Field, is_own_name

if TYPE_CHECKING:
    from ase import Atoms

# ASE keeps velocities in Å/(Å sqrt(amu/eV)); one such unit of time in fs.
ASE_TIME_FS = 10.180505710774743

# Arrays of ASE that have a place of their own in a batch, and per-atom results that are recomputed here.
_KNOWN_ARRAYS = {"positions", "numbers", "momenta", "masses"}


def from_atoms(atoms: Atoms | Sequence[Atoms], ids: Sequence[str] | None = None) -> Batch:
    """A batch of these structures; their ids are, unless given, ``info["id"]`` or ``system-0``, ``system-1`` …

    Numeric per-atom arrays travel as per-atom fields, except those named like a field that the project keeps itself
    (forces, reference …). An item of `Atoms.info` becomes a per-system field if one of its name is declared
    (`mattermill.declare_field`); what JSON can say of the others is carried as info: arrays become lists. See
    `not_taken_along` for the rest.

    Raises:
        BatchError: not as many ids as structures; a value that is not what its field was declared to be.
    """
    structures: list[Atoms] = [atoms] if hasattr(atoms, "get_positions") else list(atoms)  # type: ignore[list-item]
    if ids is None:
        ids = _own_ids(structures)
    if len(ids) != len(structures):
        raise BatchError(f"{len(structures)} structures need as many ids, got {len(ids)}")
    return Batch.concat(_one(a, i) for a, i in zip(structures, ids, strict=True))


def _own_ids(structures: Sequence[Atoms]) -> list[str]:
    """What the structures call themselves in ``info["id"]``, if they all do and differ; else numbers."""
    named = [atoms.info.get("id") for atoms in structures]
    if all(isinstance(name, str) and name for name in named) and len(set(named)) == len(named):
        return [str(name) for name in named]
    return [f"system-{k}" for k in range(len(structures))]


def _one(atoms: Atoms, system_id: str) -> Batch:
    cell = np.array(atoms.cell.array, dtype=float)
    lower, rotation = lower_triangular(cell)
    n = len(atoms)
    momenta = atoms.arrays.get("momenta")
    masses = np.asarray(atoms.get_masses(), dtype=float)
    velocities = np.zeros((n, 3)) if momenta is None else np.asarray(momenta) / masses[:, None] / ASE_TIME_FS
    per_atom: dict[str, Any] = {
        "positions": turned(np.asarray(atoms.positions, dtype=float), rotation),
        "velocities": turned(velocities, rotation),
        "masses": masses,
        "numbers": np.asarray(atoms.numbers, dtype=np.int64),
        "atom_id": np.arange(n, dtype=np.int64),
    }
    for name, values in atoms.arrays.items():
        if name not in _KNOWN_ARRAYS and not is_own_name(name) and _is_numeric(values):
            if _declared(name, "system") is not None:
                raise BatchError(f"field {name!r} is declared per system, the structure {system_id!r} has it per atom")
            per_atom[name] = _widen(np.asarray(values))
    per_system: dict[str, Any] = {
        "cell": lower[None],
        "pbc": np.asarray(atoms.pbc, dtype=bool)[None],
        "rotation": rotation[None],
        "step": np.zeros(1, dtype=np.int64),
    }
    info = {}
    for key, value in atoms.info.items():
        field = _declared(key, "system")
        if field is not None and value is not None:
            per_system[field.name] = _row_of(field, value, system_id)[None]
        elif _is_plain(key, value):
            info[key] = plain(value)
    return Batch([system_id], [n], _tensors(per_atom), _tensors(per_system), [info])


def _declared(name: Any, per: str) -> Field | None:
    """The field of the user's own that is declared under this name, per atom or per system."""
    field = FIELDS.get(name) if isinstance(name, str) and not is_own_name(name) else None
    return field if field is not None and field.per == per else None


def _row_of(field: Field, value: Any, system_id: str) -> np.ndarray:
    """The value of a per-system field, in its declared shape and dtype; nothing is rounded to fit."""
    kind = np.dtype(str(field.dtype).removeprefix("torch."))
    try:
        given = np.asarray(value)
        with np.errstate(invalid="ignore"):
            row = given.astype(kind)
        fits = given.dtype.kind in "fiub" and np.squeeze(row).shape == tuple(n for n in field.shape if n != 1)
        fits = fits and np.array_equal(row.astype(np.float64), given.astype(np.float64), equal_nan=kind.kind == "f")
    except (TypeError, ValueError):
        fits = False
    if not fits:
        what = f"{field.dtype} of shape {field.shape}".replace("torch.", "") if field.shape else f"one {kind}"
        raise BatchError(f"info {field.name!r} of {system_id!r} is declared per system as {what}, is {value!r}")
    return row.reshape(field.shape)


def not_taken_along(atoms: Atoms) -> list[str]:
    """Names of what a structure carries and a batch does not.

    Text arrays, arrays named like a field of ours, constraints, a calculator's results, a displaced cell, and info
    that JSON cannot say.
    """
    left = [
        name
        for name, values in atoms.arrays.items()
        if name not in _KNOWN_ARRAYS and (is_own_name(name) or not _is_numeric(values))
    ]
    if atoms.constraints:
        left.append("constraints")
    if atoms.calc is not None and getattr(atoms.calc, "results", None):
        left.extend(f"calculator result {name!r}" for name in atoms.calc.results)
    if np.any(atoms.get_celldisp()):
        left.append("celldisp")
    left.extend(f"info {k!r}" for k, v in atoms.info.items() if not _is_plain(k, v))
    return left


def to_atoms(batch: Batch, *, wrap: bool = False) -> list[Atoms]:
    """One ASE Atoms per system; energy, forces and stress, where present, in a SinglePointCalculator.

    Fields of a user's own come out as arrays (per atom) and in `Atoms.info` (per system; there they take precedence
    over an item of the batch's info of that name). One that a system never had is left out, where its fill is NaN.

    Args:
        batch: the systems.
        wrap: put atoms into their cells; by default positions are as they are, unwrapped.

    Raises:
        BatchError: with `wrap`, positions or a cell that do not allow it.
    """
    return [_to_one(single, wrap) for single in batch.split()]


def _to_one(single: Batch, wrap: bool) -> Atoms:
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator

    single = single.to("cpu")
    rotation = np.eye(3)
    if "rotation" in single and bool(torch.isfinite(single.rotation).all()):
        rotation = single.rotation[0].numpy()
    back = rotation.T
    atoms = Atoms(
        numbers=single.numbers.numpy(),
        positions=turned((single.wrapped() if wrap else single.positions).numpy(), back),
        cell=turned(single.cell[0].numpy(), back),
        pbc=single.pbc[0].numpy(),
        masses=single.masses.numpy(),
    )
    if "velocities" in single:
        momenta = turned(single.velocities.numpy(), back) * single.masses.numpy()[:, None] * ASE_TIME_FS
        atoms.set_momenta(momenta)
    for name, value in _of_the_users(single.atoms):
        atoms.set_array(name, value.numpy())
    atoms.info.update(single.info[0])
    atoms.info.update({name: _unboxed(value[0]) for name, value in _of_the_users(single.systems)})
    atoms.info["id"] = single.ids[0]
    results: dict[str, Any] = {}
    if "energy" in single and bool(torch.isfinite(single.energy[0])):
        results["energy"] = float(single.energy[0])
    if "forces" in single and bool(torch.isfinite(single.forces).all()):
        results["forces"] = turned(single.forces.numpy(), back)
    if "stress" in single and bool(torch.isfinite(single.stress[0]).all()):
        s = rotation @ single.stress[0].numpy() @ back
        results["stress"] = np.array([s[0, 0], s[1, 1], s[2, 2], s[1, 2], s[0, 2], s[0, 1]])
    if results:
        atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def _of_the_users(fields: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Fields of the users' own that this system has."""
    return [(n, v) for n, v in fields.items() if not is_own_name(n) and not n.startswith("_") and not _all_missing(v)]


def _unboxed(row: torch.Tensor) -> Any:
    """A number of Python's, or an array."""
    return row.item() if row.ndim == 0 else row.numpy().copy()


def turned(vectors: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """vectors (n, 3) @ rotation (3, 3), in plain products and sums: with BLAS a row's bits may depend on threads."""
    x, y, z = vectors[:, 0, None], vectors[:, 1, None], vectors[:, 2, None]
    return x * rotation[0] + y * rotation[1] + z * rotation[2]


def lower_triangular(cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cell turned so that its first vector lies along x and its second in the xy plane.

    Returns:
        (lower, rotation): ``lower = cell @ rotation`` with zeros above the diagonal, rotation proper (det +1).
        Vectors as rows turn as ``v @ rotation``. Vectors of no length (molecules, slabs without a vacuum vector)
        stay so, and the others turn as if the missing ones stood perpendicular to them. A left-handed cell keeps
        its hand: its third diagonal element is negative, as mirroring would change the structure. Vectors that
        depend on each other span no cell and are returned as they are, with the identity; so is a cell that is not
        finite.
    """
    if not np.isfinite(cell).all():
        # Nothing can be turned: the intake names it, and no other system is touched.
        return cell.copy(), np.eye(3)
    full = _completed(cell)
    if np.linalg.matrix_rank(full) < 3:
        return cell.copy(), np.eye(3)
    if not np.triu(full, 1).any() and full[0, 0] > 0 and full[1, 1] > 0:
        return cell.copy(), np.eye(3)
    rotation, upper = np.linalg.qr(full.T)
    signs = np.where(np.diag(upper) < 0, -1.0, 1.0)
    rotation, upper = rotation * signs, signs[:, None] * upper
    if np.linalg.det(rotation) < 0:
        rotation[:, 2], upper[2] = -rotation[:, 2], -upper[2]
    return np.tril(upper.T) * np.any(cell, axis=1)[:, None], rotation


def _completed(cell: np.ndarray) -> np.ndarray:
    """The cell with each vector of no length replaced by a unit vector perpendicular to the others."""
    full = np.array(cell, dtype=float)
    missing = [k for k in range(3) if not full[k].any()]
    if len(missing) == 3:
        return np.eye(3)
    if len(missing) == 2:
        present = ({0, 1, 2} - set(missing)).pop()
        # Any perpendicular will do; that of the least component is well conditioned.
        unit = np.eye(3)[int(np.argmin(np.abs(full[present])))]
        after = (present + 1) % 3
        full[after] = _unit(np.cross(full[present], unit))
        missing = [k for k in missing if k != after]
    for k in missing:
        full[k] = _unit(np.cross(full[(k + 1) % 3], full[(k + 2) % 3]))
    return full


def _unit(vector: np.ndarray) -> np.ndarray:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm > 0 else vector


def _is_plain(key: Any, value: Any) -> bool:
    """Whether JSON can say an item of info."""
    if isinstance(value, np.ndarray):
        return isinstance(key, str) and value.dtype.kind in "fiubU"
    if isinstance(value, dict):
        return isinstance(key, str) and all(_is_plain(str(k), v) for k, v in value.items())
    if isinstance(value, list | tuple | set):
        return isinstance(key, str) and all(_is_plain(key, v) for v in value)
    return isinstance(key, str) and (value is None or isinstance(value, bool | int | float | str | np.generic))


def _is_numeric(values: Any) -> bool:
    return np.asarray(values).dtype.kind in "fiub"


def _widen(values: np.ndarray) -> np.ndarray:
    return values.astype({"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}[values.dtype.kind])


def _all_missing(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0 and bool(torch.isnan(value).all())


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in arrays.items()}
