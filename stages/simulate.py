"""By hand: evaluate, simulate and relax structures without a campaign, in a notebook, a script or under torchrun.

All three take one structure or many (ASE Atoms, a `Batch`, what `mm.read` returns), and return a `Batch` in the order
of the input. Under torchrun every rank calls them alike with ``mesh=mm.Mesh.from_env()``; the lead's structures count,
and every rank gets the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union

import torch

from ..domain.batch import Batch
from .dynamics import Sampling
from .ensembles import Ensemble, require
from .relax import Relax
from .status import Status

if TYPE_CHECKING:
    from ase import Atoms

    from ..domain.mesh import Mesh
    from ..domain.models.base import Model
    from ..domain.reading import Structures
    from ..domain.strategy import Choice
    from .reporter import Reporter
    from .stage import Stage

Systems = Union["Atoms", Sequence["Atoms"], Batch, "Structures"]


def evaluate(
    model: Model,
    atoms: Systems | None,
    *,
    mesh: Mesh | None = None,
    grid: Sequence[int] | None = None,
    split_atoms: int = 500,
    strategy: Choice = "auto",
    memory: float | None = None,
) -> Batch:
    """Energy (eV), forces (eV/Å) and stress (eV/Å^3, tensile positive) of structures as they are.

    Args:
        atoms: on several ranks the lead's count; the others may pass None. Every rank gets the result.
        mesh: the ranks to work on; None is this process alone.
        grid, split_atoms, strategy, memory: see `DomainParallel`. A system is divided from twice `split_atoms` on.

    Raises:
        ValueError: a structure that the model cannot take; all such are named with their reasons.
    """
    from ..domain.mesh import Mesh
    from ..domain.runner import DomainParallel
    from .intake import why_not
    from .integrators.still import Still

    mesh = mesh or Mesh.single()
    with mesh.guard():
        batch = _given(mesh, atoms)
        reasons = {single.ids[0]: why_not(single, model) for single in batch.to("cpu").split()} if batch else {}
        refused = [f"{i}: {reason}" for i, reason in reasons.items() if reason is not None]
        mesh.broadcast_object(ValueError(f"cannot be evaluated: {_some(refused)}") if refused else None)
        options: dict[str, Any] = {"grid": grid, "split_atoms": split_atoms, "strategy": strategy, "memory": memory}
        with DomainParallel(model, Still(), mesh, skin=0.0, **options) as runner:
            runner.admit(batch)
            whole = runner.gather()
        result: Batch = mesh.broadcast_object(whole)
    return result.without(["reference", "reference_cell", "memory_grid"])


def _given(mesh: Mesh, atoms: Systems | None) -> Batch | None:
    """The lead's structures as a batch, None elsewhere; what is wrong with them is raised on every rank. Collective."""
    given: Batch | Exception | None = None
    if mesh.is_lead:
        try:
            given = as_batch(atoms)
        except (ValueError, TypeError) as error:
            given = error
    mesh.broadcast_object(given if isinstance(given, Exception) else None)
    return None if isinstance(given, Exception) else given


def simulate(
    model: Model,
    atoms: Systems | None,
    ensemble: Ensemble,
    steps: int,
    dt: float = 1.0,
    *,
    temperature: float | None = None,
    mesh: Mesh | None = None,
    hooks: Sequence[Any] = (),
    seed: int = 0,
    every: int = 0,
    reporter: Reporter | None = None,
    max_atoms: int | None = None,
    skin: float = 1.0,
    grid: Sequence[int] | None = None,
    split_atoms: int = 500,
    strategy: Choice = "auto",
    memory: float | None = None,
) -> Batch:
    """Molecular dynamics of all these structures, `steps` of `dt` fs each; returns their final states.

    Args:
        ensemble: `NVE()` or `NVT(temperature)`.
        temperature: K; draw Maxwell-Boltzmann velocities at it, momentum removed. None keeps the velocities that came;
            a structure without any starts at the ensemble's temperature, if it has one.
        atoms: on several ranks the lead's count; the others may pass None. Every rank gets the result.
        mesh: the ranks to work on; None is this process alone.
        hooks: functions called after every step with the rank's `State`, or `mattermill.domain.hooks.Hook` objects.
        seed: of all noise.
        every: steps between frames that the reporter gets (`mattermill.stages.reporter.MemoryReporter()` keeps them).
        max_atoms: so many atoms at a time; the rest follows as others finish.
        skin, grid, split_atoms, strategy, memory: see `DomainParallel`.

    Each system's `status` and `reason` are in the batch's info; systems that failed are warned about as well.
    """
    stage = Simulation(ensemble=ensemble, steps=steps, dt=dt, every=every, draw=temperature)
    options = _options(hooks, skin, grid, split_atoms, strategy, memory)
    return _run(stage, model, atoms, mesh, reporter, seed=seed, max_atoms=max_atoms, options=options)


def relax(
    model: Model,
    atoms: Systems | None,
    fmax: float = 0.01,
    cell: Literal["fixed", "isotropic"] = "fixed",
    *,
    smax: float = 0.01,
    pressure: float = 0.0,
    max_steps: int = 2_000,
    mesh: Mesh | None = None,
    hooks: Sequence[Any] = (),
    every: int = 0,
    reporter: Reporter | None = None,
    max_atoms: int | None = None,
    skin: float = 1.0,
    grid: Sequence[int] | None = None,
    split_atoms: int = 500,
    strategy: Choice = "auto",
    memory: float | None = None,
) -> Batch:
    """Relax all these structures; arguments as for `Relax`, the rest as for `simulate`.

    Returns:
        Final states in the order of the input; in each one's info `status` (converged, unconverged or failed) and
        `reason`.
    """
    stage = Relax(fmax=fmax, cell=cell, smax=smax, pressure=pressure, max_steps=max_steps, every=every, thermo_every=0)
    options = _options(hooks, skin, grid, split_atoms, strategy, memory)
    return _run(stage, model, atoms, mesh, reporter, seed=0, max_atoms=max_atoms, options=options)


def _options(
    hooks: Sequence[Any],
    skin: float,
    grid: Sequence[int] | None,
    split_atoms: int,
    strategy: Choice,
    memory: float | None,
) -> dict[str, Any]:
    """What goes to the runner as it is."""
    names = ("hooks", "skin", "grid", "split_atoms", "strategy", "memory")
    return dict(zip(names, (hooks, skin, grid, split_atoms, strategy, memory), strict=True))


def as_batch(atoms: Systems | None) -> Batch:
    """One structure or many as a batch.

    Raises:
        ValueError: no structure at all.
        TypeError: something else.
    """
    if isinstance(atoms, Batch):
        batch = atoms
    elif isinstance(getattr(atoms, "batch", None), Batch):
        batch = atoms.batch  # type: ignore[union-attr]
    elif hasattr(atoms, "get_positions") or isinstance(atoms, list | tuple):
        batch = Batch.from_atoms(atoms)  # type: ignore[arg-type]
    else:
        raise TypeError(
            f"structures must be ASE Atoms, a list of them, a Batch or what mm.read returns, not {type(atoms).__name__}"
        )
    if not batch:
        raise ValueError("there is no structure to work on")
    return batch


@dataclass(frozen=True, kw_only=True)
class Simulation(Sampling):
    """The stage behind `simulate`: an ensemble, so many steps, and velocities drawn if a temperature is given."""

    draw: float | None = None
    thermo_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draw is not None:
            require(self.draw, "temperature", "K")

    def start_temperature(self, batch: Batch) -> tuple[float | None, torch.Tensor]:
        if self.draw is None:
            return super().start_temperature(batch)
        return float(self.draw), torch.ones(len(batch), dtype=torch.bool)


def _run(
    stage: Stage,
    model: Model,
    atoms: Systems | None,
    mesh: Mesh | None,
    reporter: Reporter | None,
    *,
    seed: int,
    max_atoms: int | None,
    options: dict[str, Any],
) -> Batch:
    from ..domain.mesh import Mesh
    from .run import StageRun

    mesh = mesh or Mesh.single()
    with mesh.guard():
        batch = _given(mesh, atoms)
        run = StageRun(stage, model, mesh, reporter, seed=seed, max_atoms=max_atoms, **options)
        try:
            run.admit(batch)
            report = run.advance()
        finally:
            run.close()
        whole = Batch.concat([report.finished, report.failed]).select(batch.ids) if batch else None
        states: Batch = mesh.broadcast_object(whole)
    ends = {outcome.id: outcome for outcome in report.outcomes}
    failed = [f"{i}: {ends[i].reason}" for i in states.ids if ends[i].status is Status.failed]
    if failed and run.mesh.is_lead:
        warnings.warn(f"{len(failed)} of {len(states)} systems failed: {_some(failed)}", stacklevel=3)
    info = [
        {**one, "status": str(ends[i].status), "reason": ends[i].reason}
        for i, one in zip(states.ids, states.info, strict=True)
    ]
    return states.with_fields(info=info)


def _some(reasons: Sequence[str], most: int = 5) -> str:
    """The first few of these in a sentence; a campaign's worth of reasons is nothing to read in a warning."""
    more = f"; and {len(reasons) - most} more, see the batch's info" if len(reasons) > most else ""
    return "; ".join(reasons[:most]) + more


__all__ = ["Simulation", "Systems", "as_batch", "evaluate", "relax", "simulate"]
