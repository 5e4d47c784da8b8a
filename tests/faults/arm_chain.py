"""The real chain of the arm faults, in real processes on a ROS domain of its own.

policy --> supervisor --> driver host --ROS 2--> robot-rl serve-sim-arm, which keeps the log
               ^------- the campaign watches ------^ and taps what is sent
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from arm_judge import ArmLog, Array, steps_in
from wall_clock import WallClock

from robot_rl.core.errors import DeviceError
from robot_rl.real.client import ArmClient
from robot_rl.real.launch import StationProcesses
from robot_rl.real.messages import Status
from robot_rl.real.ros2.api import call_once
from robot_rl.real.ros2.node import open_node
from robot_rl.real.station import CameraConfig, StationConfig, load_station
from robot_rl.real.supervisor.main import SUPERVISOR_SOCKET

WAIT_S = 60.0
"""Of a busy machine."""
POSITION = "forward_position_controller"
BROADCASTER = "joint_state_broadcaster"
_BY = "the fault campaign"
_LO = "ip link set lo up; "
_OURS, _THEIRS = "192.0.2.1/24", "192.0.2.2/24"  # of documentation's addresses (RFC 5737)


def until(holds: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """Waits for a condition and returns what it says."""
    until_s = time.monotonic() + wait_s
    while True:
        if found := holds():
            return found
        assert time.monotonic() < until_s, f"{what}: not within {wait_s:g} s"
        time.sleep(0.02)


def station_of(name: str, domain_id: int, *, camera: bool) -> StationConfig:
    """Returns the shipped simulated arm, as this campaign has it."""
    station = load_station("sim_arm")
    assert station.ros2 is not None
    return replace(
        station,
        name=name,
        ros2=replace(station.ros2, domain_id=domain_id),
        objects={},
        cameras={"front": CameraConfig(topic="front/image_raw/compressed")} if camera else {},
        # The machine may be busy, and repeats shall be short.
        supervisor=replace(station.supervisor, max_state_age_s=0.2, stop_after_s=0.75),
    )


class Chain:
    """Arm, station and policy; every part can be killed and started again."""

    def __init__(
        self, folder: Path, *, camera: bool = False, shifts_clock: bool = False, cuts_cable: bool = False
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: for everything that is written.
            camera: whether the policy looks at one.
            shifts_clock: whether driver, supervisor and policy see the wall clock of `set_clock`.
            cuts_cable: whether the arm is in a network namespace of its own, at the end of a cable.
        """
        self.folder, self._camera, self._cuts_cable = folder, camera, cuts_cable
        domain_id = os.getpid() % 100 + 1
        self.station = station_of("faults", domain_id, camera=camera)
        self.station_file, self.store = folder / "station.yaml", folder / "store"
        self.station_file.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(self.station)))))
        reach = "SUBNET" if cuts_cable else "LOCALHOST"
        os.environ |= {"ROS_AUTOMATIC_DISCOVERY_RANGE": reach, "ROBOT_RL_STATE": str(folder / "state")}
        os.environ["ROBOT_RL_CLAIMS"] = str(folder)
        for name in ("ROS_DISTRO", "ROS_STATIC_PEERS", "ROS_LOCALHOST_ONLY", "CYCLONEDDS_URI"):
            os.environ.pop(name, None)
        self._clock = WallClock(folder) if shifts_clock else None
        self._preload = {} if self._clock is None else self._clock.environment
        self.domain_id = domain_id
        self.arm_log = folder / "truth.npz"
        self.flushed_lost = 0
        """Steps that were on the disk, by their writer, and are not in the store."""
        self.policy: subprocess.Popen[bytes] | None = None
        self._arm: subprocess.Popen[bytes] | None = None
        self._station: StationProcesses | None = None
        self._watcher: ArmClient | None = None
        self.steps, self._runs = 0, 0
        self.node: Any = None
        """Ours on the graph."""
        self._tapped: list[tuple[int, Any]] = []
        self.rival_rad: list[Array] = []
        """What somebody else commanded: nobody's limits are on that."""

    # Parts

    def start(self) -> None:
        """Starts everything and waits until the policy drives."""
        self._wire_up()
        self.start_arm()
        self.node = open_node("faults", domain_id=self.domain_id)
        self.node.create_subscription(
            "std_msgs/msg/Float64MultiArray",
            f"{POSITION}/commands",
            lambda message: self._tapped.append((time.monotonic_ns(), np.array(message.data))),
        )
        self.start_station()
        self.start_policy()

    def start_arm(self) -> None:
        code = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
        words = [
            "serve-sim-arm",
            f"domain_id={self.domain_id}",
            f"log={self.arm_log}",
            "log_s=1800",
            "rate_hz=100",
        ]
        words += ["cameras=[front]", "camera_hz=10"] if self._camera else []
        command = [sys.executable, "-c", code, *words]
        if self._cuts_cable:
            command = ["unshare", "--net", "sh", "-euc", 'read plugged; exec "$@"', "sh", *command]
        log = self.folder / f"arm-{self._next()}.log"
        with log.open("wb") as out:
            self._arm = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
        if self._cuts_cable:
            self._plug_in(self._arm)
        until(
            lambda: "ready" in log.read_text() or self._arm is None or self._arm.poll() is not None, str(log)
        )
        assert self._arm.poll() is None, log.read_text()

    def start_station(self) -> None:
        with _environment(self._preload):
            folder = self.folder / f"station-{self._next()}"
            self._station = StationProcesses(str(self.station_file), folder, linger_s=60.0, timeout_s=WAIT_S)
            self._station.__enter__()
        self._events, self.driver_log = folder / "events.jsonl", folder / "driver.log"
        self._watcher = self._station.client()

    def start_policy(self) -> None:
        number, script = self._next(), str(Path(__file__).with_name("arm_policy.py"))
        self._said = self.folder / f"policy-{number}.jsonl"
        assert self._station is not None
        words = [str(self._station.sockets / SUPERVISOR_SOCKET), str(self.store), str(self.station_file)]
        with self._said.open("wb") as out, self._said.with_suffix(".err").open("wb") as errors:
            self.policy = subprocess.Popen(
                [sys.executable, script, *words],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=errors,
                env={**os.environ, **self._preload},
            )

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    @property
    def arm_pid(self) -> int:
        assert self._arm is not None
        return self._arm.pid

    @property
    def station_processes(self) -> StationProcesses:
        assert self._station is not None
        return self._station

    def end_policy(self) -> None:
        """Ends the policy, if it lives, and counts what its store has lost of what was on the disk."""
        if self.policy is None:
            return
        self.policy.send_signal(signal.SIGTERM)
        try:
            self.policy.wait(WAIT_S)
        finally:
            self.policy.kill()
        flushed = self.said()[-1]["flushed"] if self.said() else 0
        kept = steps_in(self.store) if (self.store / "meta" / "store.json").exists() else 0
        self.flushed_lost += max(0, flushed - (kept - self.steps))
        self.steps, self.policy = kept, None

    def end_station(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        if self._station is not None:
            self._station.close()
        self._station = self._watcher = None

    def end_arm(self) -> None:
        """Ends the arm as Ctrl-C does: it writes its log."""
        if self._arm is None:
            return
        with contextlib.suppress(ValueError, OSError):  # no camera, or no arm any more
            os.kill(self.camera_pid(), signal.SIGCONT)
        self._arm.send_signal(signal.SIGCONT)  # a frozen process does not end
        self._arm.send_signal(signal.SIGINT)
        try:
            self._arm.wait(WAIT_S)
        finally:
            self._arm.kill()
            self._arm = None

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, whatever goes wrong
            if self.node is not None:
                stack.callback(self.node.close)
            for end in (self.end_arm, self.end_station, self.end_policy):
                stack.callback(end)

    # What is seen

    @property
    def status(self) -> Status:
        """What the supervisor says after this moment; its journal is a cycle ahead of older ones."""
        return self.watcher.wait(newer_than_ns=time.monotonic_ns(), timeout_s=10.0)

    @property
    def watcher(self) -> ArmClient:
        assert self._watcher is not None
        return self._watcher

    def events(self, since_ns: int) -> list[dict[str, Any]]:
        """Returns the supervisor's journal since a moment."""
        lines = [line for line in self._events.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found = [json.loads(line) for line in lines]
        return [event for event in found if event["monotonic_s"] >= 1e-9 * since_ns - 1e-6]

    def event(self, name: str, reason: str, since_ns: int) -> float:
        """Waits for an event whose reason matches; returns the seconds it came after a moment.

        Raises:
            AssertionError: another stop came, or nothing.
        """

        def look() -> dict[str, Any] | None:
            for event in self.events(since_ns):
                if event["event"] == name and re.search(reason, event.get("reason", "")):
                    return event
                assert event["event"] != "stop", f"stopped for another reason: {event['reason']}"
            return None

        return float(until(look, f"{name}: {reason}", 20.0)["monotonic_s"]) - 1e-9 * since_ns

    def said(self) -> list[dict[str, Any]]:
        """Returns the policy's lines; one that a kill cut short says nothing."""
        lines = self._said.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def tap(self) -> ArmLog:
        """Returns the commands on the wire, for an arm whose own log died with it."""
        rows = [row for row in self._tapped if len(row[1]) == len(self.station.joints)]
        nothing = np.zeros((0, len(self.station.joints)))
        return ArmLog(
            stamp_ns=np.array([stamp_ns for stamp_ns, _ in rows]),
            commanded_rad=np.array([target for _, target in rows]),
            position_rad=nothing,
            velocity_rad_s=nothing,
        )

    def until_driving(self) -> None:
        """Waits until the policy has driven for a third of a second."""

        def drives() -> bool:
            assert self.policy is not None
            assert self.policy.poll() is None, self._said.with_suffix(".err").read_text()
            status = self.status
            assert status.phase != "stopped", f"stopped before the fault: {status.reason}"
            return status.phase == "running" and status.plan > first

        first = self.status.plan
        until(lambda: self.status.phase == "running", "the policy drives")
        first = self.status.plan + 6
        until(drives, "the policy drives")

    def clear(self) -> None:
        """Lifts the stop, as a person does: again, while the arm is not as it should be."""

        def cleared() -> bool:
            try:
                self.watcher.control("clear", by=_BY)
            except DeviceError as error:
                why.append(str(error))
                return False
            return True

        why: list[str] = []
        try:
            until(cleared, "clear", 30.0)
        except AssertionError as error:
            raise AssertionError(f"{error}: {why[-1]}") from error

    # Faults

    def tell_policy(self, word: str) -> None:
        assert self.policy is not None
        assert self.policy.stdin is not None
        self.policy.stdin.write(word.encode() + b"\n")
        self.policy.stdin.flush()

    def switch(self, *, activate: tuple[str, ...] = (), deactivate: tuple[str, ...] = ()) -> None:
        """Switches controllers of the arm, as anybody on the graph may."""
        done = self._call(
            "SwitchController",
            "switch_controller",
            activate_controllers=list(activate),
            deactivate_controllers=list(deactivate),
            strictness=2,
        )
        assert done.ok, f"switch_controller: {getattr(done, 'message', '')}"

    def is_active(self, controller: str) -> bool:
        listed = self._call("ListControllers", "list_controllers")
        return any(one.name == controller and one.state == "active" for one in listed.controller)

    def set_clock(self, shift_s: int) -> None:
        """Steps the wall clock of station and policy to so far from the real one."""
        assert self._clock is not None
        self._clock.set(shift_s)

    def set_cable(self, *, plugged: bool) -> None:
        """Cuts the arm's network cable or joins it."""
        _run(
            "nsenter",
            "-t",
            str(self.arm_pid),
            "-n",
            "ip",
            "link",
            "set",
            "cable",
            "up" if plugged else "down",
        )

    def camera_pid(self) -> int:
        """Returns the process of the arm that draws."""
        found = Path(f"/proc/{self.arm_pid}/task/{self.arm_pid}/children").read_text().split()
        (pid,) = [pid for pid in found if b"arm.cameras" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(pid)

    def _call(self, kind: str, service: str, **fields: Any) -> Any:
        kind, name = f"controller_manager_msgs/srv/{kind}", f"controller_manager/{service}"
        return call_once(self.node, kind, name, 10.0, **fields)

    def _wire_up(self) -> None:
        if self._cuts_cable:
            _run("sh", "-euc", _LO)

    def _plug_in(self, arm: subprocess.Popen[bytes]) -> None:
        assert arm.stdin is not None
        pid = str(arm.pid)
        ours = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{pid}/ns/net") != ours, "the arm's network namespace")
        _run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", pid)
        up = "ip addr add {} dev cable; ip link set cable up"
        _run("sh", "-euc", up.format(_OURS))
        _run("nsenter", "-t", pid, "-n", "sh", "-euc", _LO + up.format(_THEIRS))
        arm.stdin.write(b"\n")
        arm.stdin.flush()

    def _next(self) -> int:
        self._runs += 1
        return self._runs


def missing(*programs: str) -> str:
    """Returns which programs are not installed, or an empty text."""
    lacking = [name for name in programs if shutil.which(name) is None]
    return f"needs {', '.join(lacking)}" if lacking else ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Generator[None]:
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
