"""The controller's SQLite file: one writer, write-ahead log, so that killing the process at any time loses nothing."""

from __future__ import annotations

import secrets
import sqlite3
from pathlib import Path

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE rnics (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    record BLOB NOT NULL
);
CREATE TABLE agents (host TEXT PRIMARY KEY, record BLOB NOT NULL);
CREATE TABLE lists (name TEXT PRIMARY KEY, version INTEGER NOT NULL, flows BLOB NOT NULL);
CREATE TABLE incidents (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    opened_at INTEGER NOT NULL,
    closed_at INTEGER,
    record BLOB NOT NULL
);
CREATE INDEX incidents_by_state ON incidents (state, opened_at);
CREATE TABLE findings (
    id TEXT PRIMARY KEY,
    source TEXT NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    since INTEGER NOT NULL,
    text TEXT NOT NULL,
    UNIQUE (source, kind, subject)
);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class DatabaseError(ValueError):
    """The database file cannot be used; the message names it and says what to do."""


def connect(path: str) -> sqlite3.Connection:
    """Open (and create) the database; write inside `with connection:`, which commits.

    Raises DatabaseError when the file is no database of ours, or one of a newer layout.
    """
    if path != ":memory:":
        file = Path(path).expanduser()
        path = str(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # It holds every RNIC's Q_Key. SQLite's files beside it get the same mode.
            file.touch(mode=0o600)
        except OSError as error:
            raise _unusable(path, error) from None
    try:
        db = sqlite3.connect(path, timeout=5)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            with db:
                db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise DatabaseError(
                f"database {path} has layout {version}, this version knows {SCHEMA_VERSION}: "
                "install the version that wrote it, or name another file in controller.database"
            )
    except sqlite3.Error as error:
        raise _unusable(path, error) from None
    return db


def _unusable(path: str, error: Exception) -> DatabaseError:
    return DatabaseError(f"database {path} cannot be used ({error}): name another file in controller.database")


def seed(db: sqlite3.Connection) -> int:
    """The random seed of this installation, drawn once: the same database makes the same choices again."""
    known = recall(db, "seed")
    if known is None:
        known = str(secrets.randbits(62))
        remember(db, "seed", known)
    return int(known)


def recall(db: sqlite3.Connection, key: str) -> str | None:
    """A remembered value."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else None


def remember(db: sqlite3.Connection, key: str, value: str) -> None:
    """Keep a value beyond this process."""
    with db:
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
