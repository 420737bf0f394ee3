"""Trajectories: open everywhere, whole after a kill, and a resumed one equals the unbroken one."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import warnings

import ase
import ase.io
import netCDF4
import numpy as np
import pytest
import torch
import xarray as xr
from ase.build import bulk, fcc111, molecule

from mattermill.domain.batch import Batch
from mattermill.pipeline import cdf2
from mattermill.pipeline.folder import Folder
from mattermill.pipeline.handoff import DamagedFile
from mattermill.pipeline.records import StaleWriter, read_columns, read_header
from mattermill.pipeline.reporter import TrajectoryReporter
from mattermill.pipeline.thermo import ThermoFile
from mattermill.pipeline.trajectory import NO_CELL, HostBatch, Trajectory, cell_parameters, count_frames

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mda = pytest.importorskip("MDAnalysis", reason="MDAnalysis is in the extra `dev`")


def triclinic():
    atoms = ase.Atoms("ArKrNe", [[0.1, 0.2, 0.3], [2.0, 2.5, 3.0], [4.0, 1.0, 9.0]], pbc=True)
    atoms.set_cell([[6.0, 0, 0], [1.5, 7.0, 0], [-2.0, 1.0, 8.0]])
    atoms.set_momenta(np.random.default_rng(1).normal(size=(3, 3)))
    return atoms


SYSTEMS = {
    "triclinic": triclinic(),
    "cubic": bulk("Ar", cubic=True),
    "hexagonal": bulk("Ar", "hcp", a=3.7, c=6.1) * (2, 2, 1),
    "molecule": molecule("H2O"),
    "slab": fcc111("Al", (2, 2, 2), vacuum=6.0),
    "atom": ase.Atoms("Xe"),
}


def at_step(batch, step):
    """The batch as a stage run would report it at this step: everything depends on the step."""
    n, s = batch.n_atoms, len(batch)
    shift = torch.arange(3 * n, dtype=torch.float64).reshape(n, 3) * 1e-3 * step
    values = torch.arange(s, dtype=torch.float64) + step
    return batch.with_fields(
        atoms={"positions": batch.positions + shift, "forces": shift + 1.0},
        systems={
            "cell": batch.cell * (1 + 1e-3 * step),
            "step": torch.full((s,), step),
            "timestep": torch.full((s,), 2.0, dtype=torch.float64),
            "energy": -values,
            "kinetic_energy": values,
            "kinetic_temperature": 100 + values,
            "pressure": values / 10,
        },
    )


def write(path, batch, steps, **options):
    trajectory = Trajectory.create(path, at_step(batch, steps[0]), stage="produce", **options)
    for step in steps[1:]:
        assert trajectory.append(HostBatch(at_step(batch, step)), 0)
    trajectory.close()
    return trajectory


# --- readers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[0], [0, 10, 20]], ids=["one-frame", "frames"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_reader_sees_the_same_frames(tmp_path, name, steps):
    atoms = SYSTEMS[name]
    batch = Batch.from_atoms(atoms, [name])
    path = str(tmp_path / "t.nc")
    write(path, batch, steps, velocities=True, forces=True)
    periodic = bool(atoms.pbc.all())

    for engine in ("netcdf4", "scipy"):
        with xr.open_dataset(path, engine=engine) as ds:
            assert ds.sizes["frame"] == len(steps)
            assert ds.attrs["Conventions"] == "AMBER"
            np.testing.assert_allclose(ds["time"], np.array(steps) * 2e-3, rtol=1e-15)
            assert {n: ds[n].attrs["units"] for n in ("time", "potential_energy", "temperature", "pressure")} == {
                "time": "picosecond",
                "potential_energy": "eV",
                "temperature": "K",
                "pressure": "GPa",
            }
            # Frame 0 is the state to float32.
            np.testing.assert_array_equal(ds["coordinates"][0], batch.positions.numpy().astype(np.float32))
            np.testing.assert_array_equal(ds["Z"], batch.numbers.numpy())
            np.testing.assert_array_equal(ds["step"], steps)
            np.testing.assert_array_equal(ds["cell_vectors"][-1], at_step(batch, steps[-1]).cell[0].numpy())
            expected = (batch.velocities.numpy() * 1000).astype(np.float32)
            np.testing.assert_array_equal(ds["velocities"][0], expected)

    with netCDF4.Dataset(path) as nc:
        assert nc.data_model == "NETCDF3_64BIT_OFFSET"
        assert nc.dimensions["frame"].isunlimited()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        universe = mda.Universe(path, format="NCDF", topology_format="MINIMAL", to_guess=())
    assert len(universe.trajectory) == len(steps)
    for frame, step in zip(universe.trajectory, steps, strict=True):
        state = at_step(batch, step)
        np.testing.assert_array_equal(frame.positions, state.positions.numpy().astype(np.float32))
        assert frame.time == pytest.approx(step * 2e-3)
        # MDAnalysis converts kcal/mol/Å to its kJ/mol/Å.
        np.testing.assert_allclose(frame.forces, state.forces.numpy() * 96.48533212, rtol=1e-6)
        np.testing.assert_allclose(frame.velocities, batch.velocities.numpy() * 1000, rtol=1e-6, atol=1e-9)
        if periodic:
            np.testing.assert_allclose(frame.triclinic_dimensions, state.cell[0].numpy(), rtol=1e-6, atol=1e-6)
    universe.trajectory.close()

    frames = ase.io.read(path, index=":", format="netcdftrajectory")
    assert len(frames) == len(steps)
    for frame, step in zip(frames, steps, strict=True):
        state = at_step(batch, step)
        np.testing.assert_array_equal(frame.numbers, atoms.numbers)
        np.testing.assert_array_equal(frame.pbc, atoms.pbc)
        np.testing.assert_allclose(frame.positions, state.positions.numpy(), rtol=1e-6, atol=1e-6)
        for k in range(3):
            if atoms.pbc[k]:
                np.testing.assert_allclose(frame.cell[k], state.cell[0, k].numpy(), rtol=1e-9, atol=1e-9)


def test_temperatures_and_energies_of_each_frame(tmp_path):
    batch = Batch.from_atoms(triclinic(), ["x"])
    write(tmp_path / "t.nc", batch, [0, 5])
    with xr.open_dataset(tmp_path / "t.nc") as ds:
        np.testing.assert_array_equal(ds["temperature"], [100, 105])
        np.testing.assert_array_equal(ds["potential_energy"], [0, -5])
        np.testing.assert_array_equal(ds["kinetic_energy"], [0, 5])
        np.testing.assert_array_equal(ds["pressure"], [0, 0.5])
        assert "velocities" not in ds
        assert "forces" not in ds


def test_the_intake_rotation_leads_back_to_the_input(tmp_path):
    atoms = triclinic()
    atoms.rotate(40, (1, 2, 3), rotate_cell=True)
    batch = Batch.from_atoms(atoms, ["x"])
    Trajectory.create(tmp_path / "t.nc", batch).close()
    with xr.open_dataset(tmp_path / "t.nc") as ds:
        rotation = ds.attrs["intake_rotation"].reshape(3, 3)
        np.testing.assert_allclose(ds["coordinates"][0].values @ rotation.T, atoms.positions, atol=1e-5)


def test_left_handed_cells_span_the_same_lattice():
    """Lengths and angles cannot say left-handed: the right-handed cell of the same lattice is written."""
    from ase.geometry import cellpar_to_cell

    cell = np.array([[5.0, 0, 0], [1, 6, 0], [2, -1, -7]])
    lengths, angles = cell_parameters(cell, np.ones(3, bool))
    drawn = cellpar_to_cell([*lengths, *angles])
    transform = drawn @ np.linalg.inv(cell)
    np.testing.assert_allclose(transform, np.round(transform), atol=1e-9)
    assert abs(np.linalg.det(transform)) == pytest.approx(1.0)


def test_non_periodic_directions_have_no_length():
    lengths, angles = cell_parameters(np.diag([5.0, 6.0, 30.0]), np.array([True, True, False]))
    assert lengths.tolist() == [5.0, 6.0, 0.0]
    assert angles.tolist() == [90.0, 90.0, 90.0]
    lengths, _ = cell_parameters(np.zeros((3, 3)), np.zeros(3, bool))
    assert lengths.tolist() == [NO_CELL] * 3


def test_a_cell_that_lengths_and_angles_cannot_tell_is_refused():
    with pytest.raises(ValueError, match="lower-triangular"):
        cell_parameters(np.array([[5.0, 1.0, 0], [0, 6, 0], [0, 0, 7]]), np.ones(3, bool))


def test_our_header_reads_what_the_library_writes(tmp_path):
    """The reverse direction: the layout that netCDF4 gives is the one that we compute."""
    path = tmp_path / "lib.nc"
    with netCDF4.Dataset(path, "w", format="NETCDF3_64BIT_OFFSET") as nc:
        nc.createDimension("frame", None)
        nc.createDimension("atom", 5)
        nc.title = "odd length"
        nc.number = np.array([1.5, 2.5])
        nc.createVariable("label", "S1", ("atom",))[:] = np.array(list("abcde"), "S1")
        short = nc.createVariable("short", "i2", ("frame", "atom"))
        short.units = "K"
        value = nc.createVariable("value", "f8", ("frame",))
        for k in range(3):
            short[k] = np.arange(5) + k
            value[k] = k / 2
    header = read_header(path)
    assert header.n_records == 3
    assert header.attributes["title"] == "odd length"
    assert header.variables["short"].attributes == {"units": "K"}
    columns = read_columns(path, ["short", "value"])
    np.testing.assert_array_equal(columns["value"], [0, 0.5, 1.0])
    np.testing.assert_array_equal(columns["short"], [np.arange(5) + k for k in range(3)])
    again, _ = cdf2.define({**header.dimensions, "frame": None}, list(header.variables.values()), header.attributes)
    assert again.record_dtype == header.record_dtype
    assert {n: v.begin for n, v in again.variables.items()} == {n: v.begin for n, v in header.variables.items()}


@pytest.mark.parametrize("cut", [0, 3, 50, 300])
def test_headers_that_are_cut_off_are_damage(tmp_path, cut):
    path = tmp_path / "t.nc"
    write(path, Batch.from_atoms(triclinic(), ["x"]), [0])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DamagedFile):
        read_header(path)
    with pytest.raises(DamagedFile):
        Trajectory.resume(path, 0)


# --- kill, resume, fence ----------------------------------------------------------------------------------------------


def test_a_resumed_trajectory_is_the_unbroken_one_byte_for_byte(tmp_path):
    batch = Batch.from_atoms(triclinic(), ["x"])
    write(tmp_path / "whole.nc", batch, range(0, 100, 10), velocities=True)
    write(tmp_path / "broken.nc", batch, range(0, 70, 10), velocities=True)
    resumed = Trajectory.resume(tmp_path / "broken.nc", 44)
    assert resumed.n_frames == 5
    for step in range(30, 100, 10):  # overlapping: what is there already is passed over
        assert resumed.append(HostBatch(at_step(batch, step)), 0) == (step > 40)
    resumed.close()
    assert (tmp_path / "broken.nc").read_bytes() == (tmp_path / "whole.nc").read_bytes()


def test_a_writer_that_was_cut_off_cannot_append(tmp_path):
    batch = Batch.from_atoms(triclinic(), ["x"])
    for keep_open in (True, False):
        old = write(tmp_path / "t.nc", batch, [0, 10])
        if keep_open:
            old.append(HostBatch(at_step(batch, 20)), 0)
        new = Trajectory.resume(tmp_path / "t.nc", 10)
        if keep_open:
            old.append(HostBatch(at_step(batch, 30)), 0)  # goes to the file that nobody sees any more
            with pytest.raises(StaleWriter, match="must stop"):
                old.sync()
            old.close()
        else:
            with pytest.raises(StaleWriter, match="must stop"):
                old.append(HostBatch(at_step(batch, 30)), 0)
        new.append(HostBatch(at_step(batch, 20)), 0)
        new.close()
        assert read_columns(tmp_path / "t.nc", ["step"])["step"].tolist() == [0, 10, 20]


def write_for_ever(path, batch, say):
    """What the killed process does."""
    trajectory = Trajectory.create(path, at_step(batch, 0), velocities=True)
    os.write(say, b"!")
    host = HostBatch(at_step(batch, 1))
    for step in range(1, 10**9):
        host.systems["step"][:] = step
        trajectory.append(host, 0)
        if step % 7 == 0:
            trajectory.sync()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sigkill_at_any_instant_leaves_whole_frames(tmp_path, forked):
    rng = np.random.default_rng(5)
    path = str(tmp_path / "t.nc")
    batch = Batch.from_atoms(bulk("Ar", cubic=True) * 5, ["x"])
    expected = at_step(batch, 1).positions.numpy().astype(np.float32)
    for _ in range(12):
        process = forked(lambda say: write_for_ever(path, batch, say))
        process.wait_for_word()
        # While it writes, a reader sees whole frames, too.
        for _ in range(3):
            time.sleep(float(rng.uniform(0, 0.01)))
            with xr.open_dataset(path) as ds:
                n = ds.sizes["frame"]
                np.testing.assert_array_equal(ds["step"], np.arange(n))
        process.kill()
        n = count_frames(path)
        with xr.open_dataset(path) as ds:
            assert ds.sizes["frame"] == n > 1
            np.testing.assert_array_equal(ds["step"], np.arange(n))
            np.testing.assert_array_equal(ds["coordinates"][n - 1], expected)
        assert len(ase.io.read(path, index=":2", format="netcdftrajectory")) == 2
        resumed = Trajectory.resume(path, n // 2)
        assert resumed.n_frames == n // 2 + 1
        resumed.close()


def test_a_half_written_frame_does_not_exist(tmp_path):
    batch = Batch.from_atoms(triclinic(), ["x"])
    path = tmp_path / "t.nc"
    write(path, batch, [0, 10])
    whole = path.read_bytes()
    with open(path, "ab") as file:
        file.write(b"\xff" * 77)
    with xr.open_dataset(path) as ds:
        assert ds.sizes["frame"] == 2
    Trajectory.resume(path, 10).close()
    assert path.read_bytes() == whole
    # After a power cut the count may be ahead of the data.
    path.write_bytes(whole[:-5])
    assert count_frames(path) == 1


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    batch = Batch.from_atoms(triclinic(), ["x"])
    path = tmp_path / "t.nc"
    trajectory = write(path, batch, [0, 10])
    real = os.pwrite
    room = [100]

    def nearly_full(descriptor, data, offset):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= (n := real(descriptor, memoryview(data)[: room[0]], offset))
        return n

    monkeypatch.setattr(os, "pwrite", nearly_full)
    with pytest.raises(OSError, match="No space left"):
        trajectory.append(HostBatch(at_step(batch, 20)), 0)
    monkeypatch.undo()
    with xr.open_dataset(path) as ds:
        assert ds["step"].values.tolist() == [0, 10]
    assert trajectory.append(HostBatch(at_step(batch, 20)), 0), "with room again it goes on"
    trajectory.close()
    assert count_frames(path) == 3


# --- the reporter ----------------------------------------------------------------------------------------------------


def reported(folder, batch, steps, reporter=None, start=0):
    reporter = reporter or TrajectoryReporter(folder, "produce", velocities=True, max_open=2)
    for single in batch:
        reporter.open(single.ids[0], single, start)
    for step in steps:
        reporter.frame(at_step(batch, step))
    return reporter


@pytest.fixture
def many():
    return Batch.from_atoms(list(SYSTEMS.values()), [f"../{name}" for name in SYSTEMS])


def open_below(path) -> int:
    """Files below a folder that this process has open. (Others come and go: the session's cluster runs in it too.)"""
    found = 0
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{handle}").startswith(str(path))
    return found


def test_the_reporter_keeps_a_file_per_system_and_few_of_them_open(tmp_path, many):
    folder = Folder.create(tmp_path / "a.mill")
    reporter = reported(folder, many, [0, 10, 20])
    assert 1 <= open_below(folder.path) <= 2
    assert reporter.frames == 3 * len(many)
    reporter.sync()
    for single in at_step(many, 30):
        reporter.close(single.ids[0], single)
    assert open_below(folder.path) == 0
    for single in many:
        path = folder.trajectory_file(single.ids[0], "produce")
        assert count_frames(path) == 3
        with xr.open_dataset(path) as ds:
            np.testing.assert_array_equal(ds["coordinates"][0], single.positions.numpy().astype(np.float32))
    assert len(list(folder.trajectories.rglob("*.nc"))) == len(many)


def test_the_topology_lies_beside_and_names_the_atoms(tmp_path, many):
    folder = Folder.create(tmp_path / "a.mill")
    reporter = reported(folder, many, [0])
    for single in at_step(many, 7):
        reporter.close(single.ids[0], single)
    name = "../triclinic"
    topology, path = folder.topology_file(name, "produce"), folder.trajectory_file(name, "produce")
    final = ase.io.read(topology)
    np.testing.assert_allclose(final.positions, at_step(many, 7).select([name]).positions.numpy(), atol=1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        universe = mda.Universe(str(topology), str(path), topology_format="XYZ")
    assert list(universe.atoms.names) == ["Ar", "Kr", "Ne"]
    universe.trajectory.close()


def test_the_reporter_resumes_byte_for_byte(tmp_path, many):
    whole, broken = Folder.create(tmp_path / "whole.mill"), Folder.create(tmp_path / "broken.mill")
    reported(whole, many, range(0, 60, 10)).abandon()
    reported(broken, many, range(0, 40, 10)).abandon()  # dies after step 30, its checkpoint is of step 15
    reported(broken, many, range(20, 60, 10), start=15).abandon()
    for system in many.ids:
        one, other = whole.trajectory_file(system, "produce"), broken.trajectory_file(system, "produce")
        assert one.read_bytes() == other.read_bytes()


def test_a_damaged_trajectory_is_put_aside_and_told(tmp_path, many, caplog):
    folder = Folder.create(tmp_path / "a.mill")
    reported(folder, many, [0, 10]).abandon()
    path = folder.trajectory_file("../cubic", "produce")
    path.write_bytes(b"garbage")
    reported(folder, many, [20], start=10).abandon()
    assert "begins anew at step 10" in caplog.text
    assert path.with_suffix(".damaged").read_bytes() == b"garbage"
    assert read_columns(path, ["step"])["step"].tolist() == [20]


def test_the_reporter_is_what_a_stage_run_expects(tmp_path):
    from mattermill.stages.reporter import Reporter

    assert isinstance(TrajectoryReporter(Folder(tmp_path), "x"), Reporter)


# --- damage ---------------------------------------------------------------------------------------------------------


def damaged_copies(data, length, rng, number):
    """Copies of a file with flipped bits, changed bytes or words, and cuts, all in its header."""
    for _ in range(number):
        spoilt = bytearray(data)
        kind = rng.integers(4)
        where = int(rng.integers(length))
        if kind == 0:
            spoilt[where] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            spoilt[where] = int(rng.integers(256))
        elif kind == 2:
            at = where - where % 4
            spoilt[at : at + 4] = int(rng.choice([0, 1, 2**31, 2**32 - 1])).to_bytes(4, "big")
        else:
            del spoilt[where:]
        yield bytes(spoilt)


def test_a_damaged_header_is_damage_and_nothing_else(tmp_path):
    path = tmp_path / "t.nc"
    write(path, Batch.from_atoms(triclinic(), ["odd ü"]), [0, 10, 20], velocities=True)
    data = path.read_bytes()
    refused: list[str] = []
    for spoilt in damaged_copies(data, read_header(path).record_begin, np.random.default_rng(5), 1_500):
        path.write_bytes(spoilt)
        with contextlib.suppress(cdf2.FormatError):
            cdf2.decode(spoilt)
        try:
            count_frames(path)
            read_columns(path, ["time", "coordinates"])
            Trajectory.resume(path, 10).append(HostBatch(at_step(Batch.from_atoms(triclinic(), ["odd ü"]), 20)), 0)
        except DamagedFile as error:
            refused.append(error.path)
    assert set(refused) == {str(path)}
    assert len(refused) > 800  # what says nothing about the layout (a title, a unit) is not refused


def test_damaged_time_series_are_damage_and_nothing_else(tmp_path):
    path = tmp_path / "thermo.nc"
    columns = {"step": "1", "energy": "eV"}
    file = ThermoFile.open(path, ["a", "bü"], columns)
    file.append(["a", "bü"], {"system": np.array([0, 1]), "step": np.array([1, 1]), "energy": np.array([0.1, 0.2])})
    file.close()
    data = path.read_bytes()
    for spoilt in damaged_copies(data, len(data), np.random.default_rng(6), 1_000):
        path.write_bytes(spoilt)
        try:
            ThermoFile.open(path, ["a", "bü"], columns).close()
        except DamagedFile:
            continue
        except ValueError as error:
            assert "is of other systems or columns" in str(error)  # noqa: PT017 (one of two errors)
