"""Controllers as ros2_control has them: each commands some joints while it is active.

They use no clock and no ROS: `update` is called once a cycle with the newest state and writes the
body's targets. Calls come from two threads; the caller holds the arm's lock. n joints.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from robot_rl.hal.arm import ArmState
from robot_rl.real.arm.body import Body
from robot_rl.real.arm.trajectory import (
    Code,
    Motion,
    Sample,
    Tolerances,
    TrajectoryRules,
    Verdict,
    exceeds,
)
from robot_rl.real.messages import Array
from robot_rl.real.ros2.api import nanoseconds

LEAD_S = 0.15
"""Largest lead of an integrated target, times the speed limit: a soft servo lags by 0.1 s."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One turn of the control loop."""

    now_ns: int
    """Monotonic."""
    ros_ns: int
    dt_s: float
    state: ArmState


class Controller:
    """A controller of the controller manager; this one commands nothing."""

    name: str
    kind: str
    """Type, as ros2_control names it."""
    quantity = "position"
    """That its command interfaces set."""

    def __init__(self, joints: Sequence[str] = ()) -> None:
        self.joints = tuple(joints)
        self.interfaces = tuple(f"{joint}/{self.quantity}" for joint in joints)
        """Command interfaces that it claims, `joint1/position`."""

    def activate(self, body: Body) -> None:
        """Prepares its work."""

    def halt(self, why: str, body: Body) -> None:
        """Ends its work; the arm stays where it is."""

    def update(self, cycle: Cycle, body: Body) -> None:
        """Writes its targets."""


class JointStateBroadcaster(Controller):
    """Commands nothing; while it is active, the server publishes joint states."""

    name = "joint_state_broadcaster"
    kind = "joint_state_broadcaster/JointStateBroadcaster"


class Execution:
    """A trajectory that a controller was given, until it ends."""

    def __init__(self, message: Any, tolerances: Tolerances) -> None:
        self.message, self.tolerances = message, tolerances
        self.verdict: Verdict | None = None
        self.done = threading.Event()

    def end(self, code: Code, text: str) -> None:
        if self.verdict is None:
            self.verdict = Verdict(code, text)
            self.done.set()


class JointTrajectoryController(Controller):
    """Follows trajectories from its topic and its action; the newest replaces the one before."""

    name = "joint_trajectory_controller"
    kind = "joint_trajectory_controller/JointTrajectoryController"

    def __init__(self, joints: Sequence[str], rules: TrajectoryRules | None = None) -> None:
        super().__init__(joints)
        self.rules = rules or TrajectoryRules()
        self.reference = Sample(np.zeros(len(joints)), np.zeros(len(joints)), is_over=True)
        """The newest desired state."""
        self._execution: Execution | None = None
        self._motion: Motion | None = None
        self._streamed: Array | None = None

    def follow(self, execution: Execution) -> None:
        """Begins a trajectory at the next cycle; the one before is aborted."""
        self._end(Code.INVALID_GOAL, "Current goal cancelled due to new incoming action.")
        self._execution, self._motion = execution, None

    def set(self, values: Array) -> None:
        """Takes one streamed target, as from MoveIt Servo; a trajectory is aborted."""
        self._end(Code.INVALID_GOAL, "Current goal cancelled due to a streamed command.")
        self._streamed = np.array(values, float)

    def cancel(self, execution: Execution, body: Body) -> None:
        """Ends a trajectory for its sender; the arm holds."""
        if execution is self._execution:
            self._end(Code.SUCCESSFUL, "Goal cancelled; holding position.")
            self._hold(body)

    def activate(self, body: Body) -> None:
        self._hold(body)

    def halt(self, why: str, body: Body) -> None:
        self._end(Code.INVALID_GOAL, why)
        self._hold(body)

    def update(self, cycle: Cycle, body: Body) -> None:
        execution = self._execution
        if self._streamed is not None:
            body.target_rad, self._streamed = self._streamed, None
            self.reference = Sample(body.target_rad, np.zeros(len(self.joints)), is_over=True)
        if execution is None:
            return
        motion = self._motion or self._begin(execution, cycle)
        self.reference = sample = motion.sample(cycle.now_ns)
        # A real arm's drives follow a trajectory closely; soft servos do the same if their target leads.
        body.target_rad = sample.position_rad + body.plant.servo_s * sample.velocity_rad_s
        self._judge(execution, motion, cycle, body)

    def _begin(self, execution: Execution, cycle: Cycle) -> Motion:
        stamp_ns = nanoseconds(execution.message.header.stamp)
        self._motion = Motion(
            execution.message,
            self.joints,
            start_ns=cycle.now_ns + (stamp_ns - cycle.ros_ns if stamp_ns else 0),
            now_ns=cycle.now_ns,
            position_rad=cycle.state.position_rad,
            velocity_rad_s=cycle.state.velocity_rad_s,
        )
        return self._motion

    def _judge(self, execution: Execution, motion: Motion, cycle: Cycle, body: Body) -> None:
        """Ends a trajectory that is off its path, at its goal, or too late for it."""
        if execution.verdict is not None:
            return  # it has ended: the arm stays at the last way point
        allowed, state = execution.tolerances, cycle.state
        error = self.reference.position_rad - state.position_rad
        error_speed = self.reference.velocity_rad_s - state.velocity_rad_s
        if not self.reference.is_over:
            off = exceeds(error, allowed.path_rad) | exceeds(error_speed, allowed.path_rad_s)
            if off.any():
                self._fail(Code.PATH_TOLERANCE_VIOLATED, "path tolerance violation", off, error, body)
            return
        off = exceeds(error, allowed.goal_rad) | exceeds(error_speed, allowed.goal_rad_s)
        late_s = 1e-9 * (cycle.now_ns - motion.end_ns)
        if not off.any():
            execution.end(Code.SUCCESSFUL, "Goal successfully reached!")
        elif allowed.goal_time_s and late_s > allowed.goal_time_s:
            why = f"goal_time exceeding by {late_s - allowed.goal_time_s:f} seconds"
            self._fail(Code.GOAL_TOLERANCE_VIOLATED, why, off, error, body)

    def _fail(self, code: Code, why: str, off: Array, error: Array, body: Body) -> None:
        joint = int(np.flatnonzero(off)[0])
        self._end(code, f"Aborted due to {why}: {self.joints[joint]} is off by {error[joint]:.4f} rad")
        self._hold(body)

    def _end(self, code: Code, text: str) -> None:
        if self._execution is not None:
            self._execution.end(code, text)
        self._execution = self._motion = None

    def _hold(self, body: Body) -> None:
        body.hold()
        self.reference = Sample(body.target_rad, np.zeros(len(self.joints)), is_over=True)


class ForwardPositionController(Controller):
    """Passes joint targets on as they come."""

    name = "forward_position_controller"
    kind = "position_controllers/JointGroupPositionController"
    _wanted: Array | None = None

    def set(self, values: Array) -> None:
        """Takes the values of one message, one a joint."""
        self._wanted = np.array(values, float)

    def activate(self, body: Body) -> None:
        self._wanted = None
        body.hold()

    def halt(self, why: str, body: Body) -> None:
        self.activate(body)

    def update(self, cycle: Cycle, body: Body) -> None:
        if self._wanted is not None:
            body.target_rad = self._wanted


class ForwardVelocityController(Controller):
    """Moves joints at given speeds.

    Stricter than ros2_control's: within the speed limits, and at rest after `timeout_s` without a message,
    or never if None. No target leads the arm by more than `LEAD_S`.
    """

    name = "forward_velocity_controller"
    kind = "velocity_controllers/JointGroupVelocityController"
    quantity = "velocity"

    def __init__(self, joints: Sequence[str], *, timeout_s: float | None = 0.25) -> None:
        super().__init__(joints)
        self._timeout_s, self._silent_s = timeout_s, 0.0
        self._speed: Array | None = None
        self._reference: Array | None = None

    def set(self, values: Array) -> None:
        """Takes the speeds of one message, one a joint."""
        self._speed, self._silent_s = np.array(values, float), 0.0

    def activate(self, body: Body) -> None:
        self._speed = self._reference = None
        body.hold()

    def halt(self, why: str, body: Body) -> None:
        self.activate(body)

    def update(self, cycle: Cycle, body: Body) -> None:
        self._silent_s += cycle.dt_s
        if self._speed is None:
            return
        if self._timeout_s is not None and self._silent_s > self._timeout_s:
            self.activate(body)
            return
        largest, (low, high) = body.plant.velocity_limits_rad_s, body.plant.position_limits_rad
        here_rad, speed = cycle.state.position_rad, np.clip(self._speed, -largest, largest)
        before = body.target_rad if self._reference is None else self._reference
        # As with trajectories: real drives have a speed at once; soft servos if their target leads.
        servo_rad = body.plant.servo_s * speed
        lead = before + cycle.dt_s * speed + servo_rad - here_rad
        lead = np.clip(lead, -LEAD_S * largest, LEAD_S * largest)
        self._reference = np.clip(here_rad + lead - servo_rad, low, high)
        body.target_rad = np.clip(self._reference + servo_rad, low, high)


class Grip:
    """A goal of the gripper, until it is reached or the gripper stalls."""

    def __init__(self, position: float) -> None:
        self.position = position
        self.reached = self.stalled = False
        self.done = threading.Event()


class GripperController(Controller):
    """Opens and closes, from its topic and its action; the newest goal replaces the one before."""

    name = "gripper_controller"
    kind = "position_controllers/GripperActionController"
    goal_tolerance = 0.002
    """Unit of the gripper, m for most."""
    stall_velocity_threshold = 0.001
    stall_timeout_s = 0.5

    def __init__(self, fingers: Sequence[str]) -> None:
        super().__init__(fingers)
        self._grip: Grip | None = None
        self._before = np.nan
        self._still_s = 0.0

    def set(self, position: float) -> None:
        """Takes a goal from the topic."""
        self.go(Grip(position))

    def go(self, grip: Grip) -> None:
        if self._grip is not None:
            self._grip.done.set()
        self._grip, self._still_s = grip, 0.0

    def activate(self, body: Body) -> None:
        self._before = body.state.gripper

    def halt(self, why: str, body: Body) -> None:
        if self._grip is not None:
            self._grip.done.set()
        self._grip = None

    def update(self, cycle: Cycle, body: Body) -> None:
        grip, opening = self._grip, cycle.state.gripper
        speed, self._before = abs(opening - self._before) / cycle.dt_s, opening
        if grip is None:
            return
        body.gripper = grip.position
        self._still_s = self._still_s + cycle.dt_s if speed < self.stall_velocity_threshold else 0.0
        grip.reached = abs(opening - grip.position) <= self.goal_tolerance
        grip.stalled = not grip.reached and self._still_s > self.stall_timeout_s
        if grip.reached or grip.stalled:
            grip.done.set()
