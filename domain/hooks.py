"""Hooks: functions of the user's own at nine points of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


@dataclass(frozen=True)
class Hook:
    """A function called at a point of every n-th step.

    Args:
        function: takes the `State` of the rank (LOCAL) or a `Batch` of whole systems (GLOBAL, LEAD), which is a copy.
        point: where in the step.
        every: steps between calls; the first call comes in step `every`.
        scope: see `Scope`. GLOBAL and LEAD gather, which is collective: all ranks need the same hooks.
        energy, stress: have these computed in the steps in which the hook runs.

    An ``on_converge`` hook runs after a step in which some system has converged.
    """

    function: Callable[[Any], Any]
    point: Point | str = Point.AFTER_STEP
    every: int = 1
    scope: Scope | str = Scope.LOCAL
    energy: bool = False
    stress: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"a hook's `every` must be at least 1, is {self.every}")
        object.__setattr__(self, "point", Point(self.point))
        object.__setattr__(self, "scope", Scope(self.scope))

    def due(self, step: int) -> bool:
        return step % self.every == 0


class HookSet:
    """The hooks of a runner, by point."""

    def __init__(self, hooks: Sequence[Hook | Callable[[Any], Any]]) -> None:
        self.hooks = [h if isinstance(h, Hook) else Hook(h) for h in hooks]
        self._at: dict[Point, list[Hook]] = {}
        for hook in self.hooks:
            self._at.setdefault(Point(hook.point), []).append(hook)

    def wants(self, step: int) -> tuple[bool, bool]:
        """Whether a hook that is due in this step wants energy, and stress."""
        due = [h for h in self.hooks if (h.energy or h.stress) and h.due(step)]
        return any(h.energy for h in due), any(h.stress for h in due)

    def run(self, point: Point, runner: DomainParallel, step: int) -> None:
        """Run what is due at a point; `step` counts from 1."""
        hooks = self._at.get(point)
        if not hooks:
            return
        for hook in hooks:
            if hook.due(step):
                _call(hook, runner)


def _call(hook: Hook, runner: DomainParallel) -> None:
    if hook.scope == Scope.LOCAL:
        hook.function(runner.state)
        return
    whole = runner.gather(refresh=False)
    if hook.scope == Scope.GLOBAL:
        whole = runner.mesh.broadcast_object(whole)
        hook.function(whole)
    elif whole is not None:
        hook.function(whole)


__all__ = ["Hook", "HookSet", "Point", "Scope"]
