"""The real chain of the arm faults, in real processes on a ROS domain of its own.

policy --> supervisor --> driver host --ROS 2--> robot-rl serve-sim-arm, which keeps the log
               ^------- the campaign watches ------^ and taps what is sent
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from arm_judge import ArmLog, Array, steps_in
from arm_modes import MODES, station_facts, station_of
from arm_shim import WAIT_S, Far, Shim, until, wire_up

from robot_rl.core.errors import DeviceError
from robot_rl.real.client import ArmClient
from robot_rl.real.launch import StationProcesses
from robot_rl.real.messages import Status
from robot_rl.real.ros2.api import QoS, call_once
from robot_rl.real.ros2.names import topic_on_wire
from robot_rl.real.ros2.node import open_node
from robot_rl.real.supervisor.main import SUPERVISOR_SOCKET

BROADCASTER = "joint_state_broadcaster"
_BY = "the fault campaign"
_ESTOP = "robot_rl_driver/estop"
_TAP_DEPTH = 1000
_HOUR_NS = 3600 * 1_000_000_000
_OF_ROS = ("ROS_DISTRO", "ROS_STATIC_PEERS", "ROS_LOCALHOST_ONLY", "CYCLONEDDS_URI")
_BUTTON_HZ = 20.0
_SOON_S = 8.0
"""What has to follow a fault follows within this time, whatever the machine does."""
_AGAIN_S = 20.0
"""Until the policy drives again."""


class Station(StationProcesses):
    """Driver host and supervisor, of which the second can be started again."""

    def restart_supervisor(self) -> None:
        """Starts a supervisor in place of one that has ended."""
        ended = self._processes.pop()
        assert ended.wait(WAIT_S) is not None
        (self.sockets / SUPERVISOR_SOCKET).unlink(missing_ok=True)
        self._start(*self._supervisor)

    def _start(self, module: str, socket: str, arguments: list[str]) -> None:
        if socket == SUPERVISOR_SOCKET:
            self._supervisor = module, socket, arguments
        super()._start(module, socket, arguments)

    def wake(self) -> None:
        """Lets both go on that were stopped by a signal: they could not end."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def supervisor_ended(self) -> int | None:
        """Returns the supervisor's exit code, None while it runs."""
        return self._processes[1].poll()


class Button:
    """An e-stop button on the ROS graph that publishes best effort, as buttons by radio do."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._publisher = node.create_publisher("std_msgs/msg/Bool", _ESTOP, QoS(depth=1, reliable=False))
        self._speaks, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="button", daemon=True)
        self._thread.start()

    def press(self) -> None:
        """Presses it: says so three times, as nobody confirms what a best-effort publisher says."""
        until(lambda: self._publisher.num_subscriptions > 0, "a subscription that hears the button", 3.0)
        for _ in range(3):
            self._publish(pressed=True)
            time.sleep(0.01)

    def set_alive(self, is_alive: bool) -> None:
        """Makes the button speak or fall silent."""
        (self._speaks.set if is_alive else self._speaks.clear)()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(1.0 / _BUTTON_HZ):
            if self._speaks.is_set():
                self._publish(pressed=False)

    def _publish(self, *, pressed: bool) -> None:
        self._publisher.publish(self._node.message("std_msgs/msg/Bool", data=pressed))


class Chain:
    """Arm, station and policy; every part can be killed and started again."""

    def __init__(
        self,
        folder: Path,
        mode: str,
        domain_id: int,
        *,
        camera: bool = False,
        shifts_clock: bool = False,
        arm_is_far: bool = False,
        has_far_host: bool = False,
        has_button: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: for everything that is written.
            mode: `ros2.command` of the station.
            domain_id: of ROS, which nobody else has.
            camera: whether the policy looks at one.
            shifts_clock: whether driver, supervisor and policy see the wall clock of `set_clock`.
            arm_is_far: whether the arm is in a network namespace of its own, at the end of a cable.
            has_far_host: whether another host is at the end of a cable.
            has_button: whether the station declares an e-stop button that must not be silent.
        """
        self.folder, self._camera, self.mode, self.domain_id = folder, camera, MODES[mode], domain_id
        self.command = mode
        self._arm_is_far, self._has_far_host, self._has_button = arm_is_far, has_far_host, has_button
        self.station = station_of(mode, "faults", domain_id, camera=camera)
        self.logs, self.station_file = folder / "logs", folder / "station.yaml"
        self.store = self.logs / "store"
        self.logs.mkdir()
        facts = station_facts(self.station, button=has_button)
        self.station_file.write_text(yaml.safe_dump(json.loads(json.dumps(facts))))
        reach = "SUBNET" if arm_is_far or has_far_host else "LOCALHOST"
        os.environ |= {"ROS_AUTOMATIC_DISCOVERY_RANGE": reach, "ROBOT_RL_STATE": str(folder / "state")}
        for name in (*_OF_ROS, "ROBOT_RL_CLAIMS"):  # who has the arm is known to all of this machine
            os.environ.pop(name, None)
        self.shim = Shim(folder, shifts_clock=shifts_clock)
        self.arm_log = folder / "truth.npz"
        self.flushed_lost = 0
        """Steps that were on the disk, by their writer, and are not in the store."""
        self.num_busy = 0
        """Stops of an arm whose machine was too busy, when nothing was wrong with it."""
        self.policy: subprocess.Popen[bytes] | None = None
        self._arm: subprocess.Popen[bytes] | None = None
        self.far_host: subprocess.Popen[bytes] | None = None
        """Whoever holds the other host's namespaces."""
        self._far: Far | None = None
        self._station: Station | None = None
        self._watcher: ArmClient | None = None
        self.steps, self._runs = 0, 0
        self.node: Any = None
        """Ours on the graph."""
        self._button: Button | None = None
        self.sent: list[tuple[int, Any]] = []
        """What was tapped of our own commands: when, and what they say."""
        self.newest_sent: Any = None
        """The newest of them, as a message."""
        self.rival_said: list[Array] = []
        """What somebody else commanded: nobody's limits are on that."""

    # Parts

    def start(self) -> None:
        """Starts everything and waits until the policy drives."""
        if self._arm_is_far or self._has_far_host:
            wire_up()
        if self._has_far_host:
            self.far_host = subprocess.Popen(["unshare", "--net", "--mount", "--uts", "sleep", "infinity"])
            self._far = Far(self.far_host.pid)
            self._far.hide_files(self.folder / "far")
        self.start_arm()
        self.node = open_node("faults", domain_id=self.domain_id, transport="dds")
        topic = topic_on_wire(self.node.resolve(self.mode.topic))
        self.node.participant.reader(topic, self.mode.kind, QoS(depth=_TAP_DEPTH), self._tap)
        self._button = Button(self.node)
        self._button.set_alive(self._has_button)
        self.start_station()
        self.start_policy()

    def start_arm(self) -> None:
        code = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
        words = ["serve-sim-arm", f"domain_id={self.domain_id}", f"log={self.arm_log}", "log_s=3600"]
        words += ["rate_hz=100", *(["cameras=[front]", "camera_hz=10"] if self._camera else [])]
        command = [sys.executable, "-c", code, *words]
        if self._arm_is_far:
            command = ["unshare", "--net", "sh", "-euc", 'read plugged; exec "$@"', "sh", *command]
        log = self.folder / f"arm-{self._next()}.log"
        # MoveIt Servo refuses what is old by its own clock: there, all of a host's clock is stepped.
        clock = self.shim.clock if self.command in ("twist", "pose") else {}
        with log.open("wb") as out:
            self._arm = arm = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, env={**os.environ, **clock}
            )
        if self._arm_is_far:
            self._far = Far(arm.pid)
            assert arm.stdin is not None
            arm.stdin.write(b"\n")
            arm.stdin.flush()
        until(lambda: "ready" in log.read_text() or arm.poll() is not None, str(log))
        assert arm.poll() is None, log.read_text()

    def start_station(self) -> None:
        folder = self.logs / f"station-{self._next()}"
        self._events, self.driver_log = folder / "events.jsonl", folder / "driver.log"
        station = Station(str(self.station_file), folder, linger_s=60.0, timeout_s=WAIT_S)
        with self.shim.around():
            self._station = station.__enter__()
        self._watcher = self._station.client()

    def restart_supervisor(self) -> None:
        """Starts a new supervisor for the driver that lives."""
        if self._watcher is not None:
            self._watcher.close()
        with self.shim.around():
            self.station_processes.restart_supervisor()
        self._watcher = self.station_processes.client()

    def start_policy(self) -> None:
        number, script = self._next(), str(Path(__file__).with_name("arm_policy.py"))
        self._said = self.logs / f"policy-{number}.jsonl"
        words = [str(self.station_processes.sockets / SUPERVISOR_SOCKET), str(self.store)]
        words.append(str(self.station_file))
        errors = self._said.with_suffix(".err")
        with self.shim.around(), self._said.open("wb") as out, errors.open("wb") as err:
            self.policy = subprocess.Popen(
                [sys.executable, script, *words], stdin=subprocess.PIPE, stdout=out, stderr=err
            )

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    @property
    def arm_pid(self) -> int:
        assert self._arm is not None
        return self._arm.pid

    @property
    def station_processes(self) -> Station:
        assert self._station is not None
        return self._station

    def end_policy(self) -> None:
        """Ends the policy, if it lives, and counts what its store has lost of what was on the disk."""
        if self.policy is None:
            return
        self.policy.send_signal(signal.SIGCONT)
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
            self._station.wake()
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
        self.shim.heal()
        with contextlib.ExitStack() as stack:  # all of them, whatever goes wrong
            if self.far_host is not None:
                stack.callback(self.far_host.wait)
                stack.callback(self.far_host.kill)
            if self.node is not None:
                stack.callback(self.node.close)
            if self._button is not None:
                stack.callback(self._button.close)
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

    def event(self, name: str, reason: str, since_ns: int, wait_s: float = _SOON_S) -> float:
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

        return float(until(look, f"{name}: {reason}", wait_s)["monotonic_s"]) - 1e-9 * since_ns

    def said(self) -> list[dict[str, Any]]:
        """Returns the policy's lines; one that a kill cut short says nothing."""
        lines = self._said.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def recorded(self) -> int:
        """How many steps are on the disk, by their writer."""
        said = self.said() if self.policy is not None else []
        return self.steps + (said[-1]["flushed"] if said else 0)

    def driver_says(self, what: str, since: int) -> bool:
        """Returns whether the driver's log has a pattern after so many letters."""
        return re.search(what, self.driver_log.read_text(errors="replace")[since:]) is not None

    def targets_sent(self) -> ArmLog:
        """Returns the joint targets on the wire, of a chain that is commanded by position."""
        rows = [(stamp_ns, said) for stamp_ns, said in self.sent if len(said) == len(self.station.joints)]
        others = {said.tobytes() for said in self.rival_said}
        rows = [(stamp_ns, said) for stamp_ns, said in rows if said.tobytes() not in others]
        width = len(self.station.joints)
        return ArmLog(
            stamp_ns=np.array([stamp_ns for stamp_ns, _ in rows], np.int64),
            commanded_rad=np.array([said for _, said in rows]).reshape(-1, width),
            position_rad=np.zeros((0, width)),
            velocity_rad_s=np.zeros((0, width)),
        )

    @property
    def button(self) -> Button:
        assert self._button is not None
        return self._button

    def _tap(self, octets: bytes, info: Any) -> None:
        """Notes a command, and when it was sent: this process may have had to wait for its turn."""
        message = self.node.types.codec(self.mode.kind).decode(octets)
        said = self.mode.payload(message)
        if said is not None:
            now_ns = time.monotonic_ns()
            age_ns = time.time_ns() - info.source_timestamp
            age_ns -= round(age_ns / _HOUR_NS) * _HOUR_NS  # the driver's clock may have been stepped
            self.newest_sent = message
            self.sent.append((now_ns - age_ns, said))

    def until_driving(self) -> None:
        """Waits until the policy has driven for a third of a second.

        Where the machine was too busy for joint states in time, the arm was stopped: that is cleared.
        """

        def drives() -> bool:
            assert self.policy is not None
            assert self.policy.poll() is None, self._said.with_suffix(".err").read_text()
            status = self.status
            if status.phase == "stopped":
                assert "newest joint state" in status.reason, f"stopped before the fault: {status.reason}"
                self.num_busy += 1
                self.clear()
            return status.phase == "running" and status.plan > first

        first = -1
        until(drives, "the policy drives", _AGAIN_S)
        first = self.status.plan + 6
        until(drives, "the policy drives", _AGAIN_S)

    def clear(self) -> None:
        """Lifts the stop, as a person does: again, while the arm is not as it should be."""
        if self.status.phase != "stopped":
            return

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

    def set_cable(self, *, plugged: bool) -> None:
        """Cuts the network cable or joins it."""
        assert self._far is not None
        self._far.set_cable(plugged=plugged)

    def camera_pid(self) -> int:
        """Returns the process of the arm that draws."""
        found = Path(f"/proc/{self.arm_pid}/task/{self.arm_pid}/children").read_text().split()
        (pid,) = [pid for pid in found if b"arm.cameras" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(pid)

    def _call(self, kind: str, service: str, **fields: Any) -> Any:
        kind, name = f"controller_manager_msgs/srv/{kind}", f"controller_manager/{service}"
        return call_once(self.node, kind, name, 10.0, **fields)

    def _next(self) -> int:
        self._runs += 1
        return self._runs
