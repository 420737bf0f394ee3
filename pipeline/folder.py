"""The campaign folder: where everything lies, under names that no id can break out of."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .lock import Lock, read_holder

#: Longest file name (without its ending) made from an id; file systems allow 255 bytes.
NAME_LIMIT = 100

_UNSAFE = re.compile(r"[^A-Za-z0-9._+=@,()-]")
_LAYOUT = {"recipe.json", "ledger.sqlite", "summary.nc", "trajectories", "thermo", "handoff", "checkpoints"}
_OWN_PREFIXES = ("campaign.lock", ".campaign.lock", "ledger.sqlite", ".tmp-")


class FolderError(ValueError):
    """The folder cannot serve: it holds a campaign already, or none; the message says what to do."""


def safe_name(text: str) -> str:
    """A file name for an id or a stage name: distinct texts give distinct names, and none leaves its folder.

    Harmless texts stay as they are. Others have their odd characters replaced and end in ``~`` and a hash of the
    text; a text cannot feign such an ending, as ``~`` is one of the odd characters.
    """
    name = _UNSAFE.sub("_", text)
    if name.startswith((".", "-")):
        name = "_" + name[1:]
    if name == text and 0 < len(name) <= NAME_LIMIT:
        return name
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{name[: NAME_LIMIT - 17]}~{digest}"


@dataclass(frozen=True)
class Folder:
    """The paths of one campaign. Building one touches nothing on disk; see `create`, `open` and `hold`."""

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path).expanduser().absolute())

    # --- taking ------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Folder:
        """Make the folder of a new campaign.

        Raises:
            FolderError: it holds a campaign already, is not a folder, or holds files of somebody else.
        """
        folder = cls(path)
        folder.refuse_campaign()
        for sub in (folder.path, folder.trajectories, folder.thermo, folder.handoff, folder.checkpoints):
            sub.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Folder:
        """The folder of a campaign that exists.

        Raises:
            FolderError: there is none.
        """
        folder = cls(path)
        if not folder.path.is_dir():
            raise FolderError(f"{folder.path} is not a folder: give the path of a campaign (NAME.mill)")
        if not folder.holds_campaign:
            raise FolderError(f"{folder.path} holds no campaign (no ledger.sqlite): start one there with `run`")
        return folder

    def hold(self, *, new: bool = False, force: bool = False) -> Lock:
        """Become the one writer of this folder.

        Args:
            new: refuse when the folder holds a campaign, looked up again under the lock.
            force: take the lock from its holder.

        Raises:
            LockedError: another process holds the folder.
            FolderError: `new`, and it holds a campaign.
        """
        lock = Lock.acquire(self.lock, force=force)
        try:
            if new:
                self.refuse_campaign(lock)
        except FolderError:
            lock.release()
            raise
        return lock

    @property
    def holds_campaign(self) -> bool:
        return self.recipe.exists() or self.ledger.exists()

    def refuse_campaign(self, mine: Lock | None = None) -> None:
        """Raise a `FolderError` unless a new campaign can start here; `mine` is the lock, if held already."""
        if self.path.exists() and not self.path.is_dir():
            raise FolderError(f"{self.path} is a file, not a folder: choose another path")
        if self.holds_campaign:
            holder = read_holder(self.lock)
            others = holder is not None and (mine is None or holder.token != mine.holder.token)
            if holder is not None and others and holder.is_gone() is False:
                raise FolderError(f"{self.path} holds a campaign that runs, by {holder}: choose another path")
            raise FolderError(
                f"{self.path} already holds a campaign: go on with it by `mattermill resume {self.path}`, "
                "or choose another path"
            )
        if self.path.is_dir():
            strange = [e.name for e in self.path.iterdir() if not _is_own(e.name)]
            if strange:
                shown = ", ".join(sorted(strange)[:3])
                raise FolderError(
                    f"{self.path} holds {len(strange)} files of something else ({shown}): choose another path"
                )

    # --- paths -------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def summary(self) -> Path:
        return self.path / "summary.nc"

    @property
    def lock(self) -> Path:
        return self.path / "campaign.lock"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def thermo(self) -> Path:
        return self.path / "thermo"

    @property
    def handoff(self) -> Path:
        return self.path / "handoff"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def trajectory_file(self, system: str, stage: str) -> Path:
        return self.trajectories / safe_name(stage) / f"{safe_name(system)}.nc"

    def topology_file(self, system: str, stage: str) -> Path:
        return self.trajectories / safe_name(stage) / f"{safe_name(system)}.extxyz"

    def thermo_file(self, stage: str) -> Path:
        return self.thermo / f"{safe_name(stage)}.nc"

    def handoff_file(self, stage: str, key: str) -> Path:
        """Where finished systems of one segment lie; `key` must be new each time (claim, epoch, number)."""
        return self.handoff / safe_name(stage) / f"{safe_name(key)}.npz"

    def checkpoint_file(self, stage: str, key: str) -> Path:
        return self.checkpoints / safe_name(stage) / f"{safe_name(key)}.npz"

    def relative(self, path: str | os.PathLike[str]) -> str:
        """A path as the ledger keeps it: relative to the folder, so that a campaign can be moved."""
        return Path(path).absolute().relative_to(self.path).as_posix()

    def resolve(self, relative: str) -> Path:
        """The file a ledger entry names.

        Raises:
            FolderError: it would lie outside the folder (a ledger that was tampered with).
        """
        path = Path(os.path.normpath(self.path / relative))
        if not path.is_relative_to(self.path):
            raise FolderError(f"{relative!r} in the ledger of {self.path} points outside of the folder: refused")
        return path


def _is_own(name: str) -> bool:
    return name in _LAYOUT or name.startswith(_OWN_PREFIXES)


def sync_directory(path: Path) -> None:
    """Make names in a folder durable; file systems that cannot sync folders need no telling."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


__all__ = ["Folder", "FolderError", "safe_name", "sync_directory"]
