"""The campaign folder: names, who may begin, and the one writer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mattermill.pipeline.atomic import remove_leftovers, replacing, write_text
from mattermill.pipeline.folder import NAME_LIMIT, Folder, FolderError, safe_name
from mattermill.pipeline.lock import Holder, Lock, LockedError, LockLost, process_started, read_holder

HOLD = """
import sys, time
from mattermill.pipeline.lock import Lock
lock = Lock.acquire(sys.argv[1])
print("held", flush=True)
time.sleep(120)
"""


@pytest.fixture
def holder_process(tmp_path):
    """A process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "campaign.lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "held"
    yield process
    process.kill()
    process.wait(timeout=30)
    process.stdout.close()


# --- names -------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300))
def test_no_id_leaves_the_folder(text):
    name = safe_name(text)
    assert 0 < len(name) <= NAME_LIMIT
    assert name.isascii()
    assert "/" not in name
    assert not name.startswith((".", "-"))
    assert os.path.basename(name) == name


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab/._~-\\ é"), max_size=6), unique=True, max_size=40))
def test_distinct_ids_have_distinct_names(ids):
    assert len({safe_name(i) for i in ids}) == len(ids)


@pytest.mark.parametrize("name", ["mp-149", "POSCAR-0", "Ar_fcc.2", "NaCl(100)", "x" * NAME_LIMIT])
def test_harmless_ids_stay_readable(name):
    assert safe_name(name) == name


@pytest.mark.parametrize("evil", ["../../etc/passwd", "..", ".", "", "/abs", "a/b", "a\0b", "-rf", "x" * 500, "a~b"])
def test_evil_ids_stay_inside(tmp_path, evil):
    folder = Folder(tmp_path / "a.mill")
    for path in (folder.trajectory_file(evil, evil), folder.handoff_file(evil, evil), folder.thermo_file(evil)):
        assert path.resolve().is_relative_to(folder.path.resolve())
    assert safe_name(safe_name(evil)) != safe_name(evil), "an id cannot feign the name of another"


def test_ledger_entries_cannot_point_outside(tmp_path):
    folder = Folder(tmp_path / "a.mill")
    path = folder.handoff_file("relax", "1")
    assert folder.resolve(folder.relative(path)) == path
    for bad in ("../x", "/etc/passwd", "handoff/../../x"):
        with pytest.raises(FolderError, match="outside"):
            folder.resolve(bad)


# --- beginning ----------------------------------------------------------------------------------------------------


def test_a_campaign_that_runs_is_named_to_whoever_wants_its_folder(tmp_path):
    folder = Folder.create(tmp_path / "a.mill")
    folder.recipe.write_text("{}")
    with folder.hold(), pytest.raises(FolderError, match=rf"runs, by process {os.getpid()} .*{socket.gethostname()}"):
        Folder.create(tmp_path / "a.mill")
    with pytest.raises(FolderError, match="already holds a campaign: go on"):
        Folder.create(tmp_path / "a.mill")


def test_a_folder_that_holds_a_campaign_is_refused(tmp_path):
    folder = Folder.create(tmp_path / "a.mill")
    Folder.create(tmp_path / "a.mill")  # nothing has begun yet: a crash between here and the recipe is harmless
    folder.recipe.write_text("{}")
    with pytest.raises(FolderError, match=r"already holds a campaign.*resume.*another path"):
        Folder.create(tmp_path / "a.mill")
    with pytest.raises(FolderError, match="already holds"):
        folder.hold(new=True)
    assert read_holder(folder.lock) is None, "a refused start must not leave a lock"
    assert Folder.open(tmp_path / "a.mill") == folder


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FolderError, match=r"something else \(thesis.tex\)"):
        Folder.create(tmp_path)
    with pytest.raises(FolderError, match="is a file"):
        Folder.create(tmp_path / "thesis.tex")


def test_opening_what_is_no_campaign(tmp_path):
    with pytest.raises(FolderError, match="holds no campaign"):
        Folder.open(tmp_path)
    with pytest.raises(FolderError, match="not a folder"):
        Folder.open(tmp_path / "missing")


# --- one writer -----------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_with_the_name_of_the_first(tmp_path, holder_process):
    with pytest.raises(LockedError) as refused:
        Lock.acquire(tmp_path / "campaign.lock")
    assert str(holder_process.pid) in str(refused.value)
    assert socket.gethostname() in str(refused.value)


def test_a_killed_holder_does_not_block_the_next(tmp_path, holder_process):
    holder_process.send_signal(signal.SIGKILL)
    holder_process.wait(timeout=30)
    with Lock.acquire(tmp_path / "campaign.lock") as lock:
        assert read_holder(lock.path).pid == os.getpid()
    assert not (tmp_path / "campaign.lock").exists()


def test_a_process_id_given_to_somebody_else_is_not_the_holder(tmp_path):
    path = tmp_path / "campaign.lock"
    lock = Lock.acquire(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "process_started": "another-boot:17"}))
    Lock.acquire(path).release()
    assert lock.holder.is_gone() is False


def test_a_lock_of_another_host_is_refused_unless_forced(tmp_path):
    path = tmp_path / "campaign.lock"
    Lock.acquire(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "node17", "pid": 4242}))
    with pytest.raises(LockedError, match=r"process 4242 .* on host node17"):
        Lock.acquire(path)
    lock = Lock.acquire(path, force=True)
    lock.check()
    lock.release()


def test_who_lost_the_lock_notices(tmp_path):
    path = tmp_path / "campaign.lock"
    lock = Lock.acquire(path)
    lock.check()
    other = Lock.acquire(path, force=True)
    with pytest.raises(LockLost, match="must stop writing"):
        lock.check()
    lock.release()
    other.check()  # the loser's release leaves the winner's lock alone
    other.release()
    with pytest.raises(LockLost):
        other.check()


def test_a_cut_off_lock_file_is_not_taken_for_free(tmp_path):
    path = tmp_path / "campaign.lock"
    path.write_text('{"host": "no')
    with pytest.raises(LockedError, match="not a readable lock"):
        Lock.acquire(path)
    Lock.acquire(path, force=True).release()


def test_of_many_who_find_a_stale_lock_one_takes_it(tmp_path):
    path = tmp_path / "campaign.lock"
    for _ in range(10):
        path.write_text(json.dumps({**Holder.here().__dict__, "process_started": "gone"}))
        gate = threading.Barrier(8)

        def attempt(_, gate=gate):
            gate.wait(timeout=30)
            try:
                return Lock.acquire(path)
            except LockedError:
                return None

        with ThreadPoolExecutor(8) as pool:
            won = [lock for lock in pool.map(attempt, range(8)) if lock]
        assert len(won) == 1
        won[0].release()


def test_without_hard_links_the_lock_still_works(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "campaign.lock"
    with Lock.acquire(path), pytest.raises(LockedError):
        Lock.acquire(path)


def test_process_start_tells_processes_apart():
    assert process_started(os.getpid()) == process_started(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_started(ended.pid) not in ("", process_started(os.getpid()))
    ended.stdin.close()
    ended.wait(timeout=60)
    assert process_started(ended.pid) == ""


# --- files that appear whole ----------------------------------------------------------------------------------------


def test_replacing_is_all_or_nothing(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "one")

    def fail_half_way():
        with replacing(path) as draft:
            draft.write_text("tw")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["file.txt"]
    write_text(path, "two")
    assert path.read_text() == "two"


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    write_text(tmp_path / "a" / "file.txt", "one")
    (tmp_path / "a" / ".tmp-123-file.txt").touch()
    assert remove_leftovers(tmp_path) == 1
    assert os.listdir(tmp_path / "a") == ["file.txt"]
