"""Trajectories: the AMBER NetCDF convention, in CDF-2, one file per visit.

Source: "AMBER NetCDF Trajectory/Restart Convention", version 1.0, revision C. The file opens in xarray, netCDF4,
MDAnalysis (NCDF), VMD and ASE (``format="netcdftrajectory"``).

| variable | shape | unit |
|---|---|---|
| time | frame | ps |
| coordinates | frame, atom, 3 | Å, float32, unwrapped |
| velocities (on request) | frame, atom, 3 | Å/ps, float32 |
| forces (on request) | frame, atom, 3 | kcal/mol/Å, float32 |
| cell_lengths, cell_angles | frame, 3 | Å, degree; a length of 0 says that this direction is not periodic |
| cell_vectors | frame, 3, 3 | Å, all of the cell, also along directions that are not periodic |
| potential_energy, kinetic_energy | frame | eV |
| temperature | frame | K |
| pressure | frame | GPa |
| step | frame | 1 (steps of the visit; float64, as CDF-2 has no 64-bit integer) |
| Z | atom | atomic numbers |

Coordinates are in the orientation of the intake, where the cell is lower-triangular, as lengths and angles imply;
the attribute ``intake_rotation`` R (3 × 3, row by row) turns rows of the input into rows of the file, x_file =
x_input R. AMBER's cells are right-handed: for a left-handed cell, lengths and angles are those of a, b, −c,
which span the same lattice. A fully non-periodic system has cell lengths of 1e-9 Å: ASE 3.29 cannot read a file
without the variable, MDAnalysis 2.11 none whose lengths are all zero, and both take this for "not periodic".
ASE's reader takes AMBER's Å/ps for its own unit of velocity: use the hand-off files or `open_campaign` for
velocities in ASE.
"""

from __future__ import annotations

import functools
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..domain.batch import Batch
from ..domain.units import KCAL_PER_MOL, PS
from . import cdf2
from .records import RecordFile, check_variables, read_header, whole_records

#: Cell length that every reader takes for none, see above.
NO_CELL = 1e-9

#: What a frame has per atom on request.
VECTORS = ("velocities", "forces")

_CONVENTION = {"Conventions": "AMBER", "ConventionVersion": "1.0", "program": "mattermill"}


class Trajectory:
    """The writer of one visit's trajectory."""

    def __init__(self, records: RecordFile, last_step: int) -> None:
        self._records = records
        self.last_step = last_step

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        single: Batch,
        *,
        stage: str = "",
        velocities: bool = False,
        forces: bool = False,
    ) -> Trajectory:
        """Begin a trajectory with this state as its first frame, in place of a file that is there.

        Args:
            path: the file; its folder is made.
            single: a batch of one system; see `frame_values` for what it needs.
            stage: stands in the title.
            velocities, forces: whether every frame has them.

        Raises:
            ValueError: the cell is not lower-triangular.
        """
        assert len(single) == 1
        names = [n for n, wanted in zip(VECTORS, (velocities, forces), strict=True) if wanted]
        header, head = _define(single, stage, names)
        values = frame_values(HostBatch(single), 0)
        return cls(RecordFile.create(path, header, head, first=values), values["step"])

    @classmethod
    def resume(cls, path: str | os.PathLike[str], step: int) -> Trajectory:
        """Go on with a trajectory after this step: later frames are dropped and older writers cut off.

        Raises:
            DamagedFile: the file is missing or is none.
        """
        records = RecordFile.open(path)
        vectors = [name for name in VECTORS if name in records.header.variables]
        check_variables(path, records.header, _variables(vectors), only=True)
        steps = records.column("step")
        keep = int(np.count_nonzero(steps <= step))
        return cls(records.rewrite(keep), int(steps[keep - 1]) if keep else -1)

    def append(self, host: HostBatch, index: int) -> bool:
        """Append the frame of one system of a batch; False when the file has that step already.

        Raises:
            OSError: the disk is full …: what was there is whole, and the frame is not counted.
            StaleWriter: a later epoch has taken the file over.
        """
        step = int(host.systems["step"][index])
        if step <= self.last_step:
            return False
        self._records.append(frame_values(host, index))
        self.last_step = step
        return True

    @property
    def n_frames(self) -> int:
        return self._records.n_records

    @property
    def path(self) -> Path:
        return self._records.path

    @property
    def is_open(self) -> bool:
        return self._records.is_open

    def sync(self) -> None:
        """Make all frames so far durable against a power cut."""
        self._records.sync()

    def close(self) -> None:
        """Let go of the file handle; `append` takes it again."""
        self._records.close()


class HostBatch:
    """A batch as NumPy arrays, converted once for all systems of a frame."""

    def __init__(self, batch: Batch) -> None:
        self.ids, self.ptr = batch.ids, batch.ptr
        self.atoms = {k: batch.atoms[k].detach().cpu().numpy() for k in _ATOM_FIELDS if k in batch.atoms}
        self.systems = {k: batch.systems[k].detach().cpu().numpy() for k in _SYSTEM_FIELDS if k in batch.systems}

    def rows(self, name: str, index: int) -> np.ndarray:
        return self.atoms[name][self.ptr[index] : self.ptr[index + 1]]

    def scalar(self, name: str, index: int) -> float:
        return float(self.systems[name][index]) if name in self.systems else float("nan")


_ATOM_FIELDS = ("positions", "velocities", "forces")
_SYSTEM_FIELDS = (
    *("cell", "pbc", "step", "timestep", "time"),
    *("energy", "kinetic_energy", "kinetic_temperature", "pressure"),
)


def frame_values(host: HostBatch, index: int) -> dict[str, Any]:
    """One frame in the units of the file. Fields that a batch lacks are NaN; time needs `timestep` (fs), else 1 fs."""
    systems = host.systems
    step = int(systems["step"][index])
    timestep = float(systems["timestep"][index]) if "timestep" in systems else 1.0
    cell, pbc = systems["cell"][index], systems["pbc"][index]
    lengths, angles = cell_parameters(cell, pbc)
    values = {
        "time": step * timestep / PS,
        "step": step,
        "coordinates": host.rows("positions", index),
        "cell_lengths": lengths,
        "cell_angles": angles,
        "cell_vectors": cell,
        "potential_energy": host.scalar("energy", index),
        "kinetic_energy": host.scalar("kinetic_energy", index),
        "temperature": host.scalar("kinetic_temperature", index),
        "pressure": host.scalar("pressure", index),
    }
    if "velocities" in host.atoms:
        values["velocities"] = host.rows("velocities", index) * PS
    if "forces" in host.atoms:
        values["forces"] = host.rows("forces", index) / KCAL_PER_MOL
    return values


def cell_parameters(cell: np.ndarray, pbc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AMBER's lengths (Å) and angles (degree) of a lower-triangular cell, shapes (3,) and (3,).

    Directions that are not periodic have length 0 (`NO_CELL` when none is); an angle with a vector of no length is
    90°. For a left-handed cell they are those of a, b, −c.

    Raises:
        ValueError: the cell is not lower-triangular, so that lengths and angles would not fit the coordinates.
    """
    cell = np.asarray(cell, dtype=float)
    if np.any(np.abs(cell[np.triu_indices(3, 1)]) > 1e-9 * max(1.0, np.abs(cell).max())):
        raise ValueError(
            f"a trajectory needs a lower-triangular cell, got {cell.tolist()}: build the batch by Batch.from_atoms, "
            "which turns it"
        )
    if np.linalg.det(cell) < 0:
        cell = cell * np.array([[1.0], [1.0], [-1.0]])
    norms = np.linalg.norm(cell, axis=1)
    angles = np.full(3, 90.0)
    for k in range(3):
        i, j = (k + 1) % 3, (k + 2) % 3
        if norms[i] > 0 and norms[j] > 0:
            cosine = np.clip(cell[i] @ cell[j] / (norms[i] * norms[j]), -1.0, 1.0)
            angles[k] = np.degrees(np.arccos(cosine)) if cosine else 90.0
    return np.where(pbc, norms, 0.0 if np.any(pbc) else NO_CELL), angles


def _define(single: Batch, stage: str, vectors: list[str]) -> tuple[cdf2.Header, bytes]:
    dimensions = {"frame": None, "spatial": 3, "atom": single.n_atoms, "cell_spatial": 3, "cell_angular": 3, "label": 5}
    attributes: dict[str, Any] = {
        **_CONVENTION,
        "programVersion": _version(),
        "application": "AMBER",
        "title": f"{single.ids[0]} {stage}".strip(),
        "system": single.ids[0],
        "stage": stage,
    }
    if "rotation" in single and bool(single.rotation.isfinite().all()):
        attributes["intake_rotation"] = single.rotation[0].cpu().numpy().reshape(-1)
    header, head = cdf2.define(dimensions, _variables(vectors), attributes)
    labels = {
        "spatial": np.array(list("xyz"), dtype="S1"),
        "cell_spatial": np.array(list("abc"), dtype="S1"),
        "cell_angular": np.array([list("alpha"), list("beta "), list("gamma")], dtype="S1"),
        "Z": single.numbers.cpu().numpy(),
    }
    return header, head + cdf2.encode_fixed(header, labels)


def _variables(vectors: list[str]) -> list[cdf2.Variable]:
    def record(name: str, dtype: str, dimensions: tuple[str, ...], units: str, long_name: str) -> cdf2.Variable:
        attributes = {"units": units, "long_name": long_name}
        return cdf2.Variable(name, np.dtype(dtype), ("frame", *dimensions), attributes)

    per_atom = ("atom", "spatial")
    units = {
        "velocities": ("angstrom/picosecond", "velocities"),
        "forces": ("kilocalorie/mole/angstrom", "forces on the atoms"),
    }
    return [
        cdf2.Variable("spatial", np.dtype("S1"), ("spatial",)),
        cdf2.Variable("cell_spatial", np.dtype("S1"), ("cell_spatial",)),
        cdf2.Variable("cell_angular", np.dtype("S1"), ("cell_angular", "label")),
        cdf2.Variable("Z", np.dtype(">i4"), ("atom",), {"long_name": "atomic number"}),
        record("time", ">f8", (), "picosecond", "time since the stage began"),
        record("coordinates", ">f4", per_atom, "angstrom", "unwrapped positions"),
        *(record(name, ">f4", per_atom, *units[name]) for name in vectors),
        record("cell_lengths", ">f8", ("cell_spatial",), "angstrom", "cell lengths, 0 where not periodic"),
        record("cell_angles", ">f8", ("cell_angular",), "degree", "cell angles"),
        record("cell_vectors", ">f8", ("cell_spatial", "spatial"), "angstrom", "cell vectors, one a row"),
        record("potential_energy", ">f8", (), "eV", "potential energy"),
        record("kinetic_energy", ">f8", (), "eV", "kinetic energy"),
        record("temperature", ">f8", (), "K", "kinetic temperature"),
        record("pressure", ">f8", (), "GPa", "pressure, compression positive, kinetic part included"),
        record("step", ">f8", (), "1", "steps since the stage began"),
    ]


@functools.cache
def _version() -> str:
    try:
        return version("mattermill")
    except PackageNotFoundError:
        return "unknown"


def count_frames(path: str | os.PathLike[str]) -> int:
    """Whole frames of a trajectory. Raises `DamagedFile`."""
    return whole_records(path, read_header(path))


__all__ = ["HostBatch", "Trajectory", "cell_parameters", "count_frames", "frame_values"]
