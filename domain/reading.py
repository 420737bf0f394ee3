"""Structures from files and from ASE: what enters a campaign, and what cannot, with its reason."""

from __future__ import annotations

import glob
import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .batch import Batch
from .fields import BatchError, is_own_name
from .structures import from_atoms, not_taken_along

if TYPE_CHECKING:
    from ase import Atoms

Source = Any  # a path, a glob, ASE Atoms, a Batch, Structures, or an iterable of these

_COMPRESSIONS = {".gz", ".bz2", ".xz"}
#: Formats of ASE that are no file, or that need code of somebody else to be run.
_REFUSED = {
    "postgresql": "it names a database server, not a file: export it to a file first",
    "mysql": "it names a database server, not a file: export it to a file first",
    "py": "it is a Python script, and opening structures must not run code: write it as extxyz",
    "gpw": "it needs GPAW's own reader: write it as extxyz",
}


class ReadError(ValueError):
    """The sources make no sense: a pattern that no file matches, or an object that is no structure."""


class StructureWarning(UserWarning):
    """Something that a structure carried is not taken along."""


@dataclass(frozen=True)
class Entry:
    """One system, or one that could not be read. `base` is the wished id, `digest` tells two of one name apart."""

    base: str
    digest: str
    source: str
    batch: Batch | None = None
    reason: str = ""


class Structures:
    """The systems that go into a campaign.

    Iterating gives batches of one system; ``len`` counts them. ``structures["id"]`` and ``structures[k]`` give one,
    a slice gives fewer, ``+`` joins two. What could not be read is in `failures` and does not count.

    Ids do not depend on the order of the sources: systems that wish for the same id all get a hash of their content
    appended.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = tuple(entries)
        self._all_ids = unique_ids(self.entries)
        self.failures: dict[str, str] = {
            i: e.reason for i, e in zip(self._all_ids, self.entries, strict=True) if e.batch is None
        }
        self.sources: dict[str, str] = {i: e.source for i, e in zip(self._all_ids, self.entries, strict=True)}
        self._batches: dict[str, Batch] = {
            i: e.batch.with_ids([i]) for i, e in zip(self._all_ids, self.entries, strict=True) if e.batch is not None
        }

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._batches)

    @property
    def batches(self) -> list[Batch]:
        """One batch per system."""
        return list(self._batches.values())

    @cached_property
    def batch(self) -> Batch:
        """All systems as one batch."""
        return Batch.concat(self._batches.values())

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches.values())

    def __contains__(self, system_id: object) -> bool:
        return system_id in self._batches

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            if key in self.failures:
                raise KeyError(f"{key!r} could not be read: {self.failures[key]}")
            return self._batches[key]
        if isinstance(key, slice):
            readable = [e for e in self.entries if e.batch is not None]
            return Structures(readable[key])
        return self.batches[key]

    def __add__(self, other: Structures) -> Structures:
        if not isinstance(other, Structures):
            return NotImplemented
        entries, dropped = _agree([*self.entries, *other.entries])
        _warn(dropped)
        return Structures(entries)

    def __repr__(self) -> str:
        n_atoms = sum(b.n_atoms for b in self._batches.values())
        failed = f", {len(self.failures)} that could not be read" if self.failures else ""
        return f"Structures({len(self)} systems, {n_atoms} atoms{failed})"


def read(*sources: Source, index: str | int | slice = ":", format: str | None = None) -> Structures:
    """Read structures.

    Args:
        sources: paths, patterns (``"structures/*.cif"``, ``**`` too), ASE Atoms, batches, or lists of these, mixed.
        index: which frames of each file, as in `ase.io.read`; all by default.
        format: ASE's name of the format where the file does not tell.

    Returns:
        The systems, and in `failures` what could not be read: a file that is missing, empty or unreadable, a
        structure without atoms, with non-finite coordinates or with partial occupancies.

    A system's id is the file's stem, with ``-0``, ``-1`` … where a file has several frames; `Atoms` go by
    ``info["id"]`` or else their formula. Systems that wish for the same id all get a hash of their content.

    Warns:
        StructureWarning: names everything that structures carry and batches do not, in one warning, once each.

    Raises:
        ReadError: a pattern that no file matches, or an object that is no structure.
    """
    entries: list[Entry] = []
    left: Counter[str] = Counter()
    for source in sources:
        entries.extend(_entries(source, index, format, left))
    entries, dropped = _agree(entries)
    _warn(left + dropped)
    return Structures(entries)


def unique_ids(entries: Sequence[Entry]) -> list[str]:
    """An id for each entry that depends on its name and content, not on its place among the others."""
    wished = Counter(e.base for e in entries)
    ids = [e.base if wished[e.base] == 1 else f"{e.base}-{e.digest[:8]}" for e in entries]
    # Left are copies of one structure, which are interchangeable, and names made to look like ours.
    taken: set[str] = set()
    twice = Counter(ids)
    for k in sorted(range(len(ids)), key=lambda k: (entries[k].source, k)):
        number, candidate = 1, ids[k]
        while candidate in taken or (number > 1 and twice[candidate]):
            number += 1
            candidate = f"{ids[k]}-copy{number}"
        ids[k] = candidate
        taken.add(candidate)
    return ids


# --- sources ---------------------------------------------------------------------------------------------------


def _entries(source: Source, index: Any, format: str | None, left: Counter[str]) -> Iterator[Entry]:
    if isinstance(source, str | os.PathLike):
        for path in _paths(os.fspath(source)):
            yield from _from_file(path, index, format, left)
    elif isinstance(source, Structures):
        yield from source.entries
    elif isinstance(source, Batch):
        for single in source:
            yield Entry(single.ids[0], _digest_batch(single), "batch", single)
    elif hasattr(source, "get_positions") and hasattr(source, "arrays"):
        yield _from_atoms(source, _name_of(source), "ASE Atoms", left)
    elif isinstance(source, Iterable):
        for part in source:
            yield from _entries(part, index, format, left)
    else:
        raise ReadError(f"a structure must be a path, a pattern, ASE Atoms, a batch or a list of these, got {source!r}")


def _paths(text: str) -> list[str]:
    text = os.path.expanduser(text)
    if os.path.exists(text) or not glob.has_magic(text):
        return [text]
    found = sorted(glob.glob(text, recursive=True))
    if not found:
        raise ReadError(f"no file matches {text!r} (looked from {os.getcwd()}): check the pattern")
    return found


def stem(path: str) -> str:
    """The name of a file without its ending, and without that of a compression."""
    name = Path(path).name
    root, ending = os.path.splitext(name)
    if ending.lower() in _COMPRESSIONS:
        root = os.path.splitext(root)[0] or root
    return root or name


def _from_file(path: str, index: Any, format: str | None, left: Counter[str]) -> list[Entry]:
    name, failure = stem(path), _why_not(path)
    frames: list[Atoms] = []
    if not failure:
        frames, failure = _frames(path, index, format)
    single = len(frames) + bool(failure) == 1
    entries = [_from_atoms(atoms, name if single else f"{name}-{k}", path, left) for k, atoms in enumerate(frames)]
    if failure:
        base = name if single else f"{name}-{len(frames)}"
        entries.append(Entry(base, _digest_file(path), path, reason=failure))
    return entries


def _why_not(path: str) -> str:
    """Why a path is not even tried; empty where it is."""
    if not os.path.exists(path):
        return f"no such file: {path}"
    if os.path.isdir(path):
        return "" if path.rstrip("/").endswith(".bundle") else f"a folder: give its files ({path}/*)"
    if not os.access(path, os.R_OK):
        return f"no permission to read {path}"
    return f"empty file: {path}" if os.path.getsize(path) == 0 else ""


def _frames(path: str, index: Any, format: str | None) -> tuple[list[Atoms], str]:
    """The frames up to the first that cannot be read, and why that one cannot."""
    from ase.io import iread
    from ase.io.formats import filetype

    frames: list[Atoms] = []
    # ASE's parsers raise whatever their first surprise raises; the reason is told in `failures`.
    try:
        kind = format or filetype(path)
        if kind in _REFUSED:
            return [], f"format {kind!r} is refused: {_REFUSED[kind]}"
        for atoms in iread(path, index=index, format=kind, do_not_split_by_at_sign=True):
            frames.append(atoms)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return frames, f"unreadable from frame {len(frames)} on ({type(error).__name__}: {text})"
    return frames, "" if frames else "no structure in the file"


def _from_atoms(atoms: Atoms, base: str, source: str, left: Counter[str]) -> Entry:
    digest = _digest_atoms(atoms)
    reason = _unfit(atoms)
    if reason:
        return Entry(base, digest, source, reason=reason)
    try:
        batch = from_atoms([atoms], [base])
    except BatchError as error:
        return Entry(base, digest, source, reason=str(error))
    left.update(set(not_taken_along(atoms)))
    return Entry(base, digest, source, batch)


def _unfit(atoms: Atoms) -> str:
    """Why a structure that was read cannot be a system; empty where it can."""
    if len(atoms) == 0:
        return "no atoms"
    values = {
        "positions": atoms.positions,
        "cell": atoms.cell.array,
        "masses": atoms.get_masses(),
        "momenta": atoms.arrays.get("momenta", np.zeros(1)),
    }
    for name, value in values.items():
        if not np.all(np.isfinite(value)):
            return f"non-finite {name}"
    if np.any(values["masses"] <= 0):
        return f"masses must be positive, the least is {values['masses'].min():g} amu"
    return _partial_occupancy(atoms.info.get("occupancy"))


def _partial_occupancy(occupancy: Any) -> str:
    """ASE gives {site: {symbol: share}} for files that state occupancies."""
    if not isinstance(occupancy, dict):
        return ""
    partial = [
        f"site {site}: " + ", ".join(f"{symbol} {share:g}" for symbol, share in shares.items())
        for site, shares in occupancy.items()
        if isinstance(shares, dict) and (len(shares) > 1 or any(share < 1 - 1e-6 for share in shares.values()))
    ]
    if not partial:
        return ""
    more = f" and {len(partial) - 3} more" if len(partial) > 3 else ""
    return f"partial occupancies ({'; '.join(partial[:3])}{more}): make an ordered structure first"


def _name_of(atoms: Atoms) -> str:
    name = atoms.info.get("id", atoms.info.get("name"))
    return name if isinstance(name, str) and name else atoms.get_chemical_formula()


# --- what systems of one campaign must agree on ------------------------------------------------------------------


def _agree(entries: list[Entry]) -> tuple[list[Entry], Counter[str]]:
    """Make fields of the users' own joinable: one dtype and one row shape per name.

    Numbers become float64 where some are; a field whose rows have different shapes, or which is per atom here and
    per system there, is dropped. Returns the entries and the names of what was dropped, with how many had it.
    """
    kinds: dict[str, set[tuple[Any, ...]]] = {}
    for entry in entries:
        for name, kind in _own_fields(entry):
            kinds.setdefault(name, set()).add(kind)
    clashing = {name for name, found in kinds.items() if len({(k[0], k[2]) for k in found}) > 1}
    widen = {name for name, found in kinds.items() if len({k[1] for k in found}) > 1} - clashing
    if not clashing and not widen:
        return entries, Counter()
    dropped: Counter[str] = Counter()
    result = []
    for entry in entries:
        mine = {name for name, _ in _own_fields(entry)}
        dropped.update(f"field {name!r} (its rows have different shapes)" for name in mine & clashing)
        if entry.batch is not None and mine & (clashing | widen):
            entry = replace(entry, batch=_adapted(entry.batch, clashing, widen))
        result.append(entry)
    return result, dropped


def _own_fields(entry: Entry) -> Iterator[tuple[str, tuple[Any, ...]]]:
    if entry.batch is not None:
        for per, fields in (("atom", entry.batch.atoms), ("system", entry.batch.systems)):
            for name, value in fields.items():
                if not is_own_name(name):
                    yield name, (per, value.dtype, tuple(value.shape[1:]))


def _adapted(batch: Batch, drop: set[str], widen: set[str]) -> Batch:
    batch = batch.without(drop)
    return batch.with_fields(
        atoms={k: v.to(torch.float64) for k, v in batch.atoms.items() if k in widen},
        systems={k: v.to(torch.float64) for k, v in batch.systems.items() if k in widen},
    )


def _warn(left: Counter[str]) -> None:
    if left:
        names = ", ".join(
            f"{name} ({n} systems)" if n > 1 else f"{name} (1 system)" for name, n in sorted(left.items())
        )
        warnings.warn(f"not taken along: {names}", StructureWarning, stacklevel=3)


# --- content -----------------------------------------------------------------------------------------------------


def _digest_atoms(atoms: Atoms) -> str:
    return _digest(
        np.asarray(atoms.numbers, dtype="<i8"),
        np.asarray(atoms.positions, dtype="<f8"),
        np.asarray(atoms.cell.array, dtype="<f8"),
        np.asarray(atoms.pbc, dtype="|b1"),
        np.asarray(atoms.arrays.get("momenta", ()), dtype="<f8"),
    )


def _digest_batch(single: Batch) -> str:
    return _digest(*(single.atoms[k].cpu().numpy() for k in ("numbers", "positions")), single.cell.cpu().numpy())


def _digest(*arrays: np.ndarray) -> str:
    state = hashlib.blake2b(digest_size=8)
    for array in arrays:
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()


def _digest_file(path: str) -> str:
    """Of the content, or of the name where there is no content."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


__all__ = ["Entry", "ReadError", "StructureWarning", "Structures", "read", "unique_ids"]
