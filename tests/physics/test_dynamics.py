"""Conservation of energy and the canonical distribution."""

from __future__ import annotations

import numpy as np
import pytest
from ase.build import bulk
from scipy import stats

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.domain.units import KB
from mattermill.stages.run import StageRun

ARGON = mm.models.noble_gases(truncation="switch")
# The distribution does not depend on the potential: a short cutoff is cheaper.
SHORT = mm.models.noble_gases(truncation="switch", cutoff=6.5)


def crystal(repeat: int, a: float = 5.4, copies: int = 1) -> Batch:
    atoms = bulk("Ar", "fcc", a=a, cubic=True).repeat(repeat)
    return Batch.from_atoms([atoms] * copies, ids=[f"argon-{k}" for k in range(copies)])


def series(stage, systems: Batch, model=ARGON) -> dict[str, dict[str, np.ndarray]]:
    """Time series of each system in a stage, and its final state."""
    run = StageRun(stage, model)
    run.admit(systems)
    report = run.advance()
    columns = report.thermo
    table = {}
    for k, system_id in enumerate(report.thermo_ids):
        rows = columns["system"] == k
        table[system_id] = {name: values[rows] for name, values in columns.items()}
    return table, report.finished


def drift(repeat: int, steps: int, warm: int) -> tuple[float, float]:
    """Drift of the total energy over `steps` of 2 fs at 100 K (fitted slope), and the scatter about it; eV/atom."""
    _, state = series(mm.Heat(start=100, stop=100, steps=warm, dt=2.0, friction=5.0, thermo_every=0), crystal(repeat))
    table, _ = series(mm.Produce(mm.NVE(), steps=steps, dt=2.0, every=0), state)
    one = table["argon-0"]
    total = (one["potential_energy"] + one["kinetic_energy"]) / state.n_atoms
    assert 80 < one["temperature"].mean() < 120
    slope, offset = np.polyfit(one["time"], total, 1)
    return abs(slope) * one["time"][-1], float(np.std(total - slope * one["time"] - offset))


def test_nve_does_not_drift() -> None:
    """256 atoms for 2 ps; the full size is below."""
    change, scatter = drift(4, 1000, 200)
    assert change < 1e-5
    assert scatter < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nve_of_4000_atoms_for_10_ps_does_not_drift() -> None:
    change, scatter = drift(10, 5000, 300)
    print(f"drift {change:.2e} eV/atom in 10 ps, scatter {scatter:.2e}")
    assert change < 1e-5


def test_energy_error_falls_as_the_square_of_the_time_step() -> None:
    """The scatter of velocity Verlet's energy, over the same 0.4 ps: slope 2 in dt."""
    _, state = series(mm.Heat(start=60, stop=60, steps=200, dt=2.0, friction=5.0, thermo_every=0), crystal(3))
    errors = []
    steps = np.array([2.0, 4.0, 8.0])
    for dt in steps:
        table, _ = series(mm.Produce(mm.NVE(), steps=int(400 / dt), dt=float(dt), every=0, thermo_every=1), state)
        one = table["argon-0"]
        total = one["potential_energy"] + one["kinetic_energy"]
        errors.append(np.max(np.abs(total - total[0])))
    slope = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert 1.8 < slope < 2.2


def canonical(copies: int, steps: int) -> tuple[float, float, float]:
    """Mean temperature over target, and p of the kinetic energies' distribution: chi-square and Kolmogorov-Smirnov."""
    target, dt, friction, every = 80.0, 4.0, 10.0, 125
    stage = mm.Produce(mm.NVT(target, friction=friction), steps=steps, dt=dt, every=0, thermo_every=every)
    table, state = series(stage, crystal(2, copies=copies), SHORT)
    # samples 0.5 ps apart, five times the relaxation time of the velocities; the first 2 ps are not counted
    kinetic = np.concatenate([one["kinetic_energy"][4:] for one in table.values()])
    dof = 3 * 32
    reduced = 2 * kinetic / (KB * target)
    edges = stats.chi2(dof).ppf(np.linspace(0, 1, 13))
    observed, _ = np.histogram(reduced, edges)
    assert state.n_atoms == 32 * copies
    return (
        reduced.mean() / dof,
        stats.chisquare(observed).pvalue,
        stats.kstest(reduced, stats.chi2(dof).cdf).pvalue,
    )


def test_langevin_samples_the_canonical_distribution() -> None:
    """24 crystals of 32 atoms for 14 ps: the standard error of the mean temperature is 0.6 % / sqrt(2)."""
    mean, p_chi, p_ks = canonical(24, 3500)
    assert abs(mean - 1) < 0.01
    assert p_chi > 1e-3
    assert p_ks > 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_langevin_over_a_long_run() -> None:
    mean, p_chi, p_ks = canonical(24, 15_000)
    print(f"mean/target {mean:.4f}, p {p_chi:.3f} (chi-square), {p_ks:.3f} (Kolmogorov-Smirnov)")
    assert abs(mean - 1) < 0.008  # three standard errors of 2,800 samples
    assert p_chi > 1e-3
    assert p_ks > 1e-3


def test_two_targets_share_a_batch_and_a_ramp_ends_where_it_should() -> None:
    """Per-system temperature, friction and time step; and the ramp of `Heat`."""
    systems = crystal(3, copies=2)
    cold = mm.Equilibrate(mm.NVT(20, friction=10), steps=400, dt=4.0)
    from mattermill.stages.run import StageRun as Run

    run = Run(cold, ARGON)
    run.admit(systems)
    run.advance(steps=1)
    state = run.runner.state.batch
    state.systems["temperature"][1], state.systems["friction"][1], state.systems["timestep"][1] = 70.0, 5.0, 2.0
    report = run.advance()
    results = {o.id: o.results for o in report.outcomes}
    assert 14 < results["argon-0"]["temperature"] < 26
    assert 50 < results["argon-1"]["temperature"] < 90
    table, _ = series(mm.Heat(start=10, stop=90, steps=1000, dt=4.0, friction=10.0), systems.select([0]))
    temperature = table["argon-0"]["temperature"]
    ramp = np.interp(table["argon-0"]["step"], [0, 1000], [10, 90])
    late = ramp > 30
    assert abs(np.mean(temperature[late] / ramp[late]) - 1) < 0.08


def test_drawn_velocities_are_maxwell_boltzmann_without_drift() -> None:
    alloy = bulk("Ar", "fcc", a=5.4, cubic=True).repeat(6)
    alloy.numbers[::3] = 54
    stage = mm.Heat(start=200, stop=200, steps=1)
    drawn = stage.prepare(Batch.from_atoms(alloy), seed=3)
    v, m = drawn.velocities.numpy(), drawn.masses.numpy()
    from mattermill.domain.units import ACC

    scaled = v * np.sqrt(m / (KB * ACC * 200))[:, None]
    for axis in range(3):
        assert stats.kstest(scaled[:, axis], "norm").pvalue > 1e-3
    assert np.abs((v * m[:, None]).sum(axis=0)).max() < 1e-10 * np.abs(v * m[:, None]).sum()
    again = stage.prepare(Batch.from_atoms([alloy[:4], alloy], ids=["x", "system-0"]), seed=3)
    np.testing.assert_array_equal(again.select(["system-0"]).velocities.numpy(), v)


def test_velocity_verlet_follows_ases() -> None:
    """The same trajectory as ASE's VelocityVerlet over 100 steps; its constants differ in the eighth digit."""
    from ase import units
    from ase.calculators.lj import LennardJones
    from ase.md.verlet import VelocityVerlet

    from mattermill.domain.models.noble import EPSILON, SIGMA

    cutoff = 6.5
    model = mm.models.noble_gases(truncation="switch", cutoff=cutoff, switch_onset=5.0)
    warm = mm.simulate(model, crystal(2), mm.NVE(), steps=1, dt=2.0, temperature=120)
    (atoms,) = warm.to_atoms()
    ours = mm.simulate(model, atoms, mm.NVE(), steps=100, dt=2.0)
    atoms.calc = LennardJones(epsilon=EPSILON["Ar"], sigma=SIGMA["Ar"], rc=cutoff, ro=5.0, smooth=True)
    start = atoms.positions.copy()
    VelocityVerlet(atoms, timestep=2.0 * units.fs).run(100)
    moved = np.abs(atoms.positions - start).max()
    assert moved > 0.1
    np.testing.assert_allclose(ours.positions.numpy(), atoms.positions, atol=1e-6 * moved)
    assert float(ours.energy[0]) == pytest.approx(atoms.get_potential_energy(), rel=1e-6)
