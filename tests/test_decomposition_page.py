"""docs/decomposition.md is true where a machine can tell: its model runs, its names are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms

import mattermill as mm
from mattermill.domain.hooks import Point, Scope

PAGE = (Path(mm.__file__).parent / "docs" / "decomposition.md").read_text()
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def morse(text: str = EXAMPLE) -> Any:
    """The model of the page, as the page says it."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names["Morse"]()


def crystal() -> Atoms:
    rng = np.random.default_rng(3)
    sites = np.stack(np.meshgrid(*map(np.arange, (6, 4, 4)), indexing="ij"), -1).reshape(-1, 3) * 4.0
    cell = np.array([[24.0, 0, 0], [2.0, 16.0, 0], [-1.0, 1.5, 16.0]])
    return Atoms("Ar96", sites @ cell / [[24.0, 16.0, 16.0]] + rng.normal(scale=0.2, size=(96, 3)), cell=cell, pbc=True)


def test_the_model_of_the_page_has_the_forces_and_stress_of_its_energy() -> None:
    """By finite differences; and its energy by the formula over all images."""
    model, atoms = morse(), crystal()
    batch = mm.evaluate(model, atoms)
    energy = lambda a: float(mm.evaluate(model, a).energy)  # noqa: E731
    h = 1e-4
    for atom, axis in ((0, 0), (17, 1), (95, 2)):
        ends = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions[atom, axis] += sign * h
            ends.append(energy(moved))
        assert float(batch.forces[atom, axis]) == pytest.approx(-(ends[0] - ends[1]) / (2 * h), abs=1e-8)
    for a, b in ((0, 0), (1, 0), (2, 1), (2, 2)):
        ends = []
        for sign in (1, -1):
            strained = atoms.copy()
            strain = np.eye(3)
            strain[a, b] += 0.5 * sign * h
            strain[b, a] += 0.5 * sign * h
            strained.set_cell(atoms.cell.array @ strain, scale_atoms=True)
            ends.append(energy(strained))
        slope = (ends[0] - ends[1]) / (2 * h) / atoms.get_volume()
        assert float(batch.stress[0, a, b]) == pytest.approx(slope, abs=1e-9)
    d = atoms.positions[:, None] - atoms.positions[None]
    total = 0.0
    for shift in np.stack(np.meshgrid(*[np.arange(-1, 2)] * 3), -1).reshape(-1, 3) @ atoms.cell.array:
        r = np.linalg.norm(d + shift, axis=-1)
        r = r[(r > 0) & (r < 7.0)]
        total += 0.5 * (0.012 * ((1 - np.exp(-1.5 * (r - 3.8))) ** 2 - 1) * (1 - r**2 / 49.0) ** 3).sum()
    assert float(batch.energy) == pytest.approx(total, rel=1e-12)


def _divided(mesh: Any, text: str) -> Any:
    model = morse(text)
    # The page's own line, and some steps on as many ranks as fit.
    first = mm.evaluate(model, crystal(), mesh=mesh)
    out = mm.simulate(model, crystal(), mm.NVE(), 20, dt=4.0, temperature=100, mesh=mesh, split_atoms=20, skin=0.5)
    with mm.DomainParallel(model, mm.NVE().propagator(), mesh, skin=0.5, split_atoms=20) as runner:
        batch = mm.Batch.from_atoms(crystal(), ["x"])
        batch = batch.with_fields(systems={"timestep": torch.ones(1, dtype=torch.float64)})
        runner.partition(batch if runner.mesh.is_lead else None)
        return first, out, runner.grids["x"], runner.strategy.name


def test_the_model_of_the_page_is_the_same_on_three_ranks(ranks) -> None:
    one = _divided(None, EXAMPLE)
    for first, out, grid, strategy in ranks.run(_divided, 3, EXAMPLE):
        assert np.prod(grid) > 1
        assert strategy == one[3] == "wide"
        for got, expected in ((first, one[0]), (out, one[1])):
            for name in ("positions", "forces", "energy", "stress"):
                torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-9, atol=1e-9)


def test_the_example_is_as_long_as_it_says() -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 30


def test_names_on_the_page_are_there() -> None:
    """Files of domain/, points, scopes and strategies; nothing that has gone, nothing left out."""
    folder = Path(mm.__file__).parent
    for name in set(re.findall(r"`(\w+\.py)`", PAGE)):
        assert (folder / "domain" / name).exists(), name
    for name in set(re.findall(r"`(tests/[\w/]+(?:\.py)?)`", PAGE)):
        assert (folder / name).exists(), name
    for choice in (*Point, *Scope):
        assert f"`{choice}`" in PAGE, choice
    from typing import get_args

    from mattermill.domain.strategy import Name

    for strategy in get_args(Name):
        assert f"| `{strategy}` |" in PAGE, strategy
