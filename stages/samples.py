"""What is recorded while a stage runs: samples of the thermodynamics and frames, each at a system's own steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .reporter import Reporter
from .thermo import COLUMNS, Thermo, add_samples, thermo

if TYPE_CHECKING:
    from ..domain.runner import DomainParallel
    from .stage import Stage

#: Fields of a frame, as far as a batch has them.
FRAME_FIELDS = (
    *("positions", "velocities", "forces", "numbers", "masses", "atom_id"),
    *("cell", "pbc", "rotation", "energy", "stress", "step", "timestep"),
)


class Recorder:
    """Samples and frames of the systems aboard. Methods are collective; only the lead keeps and reports.

    A system is sampled when its own step is a multiple of the stage's `thermo_every`, and has a frame at multiples of
    `frames_every`: company and interruptions change nothing.
    """

    def __init__(self, stage: Stage, runner: DomainParallel, reporter: Reporter) -> None:
        self.stage, self.runner, self.reporter = stage, runner, reporter
        self.frames = 0
        self._ids: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []

    def due(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which systems are sampled, and which have a frame, at these steps: two bool (systems,)."""
        return _every(steps, self.stage.thermo_every), _every(steps, self.stage.frames_every)

    def record(self, steps: np.ndarray, which: np.ndarray | None = None) -> None:
        """Record what is due now, of the systems in `which` (default: all). Energy and stress are made current."""
        sampled, framed = self.due(steps)
        if which is not None:
            sampled, framed = sampled & which, framed & which
        if not (sampled.any() or framed.any()):
            return
        self.runner.energies()
        now = thermo(self.runner.state)
        if sampled.any():
            # The state that came in is in the series, but no mean counts it.
            add_samples(self.runner.state.batch, now, sampled & (steps > 0))
            self._note(steps, sampled, now)
        if framed.any():
            self._frame(framed, now)

    def take(self) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        """The series since the last call: ids, and columns with `system` as an index into them."""
        ids, rows = tuple(self._ids), self._rows
        self._ids, self._rows = {}, []
        if not rows:
            return ids, {}
        return ids, {name: np.concatenate([row[name] for row in rows]) for name in ("system", *COLUMNS)}

    def _note(self, steps: np.ndarray, which: np.ndarray, now: Thermo) -> None:
        if not self.runner.mesh.is_lead:
            return
        ids = [i for i, w in zip(self.runner.ids, which, strict=True) if w]
        batch = self.runner.state.batch
        dt = batch.timestep.cpu().numpy() if "timestep" in batch else np.ones(len(batch))
        values = {"step": steps, "time": steps * dt, **now.as_numpy()}
        row = {name: np.asarray(values[name])[which] for name in COLUMNS}
        row["system"] = np.array([self._ids.setdefault(i, len(self._ids)) for i in ids], dtype=np.int64)
        self._rows.append(row)

    def _frame(self, which: np.ndarray, now: Thermo) -> None:
        ids = [i for i, w in zip(self.runner.ids, which, strict=True) if w]
        whole = self.runner.gather(ids, FRAME_FIELDS)
        self.frames += len(ids)
        if whole is None:
            return
        rows = torch.from_numpy(np.flatnonzero(which)).to(now.volume.device)
        extra = {
            "kinetic_energy": now.kinetic_energy[rows],
            "kinetic_temperature": now.temperature[rows],
            "pressure": now.pressure[rows],
        }
        self.reporter.frame(whole.with_fields(systems=extra))


def _every(steps: np.ndarray, every: int) -> np.ndarray:
    return steps % every == 0 if every > 0 else np.zeros(len(steps), dtype=bool)


__all__ = ["FRAME_FIELDS", "Recorder"]
