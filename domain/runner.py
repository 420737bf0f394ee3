"""DomainParallel: wraps any propagator and owns the step, on one rank or many, for one system or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from .aboard import Aboard
from .agreement import agree
from .batch import Batch
from .hooks import Hook, HookSet, Point
from .memory import Budget, allowance
from .mesh import Mesh
from .models.base import Model, ModelOutput
from .models.computing import Computing
from .partition import check_grid
from .resident import Splitting
from .state import Propagator, State
from .strategy import Choice, strategy_for
from .units import volume


class DomainParallel:
    """Steps a batch of systems, each divided over the ranks of a mesh as suits it.

    Args:
        model: computes forces; its cutoff, `hops` and `pairs` decide what ranks need of each other.
        propagator: an integrator or optimizer, see `Propagator`.
        mesh: this rank's view of the ranks; None is one rank on the CPU.
        skin: Å beyond the cutoff; lists and ghosts last until an atom has moved about half of it.
        hooks: `Hook` objects, or functions to be called after every step with the rank's `State`.
        grid: domains per axis for every system, (px, py, pz); None lets each system's shape decide.
        split_atoms: a system takes another rank only for every so many atoms.
        strategy: how a system is served on several ranks, see `domain/strategy.py`; "auto" lets the model decide.
        memory: bytes a rank may use for any one system; None is most of its share of the device or host. A system is
            divided so that it fits, and refused if it can't be.

    Every method is collective: all ranks of the mesh call it in the same order. The answer is a function of a system's
    own state: at an equal rank grid it has the same bits in any company and however often a run was interrupted.

    Raises:
        ValueError: a skin that is negative, a grid that does not fit the mesh, a strategy that does not suit the model.
    """

    def __init__(
        self,
        model: Model,
        propagator: Propagator,
        mesh: Mesh | None = None,
        *,
        skin: float = 1.0,
        hooks: Sequence[Hook | Callable[[Any], Any]] = (),
        grid: Sequence[int] | None = None,
        split_atoms: int = 500,
        strategy: Choice = "auto",
        memory: float | None = None,
    ) -> None:
        if not 0 <= skin < float("inf"):
            raise ValueError(f"skin must be a number from 0, is {skin} Å")
        if split_atoms < 1:
            raise ValueError(f"split_atoms must be at least 1, is {split_atoms}")
        if memory is not None and not memory > 0:
            raise ValueError(f"memory must be a number of bytes above 0, is {memory}")
        self.model, self.propagator = model, propagator
        self.mesh = mesh or Mesh.single()
        self.strategy = strategy_for(model, skin, strategy)
        forced = None if grid is None else check_grid(grid, self.mesh.size)
        self._aboard = Aboard(self.mesh, Splitting(self.mesh.size, self.strategy, split_atoms, forced))
        self._hooks = HookSet(hooks)
        self._agreed, self._memory = False, memory
        self.steps = 0
        self.state = self._new_state()
        self._want = (False, False)
        self._has = (True, True)  # whether energy and stress belong to the present positions

    # --- coming and going --------------------------------------------------------------------------------------

    def partition(self, batch: Batch | None) -> None:
        """Take whole systems aboard: the lead passes the batch, the others None. Forces are ready afterwards."""
        self.admit(batch)

    def admit(self, batch: Batch | None) -> None:
        """As `partition`, also while others are under way; they are not affected, to the last bit.

        A system that carries a reference (because it was aboard before) gets the very lists it had. Energy and stress
        are computed along with the forces if they are wanted (`want`).

        Raises:
            ValueError: on every rank: an id that is aboard already, positions that are not finite, a cell that is none,
                a system that does not fit into memory.
        """
        with self.mesh.guard():
            self.agree()
            whole = self.mesh.broadcast_object(self._checked(batch) if self.mesh.is_lead else None)
            if not whole:
                return
            self._aboard.add(whole)
            self._sync()
            wanted = (self._want[0], self._want[1] or self.propagator.needs_stress)
            self._want = (False, False)
            self._compute(*wanted)
            primed = getattr(self.propagator, "primed", None)
            if primed is not None:
                # What an optimizer measures from forces must be there for those who have just come; for the others
                # it is measured again from the same forces.
                primed(self.state)

    def agree(self, settings: Mapping[str, object] | None = None) -> None:
        """Make sure that all ranks were given the same, and how much memory there is; admission does so by itself.

        Args:
            settings: what else must be the same, by name; compared by what it prints, at the first call only.

        Raises:
            ValueError: on every rank: they were not. Whoever differs would hang the others, or spoil their numbers.
        """
        if self._agreed:
            return
        splitting, propagator = self._aboard.splitting, self.propagator
        mine = {
            "hooks of scope global or lead, or with energy or stress,": self._hooks.shared(),
            "the model": self.model.identity(),
            # An object that is no value prints its address, which differs.
            "the propagator": propagator if is_dataclass(propagator) else type(propagator).__name__,
            "strategy": self.strategy.name,
            "skin": self.strategy.skin,
            "grid": splitting.grid,
            "split_atoms": splitting.split_atoms,
        }
        agree(self.mesh, {**mine, **(settings or {})})
        allowed = allowance(self.mesh, self._memory)
        self._aboard.budget = Budget(self.model, self.strategy, self.mesh.size, splitting.grid, allowed)
        self._agreed = True

    def too_large(self, batch: Batch) -> dict[str, str]:
        """By id, why systems do not fit into the memory there is, however they are divided.

        Not collective; before anything has come aboard, `agree` must have been called.
        """
        return self._aboard.too_large(batch)

    def _checked(self, batch: Batch | None) -> Batch | Exception | None:
        """The batch, ready to come aboard, or what is wrong with it: that is told to every rank."""
        if not batch:
            return None
        try:
            self._aboard.check(batch)
            ready = self.propagator.prepare(batch)
            for system_id, reason in self.too_large(ready).items():
                raise ValueError(f"system {system_id!r} {reason}")
            return ready
        except Exception as error:  # raised again on all ranks by broadcast_object
            return error

    def release(self, ids: Sequence[str]) -> Batch | None:
        """Hand whole systems over to the lead, as `gather` does, and forget them."""
        with self.mesh.guard():
            whole = self.gather(ids)
            self._aboard.drop(ids)
            self._hooks.forget(ids)
            self._sync()
            return whole

    def gather(
        self, ids: Sequence[str] | None = None, fields: Sequence[str] | None = None, *, refresh: bool = True
    ) -> Batch | None:
        """Whole systems on the lead, None on the others: atoms in their first order, positions unwrapped.

        Args:
            ids: which; default all. fields: names of fields; default all.
            refresh: compute energy and stress if they are out of date and asked for.
        """
        ids = self.ids if ids is None else tuple(ids)
        for system_id in ids:
            self._aboard.index(system_id)  # an id that is not aboard is a mistake on every rank: no reason to close
        with self.mesh.guard():
            if refresh and (fields is None or {"energy", "energies", "stress"} & set(fields)):
                self.energies()
            whole = self._aboard.gather(ids, fields)
        if whole is not None:
            self._blank_stale(whole)
        return whole

    def _blank_stale(self, whole: Batch) -> None:
        """What does not belong to the present positions is not handed out."""
        for names, fresh in ((("energy", "energies"), self._has[0]), (("stress",), self._has[1])):
            for name in names:
                if not fresh and name in whole:
                    getattr(whole, name).fill_(torch.nan)

    def close(self) -> None:
        """Let go of all systems; twice is fine. The mesh stays open: it belongs to whoever made it."""
        if self._aboard.residents:
            self._aboard.drop(self.ids)
            self._sync()

    def __enter__(self) -> DomainParallel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def ids(self) -> tuple[str, ...]:
        """Systems aboard."""
        return self._aboard.batch.ids

    @property
    def broken(self) -> dict[str, str]:
        """Systems that can't go on, and why. They stand still, at their last reference positions and at rest, until
        they are released; energy and forces are then those of that configuration only after `energies`."""
        return dict(self._aboard.broken)

    @property
    def rebuilds(self) -> int:
        """Neighbour lists rebuilt in flight so far, over all systems."""
        return self._aboard.rebuilds

    @property
    def grids(self) -> dict[str, tuple[int, int, int]]:
        """Domains per axis of each system on this rank."""
        return {r.id: r.grid.dims for r in self._aboard.residents}

    # --- stepping ----------------------------------------------------------------------------------------------

    def want(self, *, energy: bool = False, stress: bool = False) -> None:
        """Have energy or stress computed in the next step or admission. All ranks must want the same."""
        self._want = (self._want[0] or energy, self._want[1] or stress)

    def step(self) -> np.ndarray | None:
        """One step of every system aboard; returns what the propagator says has converged, bool (systems,).

        Raises:
            RankFailed: another rank's hook, model or propagator has raised; says which and what. The mesh is closed.
        """
        if not self.ids:
            return None
        with self.mesh.guard():
            if self._aboard.level():
                self._sync()
            at = self.steps + 1
            self._call(Point.BEFORE_STEP, at)
            self._call(Point.BEFORE_PRE_UPDATE, at)
            self.propagator.pre_update(self.state)
            self._call(Point.AFTER_PRE_UPDATE, at)
            self._compute(*self._wanted(at), step=at)
            self._call(Point.AFTER_COMPUTE, at)
            self._call(Point.BEFORE_POST_UPDATE, at)
            self.propagator.post_update(self.state)
            self._count(at)
            self._call(Point.AFTER_POST_UPDATE, at)
            self._call(Point.AFTER_STEP, at)
            return self.judge()

    def judge(self) -> np.ndarray | None:
        """What the propagator says has converged as things stand, bool (systems,); tells on-converge hooks."""
        with self.mesh.guard():
            converged = self.propagator.converged(self.state)
            if self._hooks.hooks:
                self._hooks.converged(self, self.steps, converged)
            return converged

    def run(self, steps: int, *, until_converged: bool = False) -> np.ndarray | None:
        """`steps` steps, or fewer if `until_converged` and every system that is not broken has converged."""
        converged = None
        for _ in range(steps):
            converged = self.step()
            if until_converged and converged is not None:
                broken = self.broken
                if all(c or i in broken for c, i in zip(converged.tolist(), self.ids, strict=True)):
                    break
        return converged

    def energies(self) -> None:
        """Make `batch.energy`, `energies` and `stress` belong to the present positions, if they do not."""
        if self.ids and not all(self._has):
            with self.mesh.guard():
                self._compute(energy=True, stress=True)

    # --- phases ------------------------------------------------------------------------------------------------

    def _call(self, point: Point, step: int) -> None:
        if self._hooks.hooks:
            self._hooks.run(point, self, step)

    def _wanted(self, step: int) -> tuple[bool, bool]:
        energy, stress = self._hooks.wants(step) if self._hooks.hooks else (False, False)
        wanted = (energy or self._want[0], stress or self._want[1] or self.propagator.needs_stress)
        self._want = (False, False)
        return wanted

    def _compute(self, energy: bool, stress: bool, *, step: int | None = None) -> None:
        """Ghosts and lists up to date, forces of the present positions; energy and stress where wanted.

        What needs no ghost is computed while messages travel, and thrown away if they say that lists are used up.
        """
        aboard = self._aboard
        sound = aboard.begin()
        begun: Computing | None = None
        # A hook before the computing wants to find everything in place.
        if sound and aboard.exchange is not None and not (step and self._hooks.at(Point.BEFORE_COMPUTE)):
            begun = self._begun(energy, stress)
        if not aboard.finish():
            self._sync()
            if begun is not None:
                begun.close()
                begun = None
        if step:
            self._call(Point.BEFORE_COMPUTE, step)
        out = self._finished(begun or self._begun(energy, stress), energy)
        self.state.batch.atoms["forces"] = out.forces[: aboard.tables.n_owned]
        self._has = (energy, stress)
        if energy or stress:
            self._sum_up(out, energy, stress)

    def _begun(self, energy: bool, stress: bool) -> Computing:
        nb = self._aboard.tables.nb
        return Computing(self.model, nb, self.strategy.folds, energy=energy, stress=stress)

    def _finished(self, computing: Computing, energy: bool) -> ModelOutput:
        """The rest of the phases; what stands on ghosts goes home while the last of them computes."""
        exchange = self._aboard.exchange if self._aboard.any_halo and self.strategy.folds else None
        so_far = computing.middle()
        energies = so_far.energies if energy and self.strategy.folds_energies else None
        if exchange is None:
            return computing.end()
        exchange.begin_fold(so_far.forces, energies)
        out = computing.end()
        exchange.finish_fold(out.forces, energies)
        return out

    def _sum_up(self, out: ModelOutput, energy: bool, stress: bool) -> None:
        """Per-system energy and stress over all ranks, in one collective."""
        batch, state = self.state.batch, self.state
        n = len(batch)
        parts = torch.zeros((n, 10), dtype=torch.float64, device=batch.device)
        if energy:
            from .kernels import segment_sum

            assert out.energies is not None  # `Computing` has looked
            batch.atoms["energies"] = out.energies[: self._aboard.tables.n_owned]
            parts[:, 0] = segment_sum(batch.energies, state.ptr)
        if stress:
            assert out.virial is not None
            parts[:, 1:] = out.virial.reshape(n, 9)
        total = self.mesh.sum(parts)
        if energy:
            batch.systems["energy"] = total[:, 0].clone()
        if stress:
            size = volume(batch.cell)[:, None, None]
            # A system without a volume has no stress.
            stresses = torch.where(size > 0, -total[:, 1:].reshape(n, 3, 3) / size, torch.nan)
            batch.systems["stress"] = stresses

    def _count(self, at: int) -> None:
        """The step is done: counters of the systems that go on move by one."""
        self.steps = self.state.steps = at
        step = self.state.batch.step
        if not self._aboard.broken:
            step += 1
            return
        for s, system_id in enumerate(self.ids):
            if system_id in self._aboard.broken:
                self._aboard.hush(s)
            else:
                step[s] += 1

    def _new_state(self) -> State:
        aboard = self._aboard
        return State(aboard.batch, self.mesh, aboard.tables.nb.ptr, aboard.tables.nb.system, self.steps)

    def _sync(self) -> None:
        """The state after rows may have changed. One `State` for a runner's life: hooks and stages may keep it."""
        fresh, state = self._new_state(), self.state
        state.batch, state.ptr, state.system = fresh.batch, fresh.ptr, fresh.system


__all__ = ["DomainParallel", "Propagator", "State"]
