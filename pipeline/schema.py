"""The tables of the ledger."""

from __future__ import annotations

VERSION = 1

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE systems (
    number   INTEGER PRIMARY KEY,            -- order of intake, from 0
    id       TEXT NOT NULL UNIQUE,
    n_atoms  INTEGER NOT NULL,
    formula  TEXT NOT NULL DEFAULT '',
    source   TEXT NOT NULL DEFAULT '',
    failure  TEXT                            -- why it never entered a stage
);
CREATE TABLE visits (
    system     TEXT NOT NULL,
    stage      TEXT NOT NULL,
    parent     TEXT NOT NULL DEFAULT '',     -- the stage it came from
    status     TEXT,                         -- NULL while pending or running
    reason     TEXT NOT NULL DEFAULT '',
    attempts   INTEGER NOT NULL DEFAULT 0,   -- times it was started
    deaths     INTEGER NOT NULL DEFAULT 0,   -- times its gang died with it aboard
    steps      INTEGER NOT NULL DEFAULT 0,
    n_atoms    INTEGER NOT NULL DEFAULT 0,
    claim      TEXT,                         -- who runs it now
    queued     TEXT NOT NULL,
    started    TEXT,
    ended      TEXT,
    seconds    REAL NOT NULL DEFAULT 0,
    input_file   TEXT, input_digest  TEXT,   -- the state it starts from
    state_file   TEXT, state_digest  TEXT,   -- the state it ended in
    results    TEXT NOT NULL DEFAULT '{}',
    PRIMARY KEY (system, stage)
) WITHOUT ROWID;
CREATE INDEX visits_by_stage ON visits (stage, status);
CREATE TABLE checkpoints (
    system   TEXT NOT NULL,
    stage    TEXT NOT NULL,
    age      INTEGER NOT NULL,               -- 0: the newest, 1: the one before
    file     TEXT NOT NULL,
    digest   TEXT NOT NULL,
    step     INTEGER NOT NULL,
    written  TEXT NOT NULL,
    PRIMARY KEY (system, stage, age)
) WITHOUT ROWID;
CREATE INDEX checkpoints_by_file ON checkpoints (file);
"""

__all__ = ["SCHEMA", "VERSION"]
