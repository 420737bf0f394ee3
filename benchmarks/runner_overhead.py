"""Time a step takes outside the model: `python benchmarks/runner_overhead.py [--ranks 2] [--steps 500]`.

NVE steps without a rebuild, 256 and 4,000 atoms, on one rank and on more (spawned here): the whole step, the part of it
outside the model (median, and the best tenth: what it is when nobody else computes), messages and bytes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


class Timed:
    """A model, and how long its last call took."""

    def __init__(self, model: Any) -> None:
        self.model, self.seconds = model, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def compute(self, nb: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = self.model.compute(nb, **kwargs)
        self.seconds = time.perf_counter() - start
        return out


def crystal(repeat: int) -> Any:
    import numpy as np
    from ase.build import bulk

    import mattermill as mm

    atoms = bulk("Ar", "fcc", 5.3, cubic=True).repeat(repeat)
    atoms.set_velocities(np.random.default_rng(0).normal(scale=0.014, size=(len(atoms), 3)))
    return mm.Batch.from_atoms(atoms, ["argon"])


def measure(mesh: Any, repeat: int, steps: int) -> str | None:
    """Microseconds of steps without a rebuild."""
    import mattermill as mm
    from mattermill.stages.integrators.verlet import VelocityVerlet

    model = Timed(mm.models.noble_gases(cutoff=8.5))
    with mm.DomainParallel(model, VelocityVerlet(), mesh, grid=(mesh.size, 1, 1)) as runner:  # type: ignore[arg-type]
        runner.partition(crystal(repeat) if mesh.is_lead else None)
        atoms = int(mesh.sum(runner.state.batch.positions.new_tensor([runner.state.n_owned])))
        runner.run(20)
        whole, outside, counts = [], [], []
        for _ in range(steps):
            before, built = (mesh.messages, mesh.bytes_sent, mesh.collectives), runner.rebuilds
            start = time.perf_counter()
            runner.step()
            seconds = time.perf_counter() - start
            if runner.rebuilds == built:
                whole.append(seconds)
                outside.append(seconds - model.seconds)
                after = (mesh.messages, mesh.bytes_sent, mesh.collectives)
                counts.append(tuple(a - b for a, b in zip(after, before, strict=True)))
    middle, best = 1e6 * statistics.median(outside), 1e6 * statistics.quantiles(outside, n=10)[0]
    text = (
        f"{atoms:7d} atoms, {mesh.size} rank(s) over {mesh.wire:5s}: step {1e6 * statistics.median(whole):6.0f} µs, "
        f"outside the model {middle:5.0f} µs (best tenth {best:4.0f})"
    )
    if mesh.size > 1:
        messages, sent, collectives = max(counts)
        text += f"; per step and rank {messages} message(s), {sent} bytes, {collectives} exchange(s)"
    return text if mesh.is_lead else None


def rank_main(port: int, rank: int, size: int, wire: str, repeat: int, steps: int, queue: Any) -> None:
    import torch
    from torch.distributed import TCPStore

    from mattermill.domain.mesh import Mesh

    torch.set_num_threads(1)
    with Mesh.join(TCPStore("127.0.0.1", port, is_master=False), rank, size, wire=wire) as mesh:  # type: ignore[arg-type]
        text = measure(mesh, repeat, steps)
        if text:
            queue.put(text)


def several(size: int, wire: str, repeat: int, steps: int) -> str:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(store.port, r, size, wire, repeat, steps, queue)) for r in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        return str(queue.get(timeout=300))
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    import torch

    from mattermill.domain.mesh import Mesh

    torch.set_num_threads(1)
    for repeat in (4, 10):
        print(measure(Mesh.single(), repeat, options.steps), flush=True)
        if options.ranks > 1:
            for wire in ("local", "gloo"):
                print(several(options.ranks, wire, repeat, options.steps), flush=True)


if __name__ == "__main__":
    main()
