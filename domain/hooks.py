"""Hooks: functions of the user's own at nine points of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from .batch import Batch
    from .runner import DomainParallel


class Point(StrEnum):
    """Where in a step a hook runs, in this order."""

    BEFORE_STEP = "before_step"
    BEFORE_PRE_UPDATE = "before_pre_update"
    AFTER_PRE_UPDATE = "after_pre_update"
    BEFORE_COMPUTE = "before_compute"
    AFTER_COMPUTE = "after_compute"
    BEFORE_POST_UPDATE = "before_post_update"
    AFTER_POST_UPDATE = "after_post_update"
    AFTER_STEP = "after_step"
    ON_CONVERGE = "on_converge"


class Scope(StrEnum):
    """What a hook gets: the rank's own `State`, the whole `Batch` on every rank, or the whole batch on the lead."""

    LOCAL = "local"
    GLOBAL = "global"
    LEAD = "lead"


#: Points at which positions are those of the last step's forces: a new step has not moved them yet.
_BEFORE = (Point.BEFORE_STEP, Point.BEFORE_PRE_UPDATE)
#: Points at which positions have moved and forces have not followed.
_BETWEEN = (Point.AFTER_PRE_UPDATE, Point.BEFORE_COMPUTE)
_OF_POSITIONS = ("energy", "energies", "stress", "forces")

Choice = TypeVar("Choice", Point, Scope)


@dataclass(frozen=True)
class Hook:
    """A function called at a point of every n-th step.

    Args:
        function: takes the `State` of the rank (LOCAL) or a `Batch` of whole systems (GLOBAL, LEAD), which is a copy:
            atoms in the order in which they came in, positions unwrapped.
        point: where in the step.
        every: steps of the runner between calls; the first call comes in step `every`. Not for ``on_converge``.
        scope: see `Scope`. GLOBAL and LEAD gather, which is collective: all ranks need the same hooks, also those on
            which a LEAD hook's function is never called.
        energy, stress: have these computed whenever the hook runs: they are then those of the positions that it sees.
            Not between ``after_pre_update`` and ``before_compute``, where no forces belong to the positions yet.

    A LOCAL hook may change positions (and cells, alike on all ranks) up to ``after_pre_update``, and velocities at any
    point: in place. What it returns is dropped.

    An ``on_converge`` hook runs once for each time a system converges: after the step in which all ranks know it. It
    gets a batch of the systems that have just converged (GLOBAL, LEAD), or the state with `State.converged` set, bool
    (systems,) (LOCAL).

    Raises:
        ValueError: no function, a point or a scope that there is not, an `every` that is no whole number from 1.
    """

    function: Callable[[Any], Any]
    point: Point | str = Point.AFTER_STEP
    every: int = 1
    scope: Scope | str = Scope.LOCAL
    energy: bool = False
    stress: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"a hook's function must be callable, is {self.function!r}")
        object.__setattr__(self, "point", _one_of(Point, self.point, "point"))
        object.__setattr__(self, "scope", _one_of(Scope, self.scope, "scope"))
        if not isinstance(self.every, Integral) or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(f"a hook's `every` must be a whole number of at least 1, is {self.every!r}")
        if self.point is Point.ON_CONVERGE and self.every != 1:
            raise ValueError(
                f"an on_converge hook runs whenever a system converges, in whatever step: leave out every={self.every}"
            )
        if self.point in _BETWEEN and (self.energy or self.stress):
            raise ValueError(
                f"at {self.point} no energy or stress belongs to the positions: use after_compute or a later point"
            )

    def due(self, step: int) -> bool:
        return step % self.every == 0


def _one_of(kind: type[Choice], value: Any, what: str) -> Choice:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"a hook's {what} must be one of {', '.join(kind)}; is {value!r}") from None


class HookSet:
    """The hooks of a runner, by point."""

    def __init__(self, hooks: Sequence[Hook | Callable[[Any], Any]]) -> None:
        if isinstance(hooks, Hook) or callable(hooks) or not isinstance(hooks, Iterable):
            raise ValueError(f"hooks must be a list of hooks or functions, is {hooks!r}")
        self.hooks = [h if isinstance(h, Hook) else Hook(h) for h in hooks]
        self._at: dict[Point, list[Hook]] = {}
        for hook in self.hooks:
            self._at.setdefault(Point(hook.point), []).append(hook)
        self._look_before_moves()
        self._eager = [h for h in self.hooks if (h.energy or h.stress) and h.point is not Point.ON_CONVERGE]
        # The step in which each system was last seen converged.
        self._seen: dict[str, int] = {}

    def _look_before_moves(self) -> None:
        """A local hook may move atoms before the step: who wants energies there sees them first.

        Raises:
            ValueError: if it could not.
        """
        for point in _BEFORE:
            self._at.get(point, []).sort(key=lambda h: not (h.energy or h.stress))
        first, second = (self._at.get(point, ()) for point in _BEFORE)
        movers = any(h.scope == Scope.LOCAL and not (h.energy or h.stress) for h in first)
        if movers and any(h.energy or h.stress for h in second):
            raise ValueError(
                "a hook with energy or stress at before_pre_update must not follow a local hook at before_step, which "
                "may have moved atoms: give it the point before_step, where it runs first"
            )

    def forget(self, ids: Sequence[str]) -> None:
        """Systems that have left: if they come again, they converge anew."""
        for system_id in ids:
            self._seen.pop(system_id, None)

    def shared(self) -> str:
        """What all ranks must have alike: hooks that gather, or have energies computed, in one line."""
        shared = [h for h in self.hooks if h.scope != Scope.LOCAL or h.energy or h.stress]
        return ", ".join(
            f"{h.scope} {h.point} every {h.every}{' energy' * h.energy}{' stress' * h.stress}" for h in shared
        )

    def wants(self, step: int) -> tuple[bool, bool]:
        """Whether a hook wants the energy, and the stress, that are computed in this step: one that is due later in it,
        or before the next has moved anything."""
        if not self._eager:
            return False, False
        later = [h for h in self._eager if h.point not in _BEFORE and h.due(step)]
        # For these `energies` will be asked, which wants both.
        if any(h.point in _BEFORE and h.due(step + 1) for h in self._eager):
            return True, True
        return any(h.energy for h in later), any(h.stress for h in later)

    def at(self, point: Point) -> bool:
        """Whether there is any hook at a point."""
        return point in self._at

    def run(self, point: Point, runner: DomainParallel, step: int) -> None:
        """Run what is due at a point; `step` counts from 1."""
        for hook in self._at.get(point, ()):
            if hook.due(step):
                if point in _BEFORE and (hook.energy or hook.stress):
                    runner.energies()  # there already, but in the first step
                _call(hook, runner, runner.ids)

    def converged(self, runner: DomainParallel, step: int, converged: np.ndarray | None) -> None:
        """Run the on_converge hooks for systems that have converged and had not in the step before.

        Args:
            converged: the mesh's decision, bool (systems,), the same on every rank; None from what never converges.
        """
        hooks = self._at.get(Point.ON_CONVERGE)
        if not hooks or converged is None or not converged.any():
            return
        ids, broken = runner.ids, runner.broken
        there = [i for i, c in zip(ids, converged.tolist(), strict=True) if c and i not in broken]
        fresh = [i for i in there if self._seen.get(i, -2) < step - 1]
        self._seen = dict.fromkeys(there, step)
        if not fresh:
            return
        runner.state.converged = np.isin(ids, fresh)
        try:
            for hook in hooks:
                if hook.energy or hook.stress:
                    runner.energies()
                _call(hook, runner, fresh)
        finally:
            runner.state.converged = None


def _call(hook: Hook, runner: DomainParallel, ids: Sequence[str]) -> None:
    if hook.scope == Scope.LOCAL:
        hook.function(runner.state)
        return
    whole = runner.gather(ids, refresh=False)
    if whole is not None and hook.point in _BETWEEN:
        _blank(whole)
    if hook.scope == Scope.GLOBAL:
        whole = runner.mesh.broadcast_object(whole)
        hook.function(whole)
    elif whole is not None:
        hook.function(whole)


def _blank(whole: Batch) -> None:
    """What belongs to the positions before the move is not handed out with those after it."""
    for name in _OF_POSITIONS:
        if name in whole:
            getattr(whole, name).fill_(torch.nan)


__all__ = ["Hook", "HookSet", "Point", "Scope"]
