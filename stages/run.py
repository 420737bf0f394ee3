"""One stage at work on one mesh: admit, step, refill, report. What both `mm.simulate` and a Dask gang drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..domain.batch import Batch
from .reporter import NoReporter, Outcome, Reporter, SegmentReport

if TYPE_CHECKING:
    from ..domain.mesh import Mesh
    from ..domain.models.base import Model
    from .stage import Stage


class StageRun:
    """A stage at work on one mesh. Every method is collective: all ranks of the mesh call it, in the same order.

    Args:
        stage: what is done.
        model: computes forces; the stage's own model, where it has one, takes precedence.
        mesh: this rank's view of the sub-mesh; None is a mesh of one on the CPU.
        reporter: keeps frames; used on the lead only.
        seed: the campaign's seed; noise is a function of it, the system, the stage's name, the atom and the step.
        max_atoms, max_systems: room aboard; None is no limit. A system larger than max_atoms goes alone.
        hooks, skin, split_atoms: handed to `DomainParallel`.
    """

    def __init__(
        self,
        stage: Stage,
        model: Model | None,
        mesh: Mesh | None = None,
        reporter: Reporter | None = None,
        *,
        seed: int = 0,
        max_atoms: int | None = None,
        max_systems: int | None = None,
        hooks: Sequence[Any] = (),
        skin: float | None = None,
        split_atoms: int | None = None,
    ) -> None:
        self.reporter = reporter or NoReporter()
        raise NotImplementedError

    def admit(self, batch: Batch | None) -> None:
        """Put systems into the inbox (the lead has the batch, others pass None).

        A fresh system is checked and prepared; one that carries a visit of this stage (from `resident`) goes on as it is.
        What fails a check becomes a failed `Outcome` of the next report.
        """
        raise NotImplementedError

    def advance(
        self,
        seconds: float | None = None,
        steps: int | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SegmentReport:
        """Step until nothing is aboard and the inbox is empty, or until the time, the steps or `should_stop` (asked on the
        lead, every few steps) say so. Systems from the inbox come aboard in the same step as others leave."""
        raise NotImplementedError

    def resident(self) -> Batch | None:
        """On the lead: every system aboard or waiting, as a batch that another StageRun of this stage, on any mesh and in any
        company, continues to the last bit. None elsewhere."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the runner. What is still aboard is dropped: ask `resident` first. Idempotent."""


__all__ = ["Outcome", "SegmentReport", "StageRun"]
