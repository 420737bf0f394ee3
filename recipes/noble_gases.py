"""The demo: crystals of neon, argon, krypton and xenon, and argon/krypton alloys, relaxed, heated, held and followed.

    python recipes/noble_gases.py [--out noble-gases.mill] [--png noble-gases.png] [--ranks 2] [--quick]

or, without the closing table and picture, `mattermill run recipes/noble_gases.py --out noble-gases.mill`.

The crystals are those of ase.collections.dcdft, whose volumes lie far from the Lennard-Jones minimum: the cell has to
relax first. Then all are heated to 150 K at the relaxed volume. kT is then 0.65 of the well depth of xenon and 4.1 of
that of neon: xenon stays a crystal, neon melts. Systems above 2,000 atoms are produced on two ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import mattermill as mm

if TYPE_CHECKING:
    from ase import Atoms

KELVIN = 150.0
#: Atoms above which a system is produced on two ranks.
LARGE = 2_000
#: Pure crystals: conventional cells (4 atoms) along an edge. 4: 256 atoms, 10: 4,000.
CRYSTALS = {"Ne": (4, 5), "Ar": (4, 6, 10), "Kr": (4, 5, 7), "Xe": (4, 6)}
#: Alloys of argon and krypton: fraction of krypton, cells along an edge.
ALLOYS = ((0.25, 5), (0.5, 6))


def structures() -> list[Atoms]:
    """The twelve systems, 256 to 4,000 atoms, each with its id in ``info["id"]``."""
    from ase.collections import dcdft

    systems = []
    for element, sizes in CRYSTALS.items():
        for edge in sizes:
            crystal = dcdft[element] * (edge, edge, edge)
            crystal.info = {"id": f"{element}-{len(crystal)}"}
            systems.append(crystal)
    for fraction, edge in ALLOYS:
        systems.append(alloy(dcdft["Ar"], dcdft["Kr"], fraction, edge))
    return systems


def alloy(one: Atoms, other: Atoms, fraction: float, edge: int) -> Atoms:
    """A random substitutional alloy on the fcc lattice, its volume between the two (Vegard), the same every time."""
    crystal = one * (edge, edge, edge)
    scale = 1 - fraction + fraction * other.cell.lengths()[0] / one.cell.lengths()[0]
    crystal.set_cell(crystal.cell * scale, scale_atoms=True)
    places = np.random.default_rng(2026).permutation(len(crystal))[: round(fraction * len(crystal))]
    crystal.symbols[places] = other.symbols[0]
    crystal.set_masses(None)
    crystal.info = {"id": f"Ar{100 - round(100 * fraction)}Kr{round(100 * fraction)}-{len(crystal)}"}
    return crystal


def noble_gases(length: float = 1.0) -> mm.Recipe:
    """The recipe; `length` scales the number of steps."""

    def steps(number: int) -> int:
        return max(20, round(number * length))

    relax = mm.Relax(fmax=0.002, smax=0.001, cell="isotropic", max_steps=1_000)
    heat = mm.Heat(start=10.0, stop=KELVIN, steps=steps(1_500), dt=2.0, every=40)
    settle = mm.Equilibrate(mm.NVT(KELVIN), steps=steps(1_700), dt=2.0)
    small = mm.Produce(mm.NVT(KELVIN), steps=steps(1_500), every=50, dt=2.0)
    large = mm.Produce(mm.NVT(KELVIN), steps=steps(1_500), every=50, dt=2.0, name="produce-large", ranks=2)
    ends = [
        mm.Filter(f"n_atoms <= {LARGE}", name="small") >> small,
        mm.Filter(f"n_atoms > {LARGE}", name="large") >> large,
    ]
    return mm.Recipe("noble-gases", model=mm.models.noble_gases(), graph=relax >> heat >> settle >> ends)


#: What `mattermill run recipes/noble_gases.py` runs.
recipe = noble_gases()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="noble-gases.mill", help="folder to write")
    parser.add_argument("--png", default="noble-gases.png", help="picture to write")
    parser.add_argument("--ranks", type=int, help="ranks of the local cluster; all cores by default")
    parser.add_argument("--quick", action="store_true", help="a thirtieth of the steps, three systems: does it run?")
    arguments = parser.parse_args()

    systems = structures()
    if arguments.quick:
        systems = [s for s in systems if s.info["id"] in ("Ne-256", "Xe-256") or len(s) > LARGE]
    start = time.perf_counter()
    recipe = noble_gases(1 / 30 if arguments.quick else 1.0)
    try:
        # All systems would fit aboard one rank (the default is 50,000 atoms): so both have work.
        recipe.run(systems, out=arguments.out, ranks=arguments.ranks, max_atoms=5_500)
    except (ValueError, mm.CampaignError) as error:
        sys.exit(f"noble_gases: {error}")
    report(arguments.out, Path(arguments.png), time.perf_counter() - start)


def report(out: str, png: Path, seconds: float) -> None:
    """The table, the picture, and how to open the results."""
    from plots import closing_table, draw
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 130)
    view = mm.open_campaign(out)
    rows = closing_table(view, console)
    draw(view, rows, png)
    console.print(f"{len(rows)} systems in {seconds:.0f} s; picture: {png}", highlight=False)
    opened = f'import mattermill as mm; campaign = mm.open_campaign("{out}"); print(campaign.summary)'
    console.print(f"open the results with\n  {sys.executable} -ic '{opened}'", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
