"""Batches on disk: hand-off files and checkpoints.

A file is a plain ``.npz`` (zip, not compressed, no pickle: ``numpy.load`` opens it) whose first member,
``header.json``, holds format version, ids, counts, info, the list of fields and a blake2b digest per system. The
digest of the header is the digest of the file. Because every system has a digest of its own, some systems can be
read and verified without touching the others. A file appears in one step, see `atomic.replacing`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch

from ..domain.batch import Batch, plain
from .atomic import replacing
from .errors import CampaignError

FORMAT = "mattermill-batch"
VERSION = 1
_HEADER = "header.json"
_DTYPES = {"float64": "<f8", "float32": "<f4", "int64": "<i8", "int32": "<i4", "bool": "|b1", "uint8": "|u1"}


class DamagedFile(CampaignError):
    """A file that cannot be trusted: cut off, changed, missing or of an unknown version."""

    def __init__(self, path: str | os.PathLike[str], reason: str, remedy: str = "") -> None:
        self.path, self.reason = str(path), reason
        self.remedy = remedy or "use the previous checkpoint, or let the systems restart from their last stage"
        super().__init__(f"{path} is damaged: {reason}; {self.remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.reason, self.remedy)


@dataclass(frozen=True)
class Header:
    """What a file says about itself; `fields` maps member name to (dtype, row shape)."""

    ids: tuple[str, ...]
    counts: np.ndarray
    info: tuple[dict[str, Any], ...]
    fields: dict[str, tuple[str, tuple[int, ...]]]
    digests: tuple[str, ...]
    digest: str


def write_batch(path: str | os.PathLike[str], batch: Batch, *, sync: bool = True) -> str:
    """Write a batch durably; the file appears whole or not at all.

    Args:
        path: where; its folder is made. A file that is there is replaced.
        batch: any batch, the empty one too.
        sync: False leaves durability against a power cut to the operating system.

    Returns:
        The digest of the content, to be kept in the ledger.

    Raises:
        OSError: no space, no permission; the file that was there before is untouched.
    """
    arrays = _arrays(batch)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "ids": list(batch.ids),
        "counts": batch.counts.tolist(),
        "info": [plain(i) for i in batch.info],
        "fields": {k: [a.dtype.str, list(a.shape[1:])] for k, a in arrays.items()},
        "digests": _digests(batch.ptr, arrays),
    }
    text = json.dumps(header).encode()
    digest = _hash(text)
    with replacing(path, sync=sync) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = f"blake2b:{digest}".encode()
        archive.writestr(_HEADER, text)
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(_npy_header(array.dtype, array.shape))
                member.write(_bytes_of(array))
    return digest


def read_batch(path: str | os.PathLike[str], ids: Sequence[str] | None = None, *, expect: str | None = None) -> Batch:
    """Read a batch and verify it.

    Args:
        path: a file of `write_batch`.
        ids: only these systems, in this order; None for all. Only their bytes are read.
        expect: the digest the ledger has; another one means another file.

    Raises:
        DamagedFile: missing, cut off, changed, of a later version, or not the file that was expected.
        KeyError: an id that is not in the file.
    """
    with _opened(path) as (file, archive):
        header = _header(path, archive, expect)
        if ids is None:
            return _read_rows(path, file, archive, header, range(len(header.ids)))
        position = {i: k for k, i in enumerate(header.ids)}
        missing = [i for i in ids if i not in position]
        if missing:
            raise KeyError(f"{path} holds no system {missing[0]!r}")
        return Batch.concat(_read_rows(path, file, archive, header, [position[i]]) for i in ids)


def read_header(path: str | os.PathLike[str], *, expect: str | None = None) -> Header:
    """What a file holds, without reading the arrays. Raises `DamagedFile` as `read_batch` does."""
    with _opened(path) as (_, archive):
        return _header(path, archive, expect)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, zipfile.ZipFile]]:
    """The file as bytes and as a zip; what damage makes of either is told as `DamagedFile`."""
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            yield file, archive
    except FileNotFoundError:
        raise DamagedFile(path, "it is missing") from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # a seek to where no file goes is damage, the rest is the machine's trouble
            raise
        raise DamagedFile(path, f"it names impossible places ({error})") from error
    except _DAMAGE as error:
        raise DamagedFile(path, f"it is cut off or not a hand-off file ({error})") from error


# What zipfile and json make of damaged bytes: bad records, unknown methods and flags, impossible sizes.
_DAMAGE = (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, ValueError, OverflowError, zlib.error)


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    arrays = {}
    for kind, fields in (("atoms", batch.atoms), ("systems", batch.systems)):
        for name, value in fields.items():
            dtype = str(value.dtype).removeprefix("torch.")
            assert dtype in _DTYPES, f"field {name!r} has dtype {dtype}, which no file format is agreed for"
            arrays[f"{kind}/{name}"] = np.ascontiguousarray(value.detach().cpu().numpy(), dtype=_DTYPES[dtype])
    return arrays


def _digests(ptr: np.ndarray, arrays: dict[str, np.ndarray]) -> list[str]:
    """One digest per system over its rows of every field, fields in the order of their names."""
    hashers = [hashlib.blake2b(digest_size=16) for _ in ptr[:-1]]
    for name in sorted(arrays):
        rows = _bytes_of(arrays[name])
        width = arrays[name].dtype.itemsize * int(np.prod(arrays[name].shape[1:], dtype=np.int64))
        offsets = ptr if name.startswith("atoms/") else np.arange(len(ptr))
        for hasher, first, last in zip(hashers, offsets[:-1], offsets[1:], strict=True):
            hasher.update(rows[int(first) * width : int(last) * width])
    return [h.hexdigest() for h in hashers]


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array, not a copy."""
    return array.reshape(-1).view(np.uint8).data


def _npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The head of an .npy file, format version 1.0; written and compared as bytes, so that none is ever parsed."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _header(path: str | os.PathLike[str], archive: zipfile.ZipFile, expect: str | None) -> Header:
    try:
        if archive.getinfo(_HEADER).flag_bits & 1:
            raise DamagedFile(path, "its header claims to be encrypted")
        text = archive.read(_HEADER)
    except KeyError:
        raise DamagedFile(path, "it is not a hand-off file (no header.json)") from None
    digest = _hash(text)
    if archive.comment != f"blake2b:{digest}".encode():
        raise DamagedFile(path, "its header does not match its checksum")
    if expect is not None and digest != expect:
        raise DamagedFile(path, f"it has checksum {digest}, the ledger expects {expect}")
    data = json.loads(text)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        found = f"{data.get('format')} version {data.get('version')}"
        raise DamagedFile(path, f"it is {found}, this is {FORMAT} version {VERSION}", "use the version that wrote it")
    return Header(
        tuple(data["ids"]),
        np.asarray(data["counts"], dtype=np.int64),
        tuple(data["info"]),
        {name: (dtype, tuple(shape)) for name, (dtype, shape) in data["fields"].items()},
        tuple(data["digests"]),
        digest,
    )


def _read_rows(
    path: str | os.PathLike[str], file: BinaryIO, archive: zipfile.ZipFile, header: Header, which: Sequence[int]
) -> Batch:
    """The systems at these neighbouring positions, verified."""
    if not which:
        return Batch.empty()
    ptr = np.concatenate(([0], np.cumsum(header.counts)))
    first, last = which[0], which[-1] + 1
    arrays = {}
    for name, (dtype, shape) in header.fields.items():
        rows = (int(ptr[first]), int(ptr[last])) if name.startswith("atoms/") else (first, last)
        total = int(ptr[-1]) if name.startswith("atoms/") else len(header.ids)
        arrays[name] = _rows_of(path, file, archive, name, np.dtype(dtype), (total, *shape), rows)
    found = _digests(ptr[first : last + 1] - ptr[first], arrays)
    for k, digest in zip(which, found, strict=True):
        if digest != header.digests[k]:
            raise DamagedFile(path, f"the data of system {header.ids[k]!r} do not match their checksum")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return Batch(
        header.ids[first:last],
        header.counts[first:last],
        {k.removeprefix("atoms/"): v for k, v in tensors.items() if k.startswith("atoms/")},
        {k.removeprefix("systems/"): v for k, v in tensors.items() if k.startswith("systems/")},
        header.info[first:last],
    )


def _rows_of(
    path: str | os.PathLike[str],
    file: BinaryIO,
    archive: zipfile.ZipFile,
    name: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    rows: tuple[int, int],
) -> np.ndarray:
    """Rows of one member, read in place: members are stored, so their bytes lie in the file as they are."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise DamagedFile(path, f"field {name!r} is missing") from None
    file.seek(info.header_offset)
    local = file.read(30)
    if len(local) < 30 or local[:4] != b"PK\x03\x04":
        raise DamagedFile(path, f"field {name!r} is cut off")
    name_length, extra_length = struct.unpack("<HH", local[26:30])
    file.seek(info.header_offset + 30 + name_length + extra_length)
    expected = _npy_header(dtype, shape)
    if file.read(len(expected)) != expected:
        raise DamagedFile(path, f"field {name!r} is not {dtype}{shape}, as the header says")
    width = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
    array = np.empty((rows[1] - rows[0], *shape[1:]), dtype=dtype)
    file.seek(rows[0] * width, os.SEEK_CUR)
    if file.readinto(_bytes_of(array)) != array.nbytes:  # type: ignore[attr-defined]
        raise DamagedFile(path, f"field {name!r} is cut off")
    return array


__all__ = ["FORMAT", "VERSION", "DamagedFile", "Header", "read_batch", "read_header", "write_batch"]
