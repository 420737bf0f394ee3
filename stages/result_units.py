"""The results of a visit that every stage of ours gives, and their units. Costs nothing to import."""

from __future__ import annotations

#: Units of the results, by name.
UNITS: dict[str, str] = {
    "n_atoms": "1",
    "steps": "1",
    "energy": "eV",
    "energy_per_atom": "eV",
    "kinetic_energy": "eV",
    "temperature": "K",
    "temperature_mean": "K",
    "energy_mean": "eV",
    "pressure": "GPa",
    "pressure_mean": "GPa",
    "volume": "angstrom^3",
    "density": "g/cm^3",
    "max_force": "eV/angstrom",
    "cell_a": "angstrom",
    "cell_b": "angstrom",
    "cell_c": "angstrom",
}

__all__ = ["UNITS"]
