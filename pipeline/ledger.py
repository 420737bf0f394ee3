"""The ledger: what has happened to every system, in SQLite.

One process writes (the one that holds the folder's lock); any number read, at any time. A visit is one system's
passage through one stage; its row goes from pending (status NULL, not started) to running (status NULL, started)
to done (status set), and a done visit is never written again: finishing it twice is reported, not recorded. All
that one report of a gang says goes into one transaction, so the ledger never knows half a report.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from ..domain.batch import plain
from .entries import Checkpointed, Entry, Finished, Queued, Recorded, Returned, Started, SystemRow, Visit
from .errors import CampaignError
from .filesystem import is_network_file_system
from .schema import SCHEMA, VERSION

logger = logging.getLogger(__name__)


class LedgerError(CampaignError):
    """The ledger cannot be used: not there, of another version, damaged, or used against its rules."""


class Ledger:
    """The ledger of one campaign. Safe to use from several threads of the one process."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, readonly: bool = False) -> None:
        self._db = connection
        self._db.row_factory = sqlite3.Row
        self._lock = threading.RLock()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.path = path
        self.readonly = readonly

    # --- opening -----------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Ledger:
        """A new ledger. Raises `LedgerError` when there is one already."""
        path = Path(path)
        if path.exists():
            raise LedgerError(f"{path} exists: open it, or choose another folder")
        ledger = cls(_connect(path), path)
        with ledger._transaction() as db:
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES ('version', ?)", (str(VERSION),))
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Ledger:
        """The ledger of a campaign that is resumed, to read and write; one process only.

        Raises:
            LedgerError: not there, damaged, or of another version.
        """
        path = Path(path)
        if not path.exists():
            raise LedgerError(f"{path} does not exist: is this the folder of a campaign?")
        ledger = cls(_connect(path), path)
        ledger._check_version()
        return ledger

    @classmethod
    def open_readonly(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read a ledger at any time, also while a campaign writes it, also in a folder without write permission.

        Raises:
            LedgerError: not there, damaged, or of another version.
        """
        path = Path(path)
        if not path.exists():
            raise LedgerError(f"{path} does not exist: is this the folder of a campaign?")
        uri = f"{path.absolute().as_uri()}?mode=ro"
        ledger = cls(sqlite3.connect(uri, uri=True, check_same_thread=False, timeout=30), path, readonly=True)
        try:
            ledger._check_version()
        except sqlite3.OperationalError:
            # A write-ahead log in a folder we may not write to cannot be read in place: read a copy.
            ledger.close()
            ledger = cls._open_copy(path)
            ledger._check_version()
        return ledger

    @classmethod
    def _open_copy(cls, path: Path) -> Ledger:
        scratch = tempfile.TemporaryDirectory(prefix="mattermill-ledger-")
        for suffix in ("", "-wal"):
            source = Path(f"{path}{suffix}")
            if source.exists():
                shutil.copyfile(source, Path(scratch.name) / source.name)
        copy = sqlite3.connect(Path(scratch.name) / path.name, check_same_thread=False)
        ledger = cls(copy, path, readonly=True)
        ledger._scratch = scratch
        return ledger

    def _check_version(self) -> None:
        try:
            row = self._db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            raise LedgerError(f"{self.path} is not a ledger of mattermill") from error
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"{self.path} is damaged: {error}") from error
        if row is None or row[0] != str(VERSION):
            found = row[0] if row else "unknown"
            raise LedgerError(f"{self.path} has version {found}, this is version {VERSION}: use the version it needs")

    def close(self) -> None:
        with self._lock:
            self._db.close()
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Raises `LedgerError` where SQLite fails (a full disk, a folder that is read-only …)."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                # After some failures SQLite has rolled back by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise LedgerError(f"{self.path} cannot be written: {error}; nothing of this is recorded") from error
                raise

    # --- writing -----------------------------------------------------------------------------------------

    def set_meta(self, key: str, value: Any) -> None:
        """Keep something JSON-able about the campaign as a whole."""
        assert key != "version"
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(plain(value))))

    def add_systems(self, systems: Iterable[SystemRow]) -> int:
        """Register systems at intake, in order; known ids are left as they are. Returns how many are new."""
        with self._transaction() as db:
            before = db.execute("SELECT count(*), coalesce(max(number), -1) FROM systems").fetchone()
            db.executemany(
                "INSERT OR IGNORE INTO systems VALUES (?, ?, ?, ?, ?, ?)",
                ((before[1] + 1 + k, s.id, s.n_atoms, s.formula, s.source, s.failure) for k, s in enumerate(systems)),
            )
            return db.execute("SELECT count(*) FROM systems").fetchone()[0] - before[0]

    def record(self, entries: Iterable[Entry]) -> Recorded:
        """Record everything that one report says, in its order and in one transaction.

        * `Queued`: a visit that is known already is left alone.
        * `Started`: counts an attempt; `Checkpointed`: the one before is kept as second.
        * `Finished`: sets the status, drops the checkpoints and queues the visits of `next_stages`.
        * `Returned`: the visit waits again.

        A word about a visit that has ended, or from a claim that does not run it, changes nothing and is returned.

        Raises:
            LedgerError: an entry names a visit that was never queued, or the disk is full …; nothing is recorded.
        """
        repeated: list[tuple[str, str]] = []
        stale: list[tuple[str, str]] = []
        now = _now()
        with self._transaction() as db:
            for entry in entries:
                if isinstance(entry, Queued):
                    _queue(db, entry, now)
                    continue
                key = (entry.system, entry.stage)
                row = db.execute("SELECT status, claim FROM visits WHERE system = ? AND stage = ?", key).fetchone()
                if row is None:
                    raise LedgerError(f"system {key[0]!r} was never queued for stage {key[1]!r}")
                if row["status"] is not None:
                    repeated.append(key)
                elif isinstance(entry, Finished) and entry.claim is not None and entry.claim != row["claim"]:
                    stale.append(key)
                else:
                    _APPLY[type(entry)](db, entry, now)
        if repeated or stale:
            logger.info("ledger: %d words about ended visits and %d of stale claims", len(repeated), len(stale))
        return Recorded(tuple(repeated), tuple(stale))

    # --- reading -----------------------------------------------------------------------------------------

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.DatabaseError as error:
                raise LedgerError(f"{self.path} cannot be read: {error}") from error

    def meta(self, key: str, default: Any = None) -> Any:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(rows[0][0]) if rows else default

    def systems(self) -> list[SystemRow]:
        """All systems in the order of intake."""
        rows = self._rows("SELECT id, n_atoms, formula, source, failure FROM systems ORDER BY number")
        return [SystemRow(*row) for row in rows]

    def stages(self) -> list[str]:
        """The stages that anybody was queued for, in the order in which that first happened."""
        return [r[0] for r in self._rows("SELECT stage FROM visits GROUP BY stage ORDER BY min(queued), stage")]

    def visits(self, stage: str | None = None, *, status: str | None = None, done: bool | None = None) -> list[Visit]:
        """Visits in the order of intake of their systems, of one stage, of one status, done or not."""
        where, values = ["1"], []
        if stage is not None:
            where.append("v.stage = ?")
            values.append(stage)
        if status is not None:
            where.append("v.status = ?")
            values.append(status)
        if done is not None:
            where.append(f"v.status IS {'NOT ' if done else ''}NULL")
        rows = self._rows(
            "SELECT v.* FROM visits v LEFT JOIN systems s ON s.id = v.system "
            f"WHERE {' AND '.join(where)} ORDER BY s.number, v.queued, v.stage",
            values,
        )
        return [_visit(row) for row in rows]

    def visit(self, system: str, stage: str) -> Visit | None:
        rows = self._rows("SELECT * FROM visits WHERE system = ? AND stage = ?", (system, stage))
        return _visit(rows[0]) if rows else None

    def pending(self, stage: str | None = None) -> list[Visit]:
        """Visits that have not ended, running ones too: after a crash, all of these are to be started again."""
        return self.visits(stage, done=False)

    def counts(self) -> dict[str, dict[str, int]]:
        """Number of visits per stage and status; those that have not ended count as ``pending`` or ``running``."""
        rows = self._rows(
            "SELECT stage, coalesce(status, iif(claim IS NULL, 'pending', 'running')), count(*) "
            "FROM visits GROUP BY 1, 2"
        )
        counts: dict[str, dict[str, int]] = {stage: {} for stage in self.stages()}
        for stage, status, number in rows:
            counts[stage][status] = number
        return counts

    def checkpoints(self, system: str, stage: str) -> list[Checkpointed]:
        """The checkpoints of a visit, the newest first; at most two."""
        rows = self._rows(
            "SELECT system, stage, file, digest, step FROM checkpoints WHERE system = ? AND stage = ? ORDER BY age",
            (system, stage),
        )
        return [Checkpointed(*row) for row in rows]

    def all_checkpoints(self, stage: str | None = None) -> dict[tuple[str, str], list[Checkpointed]]:
        """The checkpoints of all visits by (system, stage), the newest first."""
        where, values = ("WHERE stage = ?", (stage,)) if stage is not None else ("", ())
        rows = self._rows(f"SELECT system, stage, file, digest, step FROM checkpoints {where} ORDER BY age", values)
        found: dict[tuple[str, str], list[Checkpointed]] = {}
        for row in rows:
            found.setdefault((row["system"], row["stage"]), []).append(Checkpointed(*row))
        return found

    def files_in_use(self) -> set[str]:
        """Files (relative) that a visit still needs to start from, or a checkpoint, or a final state lies in."""
        rows = self._rows(
            "SELECT input_file FROM visits WHERE status IS NULL AND input_file IS NOT NULL "
            "UNION SELECT state_file FROM visits WHERE state_file IS NOT NULL UNION SELECT file FROM checkpoints"
        )
        return {row[0] for row in rows}

    def last_visits(self) -> dict[str, list[Visit]]:
        """Per system the visits that led nowhere further: one, or one per branch of the graph."""
        rows = self._rows(
            "SELECT v.* FROM visits v WHERE NOT EXISTS "
            "(SELECT 1 FROM visits w WHERE w.system = v.system AND w.parent = v.stage)"
        )
        last: dict[str, list[Visit]] = {}
        for row in rows:
            last.setdefault(row["system"], []).append(_visit(row))
        return last


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, timeout=30, isolation_level=None)
    try:
        if is_network_file_system(path.parent):
            # Write-ahead logging needs memory that is shared between reader and writer: not across hosts.
            logger.info("%s lies on a network file system: the ledger goes without write-ahead logging", path)
            connection.execute("PRAGMA journal_mode = TRUNCATE")
        else:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode.lower() != "wal":
                logger.info("no write-ahead logging on %s: the ledger uses journal mode %s", path.parent, mode)
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.DatabaseError as error:
        connection.close()
        raise LedgerError(f"{path} cannot be opened as a ledger: {error}") from error
    return connection


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _queue(db: sqlite3.Connection, entry: Queued, now: str) -> None:
    db.execute(
        "INSERT OR IGNORE INTO visits (system, stage, parent, n_atoms, queued, input_file, input_digest) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (entry.system, entry.stage, entry.parent, entry.n_atoms, now, entry.file, entry.digest),
    )


def _start(db: sqlite3.Connection, entry: Started, now: str) -> None:
    db.execute(
        "UPDATE visits SET attempts = attempts + 1, claim = ?, started = coalesce(started, ?) "
        "WHERE system = ? AND stage = ?",
        (entry.claim, now, entry.system, entry.stage),
    )


def _checkpoint(db: sqlite3.Connection, entry: Checkpointed, now: str) -> None:
    key = (entry.system, entry.stage)
    db.execute("DELETE FROM checkpoints WHERE system = ? AND stage = ? AND age = 1", key)
    db.execute("UPDATE checkpoints SET age = 1 WHERE system = ? AND stage = ?", key)
    db.execute(
        "INSERT INTO checkpoints VALUES (?, ?, 0, ?, ?, ?, ?)", (*key, entry.file, entry.digest, entry.step, now)
    )
    db.execute("UPDATE visits SET steps = ? WHERE system = ? AND stage = ?", (entry.step, *key))


def _finish(db: sqlite3.Connection, entry: Finished, now: str) -> None:
    key = (entry.system, entry.stage)
    db.execute(
        "UPDATE visits SET status = ?, reason = ?, steps = max(steps, ?), seconds = ?, results = ?, state_file = ?, "
        "state_digest = ?, ended = ?, claim = NULL WHERE system = ? AND stage = ?",
        (
            str(entry.status),
            entry.reason,
            int(entry.steps),
            float(entry.seconds),
            json.dumps(plain(dict(entry.results))),
            entry.file,
            entry.digest,
            now,
            *key,
        ),
    )
    db.execute("DELETE FROM checkpoints WHERE system = ? AND stage = ?", key)
    if entry.next_stages:
        n_atoms = db.execute("SELECT n_atoms FROM visits WHERE system = ? AND stage = ?", key).fetchone()[0]
        for stage in entry.next_stages:
            _queue(db, Queued(entry.system, stage, n_atoms, entry.file, entry.digest, parent=entry.stage), now)


def _return(db: sqlite3.Connection, entry: Returned, now: str) -> None:
    db.execute(
        "UPDATE visits SET claim = NULL, deaths = deaths + ? WHERE system = ? AND stage = ?",
        (int(entry.died), entry.system, entry.stage),
    )


_APPLY: dict[type, Any] = {Started: _start, Checkpointed: _checkpoint, Finished: _finish, Returned: _return}


def _visit(row: sqlite3.Row) -> Visit:
    values = {name: row[name] for name in row.keys()}  # noqa: SIM118 (a Row iterates over values)
    values["results"] = json.loads(values["results"])
    return Visit(**values)


__all__ = [
    "Checkpointed",
    "Entry",
    "Finished",
    "Ledger",
    "LedgerError",
    "Queued",
    "Recorded",
    "Returned",
    "Started",
    "SystemRow",
    "Visit",
]
