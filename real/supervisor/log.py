"""The log of a supervisor: a line per event, and the last seconds before every stop.

A thread writes it: nothing here waits for a disk, and nothing here raises after the start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np

from robot_rl.real.messages import Array, Phase, Status
from robot_rl.real.station import StationConfig
from robot_rl.real.writer import Writer
from robot_rl.telemetry.flight import FlightRecorder

PHASES: tuple[Phase, ...] = get_args(Phase)
"""A phase in a flight record is an index into these."""
_MAX_DUMPS = 10_000  # each stop was cleared by a person: no fault fills the disk by itself


class Log:
    """Events go to <folder>/events.jsonl, flights to <folder>/flight/."""

    def __init__(self, folder: Path, station: StationConfig, writer: Writer | None = None) -> None:
        """Makes the folder; `writer` may be shared with others.

        Raises:
            OSError: nothing can be written there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        # Without a buffer: a failed line is lost, and does not appear later in the middle of others.
        self._events = (folder / "events.jsonl").open("ab", buffering=0)
        self._is_torn = False
        config = station.supervisor
        moments = max(1, round(config.flight_s * config.command_hz))
        self._flight = FlightRecorder(moments, max_dumps=_MAX_DUMPS)
        self._unknown = np.full(len(station.joints), np.nan)
        self._station = station.name
        self._writer = writer or Writer()

    @property
    def lost(self) -> int:
        """Lines, files and moments that could not be written."""
        return self._writer.lost

    def begin(self, now_ns: int, token: int) -> None:
        """Writes the begin of the run, on both clocks: other lines have the monotonic one."""
        wall_clock = datetime.now(UTC).isoformat()
        self.event(now_ns, "begin", station=self._station, token=token, wall_clock=wall_clock)

    def event(self, now_ns: int, event: str, **facts: object) -> None:
        """Appends a line."""
        self._writer.put(lambda: self._append(now_ns, event, **facts))

    def moment(self, status: Status, asked_rad: Array, age_s: float) -> None:
        """Records a cycle."""
        state = status.state
        if state is None:
            return
        try:
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
        except (ValueError, MemoryError):  # an arm that measures other joints, or no memory
            self._writer.lose()

    def dump(self, now_ns: int, reason: str) -> None:
        """Writes the last seconds to a file; they are copied now."""
        try:
            write = self._flight.snapshot(self._folder / "flight", reason, phases=np.array(PHASES))
        except MemoryError:
            self._writer.lose()
            return
        self._writer.put(lambda: self._write_flight(now_ns, write))

    def report(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON object to a file of the folder, as a whole or not at all."""
        path = self._folder / name
        self._writer.put(lambda: _replace(path, json.dumps(content, indent=1) + "\n"))

    def flush(self) -> bool:
        """Waits a while for the waiting jobs; returns whether all were tried."""
        return self._writer.flush()

    def close(self) -> None:
        """Writes the rest, if the disk takes it within a while."""
        self._writer.put(self._events.close)
        self.flush()

    def _append(self, now_ns: int, event: str, **facts: object) -> None:
        line = json.dumps({"monotonic_s": round(1e-9 * now_ns, 6), "event": event, **facts}) + "\n"
        octets = (b"\n" if self._is_torn else b"") + line.encode("ascii")
        written = self._events.write(octets)
        self._is_torn = written != len(octets)
        if self._is_torn:
            raise OSError(f"{self._events.name}: {written} of {len(octets)} bytes were written")

    def _write_flight(self, now_ns: int, write: Callable[[], Path | None]) -> None:
        path = write()
        self._append(now_ns, "flight", file=path.name if path else None)


def _replace(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text)
    os.replace(path.with_suffix(".tmp"), path)
