"""What a step costs outside the model and the neighbour lists, and what ranks tell each other in it.

    python benchmarks/runner_overhead.py [--atoms 256 4000 32000] [--ranks 1 2] [--steps 100]

Argon (8.5 Å + 1 Å skin, 60 K, 2 fs), so many atoms on each rank; NVE, Langevin and FIRE. Timers stand around the model
and around the making of neighbour lists; all else is counted as outside: integrating, refreshing, talking and waiting
for each other, moving atoms between ranks, and Python. First table: microseconds of a step (mean over the steps, those
with a rebuild among them), the share outside, and the time outside in a step without a rebuild (median, and the best
tenth: what it is when nobody else computes). Second table: messages, bytes and exchanges of a step without a rebuild,
per rank, at most.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ.setdefault("OMP_NUM_THREADS", "1")

#: What may lie outside, as a share of the step, at so many atoms a rank.
ALLOWED = {"NVE": 0.08, "Langevin": 0.20}
JUDGED = 32_000
KELVIN, DT = 60.0, 2.0


class Clock:
    """Seconds spent in what it is told to watch."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, function: Any) -> Any:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed

    def phases(self, phases: Any) -> Any:
        """The phases of a model, what it does between its yields timed."""

        def timed(nb: Any, **kwargs: Any) -> Iterator[Any]:
            inner = phases(nb, **kwargs)
            ahead = self.watch(lambda: next(inner))
            while True:
                try:
                    value = ahead()
                except StopIteration as end:
                    return end.value
                yield value

        return timed


def propagator(ensemble: str) -> Any:
    from mattermill.stages.integrators.langevin import Langevin
    from mattermill.stages.integrators.verlet import VelocityVerlet
    from mattermill.stages.optimizers.fire import Fire

    return {"NVE": VelocityVerlet, "Langevin": Langevin, "FIRE": lambda: Fire(fmax=1e-12)}[ensemble]()


def crystal(atoms: int, ranks: int) -> Any:
    """Argon of about so many atoms on each of the ranks, side by side along x."""
    import numpy as np
    import torch
    from ase.build import bulk

    import mattermill as mm
    from mattermill.domain.units import ACC, KB

    cells = round((atoms / 4) ** (1 / 3))
    argon = bulk("Ar", "fcc", a=5.3, cubic=True).repeat((cells * ranks, cells, cells))
    rng = np.random.default_rng(4711)
    argon.set_velocities(rng.normal(scale=np.sqrt(KB * ACC * KELVIN / 39.948), size=(len(argon), 3)))
    batch = mm.Batch.from_atoms([argon], ids=["argon"])
    velocities = torch.from_numpy(rng.normal(scale=np.sqrt(KB * ACC * KELVIN / 39.948), size=(len(argon), 3)))
    systems = {name: torch.tensor([value]) for name, value in {"timestep": DT, "temperature": KELVIN / 2}.items()}
    systems = {name: value.double() for name, value in systems.items()} | {"noise_key": torch.tensor([7])}
    return batch.with_fields(atoms={"velocities": velocities}, systems=systems)


def measure(mesh: Any, ensemble: str, atoms: int, steps: int) -> dict[str, Any]:
    """One row of the tables, as this rank sees it."""
    import mattermill as mm
    from mattermill.domain import aboard

    clock = Clock()
    model = mm.models.LennardJones(epsilon={"Ar": 0.0103}, sigma={"Ar": 3.4}, cutoff=8.5, truncation="plain")
    object.__setattr__(model, "phases", clock.phases(model.phases))
    made, aboard.build_lists = aboard.build_lists, clock.watch(aboard.build_lists)
    whole, outside, still, counts = [], [], [], [(0, 0, 0)]
    try:
        with mm.DomainParallel(model, propagator(ensemble), mesh, grid=(mesh.size, 1, 1)) as runner:
            runner.partition(crystal(atoms, mesh.size) if mesh.is_lead else None)
            runner.run(20)
            for _ in range(steps):
                before, built = (mesh.messages, mesh.bytes_sent, mesh.collectives), runner.rebuilds
                clock.seconds, start = 0.0, time.perf_counter()
                runner.step()
                whole.append(time.perf_counter() - start)
                outside.append(whole[-1] - clock.seconds)
                if runner.rebuilds == built:
                    still.append(outside[-1])
                    after = (mesh.messages, mesh.bytes_sent, mesh.collectives)
                    counts.append(tuple(a - b for a, b in zip(after, before, strict=True)))
            here = runner.state.n_owned
    finally:
        aboard.build_lists = made
    return {
        "atoms": here,
        "step": statistics.mean(whole),
        "share": sum(outside) / sum(whole),
        "outside": statistics.median(still),
        "best": statistics.quantiles(still, n=10)[0],
        "counts": [max(column) for column in zip(*counts, strict=True)],
        "rebuilds": steps - len(still),
        "wire": mesh.wire,
    }


def rank_main(port: int, rank: int, size: int, task: tuple[str, int, int], queue: Any) -> None:
    import torch
    from torch.distributed import TCPStore

    from mattermill.domain.mesh import Mesh

    torch.set_num_threads(1)
    with Mesh.join(TCPStore("127.0.0.1", port, is_master=False), rank, size) as mesh:
        queue.put(json.dumps({"rank": rank, **measure(mesh, *task)}))


def several(size: int, task: tuple[str, int, int]) -> list[dict[str, Any]]:
    """The rows of all ranks, in processes of their own."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=rank_main, args=(store.port, r, size, task, queue)) for r in range(size)]
    for process in ranks:
        process.start()
    try:
        return [json.loads(queue.get(timeout=300)) for _ in ranks]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def verdict(ensemble: str, atoms: int, share: float) -> str:
    if ensemble not in ALLOWED or round(atoms / JUDGED, 1) != 1.0:
        return f"{100 * share:.1f} %"
    allowed = ALLOWED[ensemble]
    return f"{100 * share:.1f} % ({'within' if share <= allowed else 'EXCEEDS'} {100 * allowed:.0f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, nargs="+", default=[256, 4_000, 32_000], help="on each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ensembles", nargs="+", default=["NVE", "Langevin", "FIRE"])
    options = parser.parse_args()
    import torch

    from mattermill.domain.mesh import Mesh

    torch.set_num_threads(1)
    costs = Table("ranks", "atoms each", "ensemble", "step", "rebuilds", "outside", "of a step", "best tenth")
    costs.title = "µs of a step, and outside the model and the lists"
    talk = Table("ranks", "atoms each", "ensemble", "wire", "messages", "bytes", "exchanges")
    talk.title = "what a rank sends in a step without a rebuild"
    for size in options.ranks:
        for atoms in options.atoms:
            for ensemble in options.ensembles:
                task = (ensemble, atoms, options.steps)
                rows = [measure(Mesh.single(), *task)] if size == 1 else several(size, task)
                # The rank that has the most to do outside is the one that others wait for least.
                row = max(rows, key=lambda one: one["share"])
                share, still = verdict(ensemble, row["atoms"], row["share"]), 1e6 * row["outside"]
                first = (str(size), str(row["atoms"]), ensemble)
                costs.add_row(
                    *first,
                    f"{1e6 * row['step']:.0f}",
                    str(row["rebuilds"]),
                    share,
                    f"{still:.0f}",
                    f"{1e6 * row['best']:.0f}",
                )
                counts = [max(column) for column in zip(*(one["counts"] for one in rows), strict=True)]
                talk.add_row(*first, row["wire"], *map(str, counts))
    Console(width=120).print(costs, talk)


if __name__ == "__main__":
    main()
