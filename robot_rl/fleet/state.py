"""What the fleet page shows: devices and their holders, who waits, arms that are up, and runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from robot_rl.core.errors import ConfigError, DeviceError, RobotRLError
from robot_rl.hal.device import DeviceSpec
from robot_rl.real.client import ArmClient
from robot_rl.real.inventory import specs as station_specs
from robot_rl.real.launch import about, socket_folders, station_at
from robot_rl.real.link import LinkError
from robot_rl.real.messages import Status
from robot_rl.real.station import StationConfig
from robot_rl.real.supervisor.main import SUPERVISOR_SOCKET
from robot_rl.sched.inventory import discover
from robot_rl.sched.lease import Lease, this_process, wall_s
from robot_rl.sched.leases import LeaseStore
from robot_rl.telemetry.metrics import FILE_NAME
from robot_rl.telemetry.runs import RunRecord, load_run
from robot_rl.worlds.inventory import specs as world_specs

Json = dict[str, Any]
_RUNS = 12
"""Newest runs that are shown."""
_POINTS = 50
"""Most points of a curve: it is drawn 8 letters wide, and sent over networks."""
_SILENT_S = 120.0
"""A run that has no summary and has written nothing for so long has stopped."""
_RATE_CYCLES, _RATE_S = 12, 0.15
"""Cycles of a supervisor that its rate is measured over, and the longest time for it."""


class FleetState:
    """Reads the state of this machine; every call is a fresh look, but runs that did not change are kept."""

    def __init__(self, runs: Path) -> None:
        """Args: runs: folder of run folders, which may not exist yet."""
        self._runs = runs
        self._read: dict[Path, tuple[tuple[float, ...], RunRecord]] = {}
        self._specs = discover()  # cores, GPUs and packages stay
        self._stations = dict[str, StationConfig]()

    def look(self) -> Json:
        """Returns all of it, ready for `json.dumps`; times are seconds since 1970."""
        return {**self.machine(), "runs": self.newest_runs()}

    def machine(self) -> Json:
        """Returns devices, who has them and waits for them, and arms that are up."""
        store, problems, folders = LeaseStore(), list[str](), socket_folders()
        up = {folder.name for folder in folders}
        self._stations = {arm: station for arm, station in self._stations.items() if arm in up}
        specs = list(self._specs)
        for listed in (station_specs, world_specs):
            try:
                specs += listed()
            except RobotRLError as error:  # the arms and their buttons are there all the same
                problems.append(str(error))
        return {
            "at_s": time.time(),
            "place": _place(store.path),
            "problems": problems,
            "devices": _devices(specs, store.active(), store),
            "waiting": [
                {"device": one.device, "priority": one.priority, "who": one.process.describe()}
                for one in store.waiting()
            ],
            "arms": [self._arm(folder) for folder in folders],
        }

    def folder_of(self, arm: str, camera: str | None = None) -> Path | None:
        """Returns the socket folder of an arm that is up, and has this camera; None if there is none."""
        folder = next((one for one in socket_folders() if one.name == arm), None)
        if folder is None or camera is None:
            return folder
        station = self._station(folder)
        return folder if station is not None and camera in station.cameras else None

    def require_folder(self, arm: str, camera: str | None = None) -> Path:
        """Returns `folder_of`.

        Raises:
            DeviceError: no such arm, or no such camera of it, is up.
        """
        folder = self.folder_of(arm, camera)
        if folder is None:
            what = "" if camera is None else f" with a camera {camera!r}"
            raise DeviceError(f"no arm {arm!r}{what} is up")
        return folder

    def _arm(self, folder: Path) -> Json:
        station = self._station(folder)
        cameras = [] if station is None else list(station.cameras)
        wanted_hz = None if station is None else station.supervisor.command_hz
        shown = {"cameras": cameras, "has_scene": station is not None, "wanted_hz": wanted_hz}
        return {**_arm(folder), **shown}

    def _station(self, folder: Path) -> StationConfig | None:
        """Returns the station of an arm that is up, as it was when it was seen first."""
        station = self._stations.get(folder.name)
        if station is None:
            try:
                station = self._stations[folder.name] = station_at(folder)
            except RobotRLError:  # the arm and its button are there all the same
                return None
        return station

    def newest_runs(self) -> list[Json]:
        """Returns the runs that wrote last, the newest first."""
        files = sorted(self._runs.glob(f"*/{FILE_NAME}"), key=_written_s, reverse=True)[:_RUNS]
        found = list[Json]()
        for file in files:
            try:
                found.append(self._run(file.parent))
            except RobotRLError as error:
                found.append({"name": file.parent.name, "state": "unreadable", "problem": str(error)})
        return found

    def _run(self, folder: Path) -> Json:
        stamps = tuple(_written_s(folder / name) for name in (FILE_NAME, "summary.json"))
        if folder not in self._read or self._read[folder][0] != stamps:
            self._read[folder] = stamps, load_run(folder)
        record = self._read[folder][1]
        steps, outcomes = record.evaluations()
        curve = [[float(at), one.share] for at, one in zip(steps, outcomes, strict=True)]
        is_running = time.time() - stamps[0] < _SILENT_S
        last = record.rows[-1] if record.rows else {}
        return {
            "name": folder.name,
            "task": record.task,
            "recipe": record.recipe,
            "state": "finished" if record.summary else "running" if is_running else "stopped",
            "phase": last.get("phase"),
            "env_steps": last.get("step", 0),
            "written_s": stamps[0],
            "curve": _thinned(curve),
            "base": record.summary.get("base_success"),
            "final": record.summary.get("final_success"),
        }


def _thinned(curve: list[list[float]]) -> list[list[float]]:
    """Returns at most `_POINTS` points of a curve, the last one among them."""
    every = max(1, math.ceil(len(curve) / _POINTS))
    return curve[::every][:-1] + curve[-1:]


def _place(path: Path) -> str:
    """Returns what no other lease file has: an agent on the hub's machine shows the same devices."""
    found = path.stat()
    return f"{this_process().boot} {found.st_dev} {found.st_ino}"


def _devices(specs: Sequence[DeviceSpec], leases: Sequence[Lease], store: LeaseStore) -> list[Json]:
    stops = store.stopped()
    names = {spec.name for spec in specs}
    gone = {lease.device for lease in leases} - names
    rows: list[Json] = [
        {
            **spec.to_json(),
            "free": spec.slots - sum(lease.slots for lease in leases if lease.device == spec.name),
            "refusal": "" if spec.refusal is None else spec.refusal(),
        }
        for spec in specs
    ]
    rows += [{"name": name, "kind": "?", "free": 0, "slots": 0, "labels": {}, "refusal": ""} for name in gone]
    for row in rows:
        row["held"] = [_lease(lease, store) for lease in leases if lease.device == row["name"]]
        stop = stops.get(row["name"])
        row["stopped"] = None if stop is None else {"reason": stop.reason, "holder": stop.holder}
    return rows


def _lease(lease: Lease, store: LeaseStore) -> Json:
    wanted = store.preemption(lease)
    return {
        "holder": lease.holder,
        "slots": lease.slots,
        "pid": lease.process.pid,
        "host": lease.process.host,
        "since_s": wall_s(lease.since_s),
        "wanted_by": None if wanted is None else wanted.by,
    }


# Arms


def _arm(folder: Path) -> Json:
    what = about(folder)
    known = {"id": folder.name, "station": what.get("station", "?"), "folder": what.get("folder", "")}
    try:
        with ArmClient(folder / SUPERVISOR_SOCKET) as client:
            status, rate_hz = _watched(client)
    except (LinkError, DeviceError) as error:
        return {**known, "phase": "silent", "reason": str(error), "position_rad": [], "rate_hz": None}
    joints = [] if status.state is None else status.state.position_rad.tolist()
    seen = {"phase": status.phase, "reason": status.reason, "position_rad": joints, "rate_hz": rate_hz}
    return {**known, **seen}


def _watched(client: ArmClient) -> tuple[Status, float | None]:
    """Returns the newest status, and how many the supervisor sends in a second: one a cycle.

    Raises:
        DeviceError: it is gone, or silent.
    """
    stamps_ns = list[int]()
    client.on_status = lambda status: stamps_ns.append(status.stamp_ns)
    status, until_s = client.wait(), time.monotonic() + _RATE_S
    while len(stamps_ns) <= _RATE_CYCLES and time.monotonic() < until_s:
        status = client.wait(status.stamp_ns)
    span_s = 1e-9 * (stamps_ns[-1] - stamps_ns[0])
    return status, (len(stamps_ns) - 1) / span_s if span_s else None


def stop_arm(arm: str, by: str) -> None:
    """Brings an arm to rest, and keeps it there until a person clears it.

    Raises:
        ConfigError: no name was given, or there is no such arm.
        DeviceError: its supervisor does not answer.
    """
    folders = {folder.name: folder for folder in socket_folders()}
    if not by.strip():
        raise ConfigError("stop: who stops it? Give a name.")
    if arm not in folders:
        raise ConfigError(f"stop: no arm {arm!r} is up. Up are: {', '.join(folders) or 'none'}.")
    with ArmClient(folders[arm] / SUPERVISOR_SOCKET) as client:
        client.control("stop", by=by)


def clear_device(device: str, by: str) -> None:
    """Allows leases of a stopped device again.

    Raises:
        ConfigError: no name was given, or the device did not stop.
    """
    LeaseStore().clear(device, by)


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
