"""The parity table: every model in every ensemble, box, number of ranks, company and precision.

To add an ensemble, a model or a shape, add it to its registry: the sample of `make test`, the whole of `make parity`
and what they check follow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import dense
import torch
from ase import Atoms
from message_passing import MessagePassing
from parity import cases, shapes
from parity.covering import covering
from parity.journey import Seen, travel

import mattermill as mm
from mattermill.domain.batch import Batch
from mattermill.stages.integrators.langevin import Langevin
from mattermill.stages.integrators.verlet import VelocityVerlet
from mattermill.stages.optimizers.fire import Fire

# --- the registries ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A model of the table.

    Attributes:
        make: the model, of a dtype. strategy: how it is divided. energies: its reference, see `dense`.
        shapes: name -> structure, given the reach. companions: four more names.
        skin, reach: Å; reach: how thick a domain must be.
    """

    make: Callable[[torch.dtype], Any]
    strategy: str
    energies: Callable[..., dense.Energies]
    shapes: dict[str, Callable[[float], Atoms]]
    companions: tuple[str, ...]
    skin: float
    reach: float


def _argon(truncation: Any) -> Kind:
    return Kind(
        make=lambda dtype: mm.models.noble_gases(cutoff=cases.CUTOFF, truncation=truncation, dtype=dtype),
        strategy="auto",
        energies=dense.lennard_jones,
        shapes={name: lambda reach, f=f: f() for name, f in cases.SHAPES.items()},
        companions=("few", "tiny", "short", "low"),
        skin=cases.SKIN,
        reach=cases.REACH,
    )


def _messages(kind: Any, hops: int) -> Kind:
    skin, model = 0.4, MessagePassing(kind=kind, hops=hops)
    return Kind(
        make=lambda dtype: MessagePassing(kind=kind, hops=hops, dtype=dtype),
        strategy=kind,
        energies=dense.message_passing,
        shapes=shapes.SHAPES,
        companions=shapes.COMPANIONS,
        skin=skin,
        reach=(hops if kind == "wide" else 1) * model.cutoff + skin,
    )


MODELS = {
    "lj": _argon("shift"),
    "lj-switch": _argon("switch"),
    "mp-wide": _messages("wide", 2),
    "mp-refresh": _messages("refresh", 3),
    "mp-graph": _messages("graph", 2),
}


@dataclass(frozen=True)
class Ensemble:
    """What moves the atoms, and the fields of its own that must agree as well."""

    make: Callable[[], Any]
    fields: tuple[str, ...] = ()


ENSEMBLES = {
    "nve": Ensemble(VelocityVerlet),
    "langevin": Ensemble(Langevin),
    "fire": Ensemble(functools.partial(Fire, fmax=1e-12), ("fire", "fire_velocities", "fire_dots")),
}

SHAPES = ("cubic", "triclinic", "skewed", "slab", "wire", "cluster", "thin")
RANKS = (1, 2, 3, 4, 8)
SYSTEMS = (1, 5)
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}

#: Grids that are asked for, so that systems are divided that the runner would leave whole for their size, and open axes
#: are cut too; they are reduced where domains would be too thin. What is not here is chosen by the runner.
GRIDS = {
    ("cubic", 2): (2, 1, 1),
    ("cubic", 3): (3, 1, 1),
    ("cubic", 8): (2, 2, 2),
    ("triclinic", 2): (2, 1, 1),
    ("triclinic", 4): (2, 1, 2),
    ("triclinic", 8): (2, 2, 2),
    ("skewed", 2): (1, 1, 2),
    ("skewed", 3): (1, 1, 3),
    ("skewed", 4): (1, 2, 2),
    ("slab", 2): (2, 1, 1),
    ("slab", 3): (1, 1, 3),
    ("slab", 4): (2, 2, 1),
    ("slab", 8): (2, 2, 2),
    ("wire", 2): (1, 1, 2),
    ("wire", 3): (1, 1, 3),
    ("wire", 4): (2, 1, 2),
    ("wire", 8): (1, 1, 8),
    ("cluster", 2): (2, 1, 1),
    ("cluster", 3): (1, 3, 1),
    ("cluster", 4): (2, 1, 2),
    ("cluster", 8): (2, 2, 2),
    ("thin", 2): (2, 1, 1),
    ("thin", 4): (2, 2, 1),
}

# --- a case --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A row of the table."""

    model: str
    ensemble: str
    shape: str
    systems: int
    dtype: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.ensemble}-{self.shape}-{self.ranks}r-{self.systems}s-{self.dtype}"


def whole() -> list[Case]:
    """All rows; those that share an undivided run follow each other."""
    return [Case(*row) for row in itertools.product(MODELS, ENSEMBLES, SHAPES, SYSTEMS, TOLERANCES, RANKS)]


def sample() -> list[Case]:
    """Rows in which any two values meet."""
    return sorted(Case(*row) for row in covering(MODELS, ENSEMBLES, SHAPES, SYSTEMS, TOLERANCES, RANKS))  # type: ignore[arg-type]


def structures(case: Case) -> dict[str, Atoms]:
    """The shape under test, and its company."""
    kind = MODELS[case.model]
    names = (case.shape, *kind.companions)[: case.systems]
    # In a batch the system under test is neither first nor last.
    ordered = names if case.systems == 1 else (names[1], names[2], names[0], *names[3:])
    return {name: kind.shapes[name](kind.reach) for name in ordered}


def run(mesh: Any, case: Case, steps: int) -> tuple[Batch, Seen]:
    """Travel as this row says, on a mesh of whatever size."""
    kind = MODELS[case.model]
    return travel(
        mesh,
        kind.make(getattr(torch, case.dtype)),
        cases.with_fields(structures(case)),
        ENSEMBLES[case.ensemble].make(),
        steps=steps,
        strategy=kind.strategy,
        skin=kind.skin,
        grid=GRIDS.get((case.shape, case.ranks)),
        split_atoms=8,
    )


@functools.lru_cache(maxsize=64)
def undivided(case: Case, steps: int) -> Batch:
    """The same on one rank. `case.ranks` must be 1."""
    assert case.ranks == 1
    return run(None, case, steps)[0]


def compare(got: Batch, case: Case, steps: int) -> dict[str, float]:
    """The largest difference of every field to what is expected; on one rank that is brute force."""
    if case.ranks == 1:
        return against_brute_force(got, case)
    expected = undivided(case._replace(ranks=1), steps)
    found = cases.differences(got, expected)
    return found | {name: cases.worst(got, expected, name) for name in ENSEMBLES[case.ensemble].fields}


def against_brute_force(got: Batch, case: Case) -> dict[str, float]:
    """Energies, forces and stress of the final configuration, see `dense`."""
    kind = MODELS[case.model]
    model = kind.make(torch.float64)
    parts = []
    for one in got:
        numbers, pbc, cell = one.numbers.numpy(), one.pbc[0].numpy(), one.cell[0]
        result = dense.evaluate(kind.energies(model, numbers, pbc), one.positions, cell)
        size = torch.linalg.det(cell).abs()
        stress = torch.where(size > 0, -result.virial / size, torch.nan)
        parts.append((result.energies, result.forces, result.energies.sum()[None], stress[None]))
    names = ("energies", "forces", "energy", "stress")
    return {
        name: cases.difference(getattr(got, name), torch.cat(values), name)
        for name, values in zip(names, zip(*parts, strict=True), strict=True)
    }
