"""Same code, same result: in a notebook's loop, in a thread, under torchrun, in a Dask gang, on part of a larger world.

This file is its own script: torchrun runs it with the name of a file to write.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.stages.run import StageRun

STEPS = 40
#: Stages go by name into the noise: the same ones everywhere.
STAGES = {
    "nve": mm.Produce(mm.NVE(), steps=STEPS, every=0, dt=4.0, name="nve", ranks=2),
    "langevin": mm.Produce(mm.NVT(90, friction=5.0), steps=STEPS, every=0, dt=4.0, name="langevin", ranks=2),
}
SEED = 11


def model() -> Any:
    return mm.models.noble_gases(cutoff=6.0, truncation="switch")


def structures() -> list[Atoms]:
    """One large enough to be divided by two ranks as a campaign divides it, one that stays whole."""
    large = bulk("Ar", "fcc", 5.4, cubic=True).repeat((7, 6, 6))
    small = bulk("Kr", "fcc", 5.8, cubic=True).repeat((2, 2, 2))
    rng = np.random.default_rng(5)
    for atoms, name in ((large, "large"), (small, "small")):
        atoms.info["id"] = name
        atoms.positions += rng.normal(scale=0.05, size=atoms.positions.shape)
        atoms.set_velocities(rng.normal(scale=0.03, size=atoms.positions.shape))
    return [large, small]


def work(mesh: Any) -> dict[str, Batch] | None:
    """Both stages; final states on the lead. What every other place does is compared with this in one process."""
    finals = {}
    for name, stage in STAGES.items():
        run = StageRun(stage, model(), mesh, seed=SEED)
        run.admit(Batch.from_atoms(structures()) if run.mesh.is_lead else None)
        run.advance(steps=1)
        domains = int(np.prod(run.runner.grids["large"]))
        assert domains == min(run.mesh.size, 2), f"the large system lies on {domains} ranks"
        finals[name] = run.advance().finished
        run.close()
    return finals if mesh is None or mesh.is_lead else None


@pytest.fixture(scope="module")
def here() -> dict[str, Batch]:
    """In this process, one rank."""
    return work(None)


def assert_same(got: dict[str, Batch] | None, here: dict[str, Batch], tolerance: float = 1e-9) -> None:
    assert got is not None
    for name, expected in here.items():
        batch = got[name].select(expected.ids)
        for field in ("positions", "velocities", "forces", "energy"):
            a, b = getattr(batch, field), getattr(expected, field)
            error = float((a - b).abs().max() / max(float(b.abs().max()), 1e-3 if field == "velocities" else 1.0))
            assert error <= tolerance, (name, field, error)
        assert torch.equal(batch.atom_id, expected.atom_id)
        assert batch.step.tolist() == [STEPS] * 2


def test_the_two_ensembles_differ_and_atoms_move(here) -> None:
    start = Batch.from_atoms(structures())
    nve, langevin = (here[n].select(start.ids).positions for n in STAGES)
    assert float((nve - start.positions).abs().max()) > 0.3
    assert float((nve - langevin).abs().max()) > 1e-3


def test_in_a_running_event_loop(here) -> None:
    """As in a notebook, whose kernel runs one."""

    async def cell() -> dict[str, Batch] | None:
        await asyncio.sleep(0)
        return work(None)

    assert_same(asyncio.run(cell()), here, 0.0)


def test_in_a_thread(here) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(work(None))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 2
    for got in found:
        assert_same(got, here, 0.0)


@pytest.mark.parametrize("size", [2, 3])
def test_under_torchrun(here, size: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    done = subprocess.run(
        [*command, str(Path(__file__).resolve()), str(tmp_path / "out.pt")],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "out.pt", weights_only=False), here)


def test_in_a_dask_gang(here, client, tmp_path: Path) -> None:
    recipe = mm.Recipe("same", model=model(), graph=list(STAGES.values()), seed=SEED)
    campaign = recipe.run(structures(), out=tmp_path / "same.mill", client=client)
    assert_same({name: campaign.structures(name) for name in STAGES}, here)


def _on_part(world, members) -> dict[str, Batch] | None:
    mesh = world.sub(members)
    if mesh is None:
        return None
    try:
        return work(mesh)
    finally:
        mesh.close()


@pytest.mark.parametrize("members", [[1, 2], [3, 1], [2, 3, 1]])
def test_on_a_part_of_a_larger_world(ranks, here, members) -> None:
    """Ranks that do not start at 0, in an order of their own: the first of them leads."""
    results = ranks.run(_on_part, 4, members)
    assert [r is not None for r in results] == [r == members[0] for r in range(4)]
    assert_same(results[members[0]], here)


def _side_by_side(world) -> dict[str, Batch] | None:
    """Two parts at work at the same time."""
    meshes = [world.sub([0, 2]), world.sub([3, 1])]
    (mesh,) = [m for m in meshes if m is not None]
    with mesh:
        return work(mesh)


def test_on_two_parts_at_once(ranks, here) -> None:
    results = ranks.run(_side_by_side, 4)
    for rank in (0, 3):
        assert_same(results[rank], here)


def main() -> None:
    torch.set_num_threads(1)
    with mm.Mesh.from_env("cpu") as mesh:
        finals = work(mesh)
        if mesh.is_lead:
            torch.save(finals, sys.argv[1])


if __name__ == "__main__":
    main()
