"""The end of a campaign's thread: whatever fails there, whoever waits hears of it."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from campaigns import produce, recipe, systems

from mattermill.pipeline import campaign as module
from mattermill.pipeline.campaign import Campaign
from mattermill.pipeline.events import CampaignEnded
from mattermill.pipeline.folder import Folder
from mattermill.pipeline.intake import begin, structures_of
from mattermill.pipeline.ledger import LedgerError
from mattermill.pipeline.lock import Lock
from mattermill.pipeline.options import Options

LIMIT = 20.0


class Still(Campaign):
    """A campaign that does nothing between its beginning and its end."""

    ending: Any = None

    async def _run(self, address: Any, ranks: Any) -> None:
        if self.ending is not None:
            self.ending()


@pytest.fixture
def still(tmp_path: Path) -> Still:
    made = recipe(produce())
    folder = Folder.create(tmp_path / "a.mill")
    lock = folder.hold(new=True)
    return Still(made, folder, begin(folder, made, structures_of(systems(1))), lock, Options())


def test_a_terminal_that_has_gone(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def __call__(self, event: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def close(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "listener", lambda progress: Dead())
    with pytest.raises(OSError, match="Input/output error"):
        still._launch((None, None), None).wait(LIMIT)
    assert not still.running
    assert not still.folder.lock.exists()
    with pytest.raises(sqlite3.ProgrammingError):
        still._writer._db.execute("SELECT 1")


def test_a_folder_that_was_removed(still: Still) -> None:
    still.ending = lambda: shutil.rmtree(still.folder.path)
    still._launch((None, None), None).wait(LIMIT)
    assert not still.running


def test_a_ledger_that_cannot_be_read(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> Any:
        raise LedgerError("the ledger cannot be read")

    monkeypatch.setattr(still._writer, "pending", damaged)
    told: list[Any] = []
    with pytest.raises(LedgerError):
        still._launch((None, None), told.append).wait(LIMIT)
    assert [(e.outcome, e.reason) for e in told if isinstance(e, CampaignEnded)] == [
        ("failed", "the ledger cannot be read")
    ]
    assert not still.folder.lock.exists()


def test_the_first_error_is_the_one_that_is_told(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> Any:
        raise RuntimeError(text)

    still.ending = lambda: fail("first")
    monkeypatch.setattr(still._writer, "close", lambda: fail("second"))
    with pytest.raises(RuntimeError, match="first"):
        still._launch((None, None), None).wait(LIMIT)
    assert not still.folder.lock.exists()


def test_progress_that_is_none_of_the_kinds_leaves_nothing_held(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(progress: Any) -> Any:
        raise ValueError("no listener")

    monkeypatch.setattr(module, "listener", refuse)
    with pytest.raises(ValueError, match="no listener"):
        still._launch((None, None), None)
    assert not still.folder.lock.exists()


def test_a_lock_whose_folder_has_gone_is_released(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lock = Lock.acquire(tmp_path / "a" / "campaign.lock")
    shutil.rmtree(tmp_path / "a")
    lock.release()
    assert not lock.held
