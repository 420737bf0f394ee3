"""Building neighbour lists, ours beside vesin, nvalchemiops (its CPU kernels) and ASE, in one run, on one core.

    python benchmarks/neighbor_lists.py [--repeats 7]

Every program builds the list of the same rattled crystals, taking turns; the first build of each (compilation) is not
counted. Reported is the median CPU time of the one thread that all of them use, so that others on the machine disturb
little. Half lists hold each pair once, full lists twice. What comes out differs a little: ours also writes the images
that a list needs and the pairs atom by atom, nvalchemiops a matrix of neighbours, vesin and ASE unsorted pairs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.neighborlist import primitive_neighbor_list
from rich.console import Console
from rich.table import Table

from mattermill.domain.neighbors import build_system_list

#: Pairs; beyond ASE takes seconds.
ASE_UP_TO = 50_000


def crystals() -> list[tuple[str, Atoms, float]]:
    """Name, structure and reach in Å."""
    found = [
        ("Cu, primitive cell", bulk("Cu", a=3.6), 11.0),
        ("Ar", bulk("Ar", a=5.3, cubic=True).repeat(2), 9.5),
        ("Cu", bulk("Cu", a=3.6, cubic=True).repeat(5), 11.0),
        ("Ar", bulk("Ar", a=5.3, cubic=True).repeat(5), 9.5),
        ("Ar", bulk("Ar", a=5.3, cubic=True).repeat(8), 9.5),
        ("Ar slab", bulk("Ar", a=5.3, cubic=True).repeat(8), 9.5),
        ("Ar", bulk("Ar", a=5.3, cubic=True).repeat(20), 9.5),
    ]
    for name, atoms, _ in found:
        atoms.rattle(0.1, seed=1)
        atoms.wrap()
        atoms.pbc = (True, True, "slab" not in name)
    return found


def programs(atoms: Atoms, reach: float) -> dict[str, Callable[[], Any]]:
    """Each gives its pairs, or how many there are."""
    points, cell, pbc, n = atoms.positions, atoms.cell.array, atoms.pbc, len(atoms)

    def ours(pairs: Any) -> int:
        return len(build_system_list(points, n, cell, pbc, reach, pairs=pairs).neighbors)

    found: dict[str, Callable[[], Any]] = {"half": lambda: ours("half"), "full": lambda: ours("full")}
    found |= by_vesin(points, cell, pbc, reach) | by_nvalchemiops(points, cell, pbc, reach, n)
    if ours("full") <= ASE_UP_TO:
        found["ASE, full"] = lambda: len(primitive_neighbor_list("ijS", pbc, cell, points, reach)[0])
    return found


def by_vesin(points: np.ndarray, cell: np.ndarray, pbc: np.ndarray, reach: float) -> dict[str, Callable[[], Any]]:
    from vesin import NeighborList

    def build(full: bool) -> int:
        finder = NeighborList(cutoff=reach, full_list=full, n_threads=1)
        (pairs, _) = finder.compute(points, cell, periodic=pbc, quantities="PS", copy=False)
        return len(pairs)

    return {"vesin, half": lambda: build(False), "vesin, full": lambda: build(True)}


def by_nvalchemiops(
    points: np.ndarray, cell: np.ndarray, pbc: np.ndarray, reach: float, n: int
) -> dict[str, Callable[[], Any]]:
    try:
        from nvalchemiops.torch.neighbors.cell_list import cell_list
    except ImportError:
        return {}
    # Told how many neighbours to expect, which it would else estimate and fill a matrix several times as wide.
    most = int(build_system_list(points, n, cell, pbc, reach, pairs="full").count.max()) + 1
    x, box, periodic = torch.from_numpy(points), torch.from_numpy(cell)[None], torch.from_numpy(pbc)

    def build(half: bool) -> int:
        _, counts, _ = cell_list(x, reach, box, periodic, max_neighbors=most, half_fill=half)
        return int(counts.sum())

    return {"nvalchemiops, half": lambda: build(True), "nvalchemiops, full": lambda: build(False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    gc.disable()  # ASE leaves much behind, which the build after it would clear away
    torch.set_num_threads(1)
    table = Table(
        "system", "reach, Å", "pairs", "program", "ms, median (min - max)", "times ours", title="Neighbour lists"
    )
    for name, atoms, reach in crystals():
        builds = programs(atoms, reach)
        pairs = {program: build() for program, build in builds.items()}
        times: dict[str, list[float]] = {program: [] for program in builds}
        for _ in range(repeats):
            for program, build in builds.items():
                began = time.thread_time()
                build()
                times[program].append(1e3 * (time.thread_time() - began))
        for program, spent in times.items():
            kind = "full" if program.endswith("full") else "half"
            assert pairs[program] == pairs[kind], (name, pairs)
            ratio = statistics.median(spent) / statistics.median(times[kind])
            row = f"{statistics.median(spent):.3g} ({min(spent):.3g} - {max(spent):.3g})"
            label = f"ours, {program}" if program in ("half", "full") else program
            table.add_row(f"{len(atoms)} {name}", str(reach), str(pairs[program]), label, row, f"{ratio:.2g}")
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
