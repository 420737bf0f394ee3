"""Small systems together in one batch, and one after the other: what batching saves.

    python benchmarks/batched_vs_solo.py [--atoms 32 108 256] [--copies 16] [--steps 200] [--repeats 3]

Langevin argon at 60 K, `mattermill.simulate` on one rank, one thread. Both ways do the same steps of the same systems
and must end at the same bits; the benchmark checks that they do. Reported are atom-steps per second, median.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import statistics
import time

import torch
from ase.build import bulk
from rich.console import Console
from rich.table import Table

import mattermill as mm


def crystals(atoms: int, copies: int) -> mm.Batch:
    edge = round((atoms / 4) ** (1 / 3))
    one = bulk("Ar", "fcc", a=5.3, cubic=True) * (edge, edge, edge)
    return mm.Batch.from_atoms([one] * copies, ids=[f"argon-{k}" for k in range(copies)])


def simulate(batch: mm.Batch, steps: int) -> mm.Batch:
    model = mm.models.noble_gases(cutoff=8.5)
    return mm.simulate(model, batch, mm.NVT(60.0), steps=steps, dt=2.0, seed=1)


def together(batch: mm.Batch, steps: int) -> list[mm.Batch]:
    return simulate(batch, steps).split()


def alone(batch: mm.Batch, steps: int) -> list[mm.Batch]:
    return [simulate(single, steps) for single in batch.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, nargs="+", default=[32, 108, 256])
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    title = f"{arguments.copies} systems, {arguments.steps} steps, median of {arguments.repeats}; thousand atom-steps/s"
    table = Table("atoms each", "one batch", "one by one", "batched / solo", "same bits", title=title)
    simulate(crystals(32, 1), 2)  # compile the kernels
    for atoms in arguments.atoms:
        batch = crystals(atoms, arguments.copies)
        seconds: dict[str, list[float]] = {"together": [], "alone": []}
        ends = {}
        for _ in range(arguments.repeats):
            for name, way in (("together", together), ("alone", alone)):
                start = time.perf_counter()
                ends[name] = way(batch, arguments.steps)
                seconds[name].append(time.perf_counter() - start)
        same = all(torch.equal(a.positions, b.positions) for a, b in zip(*ends.values(), strict=True))
        work = batch.n_atoms * arguments.steps
        rates = {name: work / statistics.median(times) for name, times in seconds.items()}
        table.add_row(
            str(batch.n_atoms // len(batch)),
            f"{rates['together'] / 1e3:.0f}",
            f"{rates['alone'] / 1e3:.0f}",
            f"{rates['together'] / rates['alone']:.2f}",
            "yes" if same else "NO",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
