"""Small systems of every kind, and helpers to compare runs to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk, fcc111

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.stages.reporter import SegmentReport
from mattermill.stages.run import StageRun

MODEL = mm.models.LennardJones(
    epsilon={"Ne": 0.0031, "Ar": 0.0104, "Kr": 0.0140},
    sigma={"Ne": 2.74, "Ar": 3.40, "Kr": 3.65},
    cutoff=7.0,
    truncation="switch",
    switch_onset=6.0,
)


def argon(repeat: int = 2, a: float = 5.3, seed: int = 1) -> Atoms:
    atoms = bulk("Ar", "fcc", a=a, cubic=True).repeat(repeat)
    atoms.rattle(0.05, seed=seed)
    return atoms


def krypton() -> Atoms:
    """A primitive cell much smaller than the cutoff, triclinic."""
    return bulk("Kr", "fcc", a=5.8)


def slab() -> Atoms:
    atoms = fcc111("Ar", (2, 3, 3), a=5.3, vacuum=9.0)
    atoms.rattle(0.03, seed=2)
    return atoms


def cluster() -> Atoms:
    rng = np.random.default_rng(3)
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3), -1).reshape(-1, 3) * 3.8
    return Atoms("Ne4Ar4", positions=grid + rng.normal(0, 0.1, (8, 3)))


def dimer(distance: float = 3.6) -> Atoms:
    return Atoms("Ar2", positions=[[0, 0, 0], [distance, 0, 0]])


KINDS = {"argon": argon, "krypton": krypton, "slab": slab, "cluster": cluster, "dimer": dimer}


def batch(*names: str) -> Batch:
    return Batch.from_atoms([KINDS[n]() for n in names], ids=list(names))


def finish(stage: Any, systems: Batch, *, mesh: Any = None, reporter: Any = None, **options: Any) -> SegmentReport:
    """All systems through a stage, in one go."""
    run = StageRun(stage, MODEL, mesh, reporter, **options)
    run.admit(systems if run.mesh.is_lead else None)
    report = run.advance()
    assert report.idle
    run.close()
    return report


def cut_up(stage: Any, systems: Batch, cuts: list[int], company: list[Batch], **options: Any) -> list[SegmentReport]:
    """The same, interrupted after each of these numbers of steps, every time going on in a new process's place and
    with one more system beside it."""
    import pickle

    reports = []
    state: Batch | None = systems
    mesh = options.pop("mesh", None)
    for k, steps in enumerate([*cuts, None]):
        run = StageRun(stage, MODEL, mesh, **options)
        if run.mesh.is_lead:
            joined = Batch.concat([*company[k : k + 1], state])
            # other ids first: places in the arrays change, too
            run.admit(joined)
        else:
            run.admit(None)
        reports.append(run.advance(steps=steps))
        state = run.resident()
        if state is not None:
            state = pickle.loads(pickle.dumps(state))
        run.close()
    return reports


def final(reports: list[SegmentReport]) -> Batch:
    return Batch.concat([r.finished for r in reports])


def assert_same_bits(one: Batch, other: Batch, ids: Any = None) -> None:
    """Every field of these systems equals, to the last bit; fields that only one side has must be neutral fillers."""
    for system_id in ids if ids is not None else one.ids:
        a, b = one.select([system_id]), other.select([system_id])
        for name in ("positions", "velocities", "forces", "cell", "energy", "stress", "step", "atom_id"):
            x, y = getattr(a, name), getattr(b, name)
            same = torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) if x.is_floating_point() else torch.equal(x, y)
            assert same, f"{name} of {system_id} differs by {(x - y).abs().max()}"


def results(reports: list[SegmentReport]) -> dict[str, dict[str, float]]:
    return {o.id: o.results for r in reports for o in r.outcomes}
