"""The ledger: exactly once, one transaction per report, readable at any time."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mattermill.pipeline import ledger as module
from mattermill.pipeline.ledger import (
    Checkpointed,
    Finished,
    Ledger,
    LedgerError,
    Queued,
    Returned,
    Started,
    SystemRow,
)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.create(tmp_path / "ledger.sqlite") as opened:
        opened.add_systems([SystemRow(f"s{k}", 10 + k, "Ar") for k in range(3)])
        opened.add_systems([SystemRow("bad", 0, failure="empty file")])
        opened.record([Queued(f"s{k}", "relax", 10 + k, "handoff/intake/0.npz", "d0") for k in range(3)])
        yield opened


def test_a_visit_from_pending_to_done(ledger):
    assert ledger.counts() == {"relax": {"pending": 3}}
    ledger.record([Started("s0", "relax", "c1")])
    assert ledger.counts() == {"relax": {"pending": 2, "running": 1}}
    done = Finished(
        *("s0", "relax", "converged"), steps=7, seconds=1.5, results={"energy": np.float64(-1.0)},
        file="handoff/relax/1.npz", digest="d1", next_stages=("heat",), claim="c1",
    )  # fmt: skip
    assert ledger.record([done]).repeated == ()
    visit = ledger.visit("s0", "relax")
    assert (visit.status, visit.attempts, visit.steps, visit.seconds) == ("converged", 1, 7, 1.5)
    assert visit.results == {"energy": -1.0}
    assert visit.claim is None
    assert ledger.counts() == {"relax": {"converged": 1, "pending": 2}, "heat": {"pending": 1}}
    assert ledger.visit("s0", "heat").input_file == "handoff/relax/1.npz"
    assert ledger.visit("s0", "heat").n_atoms == 10
    assert [v.system for v in ledger.pending("heat")] == ["s0"]


def test_finishing_twice_is_told_and_changes_nothing(ledger):
    done = Finished("s0", "relax", "converged", steps=7, next_stages=("heat",))
    ledger.record([Started("s0", "relax"), done])
    before = ledger.visit("s0", "relax")
    again = ledger.record([Finished("s0", "relax", "failed", "late", next_stages=("other",)), Started("s0", "relax")])
    assert again.repeated == (("s0", "relax"), ("s0", "relax"))
    assert ledger.visit("s0", "relax") == before
    assert ledger.visit("s0", "other") is None
    assert len(ledger.pending("heat")) == 1


def test_a_cut_off_gang_cannot_finish_a_visit(ledger):
    ledger.record([Started("s0", "relax", "c1"), Returned("s0", "relax", died=True), Started("s0", "relax", "c2")])
    late = ledger.record([Finished("s0", "relax", "converged", claim="c1")])
    assert late.stale == (("s0", "relax"),)
    assert ledger.visit("s0", "relax").status is None
    assert ledger.record([Finished("s0", "relax", "converged", claim="c2")]).stale == ()
    assert ledger.visit("s0", "relax").deaths == 1
    assert ledger.visit("s0", "relax").attempts == 2


def test_queueing_twice_is_harmless(ledger):
    ledger.record([Started("s0", "relax", "c1"), Queued("s0", "relax", 99, "elsewhere")])
    visit = ledger.visit("s0", "relax")
    assert (visit.n_atoms, visit.claim, visit.input_file) == (10, "c1", "handoff/intake/0.npz")


def test_a_report_is_recorded_whole_or_not_at_all(ledger):
    with pytest.raises(LedgerError, match="'nobody' was never queued"):
        ledger.record([Finished("s0", "relax", "converged"), Finished("nobody", "relax", "converged")])
    assert ledger.counts() == {"relax": {"pending": 3}}


def test_a_full_disk_records_nothing_and_the_next_report_goes_through(ledger):
    """SQLite is told to hold no more pages, which fails as a full disk does."""
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    before = ledger.counts()
    with pytest.raises(LedgerError, match=r"disk is full; nothing of this is recorded"):
        ledger.record(Queued(f"n{k}", "relax", file="x" * 500) for k in range(2000))
    assert ledger.counts() == before
    ledger._db.execute("PRAGMA max_page_count = 1000000")
    ledger.record(Queued(f"n{k}", "relax") for k in range(2000))
    assert ledger.counts()["relax"]["pending"] == 2003


def test_the_checkpoint_before_is_kept_until_the_visit_ends(ledger):
    ledger.record([Started("s0", "relax", "c1")])
    for step in (10, 20, 30):
        ledger.record([Checkpointed("s0", "relax", f"checkpoints/{step}.npz", f"d{step}", step)])
    assert [c.step for c in ledger.checkpoints("s0", "relax")] == [30, 20]
    assert ledger.all_checkpoints()["s0", "relax"] == ledger.checkpoints("s0", "relax")
    assert ledger.visit("s0", "relax").steps == 30
    assert {"checkpoints/30.npz", "checkpoints/20.npz"} <= ledger.files_in_use()
    assert "checkpoints/10.npz" not in ledger.files_in_use()
    ledger.record([Finished("s0", "relax", "converged", file="h.npz")])
    assert ledger.checkpoints("s0", "relax") == []
    assert "checkpoints/30.npz" not in ledger.files_in_use()
    assert {"h.npz", "handoff/intake/0.npz"} <= ledger.files_in_use()


def test_the_last_visit_of_each_branch(ledger):
    ledger.record(
        [
            Finished("s0", "relax", "converged", file="r.npz", next_stages=("small", "large")),
            Finished("s0", "small", "finished", file="r.npz", next_stages=("cold",)),
            Finished("s0", "large", "filtered", file="r.npz"),
            Finished("s0", "cold", "finished", file="c.npz"),
            Finished("s1", "relax", "failed", "exploded"),
        ]
    )
    last = ledger.last_visits()
    assert sorted(v.stage for v in last["s0"]) == ["cold", "large"]
    assert ledger.visit("s0", "cold").parent == "small"
    assert [v.status for v in last["s1"]] == ["failed"]
    assert [v.stage for v in last["s2"]] == ["relax"]


def test_systems_keep_the_order_of_intake_and_are_known_once(ledger):
    assert ledger.add_systems([SystemRow("s1", 1), SystemRow("new", 2)]) == 1
    assert [s.id for s in ledger.systems()] == ["s0", "s1", "s2", "bad", "new"]
    assert ledger.systems()[3].failure == "empty file"
    assert ledger.systems()[1].n_atoms == 11


def test_meta(ledger):
    ledger.set_meta("result_units", {"energy": "eV"})
    assert ledger.meta("result_units") == {"energy": "eV"}
    assert ledger.meta("nothing", 3) == 3


def test_reading_while_another_writes(ledger):
    with Ledger.open_readonly(ledger.path) as reader:
        assert reader.counts() == {"relax": {"pending": 3}}
        ledger.record([Finished("s0", "relax", "converged")])
        assert reader.counts() == {"relax": {"pending": 2, "converged": 1}}
        with pytest.raises(LedgerError, match=r"cannot be written: .*readonly"):
            reader.record([Started("s1", "relax")])


def test_a_ledger_in_a_folder_without_write_permission(ledger, monkeypatch):
    """As root no permission stops us, so the failure that SQLite reports there is played by hand."""
    ledger.record([Finished("s0", "relax", "converged")])
    real = Ledger._check_version
    calls = []

    def refuse_in_place(self):
        calls.append(self)
        if len(calls) == 1:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        real(self)

    monkeypatch.setattr(Ledger, "_check_version", refuse_in_place)
    with Ledger.open_readonly(ledger.path) as reader:
        assert reader.counts()["relax"]["converged"] == 1, "what lies in the write-ahead log is seen as well"
        scratch = Path(reader._scratch.name)
        assert scratch.exists()
    assert not scratch.exists()


def test_several_threads_of_one_process(ledger):
    ledger.add_systems(SystemRow(f"t{k}", 1) for k in range(200))
    ledger.record([Queued(f"t{k}", "relax") for k in range(200)])

    def finish(part):
        for k in range(part, 200, 4):
            ledger.record([Finished(f"t{k}", "relax", "converged")])

    threads = [threading.Thread(target=finish, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert ledger.counts()["relax"]["converged"] == 200


def test_what_is_no_ledger_is_named(tmp_path, ledger):
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger.open(tmp_path / "none.sqlite")
    with pytest.raises(LedgerError, match="exists"):
        Ledger.create(ledger.path)
    (tmp_path / "text.sqlite").write_text("this is not a database, not at all, by no means" * 20)
    for opener in (Ledger.open, Ledger.open_readonly):
        with pytest.raises(LedgerError, match="not a database"):
            opener(tmp_path / "text.sqlite")
    sqlite3.connect(tmp_path / "foreign.sqlite").execute("CREATE TABLE x (y)").connection.close()
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger.open_readonly(tmp_path / "foreign.sqlite")
    with ledger._transaction() as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'version'")
    with pytest.raises(LedgerError, match="version 99"):
        Ledger.open_readonly(ledger.path)


def test_a_network_file_system_gets_no_shared_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "is_network_file_system", lambda path: True)
    with caplog.at_level("INFO"), Ledger.create(tmp_path / "l.sqlite") as ledger:
        ledger.add_systems([SystemRow("a", 1)])
        assert sorted(p.name for p in tmp_path.iterdir() if "wal" in p.name or "shm" in p.name) == []
    assert "network file system" in caplog.text


def record_for_ever(path, say):
    """What the killed process does: one report after the other, each acknowledged by a byte."""
    ledger = Ledger.open(path)
    for k in range(10**9):
        name = f"{os.getpid()}-{k}"
        ledger.record([Queued(name, "relax"), Finished(name, "relax", "converged", next_stages=("heat",))])
        os.write(say, b".")


def test_a_killed_writer_leaves_whole_reports(ledger, forked):
    """SIGKILL at random instants: what was acknowledged is there, and no report is half there."""
    rng = np.random.default_rng(0)
    said = 0
    for _ in range(12):
        process = forked(lambda say: record_for_ever(ledger.path, say))
        process.wait_for_word()
        time.sleep(float(rng.uniform(0, 0.05)))
        said += 1 + len(process.kill())
        with Ledger.open_readonly(ledger.path) as reader:
            counts = reader.counts()
            assert said <= counts["relax"]["converged"] <= said + 12
            assert counts["relax"]["converged"] == counts["heat"]["pending"]


def test_reports_are_fast_enough(tmp_path):
    """500 hand-offs a second is what the campaign must sustain: reports of 100 systems through the ledger."""
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        ledger.add_systems(SystemRow(f"s{k}", 8) for k in range(5000))
        ledger.record(Queued(f"s{k}", "relax", 8) for k in range(5000))
        start = time.process_time()  # not the wall clock: others may be at work on this machine
        for first in range(0, 5000, 100):
            names = [f"s{k}" for k in range(first, first + 100)]
            ledger.record(Started(name, "relax", "c") for name in names)
            results = {f"r{k}": 1.0 * k for k in range(16)}
            ledger.record(
                Finished(name, "relax", "converged", results=results, file="f", next_stages=("heat",)) for name in names
            )
        rate = 5000 / (time.process_time() - start)
        assert len(ledger.pending("heat")) == 5000
    assert rate > 1000, rate
