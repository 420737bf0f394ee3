"""Cases that broke other codes: dense clusters, cutoffs longer than the box, atoms alone.

Numbers are those of the project's list of cases; the rest are their siblings. The reference is brute force over all
images (`brute.py`) or the formula; each test can fail.
"""

from __future__ import annotations

import itertools

import brute
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from brute import assert_all_owned, assert_exact, crystal, every_rank, start

import mattermill as mm
from mattermill.domain.batch import Batch

CUTOFF = 5.0


def _evaluated(mesh, atoms, model):
    return mm.evaluate(model, atoms, mesh=mesh)


def evaluated(ranks, size, atoms, model):
    """On so many ranks, one result each."""
    return [_evaluated(None, atoms, model)] if size == 1 else ranks.run(_evaluated, size, atoms, model)


# --- 14: more neighbours than there was room for ------------------------------------------------------------------


def clump(n=300, spread=2.5, dilute=60):
    """Hundreds of atoms within a cutoff of each other, in a box that is nearly empty elsewhere: no density in it is
    like the mean. No two closer than 0.35 Å, so that numbers stay finite."""
    rng = np.random.default_rng(5)
    side = int(np.ceil(n ** (1 / 3)))
    sites = np.array(list(itertools.product(range(side), repeat=3)))[:n] * (2 * spread / side)
    dense = sites + rng.uniform(-0.02, 0.02, sites.shape) + 14.0
    gas = rng.uniform(0, 40, (dilute, 3))
    gas = gas[np.linalg.norm(gas - 14.0 - spread, axis=1) > 9.0]
    positions = np.concatenate([dense, gas])
    return Atoms(rng.choice([18, 36], len(positions)), positions, cell=[40.0] * 3, pbc=True)


@pytest.mark.parametrize("pbc", [True, False])
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_case_14_a_very_dense_cluster(ranks, size, pbc):
    atoms = clump()
    atoms.pbc = pbc
    for got in evaluated(ranks, size, atoms, brute.model()):
        assert float(got.energy) > 1e6  # it is dense
        assert_exact(got, CUTOFF)


def squeezing(step, state):
    """Towards the middle, until a domain holds many times what it did: 24 atoms a cutoff become 400."""
    b = state.batch
    middle = b.cell[0].diagonal() / 2
    b.positions.copy_(middle + (b.positions - middle) * 0.75)
    b.velocities.zero_()


@pytest.mark.parametrize(("size", "grid"), [(1, None), (2, (2, 1, 1)), (4, (2, 2, 1))])
def test_case_14_lists_outgrow_their_room_in_flight(ranks, size, grid):
    """Cluster in a box that stays as it is: every list, halo and message outgrows what it had."""
    atoms = crystal((6, 6, 6), spacing=5.0, seed=2)
    atoms.positions += 15.0
    atoms.cell[:] = np.eye(3) * 60.0
    batch = start(atoms, dt=1e-9)
    results = every_rank(ranks, size, batch, 6, change=squeezing, look=2, grid=grid)
    assert_all_owned(results, batch)
    assert results[0]["broken"] == {}
    near = []
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF)
        d = torch.pdist(whole.positions)
        near.append(int((d < CUTOFF).sum()))
    assert near[-1] > 8 * near[0]


def _grown(mesh, systems):
    """A dilute system aboard, a dense one and a large one join: room is made, and the first feels nothing."""
    with mm.DomainParallel(brute.model(), mm.NVE().propagator(), mesh, split_atoms=20) as runner:
        lead = runner.mesh.is_lead
        for name in systems.ids:
            runner.admit(systems.select([name]) if lead else None)
            runner.run(2)
        return runner.gather()


@pytest.mark.parametrize("size", [1, 3])
def test_case_14_a_dense_system_joins_a_dilute_one(ranks, size):
    dilute = Atoms("Ar3", [[1, 1, 1], [5, 1, 1], [9, 9, 9]], cell=[20] * 3, pbc=True)
    systems = Batch.concat(
        [start(dilute, "dilute"), start(clump(150), "dense", dt=1e-9), start(crystal((5, 5, 5)), "large")]
    )
    got = _grown(None, systems) if size == 1 else ranks.run(_grown, size, systems)[0]
    assert_exact(got, CUTOFF)


# --- 15: cutoffs longer than the box ------------------------------------------------------------------------------

CELLS = {
    "cubic": bulk("Ar", "fcc", 5.4, cubic=True),
    "primitive": bulk("Ar", "fcc", 5.4),
    "one atom": Atoms("Kr", [[0.4, 3.9, 1.0]], cell=[4.1, 4.3, 4.7], pbc=True),
    "leaning": Atoms("ArKr", [[0, 0, 0], [2.9, 1.5, 2.0]], cell=[[5, 0, 0], [4.4, 4.2, 0], [-3.0, 2.0, 4.5]], pbc=True),
    "slab": Atoms("ArKr", [[0, 0, 0], [1.9, 1.5, 2.9]], cell=[[4, 0, 0], [1.4, 4.2, 0], [0, 0, 9]], pbc=(1, 1, 0)),
    "wire": Atoms("Ar2", [[0, 0, 0], [1.9, 2.5, 1.9]], cell=[[9, 0, 0], [0, 9, 0], [1, 1, 4]], pbc=(0, 0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("cutoff", [3.9, 7.0, 12.1, 20.7])
@pytest.mark.parametrize("name", CELLS)
def test_case_15_all_images_within_a_cutoff_longer_than_the_box(name, cutoff):
    """More than half the box, more than the box, several boxes; an atom that sees nothing but itself."""
    atoms = CELLS[name].copy()
    atoms.rattle(0.1, seed=1)
    assert_exact(mm.evaluate(brute.model(cutoff), atoms), cutoff)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", CELLS)
def test_case_15_a_cell_has_the_energy_per_atom_of_its_supercell(ranks, size, name):
    """4 x 4 x 4 of them, divided over the ranks: the unit cell cannot be, and must not differ for that."""
    cutoff = 7.5
    atoms = CELLS[name].copy()
    repeat = [4 if p else 1 for p in atoms.pbc]
    large = atoms.repeat(repeat)
    # The order of atoms, and where they stand, must not matter either.
    order = np.random.default_rng(1).permutation(len(large))
    large = large[order]
    large.positions += np.random.default_rng(2).integers(-2, 3, (len(large), 3)) * large.pbc @ large.cell.array
    results = (
        [_supercell(None, [atoms, large], cutoff)] if size == 1 else ranks.run(_supercell, size, [atoms, large], cutoff)
    )
    for got in results:
        small, big = got.split()
        per_atom = [float(b.energy) / b.n_atoms for b in (small, big)]
        assert per_atom[0] == pytest.approx(per_atom[1], rel=1e-12)
        rows = torch.from_numpy(order % len(atoms))
        torch.testing.assert_close(big.forces, small.forces[rows], rtol=1e-10, atol=1e-12)
        # Of a slab or a wire the stress is that of the cell it has, all the same.
        torch.testing.assert_close(big.stress, small.stress, rtol=1e-10, atol=1e-14)


def _supercell(mesh, structures, cutoff):
    batch = Batch.from_atoms(structures, ["cell", "supercell"])
    with mm.DomainParallel(brute.model(cutoff), mm.NVE().propagator(), mesh, skin=0.5, split_atoms=10) as runner:
        batch = batch.with_fields(systems={"timestep": torch.full((2,), 1.0, dtype=torch.float64)})
        runner.partition(batch if runner.mesh.is_lead else None)
        return runner.mesh.broadcast_object(runner.gather())


def test_case_15_dynamics_in_a_box_smaller_than_the_cutoff():
    """The unit cell and its supercell, started alike, stay alike: images move with their atoms."""
    small = CELLS["cubic"].copy()
    small.rattle(0.15, seed=3)
    large = small.repeat((3, 3, 3))
    finals = []
    for atoms in (small, large):
        batch = start(atoms, dt=4.0)
        finals.append(mm.simulate(brute.model(9.0), batch, mm.NVE(), 60, dt=4.0, skin=0.6))
    moved = finals[0].positions - torch.from_numpy(small.positions)
    assert float(moved.abs().max()) > 0.1
    torch.testing.assert_close(
        finals[1].positions - torch.from_numpy(large.positions), moved.repeat(27, 1), rtol=0, atol=1e-8
    )


# --- 16: alone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_case_16_one_isolated_atom(ranks, size):
    alone = [
        Atoms("Ar", [[3.0, 2.0, 1.0]]),
        Atoms("Kr", [[-80.0, 2.0, 1.0]], cell=[30, 30, 30], pbc=True),
        Atoms("Ar", [[0, 0, 0]], cell=[30, 30, 0], pbc=(True, True, False)),
    ]
    for got in evaluated(ranks, size, alone, brute.model()):
        assert got.energy.tolist() == [0.0, 0.0, 0.0]
        assert torch.equal(got.forces, torch.zeros(3, 3, dtype=torch.float64))
        assert torch.equal(got.stress[1], torch.zeros(3, 3, dtype=torch.float64))
        assert torch.isnan(got.stress[0]).all()  # no volume, no stress


def _alone(mesh):
    atoms = Atoms("Ar", [[3.0, 2.0, 1.0]])
    relaxed = mm.relax(brute.model(), [atoms], mesh=mesh)
    moved = mm.simulate(brute.model(), relaxed, mm.NVE(), 10, temperature=30, mesh=mesh)
    heated = mm.simulate(brute.model(), relaxed, mm.NVT(100), 10, mesh=mesh)
    return relaxed, moved, heated


@pytest.mark.parametrize("size", [1, 3])
def test_case_16_one_atom_through_every_stage(ranks, size):
    for relaxed, moved, heated in [_alone(None)] if size == 1 else ranks.run(_alone, size):
        assert relaxed.info[0]["status"] == "converged"
        assert torch.equal(relaxed.positions, torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.float64))
        # No momentum is left to a single atom; a thermostat gives it some.
        assert torch.equal(moved.positions, relaxed.positions)
        for batch in (relaxed, moved, heated):
            assert torch.isfinite(batch.positions).all()
            assert float(batch.energy) == 0.0
        assert float(heated.velocities.abs().max()) > 0


def pair_energy(r, cutoff):
    """Ar-Kr, switched between 0.8 of the cutoff and the cutoff, from the formula (Brooks 1983)."""
    epsilon, sigma = np.sqrt(0.0104 * 0.0140), 0.5 * (3.40 + 3.65)
    onset = 0.8 * cutoff
    s = (cutoff**2 - r**2) ** 2 * (cutoff**2 + 2 * r**2 - 3 * onset**2) / (cutoff**2 - onset**2) ** 3
    s = np.where(r < onset, 1.0, np.where(r < cutoff, s, 0.0))
    return 4 * epsilon * ((sigma / r) ** 12 - (sigma / r) ** 6) * s


def switched(cutoff=CUTOFF):
    return mm.models.LennardJones(
        epsilon={"Ar": 0.0104, "Kr": 0.0140}, sigma={"Ar": 3.40, "Kr": 3.65}, cutoff=cutoff, truncation="switch"
    )


def _pulled(mesh, distances, cell, direction):
    """A dimer at these distances, one batch; on several ranks its atoms may lie on two."""
    structures = []
    for r in distances:
        atoms = Atoms("ArKr", [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
        atoms.positions[1] += r * np.array(direction) / np.linalg.norm(direction)
        if cell is not None:
            atoms.cell[:], atoms.pbc = np.eye(3) * cell, True
        structures.append(atoms)
    batch = Batch.from_atoms(structures).with_fields(
        systems={"timestep": torch.full((len(structures),), 1.0, dtype=torch.float64)}
    )
    with mm.DomainParallel(switched(), mm.NVE().propagator(), mesh, skin=0.5, split_atoms=1) as runner:
        runner.partition(batch if runner.mesh.is_lead else None)
        split = max(int(np.prod(g)) for g in runner.grids.values())
        return runner.gather(), split


@pytest.mark.parametrize("cell", [None, 40.0])
@pytest.mark.parametrize("direction", [(1, 0, 0), (1, -2, 3)])
@pytest.mark.parametrize("size", [1, 2])
def test_case_16_a_dimer_pulled_beyond_the_cutoff(ranks, size, direction, cell):
    """Energy and force by the formula on the way out, exactly zero beyond, no jump in between."""
    r = np.concatenate([np.linspace(3.2, 6.5, 67), CUTOFF + np.array([-1e-6, -1e-9, 0.0, 1e-9, 1e-6])])
    args = (r, cell, direction)
    got, split = _pulled(None, *args) if size == 1 else ranks.run(_pulled, size, *args)[0]
    assert split == size
    energy = got.energy.numpy()
    np.testing.assert_allclose(energy, pair_energy(r, CUTOFF), rtol=1e-9, atol=1e-15)
    assert (energy[r > CUTOFF] == 0.0).all()
    unit = np.array(direction) / np.linalg.norm(direction)
    forces = got.forces.numpy().reshape(-1, 2, 3)
    np.testing.assert_allclose(forces[:, 0], -forces[:, 1], atol=1e-16)
    h = 1e-6
    slope = (pair_energy(r + h, CUTOFF) - pair_energy(r - h, CUTOFF)) / (2 * h)
    np.testing.assert_allclose(forces[:, 1] @ unit, -slope, atol=1e-7)
    assert (forces[r > CUTOFF] == 0.0).all()
    near = np.abs(r - CUTOFF) < 1e-5
    assert np.abs(energy[near]).max() < 1e-12


def pulling(step, state):
    """0.1 Å a step along x."""
    state.batch.positions[state.batch.atom_id == 1, 0] += 0.1


@pytest.mark.parametrize("size", [1, 2])
def test_case_16_pulled_apart_in_flight_and_round_the_box(ranks, size):
    """Beyond the cutoff, through nothing, and back into sight from the other side, as its own image's neighbour."""
    atoms = Atoms("ArKr", [[1.0, 5.0, 5.0], [5.0, 5.0, 5.0]], cell=[20.0, 12.0, 12.0], pbc=True)
    results = every_rank(ranks, size, start(atoms), 170, change=pulling, grid=(size, 1, 1), skin=0.3)
    energies = []
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF)
        energies.append(float(whole.energy))
    alone = [k for k, e in enumerate(energies) if e == 0.0]
    assert len(alone) > 50
    assert energies[0] < 0.0
    assert min(energies[alone[-1] :]) < -0.004, "it never came round"
    jumps = np.abs(np.diff(energies[: alone[0] + 1]))
    # Shifted at the cutoff: the energy is continuous, the force is not.
    assert jumps[-1] < 2e-4
