"""A plant that needs no physics: two joints that follow their targets with a lag, and a lie if asked.

And the arm in a process of its own.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from robot_rl.hal.arm import ArmState
from robot_rl.real.arm.body import Body, StopConfig
from robot_rl.real.arm.controllers import Cycle

PERIOD_S = 0.01
WAIT_S = 20.0
"""Of a busy machine."""


class LagPlant:
    """Two joints: each step of `dt` closes `dt / lag_s` of the way to the target; 0 follows at once."""

    joint_names = ("a", "b")
    finger_names = ("finger",)
    gripper_range = (0.0, 0.04)

    def __init__(self, lag_s: float = 0.0) -> None:
        self.lag_s = lag_s
        self.position, self.velocity, self.effort = np.zeros(2), np.zeros(2), np.zeros(2)
        self.opening, self.stuck_at = 0.04, -1.0
        self.target, self.gripper = np.zeros(2), 0.04
        self.seed = -1

    servo_s = np.zeros(2)  # says nothing of its lag
    position_limits_rad = np.array([-1.0, -2.0]), np.array([1.0, 2.0])
    velocity_limits_rad_s = np.array([1.0, 2.0])
    effort_limits_n_m = np.array([10.0, 20.0])

    def command(self, target_rad: Any, gripper: float) -> None:
        self.target, self.gripper = np.array(target_rad), gripper

    def targets(self) -> tuple[Any, float]:
        return self.target.copy(), self.gripper

    def step(self, dt_s: float) -> None:
        share = 1.0 if self.lag_s == 0 else min(1.0, dt_s / self.lag_s)
        moved = share * (self.target - self.position)
        self.position, self.velocity = self.position + moved, moved / dt_s
        self.opening = max(self.stuck_at, self.opening + np.clip(self.gripper - self.opening, -0.001, 0.001))

    def measure(self) -> ArmState:
        return ArmState(
            stamp_ns=0,
            position_rad=self.position.copy(),
            velocity_rad_s=self.velocity.copy(),
            effort_n_m=self.effort.copy(),
            gripper=float(self.opening),
        )

    def fingers(self) -> Any:
        return np.array([self.opening])

    def objects(self) -> dict[str, Any]:
        return {"cube": np.array([0.5, 0.0, 0.02, 1.0, 0.0, 0.0, 0.0])}

    def tool_pose(self) -> Any:
        return np.array([self.position[0], self.position[1], 0.0, 1.0, 0.0, 0.0, 0.0])

    def jacobian(self) -> Any:
        """Joint a moves the tool along x, joint b along y."""
        return np.eye(6)[:, :2]

    def state(self) -> Any:
        return np.concatenate([self.position, self.velocity])

    def set_state(self, row: Any) -> None:
        self.position, self.velocity = row[:2].copy(), row[2:].copy()

    def picture(self, camera: str) -> Any:
        raise AssertionError("no test looks")

    def reset(self, seed: int) -> None:
        self.seed = seed
        self.position, self.velocity = np.full(2, 0.1), np.zeros(2)
        self.target, self.opening, self.gripper = np.full(2, 0.1), 0.04, 0.04

    def close(self) -> None:
        """Nothing is open."""


class Loop:
    """A body whose controllers are updated by hand, 10 ms a cycle."""

    def __init__(self, lag_s: float = 0.0, **stop: float) -> None:
        self.plant = LagPlant(lag_s)
        self.body = Body(self.plant, StopConfig(**stop), rng=np.random.default_rng(0))
        self.now_ns = 0

    def cycle(self, *controllers: Any, ros_ns: int | None = None) -> Cycle:
        state = self.body.read(self.now_ns)
        now_ns = self.now_ns
        cycle = Cycle(now_ns=now_ns, ros_ns=now_ns if ros_ns is None else ros_ns, dt_s=PERIOD_S, state=state)
        for controller in controllers:
            controller.update(cycle, self.body)
        self.body.write(PERIOD_S)
        self.now_ns += round(1e9 * PERIOD_S)
        return cycle

    def run(self, duration_s: float, *controllers: Any) -> None:
        for _ in range(round(duration_s / PERIOD_S)):
            self.cycle(*controllers)


@pytest.fixture(name="make_loop")
def provide_loop() -> type[Loop]:
    return Loop


def start(*words: str) -> "subprocess.Popen[str]":
    """Starts `robot-rl serve-sim-arm`; the arm can be found when this returns."""
    code = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve-sim-arm", "--json", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "sim_arm: pick_cube, ready\n"
    return process


@contextlib.contextmanager
def serving(*words: str) -> Generator[list[dict[str, Any]]]:
    """Runs an arm and ends it as Ctrl-C does; the list then holds its last line."""
    process, facts = start(*words), list[dict[str, Any]]()
    try:
        yield facts
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        facts.append(json.loads(out.splitlines()[-1]))
    finally:
        process.kill()
        process.communicate()
