"""A CDF-2 file that records are appended to, safe against a kill at any instant.

The header is written once. A record is written behind the last one, then the record count in the header: readers
trust the count only, so what a killed or full-disk writer left behind it does not exist. `sync` makes what was
appended durable against a power cut, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from . import cdf2
from .atomic import replacing
from .handoff import DamagedFile

#: Bytes of a header that are read at first, and at most: a damaged length must not make us read a whole trajectory.
_HEADER_CHUNK, _HEADER_LIMIT = 1 << 16, 1 << 24
_REMEDY = "the stage must run again for this system"


class StaleWriter(RuntimeError):
    """The file has been replaced by another writer (a later epoch): this one was cut off and must stop."""


class RecordFile:
    """An open record file. Not for several threads."""

    def __init__(self, path: Path, header: cdf2.Header, n_records: int, identity: tuple[int, int]) -> None:
        self.path = path
        self.header = header
        self.n_records = n_records
        self._dtype = header.record_dtype
        self._begin = header.record_begin
        self._identity = identity
        self._descriptor: int | None = None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        header: cdf2.Header,
        head: bytes,
        *,
        first: Mapping[str, Any] | None = None,
        rows: np.ndarray | None = None,
    ) -> RecordFile:
        """Begin a file (in place of one that is there): `head` is header and fixed variables.

        With a `first` record, or with `rows`, the file appears together with these: some readers cannot open a file of
        no frames.
        """
        path = Path(path)
        assert len(head) == header.record_begin
        with replacing(path, sync=False) as draft:
            draft.write_bytes(head)
            created = cls(draft, header, 0, _identity(os.stat(draft)))
            if first is not None:
                created.append(first)
            if rows is not None:
                created.append_rows(rows)
            created.close()
        created.path = path
        return created

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RecordFile:
        """Go on with a file. Raises `DamagedFile` where it is none."""
        path = Path(path)
        header = read_header(path)
        return cls(path, header, whole_records(path, header), _identity(os.stat(path)))

    def rewrite(self, n_records: int) -> RecordFile:
        """A new file in place of this one with its first records only; whoever still writes the old one is cut off."""
        assert 0 <= n_records <= self.n_records
        self.close()
        with replacing(self.path) as draft, open(self.path, "rb") as old, open(draft, "wb") as new:
            _copy(old, new, self._begin + n_records * self._dtype.itemsize)
            new.flush()
            new.seek(cdf2.COUNT_OFFSET)
            new.write(cdf2.encode_count(n_records))
            new.flush()
            identity = _identity(os.fstat(new.fileno()))
        return RecordFile(self.path, self.header, n_records, identity)

    def append(self, values: Mapping[str, Any], n: int = 1) -> None:
        """Append n records: every record variable by name, shape (n, …) or, for one record, (…).

        Raises:
            OSError: no space …; the file is as it was before.
            StaleWriter: somebody replaced the file.
        """
        rows = np.zeros(n, dtype=self._dtype)
        for name in self._dtype.names or ():
            rows[name] = np.asarray(values[name]).reshape(rows[name].shape)
        self.append_rows(rows)

    def append_rows(self, rows: np.ndarray) -> None:
        """Append records as an array of `header.record_dtype`."""
        file = self._open()
        _write_all(file, rows.tobytes(), self._begin + self.n_records * self._dtype.itemsize)
        _write_all(file, cdf2.encode_count(self.n_records + len(rows)), cdf2.COUNT_OFFSET)
        self.n_records += len(rows)

    def sync(self) -> None:
        """Make what was appended durable: the records first, then their number.

        Raises:
            StaleWriter: somebody replaced the file while it was open here; what was appended since is lost.
        """
        file = self._open()
        if _identity(os.stat(self.path)) != self._identity:
            raise StaleWriter(f"{self.path} was replaced by another writer: this one was cut off and must stop")
        _data_sync(file)
        _write_all(file, cdf2.encode_count(self.n_records), cdf2.COUNT_OFFSET)
        _data_sync(file)

    def column(self, name: str) -> np.ndarray:
        """All values of one record variable."""
        return read_columns(self.path, [name], self.header, self.n_records)[name]

    @property
    def is_open(self) -> bool:
        """Whether it holds a file handle now; it takes one when it needs it."""
        return self._descriptor is not None

    def close(self) -> None:
        """Let go of the file handle; a later `append` takes it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR)
            if _identity(os.fstat(self._descriptor)) != self._identity:
                self.close()
                raise StaleWriter(f"{self.path} was replaced by another writer: this one was cut off and must stop")
        return self._descriptor


def read_header(path: str | os.PathLike[str]) -> cdf2.Header:
    """The header of a record file. Raises `DamagedFile` where it is none."""
    try:
        with open(path, "rb") as file:
            header = _decode(file, path)
    except FileNotFoundError:
        raise DamagedFile(path, "it is missing", _REMEDY) from None
    if not header.record_dtype.itemsize:
        raise DamagedFile(path, "it has no records", _REMEDY)
    return header


def _decode(file: BinaryIO, path: str | os.PathLike[str]) -> cdf2.Header:
    data = file.read(_HEADER_CHUNK)
    while True:
        try:
            return cdf2.decode(data)
        except cdf2.CutOff as error:
            more = file.read(len(data)) if len(data) < _HEADER_LIMIT else b""
            if not more:
                raise DamagedFile(path, str(error), _REMEDY) from error
            data += more
        except cdf2.FormatError as error:
            raise DamagedFile(path, str(error), _REMEDY) from error


def check_variables(
    path: str | os.PathLike[str], header: cdf2.Header, expected: Iterable[cdf2.Variable], *, only: bool = False
) -> None:
    """Raises `DamagedFile` unless the file has these variables (`only` these), of these types and dimensions."""
    expected = list(expected)
    if only and len(header.variables) != len(expected):
        raise DamagedFile(path, f"it has {len(header.variables)} variables instead of {len(expected)}", _REMEDY)
    for variable in expected:
        found = header.variables.get(variable.name)
        if found is None or (found.dtype, found.dimensions) != (variable.dtype, variable.dimensions):
            raise DamagedFile(path, f"it has no variable {variable.name!r} of the kind it must have", _REMEDY)


def whole_records(path: str | os.PathLike[str], header: cdf2.Header) -> int:
    """Records that the header counts and the file holds; fewer than counted only after a power cut."""
    held = (os.stat(path).st_size - header.record_begin) // header.record_dtype.itemsize
    return max(0, min(header.n_records, held))


def read_columns(
    path: str | os.PathLike[str], names: list[str], header: cdf2.Header | None = None, n_records: int | None = None
) -> dict[str, np.ndarray]:
    """Some record variables as arrays of native byte order, without reading the others. Raises `DamagedFile`."""
    header = header or read_header(path)
    missing = set(names) - {v.name for v in header.record_variables}
    if missing:
        raise DamagedFile(path, f"it has no record variable {min(missing)!r}", _REMEDY)
    n = whole_records(path, header) if n_records is None else n_records
    dtype = header.record_dtype
    if n == 0:
        return {name: np.zeros((0, *dtype[name].shape), dtype[name].base.newbyteorder("=")) for name in names}
    rows = np.memmap(path, dtype=dtype, mode="r", offset=header.record_begin, shape=(n,))
    return {name: np.array(rows[name], dtype=dtype[name].base.newbyteorder("=")) for name in names}


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return (stat.st_dev, stat.st_ino)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _data_sync(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)


def _copy(old: BinaryIO, new: BinaryIO, n_bytes: int) -> None:
    while n_bytes > 0:
        piece = old.read(min(n_bytes, 1 << 22))
        if not piece:
            raise DamagedFile(old.name, "it is cut off", _REMEDY)
        new.write(piece)
        n_bytes -= len(piece)


__all__ = ["RecordFile", "StaleWriter", "check_variables", "read_columns", "read_header", "whole_records"]
