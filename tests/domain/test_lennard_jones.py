"""Lennard-Jones against ASE, derivatives, lattice sums, itself in other company (LAMMPS: the file beside this)."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.lj import LennardJones as AseLennardJones

from mattermill.domain.batch import Batch
from mattermill.domain.models import LennardJones, Model, ModelOutput, noble_gases
from mattermill.domain.neighborhood import assemble, neighborhood_of
from mattermill.domain.neighbors import build_system_list
from mattermill.domain.units import volume

EPS, SIG = 0.0104, 3.4
ARGON: dict[str, Any] = {"epsilon": {"Ar": EPS}, "sigma": {"Ar": SIG}}
MIXED = LennardJones(
    epsilon={"Ar": EPS, "Kr": 0.014, "Ne": 0.0031, ("Kr", "Ar"): 0.013},
    sigma={"Ar": SIG, "Kr": 3.65, "Ne": 2.74, ("Ne", "Ar"): 3.0},
    cutoff=8.5,
    switch_onset=6.0,
)


def crystal(species: str = "Ar", repeat: int = 2, seed: int = 0, rattle: float = 0.2) -> Atoms:
    atoms = bulk("Ar", a=5.3, cubic=True).repeat(repeat)
    atoms.rattle(rattle, seed=seed)
    atoms.symbols[:] = np.resize([species] if species == "Ar" else ["Ar", "Kr", "Ne"], len(atoms))
    return atoms


def boxes() -> dict[str, Atoms]:
    rng = np.random.default_rng(7)
    tiny = Atoms("Ar", positions=rng.random((1, 3)), cell=[3.7, 3.9, 4.1], pbc=True)
    skew = Atoms(
        "Ar2", positions=[[0, 0, 0], [2.5, 2.4, 2.6]], cell=[[4.5, 0, 0], [3.1, 4.6, 0], [-2.2, 3.4, 5.0]], pbc=True
    )
    left = crystal()
    left.set_cell(left.cell.array @ np.array([[1, 0.1, 0.05], [0, 1.02, -0.2], [0.03, 0, 0.97]]), scale_atoms=True)
    slab = crystal(seed=3)
    slab.pbc = (True, False, True)
    slab.positions += [40.0, 0.0, -70.0]  # far outside its cell
    wire = Atoms("Ar3", positions=[[0, 0, 0], [2.0, 3.4, 0.3], [1.0, -1.0, 3.5]], cell=[4.2, 30, 30], pbc=(1, 0, 0))
    cluster = Atoms("Ar13", positions=crystal(repeat=2).positions[:13])
    return {
        "random": crystal(),
        "tiny": tiny,
        "skew": skew,
        "strained": left,
        "slab": slab,
        "wire": wire,
        "cluster": cluster,
    }


BOXES = boxes()


def compute(model: Model, atoms: Atoms | Batch, skin: float = 1.0) -> ModelOutput:
    batch = atoms if isinstance(atoms, Batch) else Batch.from_atoms(atoms)
    return model.compute(neighborhood_of(batch, model.cutoff + skin))


def as_is(atoms: Atoms) -> Batch:
    """A batch of one in the orientation given: `Batch.from_atoms` turns cells."""
    batch = Batch.from_atoms(atoms)
    return batch.with_fields(
        atoms={"positions": torch.from_numpy(atoms.positions.copy())},
        systems={"cell": torch.from_numpy(atoms.cell.array.copy())[None]},
    )


# --- against ASE -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize(("truncation", "onset"), [("shift", None), ("switch", 6.5), ("switch", 3.0)])
def test_equals_ase(name: str, truncation: str, onset: float | None) -> None:
    atoms = BOXES[name].copy()
    model = LennardJones(**ARGON, cutoff=8.5, truncation=truncation, switch_onset=onset)
    atoms.calc = AseLennardJones(epsilon=EPS, sigma=SIG, rc=8.5, smooth=truncation == "switch", ro=onset)
    out = compute(model, as_is(atoms))
    scale = max(1.0, abs(atoms.get_potential_energy()))
    assert float(out.energies.sum()) == pytest.approx(atoms.get_potential_energy(), abs=1e-10 * scale)
    assert out.energies.numpy() == pytest.approx(atoms.get_potential_energies(), abs=1e-10 * scale)
    forces = atoms.get_forces()
    assert out.forces.numpy() == pytest.approx(forces, abs=1e-10 * max(1.0, abs(forces).max()))
    if atoms.cell.rank == 3:
        stress = -out.virial[0].numpy() / atoms.get_volume()
        theirs = atoms.get_stress(voigt=False)
        assert stress == pytest.approx(theirs, abs=1e-10 * max(0.01, abs(theirs).max()))


def test_plain_is_shifted_less_the_energy_at_the_cutoff() -> None:
    plain, shift = (LennardJones(**ARGON, cutoff=8.5, truncation=t) for t in ("plain", "shift"))
    nb = neighborhood_of(Batch.from_atoms(crystal()), 9.5)
    a, b = plain.compute(nb), shift.compute(nb)
    assert torch.equal(a.forces, b.forces)
    i = torch.repeat_interleave(torch.arange(nb.n_owned), nb.count.long())
    near = (nb.positions[nb.neighbors.long()] - nb.positions[i]).norm(dim=1) < 8.5
    at_cutoff = 4 * EPS * ((SIG / 8.5) ** 12 - (SIG / 8.5) ** 6)
    assert float((a.energies - b.energies).sum()) == pytest.approx(int(near.sum()) * at_cutoff, rel=1e-10)


# --- against derivatives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [MIXED, noble_gases(cutoff=7.0), noble_gases(cutoff=9.0, truncation="shift")])
def test_forces_are_minus_the_gradient(model: LennardJones) -> None:
    atoms = crystal("mixed", seed=5)
    atoms.pbc = (True, True, False)
    forces = compute(model, as_is(atoms)).forces.numpy()
    h = 1e-4
    for atom, axis in ((0, 0), (3, 1), (17, 2), (31, 0)):
        energy = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions[atom, axis] += sign * h
            energy.append(float(compute(model, as_is(moved)).energies.sum()))
        # A shifted energy is continuous, its slope is not: no pair of this system crosses the cutoff within h.
        assert forces[atom, axis] == pytest.approx((energy[1] - energy[0]) / (2 * h), abs=2e-8)


@pytest.mark.parametrize("name", ["random", "tiny", "skew", "strained"])
def test_virial_is_minus_the_strain_derivative(name: str) -> None:
    model = LennardJones(**ARGON, cutoff=8.5, switch_onset=5.0)
    atoms = BOXES[name]
    virial = compute(model, as_is(atoms)).virial[0].numpy()
    assert virial == pytest.approx(virial.T, abs=0)
    h = 1e-5
    for a in range(3):
        for b in range(3):
            energy = []
            for sign in (1, -1):
                strain = np.eye(3)
                strain[a, b] += sign * h
                moved = atoms.copy()
                moved.set_cell(atoms.cell.array @ strain, scale_atoms=False)
                moved.positions = atoms.positions @ strain
                energy.append(float(compute(model, as_is(moved)).energies.sum()))
            assert virial[a, b] == pytest.approx((energy[1] - energy[0]) / (2 * h), abs=1e-6)


# --- what is known exactly -------------------------------------------------------------------------------------


def test_dimer_follows_the_formula_and_ends_at_the_cutoff() -> None:
    model = LennardJones(**ARGON, cutoff=8.5, switch_onset=6.0)
    rc2, ro2 = 8.5**2, 6.0**2

    def energy(r: float) -> float:
        u = 4 * EPS * ((SIG / r) ** 12 - (SIG / r) ** 6)
        s = 1.0 if r < 6.0 else (rc2 - r * r) ** 2 * (rc2 + 2 * r * r - 3 * ro2) / (rc2 - ro2) ** 3
        return u * s if r < 8.5 else 0.0

    for r in (3.0, 3.8, 5.99, 6.01, 7.3, 8.4999, 8.5001, 9.3, 20.0):
        out = compute(model, Atoms("Ar2", positions=[[0, 0, 0], [0, r, 0]]))
        assert out.energies.tolist() == pytest.approx([energy(r) / 2] * 2, rel=1e-12, abs=1e-16)
        assert out.forces[0].tolist() == (-out.forces[1]).tolist()
        slope = (energy(r + 1e-5) - energy(r - 1e-5)) / 2e-5
        assert float(out.forces[1, 1]) == pytest.approx(-slope, rel=1e-6, abs=1e-9)
    beyond = compute(model, Atoms("Ar2", positions=[[0, 0, 0], [0, 8.5001, 0]]))
    assert not beyond.forces.any()
    assert not beyond.energies.any()
    assert not beyond.virial.any()


def test_isolated_atom_and_empty_system() -> None:
    out = compute(noble_gases(), Batch.from_atoms([Atoms("Xe"), Atoms(), Atoms("Ne", cell=[50] * 3, pbc=True)]))
    assert out.forces.shape == (2, 3)
    assert out.virial.shape == (3, 3, 3)
    assert not torch.cat([out.forces.ravel(), out.energies, out.virial.ravel()]).any()


@pytest.mark.parametrize("symbols", ["Ar", "ArKr"])
def test_one_cell_is_its_supercell(symbols: str) -> None:
    cell = Atoms(
        symbols, positions=[[0, 0, 0], [2.6, 2.4, 0.2]][: 1 if symbols == "Ar" else 2], cell=[4.1, 5.2, 4.6], pbc=True
    )
    cell.set_cell(cell.cell.array + np.array([[0, 0, 0], [1.7, 0, 0], [0.4, -2.0, 0]]))
    big = cell.repeat(4)
    one, many = compute(MIXED, cell), compute(MIXED, big)
    assert float(many.energies.sum()) == pytest.approx(64 * float(one.energies.sum()), rel=1e-12)
    assert many.virial[0].numpy() == pytest.approx(64 * one.virial[0].numpy(), rel=1e-10, abs=1e-10)
    assert many.forces.numpy() == pytest.approx(np.tile(one.forces.numpy(), (64, 1)), abs=1e-11)


def lattice_sum(model: LennardJones, symbol: str, a: float) -> float:
    """Energy per atom of the fcc crystal: the pair energies of one atom's neighbours, halved."""
    n = int(np.ceil(model.cutoff / a)) + 1
    grid = np.arange(-2 * n, 2 * n + 1)
    x, y, z = np.meshgrid(grid, grid, grid, indexing="ij")
    even = ((x + y + z) % 2 == 0) & ((x != 0) | (y != 0) | (z != 0))
    r = 0.5 * a * np.sqrt((x**2 + y**2 + z**2)[even])
    r = r[r < model.cutoff]
    eps, sig = model.pair(symbol, symbol)
    u = 4 * eps * ((sig / r) ** 12 - (sig / r) ** 6)
    if model.truncation == "switch":
        rc2, ro2 = model.cutoff**2, model.switch_onset**2
        u *= np.where(r * r < ro2, 1.0, (rc2 - r * r) ** 2 * (rc2 + 2 * r * r - 3 * ro2) / (rc2 - ro2) ** 3)
    if model.truncation == "shift":
        u -= 4 * eps * ((sig / model.cutoff) ** 12 - (sig / model.cutoff) ** 6)
    return 0.5 * float(u.sum())


@pytest.mark.parametrize("truncation", ["plain", "shift", "switch"])
@pytest.mark.parametrize(("symbol", "a"), [("Ne", 4.4), ("Ar", 5.25), ("Kr", 5.6), ("Xe", 6.2)])
def test_fcc_equals_the_lattice_sum(symbol: str, a: float, truncation: str) -> None:
    model = noble_gases(cutoff=10.0, truncation=truncation)
    expected = lattice_sum(model, symbol, a)
    for atoms in (bulk(symbol, a=a), bulk(symbol, a=a, cubic=True).repeat(2)):
        out = compute(model, atoms)
        assert out.energies.numpy() == pytest.approx(expected, rel=1e-11)
        assert out.forces.numpy() == pytest.approx(0, abs=1e-12)


def test_fcc_constants_in_the_limit_of_a_long_cutoff() -> None:
    # E = 2 ε (A12 (σ/R)¹² - A6 (σ/R)⁶) per atom, R the nearest neighbour distance (Kittel, ch. 3, eq. 12).
    model = LennardJones(epsilon={"Ar": 0.5}, sigma={"Ar": 1.0}, cutoff=16.0, truncation="plain")
    e = [float(compute(model, bulk("Ar", a=r * 2**0.5), skin=0.1).energies[0]) for r in (1.0, 2.0)]
    # Unknowns: A12 - A6 = e0, A12/4096 - A6/64 = e1, with the cutoff at 16 and 8 nearest neighbour distances.
    tail6 = [4 * np.pi * 2**0.5 / 3 / (16 / r) ** 3 for r in (1.0, 2.0)]  # ∫ρ 4πr² r⁻⁶ dr, ρ = √2
    e = [e[0] - tail6[0], e[1] - tail6[1] / 64]
    a12, a6 = np.linalg.solve([[1, -1], [1 / 4096, -1 / 64]], e)
    assert a12 == pytest.approx(12.13188, abs=2e-3)
    assert a6 == pytest.approx(14.45392, abs=2e-3)


# --- precision, company, remote ghosts ---------------------------------------------------------------------------


@pytest.mark.parametrize("truncation", ["plain", "shift", "switch"])
def test_float32_is_float64_to_its_precision(truncation: str) -> None:
    atoms = crystal("mixed", repeat=3)
    atoms.positions += 500.0  # large coordinates cost nothing: differences are taken in float64
    single, double = (
        compute(noble_gases(cutoff=8.5, truncation=truncation, dtype=d), as_is(atoms))
        for d in (torch.float32, torch.float64)
    )
    for name in ("forces", "energies", "virial"):
        a, b = getattr(single, name), getattr(double, name)
        assert a.dtype == torch.float64
        assert float((a - b).abs().max()) < 1e-5 * float(b.abs().max())
    assert float(single.forces.sum(0).abs().max()) < 1e-12, "momentum is conserved in float32 too"


def test_skin_and_cached_lists_do_not_matter() -> None:
    atoms, model = crystal("mixed"), MIXED
    without = compute(model, as_is(atoms), skin=0.0)
    with_skin = compute(model, as_is(atoms), skin=2.0)
    assert with_skin.forces.numpy() == pytest.approx(without.forces.numpy(), abs=1e-13)
    assert float(with_skin.energies.sum()) == pytest.approx(float(without.energies.sum()), rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("stress", [False, True])
def test_company_leaves_every_bit_as_it_is(dtype: torch.dtype, stress: bool) -> None:
    model = noble_gases(cutoff=8.5, dtype=dtype)
    mine = crystal("mixed", repeat=3)
    alone = model.compute(neighborhood_of(Batch.from_atoms(mine), 9.5), energy=stress, stress=stress)
    for before in ([BOXES["tiny"]], [BOXES["slab"], BOXES["wire"]], [BOXES["cluster"]] * 3):
        batch = Batch.from_atoms([*before, mine, BOXES["skew"]])
        out = model.compute(neighborhood_of(batch, 9.5), energy=stress, stress=stress)
        at, k = sum(len(b) for b in before), len(before)
        assert torch.equal(out.forces[at : at + len(mine)], alone.forces)
        if stress:
            assert torch.equal(out.energies[at : at + len(mine)], alone.energies)
            assert torch.equal(out.virial[k], alone.virial[0])
        else:
            assert out.energies is None
            assert out.virial is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("truncation", ["plain", "shift", "switch"])
def test_forces_have_the_same_bits_whatever_else_is_asked_for(truncation: Any, dtype: torch.dtype) -> None:
    onset = {"switch_onset": 6.0} if truncation == "switch" else {"switch_onset": None}
    model = dataclasses.replace(MIXED, truncation=truncation, dtype=dtype, **onset)
    systems = [crystal("mixed"), *boxes().values()]
    nb = neighborhood_of(Batch.from_atoms(systems), 9.5)
    full = model.compute(nb)
    for energy, stress in ((False, False), (True, False), (False, True)):
        part = model.compute(nb, energy=energy, stress=stress)
        assert torch.equal(part.forces, full.forces), (energy, stress)
        for asked, got, expected in ((energy, part.energies, full.energies), (stress, part.virial, full.virial)):
            assert torch.equal(got, expected) if asked else got is None


def test_two_halves_with_remote_ghosts_are_the_whole() -> None:
    model, reach = MIXED, 9.5
    atoms = crystal("mixed", repeat=3, seed=9)
    atoms.wrap()
    whole = compute(model, as_is(atoms))
    x, z, cell = atoms.positions, atoms.numbers, atoms.cell.array
    energies, forces, virial = np.zeros(len(x)), np.zeros((len(x), 3)), np.zeros((3, 3))
    left = x[:, 0] < 0.4 * cell[0, 0]
    for mine in (left, ~left):
        own = np.flatnonzero(mine)
        lo, hi = x[own, 0].min() - reach, x[own, 0].max() + reach
        ghosts = []  # others, and own images along x: that axis is not periodic in the list. Each pair once: the left
        for s in (0, 1):  # half sees the right one as it is, both see what is one cell further up.
            moved = x + s * cell[0]
            seen = (~left if mine is left else np.zeros_like(left)) if s == 0 else np.ones_like(left)
            which = np.flatnonzero((moved[:, 0] > lo) & (moved[:, 0] < hi) & seen)
            ghosts.append((which, moved[which]))
        rows = np.concatenate([own, *[g[0] for g in ghosts]])
        points = np.concatenate([x[own], *[g[1] for g in ghosts]])
        one = build_system_list(points, len(own), cell, np.array([False, True, True]), reach)
        out = model.compute(assemble([one], [points], [z[rows]], [cell], [atoms.pbc]))
        assert out.forces.shape == (len(rows), 3)
        np.add.at(energies, rows, out.energies.numpy())
        np.add.at(forces, rows, out.forces.numpy())
        virial += out.virial[0].numpy()
    assert energies == pytest.approx(whole.energies.numpy(), abs=1e-13)
    assert forces == pytest.approx(whole.forces.numpy(), abs=1e-13)
    assert virial == pytest.approx(whole.virial[0].numpy(), abs=1e-11)


# --- the value ---------------------------------------------------------------------------------------------------


def test_mixing_and_given_pairs() -> None:
    assert MIXED.pair("Kr", "Ne") == pytest.approx(((0.014 * 0.0031) ** 0.5, (3.65 + 2.74) / 2))
    assert MIXED.pair("Ar", "Kr") == MIXED.pair("Kr", "Ar") == pytest.approx((0.013, (3.65 + SIG) / 2))
    assert MIXED.pair("Ar", "Ne") == pytest.approx(((EPS * 0.0031) ** 0.5, 3.0))
    assert MIXED.species == {10, 18, 36}
    assert MIXED.symbols == ("Ne", "Ar", "Kr")


def test_it_is_a_value() -> None:
    same = LennardJones(
        epsilon={"Kr": 0.014, ("Ar", "Kr"): 0.013, "Ne": 0.0031, "Ar": EPS},
        sigma={"Ar-Ne": 3, "Ne": 2.74, "Ar": SIG, "Kr": 3.65},
        cutoff=8.5,
        switch_onset=6,
    )
    assert same == MIXED
    assert hash(same) == hash(MIXED)
    assert pickle.loads(pickle.dumps(MIXED)) == MIXED
    compute(MIXED, crystal())
    assert pickle.loads(pickle.dumps(MIXED)) == MIXED
    assert LennardJones.from_identity(json.loads(json.dumps(MIXED.identity()))) == MIXED
    for other in (
        {"cutoff": 8.6},
        {"truncation": "shift", "switch_onset": None},
        {"switch_onset": 6.1},
        {"dtype": torch.float32},
        {"sigma": {"Ar": SIG, "Kr": 3.65, "Ne": 2.74}},
    ):
        arguments = {
            name: getattr(MIXED, name) for name in ("epsilon", "sigma", "cutoff", "truncation", "switch_onset")
        }
        changed = LennardJones(**{**arguments, **other})
        assert changed != MIXED
        assert changed.identity() != MIXED.identity()
    with pytest.raises(AttributeError):
        MIXED.cutoff = 9.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": {"Ar": -1.0}}, "epsilon of Ar must be positive"),
        ({"sigma": {"Ar": 0.0}}, "sigma of Ar must be positive"),
        ({"sigma": {"Ar": float("nan")}}, "sigma of Ar must be positive"),
        ({"epsilon": {"Ar": 1.0, "Kr": 1.0}}, "same species, got Ar, Kr and Ar"),
        ({"epsilon": {"Ag0": 1.0}}, "'Ag0' is not a chemical symbol"),
        ({"epsilon": {"X": 1.0}}, "'X' is not a chemical symbol"),
        ({"epsilon": {18: 1.0}}, "keys of epsilon"),
        ({"epsilon": {}}, "epsilon must map"),
        ({"epsilon": 0.01}, "epsilon must map"),
        ({"epsilon": {"Ar": 1.0, ("Ar", "Kr"): 1.0}}, "pair Ar-Kr but no value for Kr"),
        ({"epsilon": {"Ar": 1, "Kr": 1, ("Ar", "Kr"): 1.0, ("Kr", "Ar"): 2.0}}, "Ar-Kr is given twice, as 1.0 and 2.0"),
        ({"cutoff": 0.0}, "cutoff must be positive"),
        ({"cutoff": float("inf")}, "cutoff must be positive"),
        ({"switch_onset": 8.5}, "switch_onset must lie between"),
        ({"switch_onset": -1.0}, "switch_onset must lie between"),
        ({"truncation": "shift", "switch_onset": 5.0}, "for truncation='switch' only"),
        ({"truncation": "smooth"}, "truncation must be one of plain, shift, switch"),
        ({"dtype": torch.float16}, r"dtype must be torch\.float64"),
    ],
)
def test_bad_parameters_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LennardJones(**{**ARGON, "cutoff": 8.5, **change})


def test_another_models_identity_is_refused() -> None:
    with pytest.raises(ValueError, match="not SevenNet version 1"):
        LennardJones.from_identity({"name": "SevenNet", "version": 1})


def test_unknown_species_are_named_and_never_taken_for_another() -> None:
    model = LennardJones(**ARGON, cutoff=8.5)
    assert model.unknown_species([18, 36, 2, 36]) == ["He", "Kr"]
    nb = neighborhood_of(Batch.from_atoms(crystal("mixed")), 9.5)
    with pytest.raises(ValueError, match="knows Ar, not Ne, Kr"):
        model.compute(nb)
    # One that slips past the check (a remote ghost): its neighbours' forces are NaN, not argon's.
    good = neighborhood_of(Batch.from_atoms(crystal()), 9.5)
    model.compute(good)
    good.numbers[good.n_owned :] = 36
    assert bool(torch.isnan(model.compute(good).forces).any())
    # In-place changes of the owned ones are noticed.
    good.numbers[3] = 54
    with pytest.raises(ValueError, match="not Xe"):
        model.compute(good)


def test_noble_gases() -> None:
    model = noble_gases()
    assert model.symbols == ("Ne", "Ar", "Kr", "Xe")
    assert [round(model.pair(s, s)[0] * 1e3, 2) for s in model.symbols] == [3.12, 10.42, 14.04, 19.97]
    # a = 1.5418 σ for the full sum (R = 1.0902 σ, Kittel eq. 14); E = -8.61 ε per atom (eq. 16).
    wide = noble_gases(cutoff=40.0, truncation="plain")
    for symbol in model.symbols:
        eps, sig = wide.pair(symbol, symbol)
        out = compute(wide, bulk(symbol, a=1.5418 * sig), skin=0.1)
        assert float(out.energies[0]) == pytest.approx(-8.61 * eps, rel=1e-2)
        assert float(out.virial[0].trace()) / 3 == pytest.approx(0, abs=0.1 * eps)


def test_stress_has_the_sign_of_ase() -> None:
    model = LennardJones(**ARGON, cutoff=8.5)
    for a, sign in ((5.0, -1), (5.6, 1)):  # compressed: pushes outwards, negative; stretched: tensile, positive
        batch = Batch.from_atoms(bulk("Ar", a=a))
        stress = -compute(model, batch).virial[0] / volume(batch.cell)[0]
        assert np.sign(float(stress.trace())) == sign
