"""A driver host in a thread, and a supervisor that the test plays."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from robot_rl.hal.arm import ArmState
from robot_rl.real.drivers.host import DRIVER_SOCKET, Host
from robot_rl.real.link import connect
from robot_rl.real.messages import Answer, Beat, Command, Control, Operation, Plan
from robot_rl.testing.arm import FakeArm
from tests.real.supervisor.rig import two_joint_station

TIMEOUT_S = 10.0
"""Far longer than anything takes: the machine may be busy."""


def wait_for(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until_s, "timed out"
        time.sleep(0.002)


class Bench:
    """A host in a thread, and the link of its supervisor."""

    def __init__(self, folder: Path, arm: FakeArm | None = None, **station: object) -> None:
        # A busy machine delays messages by more than the default of 0.1 s.
        calm = {"hold_after_s": 60.0, "stop_after_s": 60.0, "max_state_age_s": 0.5}
        self.station = replace(two_joint_station(supervisor=calm), **station)
        self.arm = arm or FakeArm(self.station)
        self.folder = folder
        self.host = Host(self.arm, self.station, folder, linger_s=0.5)
        self.thread = threading.Thread(target=self.host.run)
        self.states: list[ArmState] = []
        self.answers: list[Answer] = []
        self.number = 0

    def __enter__(self) -> "Bench":
        self.thread.start()
        wait_for((self.folder / DRIVER_SOCKET).exists)
        self.link = connect(self.folder / DRIVER_SOCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self.host.close()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()

    def hear(self) -> None:
        for message in self.link.receive():
            if isinstance(message, ArmState):
                self.states.append(message)
            elif isinstance(message, Answer):
                self.answers.append(message)

    def control(self, operation: Operation, by: str = "test", seed: int = 0) -> Answer:
        known = len(self.answers)
        self.link.send(Control(operation=operation, by=by, seed=seed))
        wait_for(lambda: self.hear() or len(self.answers) > known)
        return self.answers[-1]

    def send(self, *target_rad: float, gripper: float = 0.5, age_s: float = 0.0) -> None:
        self.number += 1
        stamp_ns = time.monotonic_ns() - round(1e9 * age_s)
        self.link.send(
            Command(number=self.number, stamp_ns=stamp_ns, target_rad=np.array(target_rad), gripper=gripper)
        )

    def plan(self, *targets_rad: tuple[float, float], period_s: float = 0.1) -> None:
        self.number += 1
        self.link.send(
            Plan(
                number=self.number,
                start_ns=time.monotonic_ns(),
                period_ns=round(1e9 * period_s),
                targets_rad=np.array(targets_rad),
                gripper=np.ones(len(targets_rad)),
            )
        )

    def measured(self) -> ArmState:
        """Returns where the arm is now, whatever the host says."""
        state = self.arm.read()
        assert state is not None
        return state

    def beat(self, age_s: float = 0.0) -> None:
        self.link.send(Beat(stamp_ns=time.monotonic_ns() - round(1e9 * age_s)))

    def reconnect(self) -> None:
        """Plays the next supervisor."""
        self.link.close()
        self.states.clear()
        wait_for(lambda: self.host._link is None)
        self.link = connect(self.folder / DRIVER_SOCKET)

    def reason(self) -> str:
        self.hear()
        return self.states[-1].stop_reason if self.states else ""
