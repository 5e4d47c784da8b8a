"""The line of those who wait for devices, in the lease file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from robot_rl.core.clock import Clock
from robot_rl.sched.holder import Holder
from robot_rl.sched.lease_file import unchanged_s

_SILENCE_S = 5.0
"""A waiter that has not asked for as long has given up without saying so."""
_ALIVE_SILENCE_S = 60.0
"""The same, where its process is known to live: on a busy machine it may not get its turn for seconds."""
_ASK_AGAIN_S = 1.0
"""How often a waiter notes that it still waits; each note is a write to the disk."""


class Line:
    """Tickets: the larger priority goes first, then the smaller number. Within a transaction, all of it."""

    def __init__(
        self, clock: Clock, process: Callable[[], Holder], is_alive: Callable[[Holder], bool | None]
    ) -> None:
        """Takes what it needs to tell who still waits.

        Args:
            clock: stands still while the machine sleeps: nobody can ask then.
            process: who asks.
            is_alive: True, False, or None for unknown.
        """
        self._clock, self._process, self._is_alive = clock, process, is_alive

    def keep(self, rows: sqlite3.Connection, device: str, priority: int, ticket: int | None) -> int:
        """Takes a ticket, or says that its owner still waits: one that was taken away is put back."""
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
        """Takes away the tickets of those who gave up, and counts who goes first."""
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

    def leave(self, rows: sqlite3.Connection, ticket: int) -> None:
        """Gives a ticket back."""
        rows.execute("DELETE FROM waiting WHERE ticket = ?", (ticket,))
        rows.execute("DELETE FROM seen WHERE row = ?", (_row(ticket),))

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
            silent_s = unchanged_s(rows, _row(ticket), asked_s, me, now_s)
        return silent_s > (_ALIVE_SILENCE_S if is_alive else _SILENCE_S)


def _row(ticket: int) -> str:
    return f"waiter {ticket}"
