"""The SQLite file behind the leases: its place, its tables, its one writer; waiters and stopped devices."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

from robot_rl.core.clock import Clock
from robot_rl.core.errors import ConfigError, LeaseError
from robot_rl.core.files import make_folder
from robot_rl.sched.lease import Holder, this_process

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
"""Times are by the clock of the row's own process (`Holder.shares_clock`). `seen` has, for a row of another
clock, since when a reader's clock has seen it unchanged."""
_CREATE_DEVICES, *_CREATE_OTHERS = (statement for statement in _SCHEMA.split(";") if statement.strip())
_CREATE_STOPPED = """
CREATE TABLE IF NOT EXISTS stopped (
    device TEXT PRIMARY KEY, reason TEXT NOT NULL, holder TEXT NOT NULL, wall_s REAL NOT NULL
)
"""
_SILENCE_S = 5.0
"""A waiter that has not asked for this long has given up."""
_ALIVE_SILENCE_S = 60.0
"""The same, where its process is known to live: on a busy machine it may wait seconds for the processor."""
_ASK_AGAIN_S = 1.0
"""How often a waiter notes that it still waits; each note is a write to the disk."""


class LeaseFileError(LeaseError):
    """The lease file cannot be read or written: the leases are unknown."""


class LeaseFile:
    """A lease file; every transaction opens it again, so that threads and forks may use it.

    It has a rollback journal, not a write-ahead log: all users write, and two processes that switch
    to a log at the same time do not wait for each other, one fails.
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
        """Keeps the tokens; old times were by the wall clock, so all old leases must have ended."""
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


def taken_slots(
    rows: sqlite3.Connection, me: Holder, now_s: float, is_alive: Callable[[Holder], bool | None]
) -> dict[str, float]:
    """Returns how many slots of each device the leases that surely hold have, `inf` for one held alone.

    Args:
        rows: within a transaction.
        me: the calling process; leases of another clock are left out.
        now_s: by its clock.
        is_alive: whether a process lives, None if that is not visible.
    """
    taken, lives = dict[str, float](), cache(is_alive)
    found = rows.execute("SELECT device, slot_ids, exclusive, process, expires_s FROM leases")
    for device, slot_ids, exclusive, text, expires_s in found:
        holder = Holder.from_text(text)
        if expires_s > now_s and holder.shares_clock(me) and lives(holder) is not False:
            taken[device] = taken.get(device, 0) + (math.inf if exclusive else slot_ids.count(",") + 1)
    return taken


def unchanged_s(rows: sqlite3.Connection, row: str, stamp_s: float, observer: Holder, now_s: float) -> float:
    """Returns how long this clock, that of `observer` and `now_s`, has seen a row of another clock unchanged.

    `row` names the row, and `stamp_s` changes whenever the row does.
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


@dataclass(frozen=True, kw_only=True)
class Waiter:
    """Who stands in the line for a device."""

    device: str
    priority: int
    process: Holder


class Line:
    """The queue for a device: the larger priority goes first, then the smaller ticket.

    Every call is within a transaction. `clock` stands still while the machine sleeps, since no process can
    ask then; `process` returns the one that asks, `is_alive` None where that is unknown.
    """

    def __init__(
        self, clock: Clock, process: Callable[[], Holder], is_alive: Callable[[Holder], bool | None]
    ) -> None:
        self._clock, self._process, self._is_alive = clock, process, is_alive

    def keep(self, rows: sqlite3.Connection, device: str, priority: int, ticket: int | None) -> int:
        """Takes a ticket, or notes that its owner still waits: a ticket that was removed is put back."""
        now_s = self._clock.now_s()
        rows.execute(
            "INSERT INTO waiting (ticket, device, priority, process, asked_s) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (ticket) DO UPDATE SET asked_s = excluded.asked_s WHERE asked_s < ?",
            (ticket, device, priority, self._process().to_text(), now_s, now_s - _ASK_AGAIN_S),
        )
        if ticket is None:
            (ticket,) = rows.execute("SELECT last_insert_rowid()").fetchone()
            assert ticket is not None
        return ticket

    def count_ahead(self, rows: sqlite3.Connection, device: str, priority: int, ticket: int | None) -> int:
        """Removes the tickets of waiters that gave up, and counts those that go first."""
        me = self._process()
        waiting = rows.execute(
            "SELECT ticket, priority, process, asked_s FROM waiting WHERE device = ?", (device,)
        )
        ahead = 0
        for other, other_priority, text, asked_s in waiting.fetchall():
            if other == ticket:
                continue
            if self._gave_up(rows, other, Holder.from_text(text), asked_s, me):
                self.leave(rows, other)
            elif other_priority > priority or (
                other_priority == priority and (ticket is None or other < ticket)
            ):
                ahead += 1
        return ahead

    def waiters(self, rows: sqlite3.Connection) -> list[Waiter]:
        """Returns all that have not given up, by device and place."""
        me = self._process()
        found = rows.execute(
            "SELECT ticket, device, priority, process, asked_s FROM waiting "
            "ORDER BY device, priority DESC, ticket"
        )
        return [
            Waiter(device=device, priority=priority, process=owner)
            for ticket, device, priority, text, asked_s in found.fetchall()
            if not self._gave_up(rows, ticket, owner := Holder.from_text(text), asked_s, me)
        ]

    def leave(self, rows: sqlite3.Connection, ticket: int) -> None:
        """Gives a ticket back."""
        rows.execute("DELETE FROM waiting WHERE ticket = ?", (ticket,))
        rows.execute("DELETE FROM seen WHERE row = ?", (f"waiter {ticket}",))

    def _gave_up(
        self, rows: sqlite3.Connection, ticket: int, owner: Holder, asked_s: float, me: Holder
    ) -> bool:
        is_alive = self._is_alive(owner)
        if is_alive is False:
            return True
        now_s = self._clock.now_s()
        if owner.shares_clock(me):
            silent_s = now_s - asked_s
        else:
            silent_s = unchanged_s(rows, f"waiter {ticket}", asked_s, me, now_s)
        return silent_s > (_ALIVE_SILENCE_S if is_alive else _SILENCE_S)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A device that latched: it is leased to nobody until a person clears it."""

    device: str
    reason: str
    holder: str
    """Who had it then."""
    wall_s: float
    """When, by the wall clock: for people only."""

    def refusal(self) -> str:
        """Returns the error for those who ask for a lease."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.wall_s))
        return (
            f"lease of {self.device}: it stopped at {when}, held by {self.holder!r}: {self.reason} "
            f"Look at it; then `robot-rl devices clear={self.device} by=<your name>` lets it be used again."
        )


def add_stop(rows: sqlite3.Connection, stop: Stop) -> None:
    """Notes a stop; the first one of a device stays until it is cleared."""
    rows.execute(_CREATE_STOPPED)
    rows.execute("INSERT OR IGNORE INTO stopped VALUES (?, ?, ?, ?)", astuple(stop))


def find_stops(rows: sqlite3.Connection) -> dict[str, Stop]:
    """Returns the stops that nobody has cleared, by device."""
    rows.execute(_CREATE_STOPPED)
    found = rows.execute("SELECT device, reason, holder, wall_s FROM stopped ORDER BY wall_s")
    return {
        device: Stop(device=device, reason=reason, holder=holder, wall_s=wall_s)
        for device, reason, holder, wall_s in found
    }


def clear_stop(rows: sqlite3.Connection, device: str, by: str) -> Stop:
    """Removes a device's stop, and returns it.

    Raises:
        ConfigError: no name was given, or the device did not stop.
    """
    if not by.strip():
        raise ConfigError(f"clear={device}: who looked at it? Say by=<your name>.")
    stops = find_stops(rows)
    if device not in stops:
        raise ConfigError(f"clear={device}: it has not stopped. Stopped are: {', '.join(stops) or 'none'}.")
    rows.execute("DELETE FROM stopped WHERE device = ?", (device,))
    return stops[device]


def default_path() -> Path:
    """Returns $ROBOT_RL_STATE/leases.db, else robot_rl/leases.db in the user's state folder."""
    own = os.environ.get("ROBOT_RL_STATE")
    if own:
        return Path(own).expanduser() / "leases.db"
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "robot_rl" / "leases.db"
