"""The fault campaign's policy: sinusoids at 20 Hz through the supervisor, every step kept in a store.

    python tests/faults/arm_policy.py <socket> <store> <station.yaml>

It starts whenever the arm is paused, and ends with its supervisor or on SIGTERM. Words on stdin are its
faults, `nan` and `far`, and what it is to do: sway `away` from home or at `home` again, not start after the
next pause (`rest`), start again (`go`), or have the arm moved home while it rests (`homing`). Each line of
stdout is a step: how many are on the disk, and the wall clock.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from arm_judge import Array, action_of

from robot_rl.core.errors import DeviceError
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.writer import StoreWriter
from robot_rl.real.client import ArmClient
from robot_rl.real.messages import Frame, Operation, Plan, Status

PERIOD_NS = 50_000_000
AHEAD = {"trajectory": 40}
"""Targets of a plan, by `ros2.command`: long where whole plans go to the arm."""
_AHEAD = 4
"""Else: a policy that is late is bridged by them."""
_SHARE = {"twist": 0.4, "pose": 0.4}
"""Of the campaign's motion, where the tool's speed is bounded too."""
FAR_RAD = 10.0
FAR_STEPS = 8
_HOMEWARDS_STEPS = 20
"""After so many steps 1/e of the way from where it began to home is left."""
_AWAY_JOINT = 5
"""Tilts the hand outwards, which no other joint does as well: so it is where a Cartesian arm has it, too."""
_AWAY_RAD = 1.0
_AWAY_STEP_RAD = 0.03
"""How far and how fast it turns `away`."""


class Policy:
    """Drives an arm, episode after episode."""

    def __init__(self, station: dict[str, Any], client: ArmClient, writer: StoreWriter, sensors: Any) -> None:
        self._client, self._writer, self._sensors = client, writer, sensors
        self._home, self._open = np.asarray(station["home_rad"]), station["gripper"]["open"]
        self._max_age_ns = {name: round(1e9 * one["max_age_s"]) for name, one in station["cameras"].items()}
        command = station["ros2"]["command"]
        self._ahead, self._share = AHEAD.get(command, _AHEAD), _SHARE.get(command, 1.0)
        self._number = self._nan = self._far = 0
        self._away_rad = self._turned_rad = 0.0
        self._is_resting = self._is_homing = False
        self.ends = threading.Event()

    def run(self) -> None:
        """Drives until the supervisor is gone (DeviceError) or the process is asked to end."""
        while True:
            self._listen()
            if self._status().phase == "paused" and self._see() is not None:
                if self._is_homing:
                    self._is_homing = False
                    self._ask("home")
                elif not self._is_resting and self._ask("start"):
                    self._drive()
                    self._writer.end_episode()
            time.sleep(0.02)

    def _ask(self, operation: Operation) -> bool:
        """Gives an order and returns whether it was carried out."""
        try:
            self._client.control(operation, by="policy")
        except DeviceError as error:
            if "refused" not in str(error):
                raise
            return False
        return True

    def _drive(self) -> None:
        """Does one episode: until the arm is stopped, or a camera stands."""
        step, due_ns = 0, time.monotonic_ns()
        status = self._status()
        assert status.state is not None
        self._turned_rad, self._far = 0.0, 0  # what was left of it when the arm was stopped is over
        began = status.state.position_rad - self._home
        while status.phase in ("running", "holding"):
            frames = self._see()
            if frames is None:
                self._client.control("pause", by="policy")
                return
            self._listen()
            self._send(step, began)
            self._keep(step, status, frames)
            step += 1
            due_ns = max(due_ns + PERIOD_NS, time.monotonic_ns())
            time.sleep(max(0.0, 1e-9 * (due_ns - time.monotonic_ns())))
            status = self._status()

    def _status(self) -> Status:
        """Returns the newest, however long the supervisor says nothing."""
        while True:
            try:
                return self._client.status
            except DeviceError as error:
                if "says nothing new" not in str(error):
                    raise
                self._listen()

    def _see(self) -> dict[str, Frame] | None:
        """Returns the newest pictures; None if one is missing or too old to act on."""
        if self._sensors is None:
            return {}
        frames, now_ns = dict(self._sensors.read()), time.monotonic_ns()
        for camera, max_age_ns in self._max_age_ns.items():
            frame = frames.get(f"{camera}.rgb")
            if frame is None or now_ns - frame.stamp_ns > max_age_ns:
                return None
        return frames

    def _listen(self) -> None:
        if self.ends.is_set():
            raise SystemExit
        while select.select([sys.stdin], [], [], 0)[0]:
            words = os.read(sys.stdin.fileno(), 4096).split()
            if not words:
                raise SystemExit  # the campaign is gone
            for word in words:
                self._obey(word.decode())

    def _obey(self, word: str) -> None:
        match word:
            case "nan":
                self._nan = 1
            case "far":
                self._far = FAR_STEPS
            case "away" | "home":
                self._away_rad = _AWAY_RAD if word == "away" else 0.0
            case "homing":
                self._is_homing = True
            case _:
                self._is_resting = word == "rest"

    def _send(self, step: int, began: Array) -> None:
        rows = np.arange(step, step + self._ahead)
        left = np.exp(-self._share * rows / _HOMEWARDS_STEPS)[:, None]
        sway = self._share * np.array([action_of(row) for row in rows.tolist()])
        targets = self._home + left * began + sway
        self._turned_rad = min(self._turned_rad + _AWAY_STEP_RAD, self._away_rad)
        targets[:, _AWAY_JOINT] += self._turned_rad
        if self._nan:
            targets[0, 3] = np.nan
        if self._far:
            # The base and the wrist: they hit nothing, however far they turn.
            targets[:, [0, 6]] += [FAR_RAD, -FAR_RAD]
        self._nan, self._far = 0, max(0, self._far - 1)
        self._number += 1
        self._client.send(
            Plan(
                number=self._number,
                start_ns=time.monotonic_ns(),
                period_ns=PERIOD_NS,
                targets_rad=targets,
                gripper=np.full(self._ahead, self._open),
            )
        )

    def _keep(self, step: int, status: Status, frames: dict[str, Frame]) -> None:
        assert status.state is not None
        self._writer.append(
            obs={"state": status.state.position_rad.astype(np.float32)}
            | {name: frame.array for name, frame in frames.items() if name.endswith(".rgb")},
            action=action_of(step),
            reward=float(step),
            source="sim",
            stamp_ns=status.state.stamp_ns,
            picture_stamp_ns={name: frame.stamp_ns for name, frame in frames.items()},
        )
        print(json.dumps({"flushed": self._writer.stats.flushed_steps, "wall_s": time.time()}), flush=True)


def open_store(folder: Path, station: dict[str, Any]) -> StoreWriter:
    """Returns a writer that brings what it got to the disk five times a second."""
    joints = tuple(station["joints"])
    meta = EpisodesMeta(
        task="Sway",
        robot=station["robot"],
        control_hz=1e9 / PERIOD_NS,
        instruction="sway",
        state_names=joints,
        action_names=joints,
    )
    pictures = {f"{camera}.rgb": Feature("uint8", (96, 96, 3)) for camera in station["cameras"]}
    state = {"state": Feature("float32", (len(joints),))}
    return StoreWriter(folder, meta, state | pictures, flush_s=0.2)


def open_cameras(path: str) -> Any:
    """Returns the station's sensors."""
    from robot_rl.real.sensors import open_sensors  # with ROS, and slow to import: who is blind goes without
    from robot_rl.real.station import load_station

    return open_sensors(load_station(path), Path())


def main(words: list[str]) -> int:
    socket, store, path = words
    # As it is, not by `load_station`: that imports for a second, in which nobody drives.
    station = yaml.safe_load(Path(path).read_text())
    sensors = open_cameras(path) if station["cameras"] else None
    with open_store(Path(store), station) as writer, ArmClient(Path(socket)) as client:
        policy = Policy(station, client, writer, sensors)
        # An exception from the handler could leave a lock held that the exit needs.
        signal.signal(signal.SIGTERM, lambda *_: policy.ends.set())
        try:
            policy.run()
        except DeviceError as error:
            print(error, file=sys.stderr)
    if sensors is not None:
        sensors.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
