"""The work: what of a recipe the ranks need. Pickled once per campaign, by value where a user's own classes ask it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .filter import Sieve

if TYPE_CHECKING:
    from ..domain.models.base import Model
    from ..stages.stage import Stage
    from .recipe import Recipe


@dataclass(frozen=True)
class Job:
    """One stage: what it does and with which model."""

    stage: Stage
    model: Model
    sieves: tuple[Sieve, ...]


@dataclass(frozen=True)
class Work:
    """All stages of a recipe, by name."""

    stages: dict[str, Job]
    seed: int

    @classmethod
    def of(cls, recipe: Recipe) -> Work:
        plan = recipe.plan
        jobs = {}
        for name, stage in plan.stages.items():
            model = stage.model or recipe.model
            assert model is not None, "the recipe has checked it"
            jobs[name] = Job(stage, model, plan.sieves_behind(name))
        return cls(jobs, recipe.seed)

    def filters_behind(self, stage: str) -> tuple[Sieve, ...]:
        return self.stages[stage].sieves

    def pickled(self) -> bytes:
        """Once, here: a class of a recipe file or a notebook goes by value."""
        import cloudpickle

        return cloudpickle.dumps(self)


__all__ = ["Job", "Work"]
