"""The scribe: writes what is derived from the ledger and the reports, in a thread of its own, off the event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .folder import Folder
from .ledger import Ledger
from .orders import Report
from .results import write_summary
from .thermo import ThermoFile

logger = logging.getLogger(__name__)


class Scribe:
    """Keeps summary.nc and thermo/ up to date, and removes checkpoints that nobody needs.

    All of it can be made again from the ledger and the next reports, so an error here is logged and not fatal. One
    that nobody foresaw, or that kept the last summary from being written, stays in `trouble` for the campaign to tell.

    Args:
        folder, ledger: of the campaign.
        every: seconds between two summaries.
    """

    def __init__(self, folder: Folder, ledger: Ledger, every: float) -> None:
        self.folder, self.ledger, self.every = folder, ledger, every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mattermill-scribe")
        self._systems = [s.id for s in ledger.systems()]
        self._thermo: dict[str, ThermoFile] = {}
        self._checkpoints: set[str] = set()
        self._written = time.monotonic()
        self._pending: Future[Exception | None] | None = None
        self.trouble: Exception | None = None

    def thermo(self, stage: str, report: Report) -> None:
        """Append the time series of a report."""
        if report.thermo_ids:
            self._do(lambda: self._append(stage, report))

    def checkpoint(self, file: str) -> None:
        """A checkpoint is in use from now on."""
        self._checkpoints.add(file)

    def summarise(self) -> None:
        """Rewrite the summary, if it is time and the last one is done."""
        now = time.monotonic()
        if now - self._written >= self.every and (self._pending is None or self._pending.done()):
            self._written = now
            self._pending = self._do(self._tidy)

    def close(self) -> None:
        """Write everything a last time. Blocks; call it off the event loop."""
        self.trouble = self._do(self._tidy).result() or self.trouble
        self._thread.shutdown(wait=True)
        for file in self._thermo.values():
            file.close()

    # --- in the thread -------------------------------------------------------------------------------------------

    def _do(self, what: Callable[[], Any]) -> Future[Exception | None]:
        return self._thread.submit(self._guarded, what)

    def _guarded(self, what: Callable[[], Any]) -> Exception | None:
        """Nobody waits for most of what is done here, so no error may leave it."""
        try:
            what()
            return None
        except (OSError, ValueError, RuntimeError) as error:  # the disk, a damaged file, another writer, the ledger
            logger.warning("%s: %s: %s", self.folder.path.name, type(error).__name__, error)
            return error
        except Exception as error:  # a bug of ours: told in the log now, and by the campaign at its end
            logger.exception("%s: the scribe failed", self.folder.path.name)
            self.trouble = self.trouble or error
            return error

    def _append(self, stage: str, report: Report) -> None:
        from ..stages.thermo import COLUMNS

        if stage not in self._thermo:
            path = self.folder.thermo_file(stage)
            self._thermo[stage] = ThermoFile.open(path, self._systems, COLUMNS)
        self._thermo[stage].append(report.thermo_ids, report.thermo)

    def _tidy(self) -> None:
        for series in self._thermo.values():
            series.sync()
        write_summary(self.folder, self.ledger)
        used = self.ledger.files_in_use()
        # Only what was recorded and is not needed any more: a lead may have written one that no report tells of yet.
        for file in list(self._checkpoints - used):
            self.folder.resolve(file).unlink(missing_ok=True)
            self._checkpoints.discard(file)


__all__ = ["Scribe"]
