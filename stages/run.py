"""One stage at work on one mesh: admit, step, refill, report. What both `mm.simulate` and a Dask gang drive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..domain.batch import Batch
from ..domain.mesh import Mesh
from ..domain.runner import DomainParallel
from .ensembles import require_count
from .fields import without_visit
from .inbox import Inbox, Refused
from .intake import begin, is_under_way
from .pace import Pace
from .reporter import NoReporter, Outcome, Reporter, SegmentReport
from .samples import Recorder
from .stage import visit_key
from .status import Status

if TYPE_CHECKING:
    from ..domain.models.base import Model
    from ..domain.strategy import Choice
    from .stage import Stage


class StageRun:
    """A stage at work on one mesh. Every method is collective: all ranks of the mesh call it, in the same order.

    What fails on one rank (the stage's own methods, the model, a hook, the reporter on the lead) ends the call on all
    of them: there with its error, on the others with a `RankFailed` that has its text; the mesh is closed then. An
    error that all ranks raise alike, such as an id that is aboard already, leaves mesh and systems as they were.

    Args:
        stage: what is done.
        model: computes forces; the stage's own model, where it has one, takes precedence.
        mesh: this rank's view of the sub-mesh; None is a mesh of one on the CPU.
        reporter: keeps frames; used on the lead only.
        seed: the campaign's seed; noise is a function of it, the system, the stage's name, the atom and the step.
        max_atoms, max_systems: room aboard; None is no limit. A system larger than max_atoms goes alone.
        hooks, skin, grid, split_atoms, strategy, memory: handed to `DomainParallel`. Who does not fit in memory fails;
            each system is judged as if it were alone: how many go side by side, max_atoms says.

    Raises:
        ValueError: no model, or a limit below 1.
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
        skin: float = 1.0,
        grid: Sequence[int] | None = None,
        split_atoms: int = 500,
        strategy: Choice = "auto",
        memory: float | None = None,
    ) -> None:
        chosen = stage.model if stage.model is not None else model
        if chosen is None:
            raise ValueError(f"stage {stage.name!r} needs a model: give it one, or the recipe")
        require_count(seed, "seed", least=0)
        self.stage, self.model, self.seed = stage, chosen, seed
        self.mesh = mesh or Mesh.single()
        self.reporter = reporter or NoReporter()
        self.runner = DomainParallel(
            chosen,
            stage.propagator(),
            self.mesh,
            skin=skin,
            hooks=hooks,
            grid=grid,
            split_atoms=split_atoms,
            strategy=strategy,
            memory=memory,
        )
        self._recorder = Recorder(stage, self.runner, self.reporter)
        self._inbox = Inbox(self.mesh, max_atoms, max_systems)
        self._key = visit_key(stage.name)
        # What each rank acts on without asking the others. A stage of the user's own may be no value.
        spec = stage if is_dataclass(stage) else type(stage).__name__
        self._settings = {"the stage": spec, "seed": seed, "max_atoms": max_atoms, "max_systems": max_systems}
        # Of the systems aboard, in the runner's order, alike on every rank: steps of the visit, atoms, seconds.
        self._steps = np.zeros(0, dtype=np.int64)
        self._atoms = np.zeros(0, dtype=np.int64)
        self._seconds = np.zeros(0)
        self._converged: np.ndarray | None = None
        self._report = SegmentReport()
        self._finished: list[Batch] = []
        self._failed: list[Batch] = []

    # --- what others call --------------------------------------------------------------------------------------

    def admit(self, batch: Batch | None) -> None:
        """Put systems into the inbox (the lead has the batch, others pass None); they board when there is room.

        A fresh system is checked and prepared; one that carries a visit of this stage (from `resident`) goes on as it
        is. What fails a check becomes a failed `Outcome` of the next report.

        Raises:
            ValueError: on every rank, if an id is aboard or waiting already.
        """
        with self.mesh.guard():
            self.runner.agree(self._settings)
            refused, states = self._inbox.put(
                batch, self.stage, self.model, self._key, self.runner.ids, self.runner.too_large
            )
        self._refuse(refused, states)

    def _refuse(self, refused: Sequence[Refused], states: Batch) -> None:
        """Who may not board has failed; on the lead with the state it came in."""
        for system_id, reason, n_atoms in refused:
            self._report.outcomes.append(Outcome(system_id, Status.failed, reason, 0, n_atoms))
        self._failed.append(states)

    def advance(
        self,
        seconds: float | None = None,
        steps: int | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SegmentReport:
        """Step until nothing is aboard and the inbox is empty, or until it is time to stop; report.

        Systems from the inbox board in the same step as others leave. At least one step is taken where there is work.

        Args:
            seconds: stop after about so many, by the lead's clock.
            steps: stop after so many.
            should_stop: asked on the lead every few steps.
        """
        pace = Pace(self.mesh, seconds, should_stop)
        with self.mesh.guard():
            taken = self._work(pace, steps)
        return self._close_report(taken, pace.elapsed)

    def resident(self) -> Batch | None:
        """Every system aboard or waiting, on the lead; None elsewhere.

        Another `StageRun` of this stage, on any mesh and in any company, continues from it to the last bit (at an equal
        rank grid).
        """
        with self.mesh.guard():
            aboard = self.runner.gather() if self.runner.ids else None
        if not self.mesh.is_lead:
            return None
        if aboard:
            # Written here only: clocks differ between ranks, and a state aboard is alike on all of them.
            aboard = aboard.with_fields(systems={"visit_seconds": torch.from_numpy(self._seconds).to(aboard.device)})
        return Batch.concat([aboard or Batch.empty(), *self._inbox.states()])

    def close(self) -> None:
        """Let go of the runner. What is still aboard is dropped: ask `resident` first. Idempotent."""
        self.runner.close()

    # --- a step ------------------------------------------------------------------------------------------------

    def _work(self, pace: Pace, steps: int | None) -> int:
        """Steps until it is time to stop; how many they were."""
        taken = 0
        self._board()
        while self.runner.ids and (steps is None or taken < steps):
            self._step()
            taken += 1
            self._settle()
            self._board()
            if pace.is_over():
                break
        return taken

    def _step(self) -> None:
        """Before-step of the stage, one step of the runner, what is due to be recorded, and who leaves."""
        started = time.perf_counter()
        state = self.runner.state
        self.stage.before_step(state)
        sampled, framed = self._recorder.due(self._steps + 1)
        if sampled.any() or framed.any():
            self.runner.want(energy=True, stress=True)
        self._converged = self.runner.step()
        # On a GPU this waits for the step: who leaves, and what is due, is decided on the host (as does `verdict`).
        self._steps = state.batch.step.cpu().numpy().copy()
        if sampled.any() or framed.any():
            self._recorder.record(self._steps, self._sound())
        n_atoms = int(self._atoms.sum())
        self._report.atom_steps += n_atoms
        self._seconds += self._atoms * ((time.perf_counter() - started) / n_atoms)

    def _sound(self) -> np.ndarray:
        """Which systems are not broken."""
        broken = self.runner.broken
        return np.array([i not in broken for i in self.runner.ids], dtype=bool)

    def _settle(self) -> None:
        """Everyone whose visit is over leaves, in the step in which it is over."""
        broken = self.runner.broken
        verdicts = self.stage.verdict(self.runner.state, self._converged)
        leaving: dict[str, tuple[Status, str]] = {}
        for system_id, verdict in zip(self.runner.ids, verdicts, strict=True):
            if system_id in broken:
                leaving[system_id] = (Status.failed, broken[system_id])
            elif verdict is not None:
                leaving[system_id] = (verdict, self.stage.reason(verdict))
        if leaving:
            self._leave(leaving)

    def _leave(self, leaving: dict[str, tuple[Status, str]]) -> None:
        ids = self.runner.ids
        places = [ids.index(i) for i in leaving]
        seconds, steps, atoms = self._seconds[places], self._steps[places], self._atoms[places]
        whole = self.runner.release(list(leaving))
        keep = np.array([i not in leaving for i in ids], dtype=bool)
        self._steps, self._atoms, self._seconds = self._steps[keep], self._atoms[keep], self._seconds[keep]
        for k, (system_id, (status, reason)) in enumerate(leaving.items()):
            outcome = Outcome(system_id, status, reason, int(steps[k]), int(atoms[k]), {}, float(seconds[k]))
            if whole is not None:
                outcome = self._taken_leave(outcome, whole.select([system_id]))
            self._report.outcomes.append(outcome)

    def _taken_leave(self, outcome: Outcome, single: Batch) -> Outcome:
        """On the lead: results and final state of one system that has left."""
        if outcome.status is not Status.failed:
            try:
                results = {name: value[0].item() for name, value in self.stage.results(single).items()}
                outcome = replace(outcome, results=results)
            except Exception as error:  # a stage of the user's own may raise anything: the outcome says so
                reason = f"results of stage {self.stage.name!r} raised {type(error).__name__}: {error}"
                outcome = replace(outcome, status=Status.failed, reason=reason)
        final = without_visit(single)
        (self._failed if outcome.status is Status.failed else self._finished).append(final)
        self.reporter.close(outcome.id, final)
        return outcome

    # --- coming aboard -----------------------------------------------------------------------------------------

    def _board(self) -> None:
        """Take in who fits, until nobody does; a visit that is over at its first step makes room at once."""
        while ids := self._inbox.next(self._atoms):
            waiting = self._inbox.look(ids)
            ready, refused = self._prepared(waiting)
            if refused:
                gone = [i for i, _, _ in refused]
                self._refuse(refused, Batch.empty() if waiting is None else waiting.select(gone))
                self._inbox.drop(gone)
            if len(refused) == len(ids):
                continue
            before = self.runner.ids
            if self.stage.thermo_every > 0 or self.stage.frames_every > 0:
                self.runner.want(energy=True, stress=True)
            try:
                self.runner.admit(ready)
            finally:
                # After an error that all ranks share, who is not aboard waits on and is not lost.
                self._inbox.drop([i for i in self.runner.ids if i in ids])
            self._entered(before)
            self._converged = self.runner.judge()
            self._settle()

    def _prepared(self, waiting: Batch | None) -> tuple[Batch | None, list[Refused]]:
        """On the lead: fresh systems at the start of their visit, the others as they are; on all ranks: who is too
        large with all that its visit adds."""
        told: list[Refused] | Exception = []
        ready = None
        if waiting is not None:
            under_way = is_under_way(waiting, self._key)
            fresh = waiting.select(np.flatnonzero(~under_way))
            try:
                if fresh:
                    fresh = begin(fresh, self.stage, self.runner.propagator, self.seed)
                ready = Batch.concat([fresh, waiting.select(np.flatnonzero(under_way))])
                reasons = self.runner.too_large(ready)
                sizes = dict(zip(ready.ids, ready.counts.tolist(), strict=True))
                told = [(i, reason, sizes[i]) for i, reason in reasons.items()]
                ready = ready.select([i for i in ready.ids if i not in reasons])
            except Exception as raised:  # a stage of the user's own may raise anything: every rank is told
                told = raised
        refused: list[Refused] = self.mesh.broadcast_object(told)
        return ready, refused

    def _entered(self, before: tuple[str, ...]) -> None:
        """Counters, trajectories and first samples of those who have just come aboard."""
        state = self.runner.state
        new = self.runner.ids[len(before) :]
        self._steps = state.batch.step.cpu().numpy().copy()
        self._atoms = state.batch.natoms.cpu().numpy().copy()
        spent = (
            state.batch.visit_seconds.cpu().numpy() if "visit_seconds" in state.batch else np.zeros(len(state.batch))
        )
        self._seconds = np.concatenate([self._seconds, spent[len(before) :]])
        arrived = np.arange(len(self._steps)) >= len(before)
        if self.stage.frames_every > 0:
            whole = self.runner.gather(new, refresh=False)
            for k, system_id in enumerate(new):
                if whole is not None:
                    self.reporter.open(system_id, whole.select([k]), int(self._steps[len(before) + k]))
        # Who resumes has recorded this step already.
        self._recorder.record(self._steps, arrived & (self._steps == 0) & self._sound())

    # --- the report --------------------------------------------------------------------------------------------

    def _close_report(self, taken: int, elapsed: float) -> SegmentReport:
        report, self._report = self._report, SegmentReport()
        report.finished, report.failed = Batch.concat(self._finished), Batch.concat(self._failed)
        self._finished, self._failed = [], []
        report.resident, report.waiting = self.runner.ids, self._inbox.ids
        report.progress = dict(zip(self.runner.ids, self._steps.tolist(), strict=True))
        report.steps, report.seconds = taken, elapsed
        report.frames, self._recorder.frames = self._recorder.frames, 0
        report.thermo_ids, report.thermo = self._recorder.take()
        return report


__all__ = ["Outcome", "SegmentReport", "StageRun"]
