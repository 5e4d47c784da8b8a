"""Leases that others can take: who asked for one, and until when its holder has to give it up.

    acquire(..., preemptible=True)     the holder promises to look, and to give up in time
    acquire(..., preemptible=True, turn_s=600)   to an equal priority too, but only after so many seconds
    acquire(..., preempt_s=10)         a waiter of larger priority asks it to, within so many seconds;
                                       of equal priority, once the holder's turn is over
    HeldLease.preemption               what the holder sees: it finishes its chunk, parks, releases

At the deadline the lease is over, whatever the holder does, and its fencing token with it. Who did not
promise keeps the lease. Every call is within a transaction of the lease file.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from robot_rl.sched.lease import Holder, Lease
from robot_rl.sched.lease_file import unchanged_s

_CREATE = (
    """
CREATE TABLE IF NOT EXISTS preemptible (
    device TEXT NOT NULL, token INTEGER NOT NULL, priority INTEGER NOT NULL,
    by_holder TEXT, by_process TEXT, asked_s REAL, within_s REAL, PRIMARY KEY (device, token)
)
""",
    """
CREATE TABLE IF NOT EXISTS turns (
    device TEXT NOT NULL, token INTEGER NOT NULL, turn_s REAL NOT NULL, PRIMARY KEY (device, token)
)
""",
)


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """A lease is wanted by a larger priority, or by an equal one at the end of its turn."""

    by: str
    """Who wants it."""
    left_s: float
    """Seconds until the lease is over; negative if it is."""


class PreemptedError(Exception):
    """Ends what the holder of a lease does: others want it, and go first."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.by = by


def create(rows: sqlite3.Connection) -> None:
    """Makes the tables in a lease file that has none: files of before stay readable."""
    for table in _CREATE:
        rows.execute(table)


def promise(rows: sqlite3.Connection, lease: Lease, priority: int, turn_s: float | None) -> None:
    """Notes that the holder gives up for a larger priority than this; after `turn_s` for the same one too."""
    values = (lease.device, lease.token, priority)
    rows.execute("INSERT INTO preemptible (device, token, priority) VALUES (?, ?, ?)", values)
    if turn_s is not None:
        rows.execute("INSERT INTO turns VALUES (?, ?, ?)", (lease.device, lease.token, turn_s))


def withdraw(rows: sqlite3.Connection, device: str, token: int) -> None:
    """Forgets a lease that has ended."""
    for table in ("preemptible", "turns"):
        rows.execute(f"DELETE FROM {table} WHERE device = ? AND token = ?", (device, token))
    rows.execute("DELETE FROM seen WHERE row = ?", (_row(device, token),))


def find(
    rows: sqlite3.Connection, device: str, token: int, observer: Holder, now_s: float
) -> Preemption | None:
    """Returns who wants a lease, if anybody does.

    `now_s` is of the clock of `observer`; a request by another clock counts from when this one first saw it.
    """
    found = rows.execute(
        "SELECT by_holder, by_process, asked_s, within_s FROM preemptible "
        "WHERE device = ? AND token = ? AND by_holder IS NOT NULL",
        (device, token),
    ).fetchone()
    if found is None:
        return None
    by, process, asked_s, within_s = found
    if Holder.from_text(process).shares_clock(observer):
        passed_s = now_s - asked_s
    else:
        passed_s = unchanged_s(rows, _row(device, token), asked_s, observer, now_s)
    return Preemption(by=by, left_s=within_s - passed_s)


def forgive(rows: sqlite3.Connection, process: Holder, device: str) -> None:
    """Takes back what a process asked for of a device: it waits no more."""
    rows.execute(
        "UPDATE preemptible SET by_holder = NULL, by_process = NULL, asked_s = NULL, within_s = NULL "
        "WHERE by_process = ? AND device = ?",
        (process.to_text(), device),
    )


def asked(rows: sqlite3.Connection, device: str, by: str, process: Holder) -> set[int]:
    """Returns the tokens of the leases of a device whose holders a waiter has asked to give up."""
    found = rows.execute(
        "SELECT token FROM preemptible WHERE device = ? AND by_holder = ? AND by_process = ?",
        (device, by, process.to_text()),
    )
    return {token for (token,) in found}


def ask(
    rows: sqlite3.Connection,
    held: Sequence[Lease],
    *,
    missing: int,
    priority: int,
    by: str,
    process: Holder,
    now_s: float,
    within_s: float,
) -> bool:
    """Asks as many holders as are needed to give up: of those that promised, the smallest priority first.

    Those that this waiter has asked before come before all others, so that no more are asked than it needs.
    A holder that has been asked before has to give up at the earlier of both deadlines.

    Args:
        rows: of the lease file.
        held: leases of the device, oldest first; of equal priorities the newest gives up first.
        missing: slots that are wanted beyond the free ones.
        priority: of the waiter; only smaller ones are asked, and equal ones whose turn is over.
        by: its name.
        process: its process.
        now_s: by its clock.
        within_s: how long the holders have.

    Returns:
        Whether enough are willing; if not, nobody is asked: their work would be lost for nothing.
    """
    device = held[0].device if held else ""
    promised = {
        token: (of, math.inf if turn_s is None else turn_s)
        for token, of, turn_s in rows.execute(
            "SELECT token, priority, turn_s FROM preemptible LEFT JOIN turns USING (device, token) "
            "WHERE device = ?",
            (device,),
        )
    }

    def is_willing(lease: Lease) -> bool:
        if lease.token not in promised:
            return False
        of, turn_s = promised[lease.token]
        return of < priority or (of == priority and now_s - lease.since_s >= turn_s)

    willing = [lease for lease in held if is_willing(lease)]
    if sum(lease.slots for lease in willing) < missing:
        return False
    ours = asked(rows, device, by, process)
    for lease in sorted(willing, key=lambda it: (it.token not in ours, promised[it.token][0], -it.token)):
        if missing <= 0:
            break
        missing -= lease.slots
        before = find(rows, device, lease.token, process, now_s)
        if before is None or before.left_s > within_s:
            rows.execute(
                "UPDATE preemptible SET by_holder = ?, by_process = ?, asked_s = ?, within_s = ? "
                "WHERE device = ? AND token = ?",
                (by, process.to_text(), now_s, within_s, device, lease.token),
            )
    return True


def _row(device: str, token: int) -> str:
    return f"preemption {device} {token}"
