"""Results: the summary adds up and opens at any instant, and the view finds what the campaign wrote."""

from __future__ import annotations

import warnings

import ase.io
import netCDF4
import numpy as np
import pytest
import torch
import xarray as xr
from ase.build import bulk

from mattermill.domain.batch import Batch
from mattermill.pipeline.export import write_final_structures
from mattermill.pipeline.folder import Folder, FolderError
from mattermill.pipeline.handoff import write_batch
from mattermill.pipeline.ledger import Finished, Ledger, Queued, Started, SystemRow
from mattermill.pipeline.records import read_columns
from mattermill.pipeline.results import open_campaign, summary_tables, write_summary
from mattermill.pipeline.thermo import ThermoFile
from mattermill.pipeline.trajectory import Trajectory

COLUMNS = {"step": "1", "time": "fs", "temperature": "K"}


@pytest.fixture
def states():
    atoms = [bulk(symbol, cubic=True) for symbol in ("Ne", "Ar", "Kr")]
    atoms[1].rotate(30, (1, 1, 0), rotate_cell=True)
    batch = Batch.from_atoms(atoms, ["ne", "ar", "k/r"])
    return batch.with_fields(systems={"energy": torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)})


@pytest.fixture
def campaign(tmp_path, states):
    """A small campaign that has come some way."""
    folder = Folder.create(tmp_path / "c.mill")
    with Ledger.create(folder.ledger) as ledger:
        ledger.add_systems([SystemRow(s.ids[0], s.n_atoms, "X4", "x.cif") for s in states])
        ledger.add_systems([SystemRow("broken", 0, failure="empty file: broken.cif")])
        ledger.record(Queued(i, "relax", 4) for i in states.ids)
        path = folder.handoff_file("relax", "1-1-1")
        digest = write_batch(path, states.select(["ne", "ar"]))
        end = {"file": folder.relative(path), "digest": digest, "next_stages": ("heat/up",)}
        ledger.record(
            [
                Started("ne", "relax", "c"),
                Finished("ne", "relax", "converged", steps=5, results={"energy": -1.0, "cycles": 2}, **end),
                Finished(
                    "ar", "relax", "unconverged", "max_steps = 9", steps=9, results={"energy": -2.0, "own": 1}, **end
                ),
                Finished("k/r", "relax", "failed", "two atoms at one site"),
                Started("ne", "heat/up", "c2"),
            ]
        )
        ledger.set_meta("result_units", {"own": "furlong"})
        write_summary(folder, ledger)
    return folder


def test_the_summary_has_a_group_per_stage_and_adds_up(campaign):
    with netCDF4.Dataset(campaign.summary) as file:
        assert file.data_model == "NETCDF4"
        assert set(file.groups) >= {"intake", "relax"}
    tree = xr.open_datatree(campaign.summary, engine="netcdf4")
    try:
        relax = tree["relax"].to_dataset().set_coords("system").set_index(system="system").load()
        assert relax["status"].sel(system="ne").item() == "converged"
        assert relax["reason"].sel(system="k/r").item() == "two atoms at one site"
        assert relax["steps"].values.tolist() == [5, 9, 0]
        np.testing.assert_array_equal(relax["energy"].values, [-1.0, -2.0, np.nan])
        assert relax["energy"].attrs["units"] == "eV"
        assert relax["own"].attrs["units"] == "furlong"
        assert relax["steps"].dtype == np.int64
        stages = {node.attrs["stage"]: node.to_dataset() for node in tree.children.values()}
        assert stages["heat/up"]["status"].values.tolist() == ["running", "pending"]
        intake = stages["intake"]
        assert dict(zip(intake["system"].values, intake["status"].values, strict=True)) == {
            "ne": "finished",
            "ar": "finished",
            "k/r": "finished",
            "broken": "failed",
        }
    finally:
        tree.close()


def test_the_view_says_the_same_as_the_file(campaign):
    view = open_campaign(campaign.path)
    live = view.summary
    stored = xr.open_datatree(campaign.summary, engine="netcdf4")
    try:
        assert set(live.children) == set(stored.children)
        for name, node in live.children.items():
            for variable in node.variables:
                one, other = node[variable], stored[name][variable]
                np.testing.assert_array_equal(one.values, other.values)
                assert one.attrs.get("units") == other.attrs.get("units")
    finally:
        stored.close()
    assert view.status()["relax"] == {"converged": 1, "unconverged": 1, "failed": 1}
    assert view.status()["heat/up"] == {"running": 1, "pending": 1}
    assert view.systems == ["ne", "ar", "k/r", "broken"]
    assert view.failures() == {"broken": "empty file: broken.cif", "k/r": "relax: two atoms at one site"}
    assert "relax: 3" in repr(view)


def test_a_summary_with_nothing_in_it_is_a_file_all_the_same(tmp_path):
    folder = Folder.create(tmp_path / "e.mill")
    with Ledger.create(folder.ledger) as ledger:
        write_summary(folder, ledger)
    with xr.open_dataset(folder.summary, group="intake") as ds:
        assert ds.sizes["system"] == 0
    assert open_campaign(folder.path).summary["intake"].sizes["system"] == 0


def test_a_failed_write_leaves_the_summary_that_was_there(campaign, monkeypatch):
    before = campaign.summary.read_bytes()
    monkeypatch.setattr("mattermill.pipeline.results._write_group", lambda *_: 1 / 0)
    with Ledger.open_readonly(campaign.ledger) as ledger, pytest.raises(ZeroDivisionError):
        write_summary(campaign, ledger)
    assert campaign.summary.read_bytes() == before
    assert [p.name for p in campaign.path.iterdir() if p.name.startswith(".tmp")] == []


def test_a_reader_keeps_its_summary_while_it_is_rewritten(campaign):
    with xr.open_dataset(campaign.summary, group="relax") as ds, Ledger.open(campaign.ledger) as ledger:
        ledger.record([Queued("broken", "relax")])
        write_summary(campaign, ledger)
        assert ds["status"].values.tolist() == ["converged", "unconverged", "failed"]
    with xr.open_dataset(campaign.summary, group="relax") as ds:
        assert ds.sizes["system"] == 4


def test_results_that_are_no_scalars_stay_in_the_ledger(tmp_path):
    with Ledger.create(tmp_path / "l.sqlite") as ledger:
        ledger.record([Queued("a", "s"), Finished("a", "s", "finished", results={"list": [1, 2], "word": "x", "n": 1})])
        _, table = summary_tables(ledger)["s"]
        assert "list" not in table
        assert table["word"].values.tolist() == ["x"]
        assert table["n"].values.dtype == np.int64


# --- trajectories, states, export ---------------------------------------------------------------------------------


def test_trajectories_open_lazily_with_units(campaign, states):
    ready = states.with_fields(systems={"timestep": torch.full((3,), 2.0, dtype=torch.float64)})
    Trajectory.create(campaign.trajectory_file("k/r", "heat/up"), ready.select(["k/r"])).close()
    view = open_campaign(campaign.path)
    with view.trajectory("k/r", "heat/up") as ds:
        assert not ds["coordinates"].variable._in_memory, "values must be read when they are asked for"
        assert ds["coordinates"].attrs["units"] == "angstrom"
        assert {"time", "step", "Z"} <= set(ds.coords)
        np.testing.assert_array_equal(ds["coordinates"][0], states.select(["k/r"]).positions.numpy().astype("f4"))
    with pytest.raises(KeyError, match="it has no trajectory yet"):
        view.trajectory("ne", "relax")
    with pytest.raises(KeyError, match="no system 'xe'"):
        view.trajectory("xe", "relax")


def test_final_states_are_float64_and_in_the_orientation_of_the_input(campaign, states):
    found = open_campaign(campaign.path).structures("relax")
    assert found.ids == ("ne", "ar")
    assert found.equals(states.select(["ne", "ar"]))
    expected = bulk("Ar", cubic=True)
    expected.rotate(30, (1, 1, 0), rotate_cell=True)
    np.testing.assert_allclose(found.to_atoms()[1].positions, expected.positions, atol=1e-12)


def test_states_that_are_gone_are_named(campaign):
    campaign.handoff_file("relax", "1-1-1").unlink()
    with pytest.warns(UserWarning, match=r"2 final states are not to be had.*missing"):
        assert open_campaign(campaign.path).structures("relax").is_sentinel


def test_export(campaign, tmp_path, states):
    out = tmp_path / "final.extxyz"
    assert write_final_structures(campaign.path, out, "relax") == 2
    atoms = ase.io.read(out, index=":")
    assert [a.info["id"] for a in atoms] == ["ne", "ar"]
    assert [a.info["status"] for a in atoms] == ["converged", "unconverged"]
    assert atoms[1].get_potential_energy() == -2.0
    assert write_final_structures(campaign.path, tmp_path / "a.traj", "relax") == 2
    with pytest.raises(ValueError, match=r"no system has been in a stage 'melt'; stages so far: relax"):
        write_final_structures(campaign.path, out, "melt")
    with pytest.raises(ValueError, match="knows no format"):
        write_final_structures(campaign.path, tmp_path / "a.docx", "relax")
    with pytest.raises(ValueError, match="holds one structure, there are 2"):
        write_final_structures(campaign.path, tmp_path / "a.gen", "relax")
    with pytest.raises(ValueError, match="no final structures of 'heat/up'"):
        write_final_structures(campaign.path, out, "heat/up")


def test_export_of_the_last_state_of_every_branch(campaign, tmp_path):
    """ar has ended in heat, was let pass by one filter and stopped by another; ne is still on its way in heat."""
    state = open_campaign(campaign.path).structures("relax").select(["ar"])
    path = campaign.handoff_file("heat", "2")
    write_batch(path, state)
    with Ledger.open(campaign.ledger) as ledger:
        end = {"file": campaign.relative(path)}
        ledger.record(
            [
                Finished("ar", "heat/up", "finished", next_stages=("small", "large"), **end),
                Finished("ar", "small", "finished", next_stages=("cold",), **end),
                Finished("ar", "large", "filtered", "not n_atoms > 500"),
                Finished("ar", "cold", "failed", "exploded"),
            ]
        )
    out = tmp_path / "final.extxyz"
    assert write_final_structures(campaign.path, out) == 2
    found = {(a.info["id"], a.info["stage"]) for a in ase.io.read(out, index=":")}
    assert found == {("ne", "relax"), ("ar", "heat/up")}


def test_opening_what_is_no_campaign(tmp_path):
    with pytest.raises(FolderError, match="holds no campaign"):
        open_campaign(tmp_path)


# --- time series ----------------------------------------------------------------------------------------------------


def rows(system, steps):
    steps = np.asarray(steps, dtype=float)
    return {"system": np.asarray(system), "step": steps, "time": steps * 2, "temperature": steps + 100}


def test_thermo_is_a_cf_indexed_ragged_array(campaign):
    file = ThermoFile.open(campaign.thermo_file("relax"), ["ne", "ar", "k/r"], COLUMNS)
    assert file.append(["ar", "ne"], rows([0, 1, 0], [0, 0, 10])) == 3
    assert file.append(["k/r"], rows([0], [5])) == 1
    assert file.append([], {}) == 0
    file.sync()
    file.close()
    with xr.open_dataset(campaign.thermo_file("relax")) as ds:
        assert ds["system_index"].attrs["instance_dimension"] == "system"
        assert ds["system_id"].attrs["cf_role"] == "timeseries_id"
        assert ds["system_id"].values.tolist() == [b"ne", b"ar", b"k/r"]
        assert ds["system_index"].values.tolist() == [1, 0, 1, 2]
        assert ds["temperature"].attrs["units"] == "K"
    view = open_campaign(campaign.path)
    ar = view.thermo("relax", "ar")
    assert ar["step"].values.tolist() == [0, 10]
    assert ar["temperature"].values.tolist() == [100, 110]
    assert view.thermo("relax").sizes == {"obs": 4, "system": 3}
    with pytest.raises(KeyError, match="no time series"):
        view.thermo("heat/up")
    with pytest.raises(KeyError, match="no system 'xe'"):
        view.thermo("relax", "xe")


def test_steps_that_are_told_again_stand_once(tmp_path):
    path = tmp_path / "t.nc"
    file = ThermoFile.open(path, ["a", "b"], COLUMNS)
    file.append(["a"], rows([0, 0, 0], [0, 10, 20]))
    assert file.append(["a", "b"], rows([0, 0, 0, 1], [10, 20, 30, 10])) == 2
    file.close()
    again = ThermoFile.open(path, ["a", "b"], COLUMNS)  # a campaign that was resumed
    assert again.append(["a", "b"], rows([0, 0, 1, 1], [30, 40, 10, 20])) == 2
    found = read_columns(path, ["system_index", "step"])
    for k, expected in enumerate(([0, 10, 20, 30, 40], [10, 20])):
        assert found["step"][found["system_index"] == k].tolist() == expected


def test_a_campaign_that_is_extended_keeps_its_series(tmp_path):
    path = tmp_path / "t.nc"
    ThermoFile.open(path, ["a"], COLUMNS).append(["a"], rows([0], [10]))
    file = ThermoFile.open(path, ["a", "longer-name"], COLUMNS)
    assert file.append(["a", "longer-name"], rows([0, 1], [10, 0])) == 1
    with xr.open_dataset(path) as ds:
        assert ds["system_id"].values.tolist() == [b"a", b"longer-name"]
        assert ds["step"].values.tolist() == [10, 0]
    with pytest.raises(ValueError, match="other systems or columns"):
        ThermoFile.open(path, ["z", "longer-name"], COLUMNS)
    with pytest.raises(ValueError, match="other systems or columns"):
        ThermoFile.open(path, ["a", "longer-name"], {"step": "1"})


def test_a_killed_thermo_writer_leaves_whole_rows(tmp_path, forked):
    path = tmp_path / "t.nc"

    def work(say):
        import os

        file = ThermoFile.open(path, ["a", "b"], COLUMNS)
        for step in range(10**9):
            file.append(["a", "b"], rows([0, 1], [step, step]))
            os.write(say, b".")

    for _ in range(5):
        process = forked(work)
        process.wait_for_word()
        process.kill()
        found = read_columns(path, ["system_index", "step", "temperature"])
        np.testing.assert_array_equal(found["temperature"], found["step"] + 100)
        steps = found["step"][found["system_index"] == 0]
        np.testing.assert_array_equal(steps, np.arange(len(steps)))
        with xr.open_dataset(path) as ds:
            assert ds.sizes["obs"] == len(found["step"])
        path.unlink()


def test_an_empty_series_opens(tmp_path):
    ThermoFile.open(tmp_path / "t.nc", [], COLUMNS).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xr.open_dataset(tmp_path / "t.nc") as ds:
            assert ds.sizes["obs"] == 0
