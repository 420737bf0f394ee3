"""The reporter that keeps trajectories in a campaign folder: what `stages` calls and NetCDF answers."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict

from ..domain.batch import Batch
from .atomic import replacing
from .folder import Folder
from .handoff import DamagedFile
from .trajectory import HostBatch, Trajectory

logger = logging.getLogger(__name__)


class TrajectoryReporter:
    """Trajectories of one stage's systems on one lead (implements `stages.reporter.Reporter`).

    Any number of systems may be aboard; at most `max_open` files are open. `sync` before a checkpoint is recorded:
    frames up to the checkpoint then survive a power cut, later ones are written again by whoever resumes.
    """

    def __init__(
        self, folder: Folder, stage: str, *, velocities: bool = False, forces: bool = False, max_open: int = 64
    ) -> None:
        assert max_open >= 1
        self.folder, self.stage, self.max_open = folder, stage, max_open
        self.velocities, self.forces = velocities, forces
        # None: aboard, but no frame yet.
        self._aboard: dict[str, Trajectory | None] = {}
        self._used: OrderedDict[str, None] = OrderedDict()
        self._unsynced: set[str] = set()
        self.frames = 0

    def open(self, system_id: str, single: Batch, step: int) -> None:
        """A system comes aboard: at step 0 it gets a new trajectory, later it goes on with its own."""
        self._aboard[system_id] = self._resume(system_id, step) if step > 0 else None

    def _resume(self, system_id: str, step: int) -> Trajectory | None:
        path = self.folder.trajectory_file(system_id, self.stage)
        try:
            return Trajectory.resume(path, step)
        except DamagedFile as error:
            logger.warning("the trajectory of %s in %s begins anew at step %d: %s", system_id, self.stage, step, error)
            if path.exists():
                path.replace(path.with_suffix(".damaged"))
            return None

    def frame(self, batch: Batch) -> None:
        """One frame of each of these systems; a step that a file has already is passed over.

        Raises:
            OSError: a full disk …; every file is as it was before the frame.
            StaleWriter: a later epoch has taken a file over, this gang was cut off.
        """
        host = HostBatch(batch)
        for index, system_id in enumerate(batch.ids):
            trajectory = self._aboard.get(system_id)
            if trajectory is None:
                trajectory = self._aboard[system_id] = self._create(system_id, batch, index)
                self.frames += 1
            else:
                self.frames += trajectory.append(host, index)
            self._unsynced.add(system_id)
            self._touch(system_id)

    def _create(self, system_id: str, batch: Batch, index: int) -> Trajectory:
        single = batch.select([index])
        path = self.folder.trajectory_file(system_id, self.stage)
        trajectory = Trajectory.create(path, single, stage=self.stage, velocities=self.velocities, forces=self.forces)
        self._write_topology(system_id, single)
        return trajectory

    def _touch(self, system_id: str) -> None:
        """Keep the most recently used files open, within the bound."""
        self._used[system_id] = None
        self._used.move_to_end(system_id)
        while len(self._used) > self.max_open:
            oldest, _ = self._used.popitem(last=False)
            trajectory = self._aboard.get(oldest)
            if trajectory is not None:
                trajectory.close()

    def sync(self) -> None:
        """Make all frames so far durable; to be called before a checkpoint is recorded."""
        for system_id in sorted(self._unsynced):
            trajectory = self._aboard.get(system_id)
            if trajectory is not None:
                trajectory.sync()
                if system_id not in self._used:
                    trajectory.close()
        self._unsynced.clear()

    def close(self, system_id: str, single: Batch) -> None:
        """The system leaves: its trajectory is made durable, its final structure is written beside it."""
        trajectory = self._aboard.pop(system_id, None)
        self._used.pop(system_id, None)
        self._unsynced.discard(system_id)
        if trajectory is not None:
            trajectory.sync()
            trajectory.close()
            self._write_topology(system_id, single)

    def abandon(self) -> None:
        """Let go of all files without a word, for a gang that dissolves."""
        for trajectory in self._aboard.values():
            if trajectory is not None:
                trajectory.close()
        self._aboard.clear()
        self._used.clear()
        self._unsynced.clear()

    def _write_topology(self, system_id: str, single: Batch) -> None:
        write_structures(self.folder.topology_file(system_id, self.stage), single, oriented=False)


def write_structures(
    path: str | os.PathLike[str], batch: Batch, *, oriented: bool = True, format: str = "extxyz"
) -> None:
    """Write structures to one file in one step.

    Args:
        path: the file.
        batch: the systems.
        oriented: True gives the orientation of the input, False that of the trajectory.
        format: one of ASE's; extxyz keeps everything.
    """
    from ase.io import write

    atoms = (batch if oriented else batch.without(["rotation"])).to_atoms()
    with replacing(path, sync=False) as draft:
        write(draft, atoms, format=format)


__all__ = ["TrajectoryReporter", "write_structures"]
