"""Argon on every rank that torchrun starts, without Dask:

    torchrun --nproc-per-node 2 recipes/torchrun_argon.py [--repeat 8] [--steps 500]

The same file runs on one process: `python recipes/torchrun_argon.py`. Each rank owns the atoms of its part of the box;
the lead prints the temperature and the energy, which must not drift, and how fast it went.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from ase.build import bulk

import mattermill as mm
from mattermill.domain.hooks import Hook
from mattermill.domain.runner import State
from mattermill.domain.units import KB, KE
from mattermill.stages.integrators.verlet import VelocityVerlet

TEMPERATURE = 180.0  # K, of the crystal at the start; half of it goes into the potential


def argon(repeat: int) -> mm.Batch:
    """An fcc crystal of 4 * repeat³ atoms wide enough to melt, with velocities."""
    atoms = bulk("Ar", "fcc", 5.7, cubic=True).repeat(repeat)
    batch = mm.Batch.from_atoms(atoms, ["argon"])
    width = np.sqrt(KB * TEMPERATURE / KE / atoms.get_masses())[:, None]
    velocities = np.random.default_rng(1).normal(size=(len(atoms), 3)) * width
    velocities -= velocities.mean(axis=0)
    return batch.with_fields(
        atoms={"velocities": torch.from_numpy(velocities)},
        systems={"timestep": torch.full((1,), 2.0, dtype=torch.float64)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Argon under torchrun.")
    parser.add_argument("--repeat", type=int, default=8, help="cubic cells along each axis")
    parser.add_argument("--steps", type=int, default=500, help="steps of 2 fs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    n_atoms = 4 * options.repeat**3

    with mm.Mesh.from_env("cpu") as mesh:

        def thermo(state: State) -> None:
            batch = state.batch
            # A sum over all ranks, in the same order on each: every rank gets the same bits.
            kinetic = float(state.sum_atoms(0.5 * KE * batch.masses * (batch.velocities**2).sum(1))[0])
            potential = float(batch.energy[0])
            temperature = 2 * kinetic / (3 * n_atoms - 3) / KB
            if mesh.is_lead:
                total = (potential + kinetic) / n_atoms
                print(f"{state.steps:6d}  {temperature:8.2f} K  total {total:+.7f} eV/atom", flush=True)

        every = max(1, options.steps // 5)
        model = mm.models.noble_gases(cutoff=8.5)
        with mm.DomainParallel(model, VelocityVerlet(), mesh, hooks=[Hook(thermo, every=every, energy=True)]) as runner:
            runner.partition(argon(options.repeat) if mesh.is_lead else None)
            grid = runner.grids["argon"]
            if mesh.is_lead:
                print(f"{n_atoms} atoms on {mesh.size} rank(s), grid {grid}, over {mesh.wire}", flush=True)
            start = time.perf_counter()
            runner.run(options.steps)
            seconds = time.perf_counter() - start
            result = runner.gather()
        if result is not None:
            rate = n_atoms * options.steps / seconds
            moved = (result.positions - argon(options.repeat).positions).norm(dim=1).mean()
            print(f"{rate:,.0f} atom-steps/s, {runner.rebuilds} rebuilds, atoms moved {float(moved):.2f} Å on average")


if __name__ == "__main__":
    main()
