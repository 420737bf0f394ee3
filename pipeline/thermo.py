"""Time series of a stage: thermo/STAGE.nc, a CF indexed ragged array that rows are appended to.

Source: CF Conventions 1.8, section 9.3.4 and appendix H.2.5. Dimension `obs` runs over all samples of all systems as
they were reported, ``system_index(obs)`` says whose they are, ``system_id(system)`` names them. The file is CDF-2,
appended to as trajectories are, so that it is whole after a kill at any instant; one process writes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from . import cdf2
from .handoff import DamagedFile
from .records import RecordFile, check_variables, read_columns

_INDEX = "system_index"
_INDEX_ATTRIBUTES = {"long_name": "which system this sample is of", "instance_dimension": "system"}
_VARIABLES = (
    cdf2.Variable("system_id", np.dtype("S1"), ("system", "id_length"), {"cf_role": "timeseries_id"}),
    cdf2.Variable(_INDEX, np.dtype(">i4"), ("obs",), _INDEX_ATTRIBUTES),
)
REMEDY = "remove it: the time series begins anew, the ledger and the trajectories are not touched"


class ThermoFile:
    """The writer of one stage's time series.

    Every sample of a system stands once, in the order of its steps: when a system goes on from a checkpoint, the
    steps between the checkpoint and the interruption are reported again and passed over here.
    """

    def __init__(self, records: RecordFile, systems: Sequence[str]) -> None:
        self._records = records
        self._number = {system: k for k, system in enumerate(systems)}
        self._last = np.full(len(systems), -1.0)
        if records.n_records:
            found = read_columns(records.path, [_INDEX, "step"], records.header, records.n_records)
            if not (found[_INDEX].min() >= 0 and found[_INDEX].max() < len(systems)):
                raise DamagedFile(records.path, "it has samples of systems that there are not", REMEDY)
            np.maximum.at(self._last, found[_INDEX], found["step"])

    @classmethod
    def open(cls, path: str | os.PathLike[str], systems: Sequence[str], columns: Mapping[str, str]) -> ThermoFile:
        """Begin a file, or go on with one.

        Args:
            path: the file; its folder is made.
            systems: ids of all systems of the campaign, in the order of the ledger. When there are more than the file
                knows (a campaign that was extended), it is written anew with them.
            columns: units by name of column; `step` must be among them.

        Raises:
            DamagedFile: there is a file, and it is none of ours.
            ValueError: it belongs to other systems or has other columns.
        """
        path = Path(path)
        assert "step" in columns
        if not path.exists():
            return cls(_create(path, systems, columns), systems)
        records = RecordFile.open(path)
        check_variables(path, records.header, _VARIABLES)
        known = read_ids(path, records.header)
        found = [v.name for v in records.header.record_variables if v.name != _INDEX]
        if list(systems[: len(known)]) != known or found != list(columns):
            raise ValueError(
                f"{path} is of other systems or columns ({len(known)} systems; {', '.join(found)}): "
                "it belongs to another campaign, remove it or use another folder"
            )
        if len(systems) > len(known):
            records = _extended(records, systems, columns)
        return cls(records, systems)

    def append(self, ids: Sequence[str], thermo: Mapping[str, np.ndarray]) -> int:
        """Append what a segment reports.

        Args:
            ids: what ``thermo["system"]`` counts in.
            thermo: the columns, each of shape (rows,), and `system`.

        Returns:
            How many rows were new.
        """
        if not len(thermo.get("system", ())):
            return 0
        numbers = np.array([self._number[i] for i in ids], dtype=np.int64)[np.asarray(thermo["system"], dtype=np.int64)]
        steps = np.asarray(thermo["step"], dtype=float)
        new = np.flatnonzero(steps > self._last[numbers])
        rows = np.zeros(len(new), dtype=self._records.header.record_dtype)
        rows[_INDEX] = numbers[new]
        for name in rows.dtype.names or ():
            if name != _INDEX:
                rows[name] = np.asarray(thermo[name], dtype=float)[new]
        if len(new):
            self._records.append_rows(rows)
            np.maximum.at(self._last, numbers[new], steps[new])
        return len(new)

    def sync(self) -> None:
        self._records.sync()

    def close(self) -> None:
        self._records.close()


def read_ids(path: str | os.PathLike[str], header: cdf2.Header) -> list[str]:
    """The ids of the systems of a file. Raises `DamagedFile`."""
    check_variables(path, header, _VARIABLES[:1])
    variable = header.variables["system_id"]
    shape = header.row_shape(variable)
    with open(path, "rb") as file:
        file.seek(variable.begin)
        data = file.read(shape[0] * shape[1])
    if len(data) < shape[0] * shape[1]:
        raise DamagedFile(path, "it is cut off", REMEDY)
    raw = np.frombuffer(data, dtype=f"S{shape[1]}")
    return [value.decode("utf-8", "surrogateescape") for value in raw]


def _define(systems: Sequence[str], columns: Mapping[str, str]) -> tuple[cdf2.Header, bytes]:
    encoded = [system.encode("utf-8", "surrogateescape") for system in systems]
    width = max([1, *(len(e) for e in encoded)])
    dimensions = {"obs": None, "system": max(1, len(systems)), "id_length": width}
    variables = [
        *_VARIABLES,
        *(cdf2.Variable(name, np.dtype(">f8"), ("obs",), {"units": unit}) for name, unit in columns.items()),
    ]
    attributes = {"Conventions": "CF-1.8", "featureType": "timeSeries", "program": "mattermill"}
    header, head = cdf2.define(dimensions, variables, attributes)
    ids = np.array(encoded or [b""], dtype=f"S{width}").view("S1").reshape(-1, width)
    return header, head + cdf2.encode_fixed(header, {"system_id": ids})


def _create(path: Path, systems: Sequence[str], columns: Mapping[str, str]) -> RecordFile:
    return RecordFile.create(path, *_define(systems, columns))


def _extended(old: RecordFile, systems: Sequence[str], columns: Mapping[str, str]) -> RecordFile:
    header, head = _define(systems, columns)
    rows = np.zeros(old.n_records, dtype=header.record_dtype)
    for name, values in read_columns(old.path, list(rows.dtype.names or ()), old.header, old.n_records).items():
        rows[name] = values
    return RecordFile.create(old.path, header, head, rows=rows)


__all__ = ["ThermoFile", "read_ids"]
