"""DomainParallel on one rank and several: fields, order, energies on demand, broken systems, dead ranks."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch
from ase.build import bulk
from parity import cases

import mattermill as mm
from mattermill.domain.neighborhood import neighborhood_of


def runner_of(mesh=None, ensemble="nve", **kwargs):
    kwargs = {"skin": cases.SKIN, "split_atoms": 30, **kwargs}
    return mm.DomainParallel(cases.model(), cases.propagator(ensemble), mesh, **kwargs)


def test_forces_are_ready_before_the_first_step():
    """Primed forces, energy and stress equal the model's on a list built without any runner."""
    batch = cases.batch(["cubic", "slab", "cluster", "tiny", "far"])
    with runner_of() as runner:
        runner.partition(batch)
        got = runner.gather()
    direct = cases.model().compute(neighborhood_of(batch, cases.REACH))
    assert (got.forces - direct.forces).abs().max() < 1e-11
    assert (got.energies - direct.energies).abs().max() < 1e-11
    volume = torch.tensor([abs(np.linalg.det(c)) for c in batch.cell.numpy()])
    for s in range(5):
        if volume[s] > 0:
            assert (got.stress[s] + direct.virial[s] / volume[s]).abs().max() < 1e-12
        else:
            assert torch.isnan(got.stress[s]).all()


def test_the_batch_that_comes_in_is_not_touched():
    batch = cases.batch(["cubic", "tiny"])
    before = batch.clone()
    with runner_of() as runner:
        runner.partition(batch)
        runner.run(5)
    assert batch.equals(before)


def test_positions_stay_unwrapped_and_drift_is_seen():
    batch = cases.batch(["far"])
    with runner_of() as runner:
        runner.partition(batch)
        runner.run(60)
        got = runner.gather()
    # A drift of 0.012 Å/fs over 240 fs, wherever the atom was, without a jump by a cell.
    moved = (got.positions - batch.positions).numpy()
    assert moved.mean(axis=0) == pytest.approx(np.array([0.012, -0.007, 0.005]) * 240, abs=0.1)
    assert np.abs(moved - moved.mean(axis=0)).max() < 5.0


def test_skin_does_not_change_the_trajectory():
    results = []
    for skin in (0.0, 0.3, 1.5):
        with runner_of(skin=skin) as runner:
            runner.partition(cases.batch(["cubic", "cluster"]))
            runner.run(40)
            results.append((runner.gather(), runner.rebuilds))
    assert results[0][1] > results[1][1] > results[2][1]
    for other, _ in results[1:]:
        assert max(cases.differences(other, results[0][0]).values()) < 1e-11


def test_atom_order_is_the_callers():
    batch = cases.batch(["cubic"])
    shuffle = torch.randperm(batch.n_atoms, generator=torch.Generator().manual_seed(3))
    shuffled = batch.with_fields(atoms={k: v[shuffle] for k, v in batch.atoms.items()})
    with runner_of() as runner:
        runner.partition(batch)
        runner.run(10)
        straight = runner.gather()
    with runner_of() as runner:
        runner.partition(shuffled)
        runner.run(10)
        got = runner.gather()
    assert torch.equal(got.atom_id, shuffled.atom_id)
    # Same ids, same atoms: the same bits, in the caller's order.
    for name in ("positions", "forces", "charge"):
        assert torch.equal(getattr(got, name), getattr(straight, name)[shuffle]), name


def _fields(mesh):
    batch = cases.batch(["cubic", "slab"]) if mesh.is_lead else None
    if batch is not None:
        n = batch.n_atoms
        batch = batch.with_fields(
            atoms={
                "flag": torch.arange(n) % 3 == 0,
                "small": torch.arange(n, dtype=torch.int32),
                "wide": torch.arange(4 * n, dtype=torch.float32).reshape(n, 2, 2),
                "big": torch.arange(n, dtype=torch.int64) + 2**60,
                "odd": torch.arange(3 * n, dtype=torch.int16).reshape(n, 3),
            },
            systems={"mark": torch.tensor([True, False])},
            info=[{"name": "a"}, {"name": "b"}],
        )
    with runner_of(mesh, grid=(mesh.size, 1, 1)) as runner:
        runner.partition(batch)
        runner.run(60)
        assert runner.rebuilds > 1
        got = runner.gather()
    if not mesh.is_lead:
        return got is None
    same = [torch.equal(getattr(got, n), getattr(batch, n)) for n in ("flag", "small", "wide", "big", "odd", "mark")]
    return all(same) and got.info == batch.info


@pytest.mark.parametrize("size", [2, 3])
def test_fields_of_every_dtype_survive_migration(ranks, size):
    assert ranks.run(_fields, size) == [True] * size


class Counting:
    """A model that notes what it was asked for."""

    def __init__(self):
        self.model, self.asked = cases.model(), []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def phases(self, nb, *, energy=True, stress=True):
        self.asked.append((energy, stress))
        return self.model.phases(nb, energy=energy, stress=stress)


def test_energy_is_computed_when_it_is_wanted():
    model = Counting()
    with mm.DomainParallel(model, cases.propagator("nve")) as runner:
        runner.want(energy=True)
        runner.partition(cases.batch(["tiny"]))
        runner.step()
        runner.want(energy=True, stress=True)
        runner.step()
        runner.energies()
        runner.gather()
        assert model.asked == [(True, False), (False, False), (True, True)]
        runner.step()
        assert torch.isnan(runner.gather(refresh=False).energy).all(), "a stale energy was handed out"
        fresh = runner.gather()
        assert model.asked[3:] == [(False, False), (True, True)]
        assert torch.isfinite(fresh.energy).all()
        direct = cases.model().compute(neighborhood_of(fresh, cases.REACH))
        assert float(fresh.energy) == pytest.approx(float(direct.energies.sum()), abs=1e-12)


def _traffic(mesh):
    with runner_of(mesh, grid=(2, 1, 1)) as runner:
        runner.partition(cases.batch(["cubic", "slab", "tiny"]) if mesh.is_lead else None)
        seen = set()
        for _ in range(40):
            before, built = (mesh.collectives, mesh.messages), runner.rebuilds
            runner.step()
            if runner.rebuilds == built:
                seen.add((mesh.collectives - before[0], mesh.messages - before[1]))
        return seen


def test_a_step_is_one_message_out_and_one_home_per_peer(ranks):
    assert ranks.run(_traffic, 2) == [{(2, 2)}, {(2, 2)}]


def test_ids_twice_and_ids_unknown():
    with runner_of() as runner:
        runner.partition(cases.batch(["tiny", "few"]))
        with pytest.raises(ValueError, match="already aboard: tiny"):
            runner.admit(cases.batch(["tiny"]))
        with pytest.raises(ValueError, match="no system 'nobody'"):
            runner.release(["nobody"])
        assert runner.release(["tiny"]).ids == ("tiny",)
        assert runner.ids == ("few",)
        runner.admit(cases.batch(["tiny"]))
        assert runner.ids == ("few", "tiny")
        runner.close()
        runner.close()
        assert runner.step() is None


def _bad_arrival(mesh):
    batch = cases.batch(["tiny"])
    batch.positions[0, 0] = float("nan")
    with runner_of(mesh) as runner:
        runner.admit(cases.batch(["few"]) if mesh.is_lead else None)
        try:
            runner.admit(batch if mesh.is_lead else None)
        except ValueError as error:
            runner.run(3)
            return str(error), runner.ids
    return "nothing raised", ()


def test_a_bad_arrival_is_an_error_on_every_rank(ranks):
    for text, ids in ranks.run(_bad_arrival, 2):
        assert "'tiny' has positions that are not finite" in text
        assert ids == ("few",)


def test_bad_arguments():
    with pytest.raises(ValueError, match="skin"):
        runner_of(skin=-1.0)
    with pytest.raises(ValueError, match="split_atoms"):
        runner_of(split_atoms=0)
    with pytest.raises(ValueError, match="needs 2 ranks"):
        runner_of(grid=(2, 1, 1))


def _poison(state, name, where):
    s = state.batch.index(name)
    rows = slice(int(state.ptr[s]), int(state.ptr[s + 1]))
    if where == "cell":
        state.batch.cell[s, 0, 0] = float("nan")
    elif rows.stop > rows.start:
        state.batch.velocities[rows.start] = {"nan": float("nan"), "absurd": 1e6}[where]


def _breaks(mesh, where):
    names = ["cubic", "slab", "tiny"]
    with runner_of(mesh) as runner:
        runner.partition(cases.batch(names) if runner.mesh.is_lead else None)
        runner.run(10)
        _poison(runner.state, "slab", where)
        runner.step()
        broken = dict(runner.broken)
        runner.run(19)
        gone = runner.release(["slab"])
        runner.run(10)
        return broken, gone, runner.gather(), dict(runner.broken)


@pytest.mark.parametrize("where", ["nan", "absurd", "cell"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_broken_system_stands_still_and_others_go_on(ranks, size, where):
    with runner_of() as runner:
        runner.partition(cases.batch(["cubic", "slab", "tiny"]))
        runner.run(40)
        expected = runner.gather(["cubic", "tiny"])
    results = [_breaks(None, where)] if size == 1 else ranks.run(_breaks, size, where)
    assert all(set(r[0]) == {"slab"} and "non-finite" in r[0]["slab"] for r in results)
    _, gone, got, later = results[0]
    assert later == {}
    # The last sound configuration, at rest, its counter where it was.
    assert torch.isfinite(gone.positions).all()
    assert torch.isfinite(gone.energy).all()
    assert torch.equal(gone.positions, gone.reference)
    assert int(gone.step) == 10
    assert max(cases.differences(got, expected).values()) < (1e-9 if size > 1 else 1e-300)


def _dies(mesh):
    with runner_of(mesh, grid=(mesh.size, 1, 1)) as runner:
        runner.partition(cases.batch(["cubic"]) if mesh.is_lead else None)
        runner.run(5)
        if mesh.rank == 1:
            os._exit(7)
        start = time.monotonic()
        try:
            runner.run(1000)
        except mm.MeshError as error:
            return str(error), time.monotonic() - start
    return "nobody missed it", 0.0


def test_a_rank_that_dies_is_missed_at_once(ranks):
    results = ranks.run(_dies, 3, may_die=(1,), mesh_timeout=30.0)
    for rank in (0, 2):
        assert "lost" in results[rank][0]
        assert results[rank][1] < 10.0


def test_energy_is_conserved_across_cuts_and_rebuilds():
    atoms = bulk("Ar", "fcc", 5.4, cubic=True).repeat(3)
    atoms.set_velocities(np.random.default_rng(0).normal(scale=0.02, size=(len(atoms), 3)))
    from mattermill.domain.units import KE

    energies = []
    with mm.DomainParallel(mm.models.noble_gases(cutoff=7.5), cases.propagator("nve"), skin=0.5) as runner:
        runner.partition(mm.Batch.from_atoms(atoms))
        for _ in range(20):
            runner.want(energy=True)
            runner.step()
            b = runner.state.batch
            energies.append(float(b.energy) + 0.5 * KE * float((b.masses[:, None] * b.velocities**2).sum()))
            runner.run(20)
        assert runner.rebuilds > 3
    assert np.ptp(energies) / len(atoms) < 2e-6
