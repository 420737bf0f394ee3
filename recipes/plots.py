"""What the demo shows of a campaign: a table of its systems and a picture. Everything is read from the results folder.

All of it is public: `open_campaign(...)` gives `summary`, `thermo(stage, system)` and `trajectory(system, stage)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

#: Stages whose time series are drawn one behind the other; a system passes one of the last two.
SERIES = ("heat", "equilibrate", "produce", "produce-large")
PRODUCED = ("produce", "produce-large")
#: Root mean square displacement over the production, in nearest-neighbour distances, above which a crystal has melted.
#: Atoms that vibrate about their sites stay near 0.2 even at the melting point (Lindemann).
MELTED = 0.3


@dataclass(frozen=True)
class Row:
    """One system: lattice constant (Å) and cohesive energy (meV per atom) of the relaxed crystal, and of its production
    the means of temperature (K) and pressure (GPa) and the displacement in nearest-neighbour distances. `speed` is
    atom-steps per second of all stages together."""

    system: str
    n_atoms: int
    lattice: float
    cohesive: float
    temperature: float
    pressure: float
    displacement: float
    steps: int
    speed: float
    stage: str

    @property
    def melted(self) -> bool:
        return self.displacement > MELTED


def rows_of(campaign: Any) -> list[Row]:
    """One row per system that reached its production, in the order of intake."""
    groups = {name: node.to_dataset() for name, node in campaign.summary.children.items()}
    relaxed = _records(groups["relax"])
    visits = {name: _records(groups[name]) for name in ("relax", *SERIES) if name in groups}
    rows = []
    for stage in PRODUCED:
        for system, produced in visits.get(stage, {}).items():
            if produced["status"] != "finished":
                continue
            crystal = relaxed[system]
            n_atoms = int(produced["n_atoms"])
            lattice = float((4 * crystal["volume"] / n_atoms) ** (1 / 3))
            done = [records[system] for records in visits.values() if system in records]
            steps = int(sum(visit["steps"] for visit in done))
            seconds = float(sum(visit["seconds"] for visit in done))
            rows.append(
                Row(
                    system=system,
                    n_atoms=n_atoms,
                    lattice=lattice,
                    cohesive=-1e3 * float(crystal["energy_per_atom"]),
                    temperature=float(produced["temperature_mean"]),
                    pressure=float(produced["pressure_mean"]),
                    displacement=displacement(campaign, system, stage) / (lattice / np.sqrt(2)),
                    steps=steps,
                    speed=n_atoms * steps / seconds if seconds > 0 else float("nan"),
                    stage=stage,
                )
            )
    order = {system: k for k, system in enumerate(_records(groups["intake"]))}
    return sorted(rows, key=lambda row: order[row.system])


def _records(dataset: Any) -> dict[str, dict[str, Any]]:
    """A group of the summary as a mapping by system."""
    ids = [str(system) for system in dataset["system"].values]
    return {i: {name: v.values[k] for name, v in dataset.variables.items()} for k, i in enumerate(ids)}


def closing_table(campaign: Any, console: Console) -> list[Row]:
    """Print the table; returns its rows."""
    rows = rows_of(campaign)
    table = Table(
        title="noble gases: crystals relaxed at 0 K, then at their relaxed volume at 150 K", title_justify="left"
    )
    table.add_column("system", no_wrap=True)
    for name in ("atoms", "a (Å)", "cohesive (meV)", "T (K)", "p (GPa)", "steps", "atom-steps/s"):
        table.add_column(name, justify="right")
    table.add_column("ends as")
    for row in rows:
        end = "[red]melt[/]" if row.melted else "[blue]crystal[/]"
        table.add_row(
            row.system,
            f"{row.n_atoms:,}",
            f"{row.lattice:.3f}",
            f"{row.cohesive:.2f}",
            f"{row.temperature:.1f}",
            f"{row.pressure:.3f}",
            f"{row.steps:,}",
            f"{row.speed:,.0f}",
            end + (" (2 ranks)" if row.stage == "produce-large" else ""),
        )
    console.print(table)
    return rows


def displacement(campaign: Any, system: str, stage: str) -> float:
    """Root mean square displacement between the first and the last frame, Å, the centre of mass held."""
    with campaign.trajectory(system, stage) as frames:
        first, last = (frames["coordinates"].isel(frame=k).values.astype(float) for k in (0, -1))
    moved = last - first
    moved -= moved.mean(axis=0)
    return float(np.sqrt((moved**2).sum(axis=1).mean()))


def radial_distribution(campaign: Any, system: str, stage: str, bins: int = 160) -> tuple[np.ndarray, np.ndarray]:
    """(r, g(r)) over the second half of a trajectory in a rectangular box, up to half the shortest edge, Å."""
    with campaign.trajectory(system, stage) as frames:
        coordinates = frames["coordinates"].values.astype(float)
        lengths = frames["cell_lengths"].values.astype(float)
    coordinates, lengths = (values[len(values) // 2 :] for values in (coordinates, lengths))
    edges = np.linspace(0.0, 0.5 * lengths.min(), bins + 1)
    n_atoms = coordinates.shape[1]
    first, second = np.triu_indices(n_atoms, 1)
    counts = np.zeros(bins)
    for positions, box in zip(coordinates, lengths, strict=True):
        apart = positions[second] - positions[first]
        apart -= box * np.round(apart / box)
        counts += np.histogram(np.sqrt((apart**2).sum(axis=1)), edges)[0]
    shells = 4 / 3 * np.pi * np.diff(edges**3)
    ideal = len(coordinates) * n_atoms * (n_atoms - 1) / 2 * shells / lengths.prod(axis=1).mean()
    return 0.5 * (edges[1:] + edges[:-1]), counts / ideal


def time_series(campaign: Any, system: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(time in ps, temperature in K, potential energy in eV) over the stages, one behind the other."""
    times, temperatures, energies = [], [], []
    start = 0.0
    for stage in SERIES:
        try:
            series = campaign.thermo(stage, system)
        except KeyError:
            continue  # it went down the other branch
        if series.sizes["step"] == 0:
            continue
        time = series["time"].values / 1e3
        times.append(start + time)
        temperatures.append(series["temperature"].values)
        energies.append(series["potential_energy"].values)
        start += time[-1]
    return np.concatenate(times), np.concatenate(temperatures), np.concatenate(energies)


def draw(campaign: Any, rows: list[Row], path: Path) -> None:
    """Temperature and energy against time, and g(r) of a crystal and of one that melted, as a picture at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (heat, energy, structure) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    colours = {"Ne": "tab:red", "Ar": "tab:blue", "Kr": "tab:green", "Xe": "tab:purple"}
    for row in rows:
        time, kelvin, potential = time_series(campaign, row.system)
        per_atom = 1e3 * (potential + row.n_atoms * row.cohesive / 1e3) / row.n_atoms
        element = row.system.partition("-")[0]
        style = {"color": colours.get(element, "tab:orange"), "lw": 0.8 + row.n_atoms / 4000, "label": row.system}
        heat.plot(time, kelvin, alpha=0.7, **style)
        energy.plot(time, per_atom, **style)
    heat.set(xlabel="time (ps)", ylabel="temperature (K)", title="heated, equilibrated, followed")
    energy.set(xlabel="time (ps)", ylabel="potential energy above the crystal (meV per atom)", title="energy")
    energy.legend(fontsize=7, ncols=2)
    for row, label in _solid_and_molten(rows):
        r, g = radial_distribution(campaign, row.system, row.stage)
        element = row.system.partition("-")[0]
        structure.plot(
            r / (row.lattice / np.sqrt(2)), g, color=colours.get(element, "tab:orange"), label=f"{row.system}: {label}"
        )
    structure.axhline(1.0, color="0.7", lw=0.8)
    structure.set(xlabel="r / nearest-neighbour distance of the crystal", ylabel="g(r)", title="radial distribution")
    structure.set_xlim(0.6, None)
    structure.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _solid_and_molten(rows: list[Row]) -> list[tuple[Row, str]]:
    """The most melted system, and the stillest crystal of one species that is not too large to count pairs of."""
    chosen = []
    if molten := [row for row in rows if row.melted]:
        chosen.append((max(molten, key=lambda row: row.displacement), "melted"))
    if solid := [row for row in rows if not row.melted and row.n_atoms <= 1_500]:
        chosen.append((min(solid, key=lambda row: row.displacement), "crystal"))
    return chosen
