"""What a supervisor leaves behind: a line per event, and the last seconds before every stop."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import numpy as np

from robot_rl.real.messages import Array, Phase, Status
from robot_rl.real.station import StationConfig
from robot_rl.telemetry.flight import FlightRecorder

PHASES: tuple[Phase, ...] = get_args(Phase)
"""A phase in a flight record is an index into these."""
_MAX_DUMPS = 10_000  # each stop was cleared by a person: no fault fills the disk by itself


class Log:
    """Events go to <folder>/events.jsonl, flights to <folder>/flight/."""

    def __init__(self, folder: Path, station: StationConfig) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._events = (folder / "events.jsonl").open("a", encoding="ascii")
        config = station.supervisor
        moments = max(1, round(config.flight_s * config.command_hz))
        self._flight = FlightRecorder(moments, max_dumps=_MAX_DUMPS)
        self._unknown = np.full(len(station.joints), np.nan)
        self._station = station.name
        self.dumps = 0
        """Flights written."""

    def begin(self, now_ns: int) -> None:
        """Says when the run began, on both clocks: all other lines are on the monotonic one."""
        self.event(now_ns, "begin", station=self._station, wall_clock=datetime.now(UTC).isoformat())

    def event(self, now_ns: int, event: str, **facts: object) -> None:
        """Appends a line."""
        self._events.write(
            json.dumps({"monotonic_s": round(1e-9 * now_ns, 6), "event": event, **facts}) + "\n"
        )
        self._events.flush()

    def moment(self, status: Status, asked_rad: Array, age_s: float) -> None:
        """Remembers a cycle."""
        state = status.state
        if state is None:
            return
        self._flight.record(
            stamp_ns=status.stamp_ns,
            state_stamp_ns=state.stamp_ns,
            state_age_s=age_s,
            position_rad=state.position_rad,
            velocity_rad_s=state.velocity_rad_s,
            effort_n_m=self._unknown if state.effort_n_m is None else state.effort_n_m,
            gripper=state.gripper,
            asked_rad=asked_rad,
            sent_rad=status.sent_rad,
            sent_gripper=status.sent_gripper,
            plan=status.plan,
            phase=PHASES.index(status.phase),
            limited=status.limited,
        )

    def dump(self, now_ns: int, reason: str) -> None:
        """Writes the last seconds to a file."""
        path = self._flight.dump(self._folder / "flight", reason, phases=np.array(PHASES))
        self.dumps += 1
        self.event(now_ns, "flight", file=path.name if path else None)

    def close(self) -> None:
        self._events.close()
