"""The wires between ranks of one host: `python benchmarks/exchange.py [--ranks 2 4] [--bytes 1000]`.

Ranks compute, then swap a message of so many bytes with every other rank; once with the two halves of the exchange
together after the computation, and once with the computation between them. The wires take turns in the same processes,
so that what else the machine does meets both. Microseconds: a step (computation and exchange; median), and of it what
the exchange took (median, and the best tenth: what it is when nobody else computes). The exchange holds the waiting
for the others: with more ranks than cores that is their computation, and only the step counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

WIRES = ("local", "gloo")
ROUNDS = 10


class Load:
    """Computation of about so many microseconds, the same amount of it on all ranks and at all times."""

    def __init__(self, microseconds: float, mesh: Any) -> None:
        import torch

        self.values = torch.ones(20_000, dtype=torch.float64)
        self.times = 20
        best = float("inf")
        for _ in range(50):
            start = time.perf_counter()
            self()
            best = min(best, (time.perf_counter() - start) / self.times)
        best = float(mesh.max(torch.tensor([best], dtype=torch.float64)))
        self.times = max(round(1e-6 * microseconds / best), 1)

    def __call__(self) -> None:
        for _ in range(self.times):
            self.values.mul_(1.0000001)


def one_step(mesh: Any, load: Load, out: list[Any], into: list[Any], overlap: bool) -> tuple[float, float]:
    """Seconds of a step, and of the exchange in it."""
    start = time.perf_counter()
    if not overlap:
        load()
    begun = time.perf_counter()
    mesh.begin(out, into)
    sent = time.perf_counter()
    if overlap:
        load()
    waits = time.perf_counter()
    mesh.finish()
    end = time.perf_counter()
    return end - start, sent - begun + end - waits


def measure(meshes: dict[str, Any], size: int, n_bytes: int, work: float, steps: int) -> list[str]:
    import torch

    first = next(iter(meshes.values()))
    load, rank = Load(work, first), first.rank
    n = max(n_bytes // 8, 1)
    out = [None if p == rank else torch.full((n,), float(rank), dtype=torch.float64) for p in range(size)]
    into = [None if p == rank else torch.zeros(n, dtype=torch.float64) for p in range(size)]
    times: dict[tuple[bool, str], list[tuple[float, float]]] = {}
    counts = {}
    for _ in range(ROUNDS):
        for overlap in (False, True):
            for wire, mesh in meshes.items():
                mesh.barrier()
                before = mesh.messages, mesh.bytes_sent
                kept = times.setdefault((overlap, wire), [])
                kept += [one_step(mesh, load, out, into, overlap) for _ in range(steps)]
                counts[wire] = (mesh.messages - before[0]) // steps, (mesh.bytes_sent - before[1]) // steps
    assert all(float(t[-1]) == p for p, t in enumerate(into) if t is not None)
    lines = []
    for (overlap, wire), pairs in times.items():
        step = 1e6 * statistics.median(p[0] for p in pairs)
        swap = 1e6 * statistics.median(p[1] for p in pairs)
        best = 1e6 * statistics.quantiles([p[1] for p in pairs], n=10)[0]
        how = "around the work" if overlap else "after the work"
        lines.append(
            f"{size} ranks, {counts[wire][0]} message(s), {counts[wire][1]:8d} bytes a rank, {wire:5s} {how:15s}: "
            f"step {step:7.0f} µs, exchange {swap:6.0f} µs (best tenth {best:5.0f})"
        )
    return lines


def rank_main(port: int, rank: int, size: int, options: argparse.Namespace, queue: Any) -> None:
    import torch
    from torch.distributed import PrefixStore, TCPStore

    from mattermill.domain.mesh import Mesh

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    meshes = {w: Mesh.join(PrefixStore(w, store), rank, size, wire=w) for w in WIRES}  # type: ignore[arg-type]
    for n_bytes in options.bytes:
        lines = measure(meshes, size, n_bytes, options.work, options.steps)
        if rank == 0:
            queue.put(lines)
    for mesh in meshes.values():
        mesh.barrier()
        mesh.close()


def several(size: int, options: argparse.Namespace) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=rank_main, args=(store.port, r, size, options, queue)) for r in range(size)]
    for process in ranks:
        process.start()
    try:
        for _ in options.bytes:
            print(*queue.get(timeout=300), sep="\n", flush=True)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="*", default=[1_000, 35_000, 70_000, 300_000])
    parser.add_argument("--work", type=float, default=1000.0, help="microseconds of computation in a step")
    parser.add_argument("--steps", type=int, default=20, help="steps of each kind in each of ten rounds")
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, {options.work:.0f} µs of computation a step")
    for size in options.ranks:
        several(size, options)


if __name__ == "__main__":
    main()
