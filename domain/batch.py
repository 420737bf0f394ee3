"""The batch: a ragged set of systems, the only thing that moves between stages.

A batch holds per-atom tensors (leading dimension: all atoms of all systems, system after system) and per-system
tensors (leading dimension: systems). Whether a field is per atom or per system is declared, never inferred from
a shape. State is float64; integers are int64; flags are bool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .fields import BatchError, fill_rows

if TYPE_CHECKING:
    from ase import Atoms


class Batch:
    """A ragged set of systems.

    Args:
        ids: one stable id per system, unique within the batch.
        counts: atoms per system, int64, shape (systems,).
        atoms: per-atom tensors by name, leading dimension sum(counts).
        systems: per-system tensors by name, leading dimension len(ids).
        info: free-form JSON-able data per system.

    Raises:
        BatchError: lengths that do not fit, or an id that stands twice.

    Fields read as attributes: ``batch.positions``, ``batch.cell``; a field of a user's own that is called like a method
    (``image``, ``split``) by ``batch.atoms["image"]``. `Batch.empty()` is the sentinel of a stream.
    """

    __slots__ = ("atoms", "counts", "ids", "info", "systems")

    ids: tuple[str, ...]
    counts: np.ndarray
    atoms: dict[str, Tensor]
    systems: dict[str, Tensor]
    info: tuple[dict[str, Any], ...]

    def __init__(
        self,
        ids: Sequence[str],
        counts: Sequence[int] | np.ndarray,
        atoms: Mapping[str, Tensor],
        systems: Mapping[str, Tensor],
        info: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.ids = tuple(ids)
        self.counts = np.asarray(counts, dtype=np.int64).reshape(-1)
        self.atoms = dict(atoms)
        self.systems = dict(systems)
        self.info = tuple(info) if info is not None else tuple({} for _ in self.ids)
        self._validate()

    def _validate(self) -> None:
        n_systems, n_atoms = len(self.ids), int(self.counts.sum())
        if len(set(self.ids)) != n_systems:
            twice = sorted({i for i in self.ids if self.ids.count(i) > 1})
            raise BatchError(f"ids must be unique within a batch, these stand twice: {', '.join(twice)}")
        if len(self.counts) != n_systems or len(self.info) != n_systems:
            raise BatchError(f"{n_systems} ids need as many counts and infos, got {len(self.counts)}, {len(self.info)}")
        for kind, fields, length in (("atom", self.atoms, n_atoms), ("system", self.systems, n_systems)):
            for name, value in fields.items():
                if value.shape[:1] != (length,):
                    raise BatchError(
                        f"per-{kind} field {name!r} must have {length} rows, has shape {tuple(value.shape)}"
                    )
        both = self.atoms.keys() & self.systems.keys()
        if both:
            raise BatchError(f"declared both per atom and per system: {', '.join(sorted(both))}")

    # --- looking -------------------------------------------------------------------------------------------

    @classmethod
    def empty(cls) -> Batch:
        """The batch without systems: the sentinel that ends a stream."""
        return cls((), (), {}, {})

    @property
    def is_sentinel(self) -> bool:
        return not self.ids

    @property
    def n_atoms(self) -> int:
        return int(self.counts.sum())

    @property
    def ptr(self) -> np.ndarray:
        """Offsets of the systems' atoms, int64, shape (systems + 1,)."""
        return np.concatenate(([0], np.cumsum(self.counts)))

    @property
    def device(self) -> torch.device:
        return self.atoms["positions"].device if self.atoms else torch.device("cpu")

    def __len__(self) -> int:
        return len(self.ids)

    def __bool__(self) -> bool:
        return bool(self.ids)

    def __repr__(self) -> str:
        fields = ", ".join([*self.atoms, *self.systems])
        return f"Batch({len(self)} systems, {self.n_atoms} atoms: {fields})"

    def __getattr__(self, name: str) -> Tensor:
        # Only reached when normal lookup failed; slots may be unset while unpickling.
        if not name.startswith("__"):
            for store in ("atoms", "systems"):
                fields = object.__getattribute__(self, store)
                if name in fields:
                    return fields[name]
        raise AttributeError(f"this batch has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Batch.__slots__:
            object.__setattr__(self, name, value)
        elif name not in self or getattr(self, name) is not value:  # `batch.positions += 1` assigns what it has changed
            raise AttributeError(
                f"a batch's fields are changed in place (batch.{name}[:] = ...) or put into a new batch by with_fields"
            )

    def __contains__(self, name: str) -> bool:
        """Whether the batch has a field of this name."""
        return name in self.atoms or name in self.systems

    def index(self, system_id: str) -> int:
        """Place of a system. BatchError if there is none of this id."""
        try:
            return self.ids.index(system_id)
        except ValueError:
            raise BatchError(f"system must be one of this batch ({_some(self.ids)}), is {system_id!r}") from None

    def _place(self, which: Any) -> int:
        if isinstance(which, str):
            return self.index(which)
        place = int(which)
        if not 0 <= place < len(self):
            raise BatchError(f"index of a system must be in 0..{len(self) - 1} (a batch of {len(self)}), is {place}")
        return place

    def system_of_atom(self) -> np.ndarray:
        """Index of each atom's system, int64, shape (atoms,)."""
        return np.repeat(np.arange(len(self)), self.counts)

    # --- coordinates: `positions` are unwrapped -----------------------------------------------------------------

    def wrapped(self) -> Tensor:
        """Positions in the cells, Å, float64, (atoms, 3); unchanged along axes that are not periodic.

        ``positions = wrapped() + image @ cell`` for each atom with the cell of its system, to round-off; see
        `mattermill.domain.wrapping.image_counts`.

        Raises:
            BatchError: names a system whose positions or cell do not allow it.
        """
        return self._in_cells()[0]

    @property
    def image(self) -> Tensor:
        """How many cells away from its wrapped place each atom is, int32, (atoms, 3); 0 along axes that are not
        periodic. Worked out from `positions` and `cell` at each call; raises as `wrapped`."""
        return self._in_cells()[1]

    def _in_cells(self) -> tuple[Tensor, Tensor]:
        from .wrapping import image_counts

        wrapped, image = np.empty((self.n_atoms, 3)), np.empty((self.n_atoms, 3), dtype=np.int32)
        if self:
            x, cell, pbc = (getattr(self, name).detach().cpu().numpy() for name in ("positions", "cell", "pbc"))
            ptr = self.ptr
            for s, system_id in enumerate(self.ids):
                span = slice(ptr[s], ptr[s + 1])
                try:
                    wrapped[span], image[span] = image_counts(x[span], cell[s], pbc[s])
                except ValueError as error:
                    raise BatchError(f"system {system_id!r}: {error}") from error
        return torch.from_numpy(wrapped).to(self.device), torch.from_numpy(image).to(self.device)

    # --- changing: every method returns a new batch, tensors are shared where they can be ----------------------

    def with_fields(
        self,
        *,
        atoms: Mapping[str, Tensor] | None = None,
        systems: Mapping[str, Tensor] | None = None,
        info: Sequence[dict[str, Any]] | None = None,
    ) -> Batch:
        """The same systems with fields added or replaced."""
        return Batch(
            self.ids,
            self.counts,
            {**self.atoms, **(atoms or {})},
            {**self.systems, **(systems or {})},
            self.info if info is None else info,
        )

    def without(self, names: Iterable[str]) -> Batch:
        """The same systems without these fields; names that are not there are passed over."""
        drop = set(names)
        return Batch(
            self.ids,
            self.counts,
            {k: v for k, v in self.atoms.items() if k not in drop},
            {k: v for k, v in self.systems.items() if k not in drop},
            self.info,
        )

    def clone(self) -> Batch:
        """A copy that shares no memory with this one."""
        return Batch(
            self.ids,
            self.counts.copy(),
            {k: v.clone() for k, v in self.atoms.items()},
            {k: v.clone() for k, v in self.systems.items()},
            tuple(dict(i) for i in self.info),
        )

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            self.ids,
            self.counts,
            {k: v.to(device) for k, v in self.atoms.items()},
            {k: v.to(device) for k, v in self.systems.items()},
            self.info,
        )

    def select(self, which: Sequence[int] | np.ndarray | Sequence[str]) -> Batch:
        """The systems with these indices or ids, in this order.

        Raises:
            BatchError: an id or an index that this batch does not have.
        """
        index = [self._place(w) for w in which]
        if not index:
            return Batch.empty()
        ptr = self.ptr
        rows = np.concatenate([np.arange(ptr[i], ptr[i + 1]) for i in index])
        # Contiguous runs are views: splitting a batch copies nothing.
        span = slice(int(rows[0]), int(rows[-1]) + 1) if _is_run(rows) else None
        atom_rows = torch.as_tensor(rows, device=self.device)
        system_rows = torch.as_tensor(index, device=self.device)
        return Batch(
            [self.ids[i] for i in index],
            self.counts[index],
            {k: v[span] if span else v[atom_rows] for k, v in self.atoms.items()},
            {k: v[system_rows] for k, v in self.systems.items()},
            [self.info[i] for i in index],
        )

    def split(self) -> list[Batch]:
        """One batch per system; tensors are views of this batch's."""
        counts = self.counts.tolist()
        atoms = {k: v.split(counts) for k, v in self.atoms.items()} if counts else {}
        systems = {k: v.split(1) for k, v in self.systems.items()}
        return [
            Batch(
                (self.ids[i],),
                self.counts[i : i + 1],
                {k: v[i] for k, v in atoms.items()},
                {k: v[i] for k, v in systems.items()},
                (self.info[i],),
            )
            for i in range(len(self))
        ]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.split())

    @classmethod
    def concat(cls, batches: Iterable[Batch]) -> Batch:
        """All systems of these batches, in order; a field that some lack is filled with its neutral value."""
        parts = [b for b in batches if b]
        if not parts:
            return cls.empty()
        if len(parts) == 1:
            return parts[0]
        return cls(
            [i for b in parts for i in b.ids],
            np.concatenate([b.counts for b in parts]),
            _join([b.atoms for b in parts], [b.n_atoms for b in parts]),
            _join([b.systems for b in parts], [len(b) for b in parts]),
            [i for b in parts for i in b.info],
        )

    # --- ASE -----------------------------------------------------------------------------------------------

    @classmethod
    def from_atoms(cls, atoms: Atoms | Sequence[Atoms], ids: Sequence[str] | None = None) -> Batch:
        """From ASE Atoms; see `mattermill.domain.structures`. ids default to ``info["id"]``."""
        from .structures import from_atoms

        return from_atoms(atoms, ids)

    def to_atoms(self, *, wrap: bool = False) -> list[Atoms]:
        """One ASE Atoms per system, in the orientation in which it came in, results attached; see
        `mattermill.domain.structures.to_atoms`. With `wrap` all atoms lie in their cells (see `wrapped`)."""
        from .structures import to_atoms

        return to_atoms(self, wrap=wrap)

    # --- moving: tensors travel as buffers, never through Python lists ----------------------------------------

    def __getstate__(self) -> tuple[Any, ...]:
        atoms = {k: _to_numpy(v) for k, v in self.atoms.items()}
        systems = {k: _to_numpy(v) for k, v in self.systems.items()}
        return (self.ids, self.counts, atoms, systems, self.info)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        ids, counts, atoms, systems, info = state
        self.ids, self.counts, self.info = ids, np.asarray(counts), info
        self.atoms = {k: _to_tensor(v) for k, v in atoms.items()}
        self.systems = {k: _to_tensor(v) for k, v in systems.items()}

    def __sizeof__(self) -> int:
        # What dask's sizeof() finds: it decides about spilling and where tasks run.
        tensors = [*self.atoms.values(), *self.systems.values()]
        return 256 + sum(t.element_size() * t.nelement() for t in tensors) + 64 * len(self.ids)

    def equals(self, other: Batch) -> bool:
        """Bit for bit the same: ids, fields, values (NaN equals NaN), info."""
        if self.ids != other.ids or not np.array_equal(self.counts, other.counts):
            return False
        if not _same_info(self.info, other.info):
            return False
        for mine, theirs in ((self.atoms, other.atoms), (self.systems, other.systems)):
            if mine.keys() != theirs.keys():
                return False
            if not all(_same(mine[k], theirs[k]) for k in mine):
                return False
        return True

    def with_ids(self, ids: Sequence[str]) -> Batch:
        """The same systems under other ids."""
        return Batch(ids, self.counts, self.atoms, self.systems, self.info)


def _join(stores: list[dict[str, Tensor]], rows: list[int]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for store in stores for name in store)
    joined = {}
    for name in names:
        like = next(store[name] for store in stores if name in store)
        pieces = [s[name] if name in s else fill_rows(name, n, like) for s, n in zip(stores, rows, strict=True)]
        shapes = {tuple(p.shape[1:]) for p in pieces}
        if len(shapes) > 1 or len({p.dtype for p in pieces}) > 1:
            raise BatchError(f"field {name!r} has different row shapes or dtypes in the batches to be joined: {shapes}")
        joined[name] = torch.cat(pieces)
    return joined


def _some(names: Sequence[str], most: int = 8) -> str:
    """The first of many names, for a message."""
    more = f" … {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) + more) or "it is empty"


def _is_run(rows: np.ndarray) -> bool:
    return len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and bool(np.all(np.diff(rows) == 1))


def _to_numpy(value: Tensor) -> np.ndarray:
    value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    return np.ascontiguousarray(value.numpy())


def _to_tensor(value: np.ndarray) -> Tensor:
    # Buffers received out of band may be read-only; a tensor that integrators write to must own its memory.
    return torch.from_numpy(value if value.flags.writeable else value.copy())


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaN equal to NaN at the same place; 0.0 equals -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().cpu(), b.detach().cpu()
    same = a == b
    if a.is_floating_point():
        same |= torch.isnan(a) & torch.isnan(b)
    return bool(same.all())


def plain(value: Any) -> Any:
    """A value as JSON gives it back: numbers, text, lists and dicts with text keys.

    Arrays become lists, NumPy scalars numbers, tuples lists. What is none of these becomes its ``str``.
    A batch whose info went through this is equal to itself after a hand-off file.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return str(value)


def _same_info(a: Any, b: Any) -> bool:
    """Equal free-form data; NaN equals NaN, and arrays are compared by value."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same_info(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same_info(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray | Tensor) or isinstance(b, np.ndarray | Tensor):
        return type(a) is type(b) and _same_info(a.tolist(), b.tolist())
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)


__all__ = ["Batch", "plain"]
