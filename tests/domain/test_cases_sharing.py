"""Cases that broke other codes: ranks without atoms, domains too thin, ranks that must stop together.

Numbers are those of the project's list of cases; the rest are their siblings. The reference is brute force over all
images (`brute.py`), ASE, or the same thing done otherwise; each test can fail.
"""

from __future__ import annotations

import brute
import numpy as np
import pytest
from ase import Atoms
from brute import argon, ase_of, assert_all_owned, assert_exact, crystal, start, watched

import mattermill as mm
from mattermill.domain.batch import Batch

CUTOFF, SKIN = 5.0, 0.8


# --- 6: convergence -----------------------------------------------------------------------------------------------


def two_parts(shake_left, shake_right):
    """Two crystallites 60 Å apart in one system: on two ranks each is one rank's own. At rest where not shaken."""
    part = mm.relax(brute.model(), argon((3, 3, 3), spacing=3.9, shake=0.0), fmax=1e-6, max_steps=5000).to_atoms()[0]
    part.pbc = False
    part = mm.relax(brute.model(), part, fmax=1e-6, max_steps=20_000).to_atoms()[0]
    parts = [part.copy(), part.copy()]
    parts[1].positions += [60.0, 0, 0]
    for k, (one, shake) in enumerate(zip(parts, (shake_left, shake_right), strict=True)):
        one.positions += np.random.default_rng(k).normal(scale=shake, size=one.positions.shape)
    both = parts[0] + parts[1]
    both.calc = None
    both.pbc, both.cell[:] = False, 0
    return both


def _relaxed(mesh, structures):
    taken = []
    out = mm.relax(
        brute.model(), structures, fmax=0.002, mesh=mesh, split_atoms=10, max_steps=5000,
        hooks=[lambda s: taken.append((s.steps, tuple(s.batch.ids), s.batch.counts.tolist()))],
    )  # fmt: skip
    return out, taken


@pytest.mark.parametrize("size", [2, 3])
def test_case_06_one_ranks_atoms_are_not_converged(ranks, size):
    """Left at rest, right shaken, and the other way round, in one batch: each system goes on for all ranks or none."""
    structures = [two_parts(0.0, 0.2), two_parts(0.1, 0.0), two_parts(0.0, 0.0)]
    batch = Batch.from_atoms(structures, ["right", "left", "rest"])
    one, alone = _relaxed(None, batch)
    results = ranks.run(_relaxed, size, batch)
    for out, taken in results:
        assert [(s, ids) for s, ids, _ in taken] == [(s, ids) for s, ids, _ in alone], "ranks stop together"
        assert [i["status"] for i in out.info] == ["converged"] * 3
        assert out.step.tolist() == one.step.tolist()
        for single in out:
            forces = ase_of(single).get_forces()
            assert np.linalg.norm(forces, axis=1).max() < 0.002
        np.testing.assert_allclose(out.positions.numpy(), one.positions.numpy(), atol=1e-7)
    steps = one.step.tolist()
    assert steps[2] == 0
    assert 0 < steps[0] != steps[1] > 0
    if size == 2:
        # A half each: one rank's own atoms were at rest from the first step on, whichever system.
        assert [taken[0][2] for _, taken in results] == [[27, 27]] * 2


# --- 8: ranks without atoms ---------------------------------------------------------------------------------------


def slab():
    """60 % vacuum along z, periodic there all the same."""
    atoms = crystal((4, 4, 4), spacing=4.0, seed=8)
    atoms.cell[2, 2] /= 0.4
    return atoms


def corner():
    """All atoms in an eighth of the box."""
    atoms = crystal((3, 3, 3), spacing=3.9, seed=8)
    atoms.cell[:] = atoms.cell.array * 3
    return atoms


def five():
    return Atoms("Ar5", [[1, 1, 1], [5, 1, 1], [1, 5, 1], [1, 1, 5], [5, 5, 5.5]], cell=[30, 30, 30], pbc=True)


EMPTY = [
    (slab, 4, None), (slab, 4, (1, 1, 4)), (slab, 4, (2, 1, 2)), (corner, 8, None), (corner, 8, (2, 2, 2)),
    (five, 8, None), (five, 8, (2, 2, 2)), (five, 8, (4, 2, 1)), (lambda: five()[:1], 4, (4, 1, 1)),
    (lambda: five()[:2], 3, None),
]  # fmt: skip


@pytest.mark.parametrize(("make", "size", "grid"), EMPTY)
def test_case_08_more_ranks_than_the_atoms_need(ranks, make, size, grid):
    batch = start(make(), speed=0.005)
    results = ranks.run(watched, size, batch, 12, grid=grid, look=3)
    assert_all_owned(results, batch)
    for whole in results[0]["frames"]:
        assert_exact(whole, CUTOFF)
    expected = watched(None, batch, 12, look=3)["frames"][-1]
    np.testing.assert_allclose(results[0]["frames"][-1].positions.numpy(), expected.positions.numpy(), atol=1e-9)
    assert all(np.prod(g["system"]) <= size for seen in results for g in seen["grids"])
    if batch.n_atoms < size:
        assert sum(not any(f["system"] for f in seen["owned"]) for seen in results) >= size - batch.n_atoms


def _by_hand(mesh):
    structures = [slab(), five(), five()[:1]]
    out = mm.relax(brute.model(), structures, fmax=0.01, max_steps=200, mesh=mesh, split_atoms=1)
    out = mm.simulate(brute.model(), out, mm.NVT(50), 10, dt=2.0, mesh=mesh, split_atoms=1)
    return [i["status"] for i in out.info], out


def test_case_08_every_stage_runs_with_idle_ranks(ranks):
    one = _by_hand(None)[1]
    for status, out in ranks.run(_by_hand, 4):
        assert status == ["finished"] * 3
        assert np.isfinite(out.positions.numpy()).all()
        np.testing.assert_allclose(out.positions.numpy(), one.positions.numpy(), atol=1e-6)


def _nobody(mesh):
    """No system at all, a stage that never has one, and a runner that is closed: nothing hangs."""
    with mm.DomainParallel(brute.model(), mm.NVE().propagator(), mesh) as runner:
        runner.partition(None)
        assert runner.step() is None
        assert runner.run(3) is None
        whole = runner.gather()
        assert whole is None or not whole
        runner.admit(start(five()) if mesh.is_lead else None)
        runner.step()
        runner.release(runner.ids)
        assert runner.step() is None
    return len(runner.ids)


def test_case_08_nothing_aboard(ranks):
    assert ranks.run(_nobody, 3) == [0, 0, 0]


# --- 9: domains thinner than their reach --------------------------------------------------------------------------


def box(lengths, spacing=4.0, seed=11):
    shape = tuple(max(1, round(x / spacing)) for x in lengths)
    atoms = crystal(shape, spacing=4.0, seed=seed)
    atoms.set_cell(np.diag(lengths), scale_atoms=True)
    return atoms


def leaning():
    """27 Å of vectors along every axis, but 13.5 Å between its faces along x."""
    atoms = crystal((4, 2, 2), spacing=4.0)
    atoms.set_cell(np.array([[13.5, 0, 23.38], [0, 8.0, 0], [0, 0, 8.0]]), scale_atoms=True)
    return atoms


THIN = [
    # box, cutoff, ranks, grid asked for, grid used (None: whatever, but said)
    (lambda: box((8.0, 8.0, 8.0)), 6.0, 2, None, (1, 1, 1)),
    (lambda: box((8.0, 8.0, 8.0)), 6.0, 2, (2, 1, 1), (1, 1, 1)),
    (lambda: box((14.0, 8.0, 8.0)), 6.0, 4, (2, 2, 1), (2, 1, 1)),
    (lambda: box((14.0, 8.0, 8.0)), 6.0, 4, None, (2, 1, 1)),
    (lambda: box((13.5, 8.0, 8.0)), 6.0, 2, (2, 1, 1), (1, 1, 1)),  # two domains of 6.75 Å, a reach of 6.8
    (lambda: box((13.7, 8.0, 8.0)), 6.0, 2, (2, 1, 1), (2, 1, 1)),
    (lambda: box((21.0, 8.0, 8.0)), 6.0, 8, (8, 1, 1), (3, 1, 1)),
    (leaning, 6.0, 2, (2, 1, 1), None),
]


@pytest.mark.parametrize(("make", "cutoff", "size", "asked", "used"), THIN)
def test_case_09_a_domain_is_never_thinner_than_its_reach(ranks, make, cutoff, size, asked, used):
    atoms = make()
    batch = start(atoms, speed=0.003)
    results = ranks.run(watched, size, batch, 6, cutoff=cutoff, grid=asked, look=2)
    dims = results[0]["grids"][0]["system"]
    if used is not None:
        assert dims == used
    # Thickness between faces: volume over the area of the opposite one.
    reciprocal = np.linalg.inv(atoms.cell.array).T
    for n, thickness in zip(dims, 1 / np.linalg.norm(reciprocal, axis=1), strict=True):
        assert n == 1 or thickness / n >= cutoff + SKIN
    for whole in results[0]["frames"]:
        assert_exact(whole, cutoff)
    wanted = size if asked is None else int(np.prod(asked))
    said = [m for m in results[0]["log"] if "'system'" in m and f"{int(np.prod(dims))} of {wanted} ranks" in m]
    if np.prod(dims) < wanted:
        # Forced and not done is a warning; chosen is information. Both with the numbers.
        assert said, results[0]["log"]
        assert said[0].startswith("WARNING" if asked is not None else "INFO")
        assert "6.8 Å" in said[0]
    else:
        assert not said
