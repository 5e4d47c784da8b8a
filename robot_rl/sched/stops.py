"""Stops that outlive the process that met them: what latched is leased to nobody until a person clears it.

They stand in the lease file, beside the leases that they refuse.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from robot_rl.core.errors import ConfigError

_TABLE = """
CREATE TABLE IF NOT EXISTS stopped (
    device TEXT PRIMARY KEY, reason TEXT NOT NULL, holder TEXT NOT NULL, wall_s REAL NOT NULL
)
"""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A device that may not be leased."""

    device: str
    reason: str
    """What stopped it."""
    holder: str
    """Who had it then."""
    wall_s: float
    """When, by the wall clock: for people only."""

    def refusal(self) -> str:
        """Returns what whoever asks for a lease is told."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.wall_s))
        return (
            f"lease of {self.device}: it stopped at {when}, held by {self.holder!r}: {self.reason} "
            f"Look at it; then `robot-rl devices clear={self.device} by=<your name>` lets it be used again."
        )


class Stops:
    """The table of them; every call is within a transaction of the lease file."""

    def add(self, rows: sqlite3.Connection, stop: Stop) -> None:
        """Notes a stop; the first of a device stays, whatever else is reported of it until it is cleared."""
        rows.execute(_TABLE)
        values = (stop.device, stop.reason, stop.holder, stop.wall_s)
        rows.execute("INSERT OR IGNORE INTO stopped VALUES (?, ?, ?, ?)", values)

    def found(self, rows: sqlite3.Connection) -> dict[str, Stop]:
        """Returns the stops that nobody has cleared, by device."""
        rows.execute(_TABLE)
        found = rows.execute("SELECT device, reason, holder, wall_s FROM stopped ORDER BY wall_s")
        return {
            device: Stop(device=device, reason=reason, holder=holder, wall_s=wall_s)
            for device, reason, holder, wall_s in found
        }

    def clear(self, rows: sqlite3.Connection, device: str, by: str) -> Stop:
        """Removes a device's stop, and returns it.

        Raises:
            ConfigError: no name was given, or the device did not stop.
        """
        if not by.strip():
            raise ConfigError(f"clear={device}: who looked at it? Say by=<your name>.")
        stops = self.found(rows)
        if device not in stops:
            raise ConfigError(
                f"clear={device}: it has not stopped. Stopped are: {', '.join(stops) or 'none'}."
            )
        rows.execute("DELETE FROM stopped WHERE device = ?", (device,))
        return stops[device]
