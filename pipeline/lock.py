"""One writer per campaign folder: a lock file that names who holds it.

The lock is a small JSON file that appears in one step (a hard link where the file system has them, else
``O_EXCL``), because byte-range locks come and go on network file systems. It names host, process and the time
that process started, so that a lock left behind by a killed process is told from one that is held, even when the
process id has been given to somebody else since. A lock of another host is never taken over unless forced: from
here nobody can tell whether its process lives.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)


class LockedError(ValueError):
    """Another process holds the folder; the message names it and says what to do."""


class LockLost(RuntimeError):
    """The lock that this process held is no longer its own: somebody forced it. Stop writing."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock: what the lock file says."""

    host: str
    pid: int
    process_started: str
    namespace: str
    since: str
    user: str
    command: str
    token: str

    @classmethod
    def here(cls) -> Holder:
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=process_started(os.getpid()),
            namespace=_pid_namespace(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            user=_user(),
            command=" ".join(sys.argv)[:200],
            token=uuid.uuid4().hex,
        )

    @classmethod
    def from_json(cls, text: str) -> Holder | None:
        """The holder a lock file names; None where the text is not one (cut off, or not ours)."""
        try:
            data = json.loads(text)
            return cls(**{name: type_(data[name]) for name, type_ in _HOLDER_TYPES.items()})
        except (ValueError, KeyError, TypeError):
            return None

    def to_json(self) -> str:
        return json.dumps(self.__dict__, indent=1) + "\n"

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on host {self.host} since {self.since} ({self.command})"

    def is_gone(self) -> bool | None:
        """Whether its process has ended; None where that cannot be told from here."""
        if self.host != socket.gethostname() or self.namespace != _pid_namespace():
            return None
        return process_started(self.pid) != self.process_started


_HOLDER_TYPES: dict[str, Any] = {
    "host": str,
    "pid": int,
    "process_started": str,
    "namespace": str,
    "since": str,
    "user": str,
    "command": str,
    "token": str,
}


class Lock:
    """A lock that this process holds; a context manager that gives it back."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.path = path
        self.holder = holder
        self.held = True

    @classmethod
    def acquire(cls, path: str | os.PathLike[str], *, force: bool = False) -> Lock:
        """Take the lock.

        Args:
            path: the lock file.
            force: take it from whoever holds it. Only right when that process is known to be gone.

        Raises:
            LockedError: another process holds it, or may hold it.
        """
        path = Path(path)
        mine = Holder.here()
        for _ in range(20):
            if _create(path, mine):
                return cls(path, mine)
            with _guard(path):
                _remove_stale(path, force)
        raise LockedError(f"{path} is being fought over by several processes: start one of them only")

    def check(self) -> None:
        """Make sure the lock is still ours.

        Raises:
            LockLost: somebody else holds it now, or the file is gone.
        """
        now = read_holder(self.path)
        if not self.held or now is None or now.token != self.holder.token:
            raise LockLost(f"{self.path} is now held by {now or 'nobody'}: this process must stop writing")

    def release(self) -> None:
        """Give the lock back; does nothing when it is not ours any more, or gone with its folder."""
        if not self.held:
            return
        self.held = False
        try:
            with _guard(self.path):
                now = read_holder(self.path)
                if now is not None and now.token == self.holder.token:
                    self.path.unlink()
        except FileNotFoundError:
            logger.warning("the lock %s has gone, and its folder with it", self.path)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def read_holder(path: str | os.PathLike[str]) -> Holder | None:
    """Who holds the lock at this path; None where nobody does or the file says nothing sensible."""
    try:
        return Holder.from_json(Path(path).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None


def process_started(pid: int) -> str:
    """A text that differs between two processes that had the same id; empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self/stat").exists() else _started_without_proc(pid)
    # The command may hold spaces and brackets: fields are counted from the last bracket. Field 3 is the state
    # (a zombie is gone for our purpose), field 22 the start in clock ticks since boot.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else f"{boot}:{fields[19]}"


def _started_without_proc(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "running"


def _create(path: Path, holder: Holder) -> bool:
    """Make the lock file appear with its whole content, or return False when there is one."""
    draft = path.with_name(f".{path.name}.{holder.token}")
    draft.write_text(holder.to_json(), encoding="utf-8")
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        return False
    except OSError:
        return _create_exclusive(path, holder)  # no hard links here
    finally:
        draft.unlink(missing_ok=True)


def _create_exclusive(path: Path, holder: Holder) -> bool:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(holder.to_json())
    return True


def _remove_stale(path: Path, force: bool) -> None:
    """Remove the lock of a process that is gone, or say who holds it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    holder = Holder.from_json(text)
    if not force:
        if holder is None:
            raise LockedError(f"{path} is not a readable lock: when no run uses this folder, {_force(path)}")
        gone = holder.is_gone()
        if gone is None:
            raise LockedError(
                f"the folder is held by {holder}; whether that process still runs cannot be told from "
                f"{socket.gethostname()}: stop it there, or, when it is surely gone, {_force(path)}"
            )
        if not gone:
            raise LockedError(f"the folder is held by {holder}: wait for it, stop it, or use another folder")
    logger.warning("taking over the lock %s of %s", path, holder or "an unknown holder")
    path.unlink(missing_ok=True)


def _force(path: Path) -> str:
    """What to do about a lock that nobody can judge."""
    return f"take it over by `mattermill resume --force-lock {path.parent}` (in Python mm.resume(..., force=True))"


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Between two processes of one host: whoever judges and removes a lock does so alone.

    Without it two processes could both find a stale lock, and the slower one remove the new lock of the faster.
    Where flock is not to be had this is a race of microseconds between two starts on one host.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(path.with_name(f".{path.name}.guard"), os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("no flock on %s (%s): going on without", path.parent, error)
        yield
    finally:
        os.close(descriptor)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no passwd entry: common in containers
        return str(os.getuid()) if hasattr(os, "getuid") else "unknown"


__all__ = ["Holder", "Lock", "LockLost", "LockedError", "process_started", "read_holder"]
