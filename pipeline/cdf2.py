"""The CDF-2 file format (NetCDF classic, 64-bit offsets), as far as appending records needs it.

Source: "NetCDF Classic Format Specification", Unidata, NetCDF Users Guide, appendix B. Big-endian throughout:

    header  = "CDF" 2  numrecs  dimensions  attributes  variables
    records = for each record, the slab of every record variable in order, each padded to four bytes

The number of records stands in bytes 4 to 8 of the file and nowhere else: a record counts once that number says
so. That makes appending safe against a kill at any instant (write the record behind the last one, then the
number), which no library that caches headers and fills records in place gives.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

MAGIC = b"CDF\x02"
COUNT_OFFSET = 4
_ABSENT = b"\0" * 8
_DIMENSION, _VARIABLE, _ATTRIBUTE = 10, 11, 12
#: Where the size field of a variable saturates.
_MOST = 2**32 - 4
#: nc_type by NumPy type, and back.
_TYPES = {"S1": 2, ">i2": 3, ">i4": 4, ">f4": 5, ">f8": 6, "|i1": 1}
_DTYPES = {number: np.dtype(name) for name, number in _TYPES.items()}

Attributes = Mapping[str, Any]


class FormatError(ValueError):
    """The bytes are not a CDF-2 header."""


class CutOff(FormatError):
    """The bytes stop before the header does: there may be more."""


@dataclass(frozen=True)
class Variable:
    """A variable: `dimensions` by name; one whose first dimension is the record dimension is a record variable.

    `dtype` is one of S1, >i2, >i4, >f4, >f8. `begin` is where its first value lies in the file.
    """

    name: str
    dtype: np.dtype
    dimensions: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    begin: int = 0


@dataclass(frozen=True)
class Header:
    """The layout of a file. `dimensions` maps names to lengths, 0 for the record dimension (at most one)."""

    dimensions: dict[str, int]
    attributes: dict[str, Any]
    variables: dict[str, Variable]
    n_records: int = 0

    @cached_property
    def record_dimension(self) -> str | None:
        return next((name for name, length in self.dimensions.items() if length == 0), None)

    def is_record(self, variable: Variable) -> bool:
        return bool(variable.dimensions) and variable.dimensions[0] == self.record_dimension

    @property
    def record_variables(self) -> list[Variable]:
        return [v for v in self.variables.values() if self.is_record(v)]

    def row_shape(self, variable: Variable) -> tuple[int, ...]:
        """The shape of one record of a record variable, or the whole shape of another one."""
        names = variable.dimensions[1:] if self.is_record(variable) else variable.dimensions
        return tuple(self.dimensions[name] for name in names)

    def size(self, variable: Variable) -> int:
        """Bytes of one record of the variable (or of the variable), padded to four."""
        raw = variable.dtype.itemsize * math.prod(self.row_shape(variable))
        return raw + (-raw) % 4

    @cached_property
    def record_dtype(self) -> np.dtype:
        """One record as a structured type, padding included, so that records can be written and mapped at once."""
        names, formats, offsets, offset = [], [], [], 0
        for variable in self.record_variables:
            names.append(variable.name)
            formats.append((variable.dtype, self.row_shape(variable)))
            offsets.append(offset)
            offset += self.size(variable)
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})

    @property
    def record_begin(self) -> int:
        return min(v.begin for v in self.record_variables)


def define(
    dimensions: Mapping[str, int | None], variables: Sequence[Variable], attributes: Attributes | None = None
) -> tuple[Header, bytes]:
    """Lay out a file with no record yet.

    Returns:
        The header with the place of every variable, and its bytes. The fixed variables follow these bytes in the
        order given, then the records.
    """
    lengths = {name: length or 0 for name, length in dimensions.items()}
    assert sum(length == 0 for length in lengths.values()) <= 1, "one record dimension at most, none of length 0"
    draft = Header(lengths, dict(attributes or {}), {v.name: v for v in variables})
    # Places do not change the length of the header: lay out once to know it, and again with the places.
    offset = len(_encode(draft))
    fixed = [v for v in variables if not draft.is_record(v)]
    placed: dict[str, int] = {}
    for variable in [*fixed, *draft.record_variables]:
        placed[variable.name] = offset
        offset += draft.size(variable)
    final = {
        v.name: Variable(v.name, v.dtype, v.dimensions, v.attributes, placed[v.name]) for v in draft.variables.values()
    }
    header = Header(lengths, draft.attributes, final)
    return header, _encode(header)


def encode_fixed(header: Header, values: Mapping[str, np.ndarray]) -> bytes:
    """The fixed variables' bytes, in the order of the file."""
    parts = []
    for variable in header.variables.values():
        if header.is_record(variable):
            continue
        array = np.ascontiguousarray(values[variable.name], dtype=variable.dtype)
        assert array.shape == header.row_shape(variable), (variable.name, array.shape, header.row_shape(variable))
        raw = array.tobytes()
        parts.append(raw + b"\0" * (header.size(variable) - len(raw)))
    return b"".join(parts)


def encode_count(n_records: int) -> bytes:
    return struct.pack(">I", n_records)


def _encode(header: Header) -> bytes:
    ids = {name: k for k, name in enumerate(header.dimensions)}
    parts = [MAGIC, encode_count(header.n_records)]
    parts.append(struct.pack(">II", _DIMENSION, len(ids)) if ids else _ABSENT)
    parts.extend(_name(name) + struct.pack(">I", length) for name, length in header.dimensions.items())
    parts.append(_attributes(header.attributes))
    parts.append(struct.pack(">II", _VARIABLE, len(header.variables)) if header.variables else _ABSENT)
    for v in header.variables.values():
        parts.append(_name(v.name) + struct.pack(">I", len(v.dimensions)))
        parts.append(b"".join(struct.pack(">I", ids[name]) for name in v.dimensions))
        parts.append(_attributes(v.attributes))
        # The size field is redundant and saturates, as the specification says.
        size = min(header.size(v), _MOST)
        parts.append(struct.pack(">IIQ", _TYPES[_type_name(v.dtype)], size, v.begin))
    return b"".join(parts)


def _type_name(dtype: np.dtype) -> str:
    return "S1" if dtype.kind == "S" else dtype.str


def _name(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">I", len(raw)) + raw + b"\0" * (-len(raw) % 4)


def _attributes(attributes: Attributes) -> bytes:
    if not attributes:
        return _ABSENT
    parts = [struct.pack(">II", _ATTRIBUTE, len(attributes))]
    for name, value in attributes.items():
        if isinstance(value, str):
            raw, number, count = value.encode(), 2, len(value.encode())
        else:
            array = np.atleast_1d(np.asarray(value))
            array = array.astype(">i4" if array.dtype.kind in "iub" else ">f8").reshape(-1)
            raw, number, count = array.tobytes(), _TYPES[array.dtype.str], len(array)
        parts.append(_name(name) + struct.pack(">II", number, count) + raw + b"\0" * (-len(raw) % 4))
    return b"".join(parts)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        if self.at + n > len(self.data):
            raise CutOff("the header is cut off")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self) -> int:
        return struct.unpack(">I", self.take(4))[0]

    def name(self) -> str:
        n = self.number()
        return _text(self.take(n + (-n) % 4)[:n])

    def items(self, tag: int) -> int:
        found, n = self.number(), self.number()
        if found not in (tag, 0) or (found == 0 and n):
            raise FormatError(f"list {found} where {tag} must be")
        return n

    def attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self.items(_ATTRIBUTE)):
            name, kind, n = self.name(), self.number(), self.number()
            if kind not in _DTYPES:
                raise FormatError(f"attribute {name!r} has the unknown type {kind}")
            size = _DTYPES[kind].itemsize * n
            raw = self.take(size + (-size) % 4)[:size]
            found[name] = _text(raw) if kind == 2 else np.frombuffer(raw, _DTYPES[kind])
        return found


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{raw[:40]!r} is no text") from error


def decode(data: bytes) -> Header:
    """The header at the beginning of these bytes.

    Raises:
        FormatError: they are none, stop too early, or contradict themselves.
    """
    reader = _Reader(data)
    if reader.take(4) != MAGIC:
        raise FormatError("it does not begin as a CDF-2 file")
    n_records = reader.number()
    dimensions = {reader.name(): reader.number() for _ in range(reader.items(_DIMENSION))}
    names = list(dimensions)
    attributes = reader.attributes()
    variables, sizes = {}, {}
    for _ in range(reader.items(_VARIABLE)):
        name, n = reader.name(), reader.number()
        which = [reader.number() for _ in range(n)]
        own = reader.attributes()
        kind, sizes[name], begin = struct.unpack(">IIQ", reader.take(16))
        if kind not in _DTYPES or any(k >= len(names) for k in which):
            raise FormatError(f"variable {name!r} has an unknown type or dimension")
        variables[name] = Variable(name, _DTYPES[kind], tuple(names[k] for k in which), own, begin)
    header = Header(dimensions, attributes, variables, n_records)
    _check(header, sizes, reader.at)
    return header


def _check(header: Header, sizes: Mapping[str, int], length: int) -> None:
    """Sizes and places are said twice, so that nearly any damage shows: of a length, a type, a dimension, a place."""
    if sum(n == 0 for n in header.dimensions.values()) > 1:
        raise FormatError("it has two record dimensions")
    fixed = [v for v in header.variables.values() if not header.is_record(v)]
    begin = length
    for v in [*fixed, *header.record_variables]:
        if any(name == header.record_dimension for name in v.dimensions[1:]):
            raise FormatError(f"variable {v.name!r} has its record dimension in a wrong place")
        if sizes[v.name] != min(header.size(v), _MOST) or v.begin != begin:
            raise FormatError(f"variable {v.name!r} is not of the size or not at the place that it says")
        begin += header.size(v)
    try:
        _ = header.record_dtype
    except (ValueError, OverflowError) as error:
        raise FormatError(f"its records cannot be: {error}") from error


__all__ = [
    "COUNT_OFFSET",
    "MAGIC",
    "CutOff",
    "FormatError",
    "Header",
    "Variable",
    "decode",
    "define",
    "encode_count",
    "encode_fixed",
]
