"""Supervisor, driver and policy in one thread, on a clock that the test turns."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import DeviceError
from robot_rl.hal.safety import SafetyLimits
from robot_rl.real.link import Link, Listener, connect
from robot_rl.real.messages import Answer, Beat, Command, Control, Message, Operation, Plan, Status
from robot_rl.real.station import GripperConfig, SimConfig, StationConfig, SupervisorConfig
from robot_rl.real.supervisor.clients import Clients
from robot_rl.real.supervisor.log import Log
from robot_rl.real.supervisor.supervisor import Supervisor
from robot_rl.real.writer import Writer
from robot_rl.testing.arm import FakeArm
from robot_rl.testing.devices import Behaviour

DT_S = 0.01
"""A cycle: 100 Hz."""
TWO_JOINTS: dict[str, Any] = {
    "position_low_rad": (-2.0, -2.0),
    "position_high_rad": (2.0, 2.0),
    "velocity_rad_s": (2.0, 2.0),
    "acceleration_rad_s2": (10.0, 10.0),
    "effort_n_m": (5.0, 5.0),
}
"""Lead: 2 rad/s x 0.1 s = 0.2 rad. Rate: (2 + 10 x 0.1) x 0.05 = 0.15 rad in any 50 ms."""


def two_joint_station(
    *, limits: dict[str, Any] | None = None, supervisor: dict[str, Any] | None = None, **changes: Any
) -> StationConfig:
    """Returns a station of two joints, at home at 0."""
    held: dict[str, Any] = {"interpolate": "hold"}
    fields: dict[str, Any] = {
        "name": "bench",
        "robot": "fake",
        "joints": ("a", "b"),
        "driver": "sim",
        "gripper": GripperConfig(open=1.0, closed=0.0),
        "home_rad": (0.0, 0.0),
        "safe_rad": (0.0, 0.0),
        "limits": SafetyLimits(**{**TWO_JOINTS, **(limits or {})}),
        "sim": SimConfig(),
        "supervisor": SupervisorConfig(**(held | (supervisor or {}))),
    }
    return StationConfig(**{**fields, **changes})


class Peer:
    """A client of the supervisor: `said` is what came back, oldest first."""

    def __init__(self, path: Path) -> None:
        self.link = connect(path)
        self.said: list[Message] = []

    def listen(self) -> None:
        self.said += self.link.receive()

    def control(self, operation: Operation, by: str = "", seed: int = 0) -> None:
        self.link.send(Control(operation=operation, by=by, seed=seed))

    @property
    def answer(self) -> Answer:
        """The newest."""
        return self.answers[-1]

    @property
    def answers(self) -> list[Answer]:
        return [message for message in self.said if isinstance(message, Answer)]

    @property
    def status(self) -> Status:
        return [message for message in self.said if isinstance(message, Status)][-1]


class Rig:
    """Turns the crank: `run` advances clock, driver and supervisor cycle by cycle."""

    def __init__(
        self,
        folder: Path,
        station: StationConfig,
        script: Sequence[Behaviour] = (),
        writer: Writer | None = None,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.arm = FakeArm(station, script, period_s=DT_S, clock=self.clock)
        ours, theirs = socket.socketpair()
        self.driver, self.folder = Link(theirs), folder
        self.path = folder / "s.sock"
        self.clients = Clients(Listener(self.path))
        self.log = Log(folder, station, writer)
        self.supervisor = Supervisor(station, Link(ours), self.clients, self.log, clock=self.clock)
        self.peers: list[Peer] = []
        self.controls: list[Control] = []
        """What the driver was told."""
        self.beats = 0
        """Cycles in which the driver heard that the supervisor lives, and nothing else."""
        self.refuse: dict[Operation, str] = {}
        """Orders that the driver refuses, and why."""
        self.deaf = False
        """Whether the driver does not answer."""
        self.speed = 0.0
        """Largest measured speed so far."""
        self._number = 0

    def connect(self) -> Peer:
        peer = Peer(self.path)
        self.peers.append(peer)
        return peer

    def started(self) -> Peer:
        """Returns a policy whose start was answered."""
        peer = self.connect()
        self.run(0.02)
        peer.control("start")
        self.run(0.1)
        assert peer.status.phase == "running", peer.status
        return peer

    def plan(self, *targets: Any, period_s: float = 0.05, start_s: float = 0.0, **changes: Any) -> Plan:
        """Returns the next plan, due `start_s` from now; each target (n,)."""
        self._number += 1
        plan = Plan(
            number=self._number,
            start_ns=self.now_ns() + round(1e9 * start_s),
            period_ns=round(1e9 * period_s),
            targets_rad=np.array(targets, float),
            gripper=np.ones(len(targets)),
        )
        return replace(plan, **changes)

    def order(self, operation: Operation, by: str = "") -> Control:
        return Control(operation=operation, by=by)

    def now_ns(self) -> int:
        return round(1e9 * self.clock.now_s())

    def close(self) -> None:
        for peer in self.peers:
            peer.link.close()
        self.driver.close()
        self.supervisor.close()

    def run(self, seconds_s: float) -> None:
        for _ in range(round(seconds_s / DT_S)):
            self.clock.advance(DT_S)
            self.step()
        self.log.flush()  # tests read what was written

    def step(self) -> None:
        self._drive()
        self.supervisor.cycle()
        for peer in self.peers:
            peer.listen()

    def _drive(self) -> None:
        """Does what the driver's host does."""
        if self.driver.closed:
            return
        for message in self.driver.receive():
            match message:
                case Command():
                    self.arm.send(message)
                case Plan():
                    self.arm.send_plan(message)
                case Beat():
                    self.beats += 1
                case Control():
                    self.controls.append(message)
                    self._obey(message)
                case _:
                    raise AssertionError(message)
        try:
            state = self.arm.read()
        except DeviceError:
            self.driver.close()
            return
        if state is not None:
            self.speed = max(self.speed, float(np.nanmax(np.abs(state.velocity_rad_s))))
            self.driver.send(state)

    def _obey(self, control: Control) -> None:
        if self.deaf:
            return
        refusal = self.refuse.get(control.operation, "")
        match control.operation:
            case _ if refusal:
                pass
            case "start":
                self.arm.start()
            case "hold":
                self.arm.hold()
            case "stop":
                self.arm.stop("asked")
            case "clear":
                self.arm.clear(control.by)
            case "reset":
                self.arm.reset(control.seed)
            case _:
                raise AssertionError(control)
        self.driver.send(Answer(operation=control.operation, done=not refusal, message=refusal))
