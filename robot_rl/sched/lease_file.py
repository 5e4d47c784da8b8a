"""The SQLite file behind the leases: where it is, its tables, and one writer at a time."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from robot_rl.core.errors import LeaseError
from robot_rl.core.files import make_folder
from robot_rl.sched.holder import Holder, this_process

_BUSY_TIMEOUT_S = 30.0
_VERSION = 2
_SCHEMA = """
CREATE TABLE devices (name TEXT PRIMARY KEY, last_token INTEGER NOT NULL);
CREATE TABLE leases (
    device TEXT NOT NULL, token INTEGER NOT NULL, slot_ids TEXT NOT NULL, exclusive INTEGER NOT NULL,
    holder TEXT NOT NULL, process TEXT NOT NULL, since_s REAL NOT NULL, expires_s REAL NOT NULL,
    ttl_s REAL NOT NULL, PRIMARY KEY (device, token)
);
CREATE TABLE waiting (
    ticket INTEGER PRIMARY KEY AUTOINCREMENT, device TEXT NOT NULL, priority INTEGER NOT NULL,
    process TEXT NOT NULL, asked_s REAL NOT NULL
);
CREATE TABLE seen (
    clock TEXT NOT NULL, row TEXT NOT NULL, stamp_s REAL NOT NULL, since_s REAL NOT NULL,
    PRIMARY KEY (clock, row)
);
"""
"""Times are by the clock of the row's own process (`Holder.shares_clock`); `seen` says since when, by a
clock of those who look, a row of another clock has not changed."""
_CREATE_DEVICES, *_CREATE_OTHERS = (statement for statement in _SCHEMA.split(";") if statement.strip())


class LeaseFileError(LeaseError):
    """The lease file itself cannot be read or written; who holds what is unknown."""


class LeaseFile:
    """A lease file; every transaction opens it anew, so threads and forks need no care.

    A rollback journal, not a write-ahead log: everyone here writes, and the switch to a log
    does not wait for another process that switches too, it fails at once.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file and its folder.

        Raises:
            LeaseFileError: it cannot be made or read, or is of another version.
        """
        self.path = path
        try:
            make_folder(path.parent)
        except OSError as error:
            raise self._unusable(error) from error
        with self.transaction() as rows:
            found = rows.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                rows.execute(_CREATE_DEVICES)
            elif found == 1:
                self._drop_version_1(rows)
            elif found != _VERSION:
                raise LeaseFileError(
                    f"{path}: the lease file has version {found}, this program writes {_VERSION}. "
                    "Use one version of robot_rl on this host, or set ROBOT_RL_STATE to another folder."
                )
            if found < _VERSION:
                for statement in _CREATE_OTHERS:
                    rows.execute(statement)
                rows.execute(f"PRAGMA user_version = {_VERSION}")

    def _drop_version_1(self, rows: sqlite3.Connection) -> None:
        """Keeps the tokens; times were by the wall clock, so leases of then must be over."""
        me = this_process()
        held = rows.execute("SELECT device, holder, process, expires_s FROM leases").fetchall()
        for device, holder, text, expires_s in held:
            process = Holder.from_text(text)
            if expires_s > time.time() and process.is_alive(seen_from=me) is not False:
                raise LeaseFileError(
                    f"{self.path}: {holder!r} ({process.describe()}) has {device} under an older version of "
                    "robot_rl. Wait until it has ended, or end it; then this version takes the file over."
                )
        rows.execute("DROP TABLE leases")
        rows.execute("DROP TABLE waiting")

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """Yields a connection that alone may write, and commits at the end.

        Raises:
            LeaseFileError: the file cannot be used.
        """
        try:
            rows = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            try:
                # EXTRA: a token must not be given twice, not even after a power cut.
                rows.execute("PRAGMA synchronous = EXTRA")
                rows.execute("BEGIN IMMEDIATE")
                try:
                    yield rows
                except BaseException:
                    rows.execute("ROLLBACK")
                    raise
                rows.execute("COMMIT")
            finally:
                rows.close()
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> LeaseFileError:
        return LeaseFileError(
            f"{self.path}: the lease file cannot be used: {error}. Check the folder's rights and free space, "
            "or set ROBOT_RL_STATE to a folder on a local disk (one and the same for all of this host)."
        )


def unchanged_s(rows: sqlite3.Connection, row: str, stamp_s: float, observer: Holder, now_s: float) -> float:
    """Returns for how long a row of another clock has stayed as it is, as far as this clock has seen.

    Args:
        rows: within a transaction.
        row: name of the row.
        stamp_s: what changes with the row.
        observer: a process of this clock.
        now_s: by this clock.
    """
    clock = f"{observer.boot} {observer.time_space}"
    rows.execute(
        "INSERT INTO seen VALUES (?, ?, ?, ?) ON CONFLICT (clock, row) DO UPDATE "
        "SET stamp_s = excluded.stamp_s, since_s = excluded.since_s "
        "WHERE stamp_s != excluded.stamp_s OR since_s > excluded.since_s",
        (clock, row, stamp_s, now_s),
    )
    since_s = rows.execute("SELECT since_s FROM seen WHERE clock = ? AND row = ?", (clock, row)).fetchone()[0]
    return now_s - float(since_s)


def default_path() -> Path:
    """Returns $ROBOT_RL_STATE/leases.db, else robot_rl/leases.db in the user's state folder."""
    own = os.environ.get("ROBOT_RL_STATE")
    if own:
        return Path(own).expanduser() / "leases.db"
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "robot_rl" / "leases.db"
