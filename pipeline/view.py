"""A campaign folder to look at: its summary, trajectories, time series and final states. Nothing here writes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..domain.batch import Batch
from .folder import Folder
from .handoff import DamagedFile, read_batch
from .ledger import Ledger, Visit
from .results import summary_tree

if TYPE_CHECKING:
    import xarray


class CampaignView:
    """Look at a campaign, during the run and after. Every property reads afresh.

    The ledger is opened for each question, so that a view never stands in the way of the campaign.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    @property
    def path(self) -> str:
        return str(self.folder.path)

    def __repr__(self) -> str:
        parts = [f"{stage}: {sum(row.values())}" for stage, row in self.status().items()]
        return f"CampaignView({self.path!r}; {', '.join(parts) or 'no visits yet'})"

    @contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        with Ledger.open_readonly(self.folder.ledger) as ledger:
            yield ledger

    # --- tables ------------------------------------------------------------------------------------------

    @property
    def summary(self) -> xarray.DataTree:
        """A group per stage with dimension `system`, as of now (summary.nc may be some seconds older)."""
        with self._ledger() as ledger:
            return summary_tree(self.folder, ledger)

    def status(self) -> dict[str, dict[str, int]]:
        """Number of systems per stage and status."""
        with self._ledger() as ledger:
            return ledger.counts()

    @property
    def stages(self) -> list[str]:
        with self._ledger() as ledger:
            return ledger.stages()

    @property
    def systems(self) -> list[str]:
        """Ids of all systems, in the order in which they came in."""
        with self._ledger() as ledger:
            return [s.id for s in ledger.systems()]

    def failures(self) -> dict[str, str]:
        """Why systems failed or were quarantined, at intake or in a stage."""
        with self._ledger() as ledger:
            found = {s.id: s.failure for s in ledger.systems() if s.failure}
            for status in ("failed", "quarantined"):
                found.update({v.system: f"{v.stage}: {v.reason}" for v in ledger.visits(status=status)})
        return found

    # --- series ------------------------------------------------------------------------------------------

    def trajectory(self, system: str, stage: str) -> xarray.Dataset:
        """The frames of one visit so far, lazy: nothing but the header is read until values are asked for.

        Coordinates `time` (ps), `step` and `Z` (atomic numbers); units stand at every variable. Close it, or use it
        in a ``with``, when many are opened.

        Raises:
            KeyError: there is none; says what there is.
            DamagedFile: the file is not a trajectory.
        """
        import xarray

        from .records import read_header

        path = self.folder.trajectory_file(system, stage)
        if not path.exists():
            raise KeyError(self._no_trajectory(system, stage))
        read_header(path)
        dataset = xarray.open_dataset(path, engine="netcdf4", decode_times=False, decode_timedelta=False)
        return dataset.set_coords(["time", "step", "Z"])

    def _no_trajectory(self, system: str, stage: str) -> str:
        with self._ledger() as ledger:
            known = [v.stage for v in ledger.visits() if v.system == system]
        there = [s for s in known if self.folder.trajectory_file(system, s).exists()]
        if not known:
            return f"this campaign has no system {system!r}"
        have = f"its trajectories: {', '.join(there)}" if there else "it has no trajectory yet"
        return f"no trajectory of {system!r} in stage {stage!r}: {have}"

    def thermo(self, stage: str, system: str | None = None) -> xarray.Dataset:
        """The time series of a stage: of all systems (CF indexed ragged array over `obs`), or of one over `step`.

        Raises:
            KeyError: the stage has none yet, or no such system.
        """
        import xarray

        path = self.folder.thermo_file(stage)
        if not path.exists():
            raise KeyError(f"stage {stage!r} has no time series yet")
        with xarray.open_dataset(path, engine="netcdf4", decode_times=False, decode_timedelta=False) as file:
            dataset = file.load()
        if system is None:
            return dataset
        ids = [i.decode() if isinstance(i, bytes) else str(i) for i in dataset["system_id"].values]
        if system not in ids:
            raise KeyError(f"this campaign has no system {system!r}")
        mine = dataset.drop_vars("system_id").isel(obs=dataset["system_index"].values == ids.index(system))
        return mine.drop_vars("system_index").swap_dims(obs="step").set_coords("step").sortby("step")

    # --- states ------------------------------------------------------------------------------------------

    def structures(self, stage: str) -> Batch:
        """The final states of a stage's systems, float64, as one batch; ``.to_atoms()`` gives ASE Atoms.

        Systems that failed count with their last good state where it was kept. What lies in a damaged or removed
        file is left out and named in a warning.
        """
        with self._ledger() as ledger:
            visits = ledger.visits(stage, done=True)
        return Batch.concat(batch for _, batch in self.states(visits))

    def states(self, visits: list[Visit]) -> Iterator[tuple[Visit, Batch]]:
        """The final state of each of these visits that has one, a file read once for all in it."""
        by_file: dict[str, list[Visit]] = {}
        for visit in visits:
            if visit.state_file:
                by_file.setdefault(visit.state_file, []).append(visit)
        found: dict[tuple[str, str], Batch] = {}
        for name, inside in by_file.items():
            try:
                batch = read_batch(self.folder.resolve(name), list(dict.fromkeys(v.system for v in inside)))
            except (DamagedFile, KeyError) as error:
                warnings.warn(f"{len(inside)} final states are not to be had: {error}", stacklevel=3)
                continue
            singles = {single.ids[0]: single for single in batch}
            found.update({(v.system, v.stage): singles[v.system] for v in inside})
        for visit in visits:
            if (visit.system, visit.stage) in found:
                yield visit, found[visit.system, visit.stage]


__all__ = ["CampaignView"]
