"""Joint trajectories by the rules of ros2_control's joint_trajectory_controller.

Refusals, the motion between way points, and the judgement of goals follow ros2_controllers; comments name
where this arm is stricter. n joints, H way points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.real.ros2.api import nanoseconds

Array = NDArray[Any]


class Code(IntEnum):
    """`error_code` of control_msgs/FollowJointTrajectory."""

    SUCCESSFUL = 0
    INVALID_GOAL = -1
    INVALID_JOINTS = -2
    OLD_HEADER_TIMESTAMP = -3
    PATH_TOLERANCE_VIOLATED = -4
    GOAL_TOLERANCE_VIOLATED = -5


@dataclass(frozen=True)
class Verdict:
    """How a trajectory ended, or why it never began."""

    code: Code
    text: str


@dataclass(frozen=True, kw_only=True)
class TrajectoryRules:
    """The controller's parameters; names as in ros2_controllers where they exist there."""

    allow_partial_joints_goal: bool = False
    """Joints that a trajectory leaves out stay where they are; if false, it is refused."""
    allow_nonzero_velocity_at_trajectory_end: bool = False
    path_tolerance_rad: float = 0.0
    """Largest |desired - measured| on the way; 0 for none."""
    goal_tolerance_rad: float = 0.05
    """The same at the end; 0 for none."""
    stopped_velocity_tolerance_rad_s: float = 0.01
    """Faster joints are not at their goal."""
    goal_time_s: float = 5.0
    """The goal may be reached this long after the last way point; 0 for ever."""


def seconds(stamp: Any) -> float:
    """Returns a builtin_interfaces Time or Duration in seconds."""
    return float(stamp.sec) + 1e-9 * float(stamp.nanosec)


def refusal(
    trajectory: Any, joints: Sequence[str], now_ns: int, rules: TrajectoryRules | None = None
) -> Verdict | None:
    """Returns why the controller of `joints` refuses a trajectory_msgs/JointTrajectory, None if it does not.

    `now_ns` is ROS time, for a stamp that is not 0.
    """
    rules = rules or TrajectoryRules()
    names, points = list(trajectory.joint_names), list(trajectory.points)
    if not names:
        return Verdict(Code.INVALID_JOINTS, "Empty joint names on incoming trajectory.")
    for name in names:
        if name not in joints:
            return Verdict(
                Code.INVALID_JOINTS, f"Incoming joint {name} doesn't match the controller's joints."
            )
    if len(set(names)) != len(names):
        return Verdict(Code.INVALID_JOINTS, "Duplicate joint names on incoming trajectory.")
    if not rules.allow_partial_joints_goal and len(names) != len(joints):
        return Verdict(
            Code.INVALID_JOINTS, "Joints on incoming trajectory don't match the controller joints."
        )
    if not points:
        return Verdict(Code.INVALID_GOAL, "Empty trajectory received.")
    start_ns = nanoseconds(trajectory.header.stamp)
    end_ns = start_ns + nanoseconds(points[-1].time_from_start)
    if start_ns and end_ns < now_ns:
        return Verdict(
            Code.OLD_HEADER_TIMESTAMP,
            f"Received trajectory with non-zero start time ({1e-9 * start_ns:f}) that ends in the past "
            f"({1e-9 * end_ns:f})",
        )
    return _refusal_of_end(names, points[-1], rules) or _refusal_of_points(names, points)


def _refusal_of_end(names: list[str], last: Any, rules: TrajectoryRules) -> Verdict | None:
    if rules.allow_nonzero_velocity_at_trajectory_end:
        return None
    for name, velocity in zip(names, last.velocities, strict=False):
        if abs(velocity) > np.finfo(np.float32).eps:
            return Verdict(
                Code.INVALID_GOAL,
                f"Velocity of last trajectory point of joint {name} is not zero: {velocity:.15f}",
            )
    return None


def _refusal_of_points(names: list[str], points: list[Any]) -> Verdict | None:
    previous_s = -np.inf
    for i, point in enumerate(points):
        time_s = seconds(point.time_from_start)
        if time_s <= previous_s:
            return Verdict(
                Code.INVALID_GOAL,
                f"Time between points {i - 1} and {i} is not strictly increasing, "
                f"it is {previous_s:f} and {time_s:f} respectively",
            )
        previous_s = time_s
        for field, may_be_empty in (("positions", False), ("velocities", True), ("accelerations", True)):
            values = np.asarray(getattr(point, field), float)
            if not len(values) and may_be_empty:
                continue
            if len(values) != len(names):
                return Verdict(
                    Code.INVALID_GOAL,
                    f"Mismatch between joint_names size ({len(names)}) and {field} ({len(values)}) "
                    f"at point #{i}.",
                )
            # ros2_controllers lets these through to the hardware.
            if not np.isfinite(values).all():
                return Verdict(Code.INVALID_GOAL, f"{field} at point #{i} are not finite.")
        if len(point.effort):
            return Verdict(Code.INVALID_GOAL, "Trajectories with effort fields are currently not supported.")
    return None


@dataclass(frozen=True)
class Sample:
    """Where a trajectory is at a moment."""

    position_rad: Array
    """(n,)"""
    velocity_rad_s: Array
    """(n,)"""
    is_over: bool
    """Whether the last way point is behind."""


class Motion:
    """The motion of a trajectory: from the first state, through its way points, to rest at the last."""

    def __init__(
        self,
        trajectory: Any,
        joints: Sequence[str],
        *,
        start_ns: int,
        now_ns: int,
        position_rad: Array,
        velocity_rad_s: Array,
    ) -> None:
        """Takes an accepted message for the controller's `joints`; those that it lacks hold.

        Its time 0 is `start_ns`, on the clock of `now_ns`, at which the joints are at `position_rad` (n,) and
        move at `velocity_rad_s` (n,).
        """
        points = list(trajectory.points)
        columns = [list(joints).index(name) for name in trajectory.joint_names]
        self._times_ns = np.array([start_ns + nanoseconds(point.time_from_start) for point in points])
        shape = (len(points), len(joints))
        self._position = np.tile(np.asarray(position_rad, float), (len(points), 1))
        # NaN rows are missing values of a way point: such segments use fewer terms.
        self._velocity, self._acceleration = np.full(shape, np.nan), np.full(shape, np.nan)
        for row, point in enumerate(points):
            self._position[row, columns] = point.positions
            for given, kept in (
                (point.velocities, self._velocity),
                (point.accelerations, self._acceleration),
            ):
                if len(given):
                    kept[row] = 0.0
                    kept[row, columns] = given
        if now_ns < self._times_ns[0]:
            self._begin_at(now_ns, position_rad, velocity_rad_s)

    def _begin_at(self, now_ns: int, position_rad: Array, velocity_rad_s: Array) -> None:
        self._times_ns = np.concatenate([[now_ns], self._times_ns])
        self._position = np.vstack([position_rad, self._position])
        self._velocity = np.vstack([velocity_rad_s, self._velocity])
        self._acceleration = np.vstack([np.full(len(position_rad), np.nan), self._acceleration])

    @property
    def end_ns(self) -> int:
        return int(self._times_ns[-1])

    def sample(self, now_ns: int) -> Sample:
        """Returns the joints' desired state at a moment.

        Linear between two way points of which one has no velocity, cubic if both have, quintic if
        both have accelerations too.
        """
        after = int(np.searchsorted(self._times_ns, now_ns, side="right"))
        if after == len(self._times_ns):
            last = self._position[-1]
            return Sample(last.copy(), np.zeros(len(last)), is_over=True)
        before = max(0, after - 1)
        span_s = 1e-9 * float(self._times_ns[after] - self._times_ns[before])
        t = 1e-9 * float(now_ns - self._times_ns[before])
        c = self._polynomial(before, after, span_s)
        powers = t ** np.arange(6)
        slopes = np.arange(1, 6) * powers[:5]
        return Sample(powers @ c, slopes @ c[1:], is_over=False)

    def _polynomial(self, before: int, after: int, span_s: float) -> Array:
        """Returns (6, n) coefficients, constant first, of the segment between two way points."""
        p0, p1 = self._position[before], self._position[after]
        v0, v1 = self._velocity[before], self._velocity[after]
        a0, a1 = self._acceleration[before], self._acceleration[after]
        c, t = np.zeros((6, len(p0))), span_s
        way = p1 - p0
        c[0] = p0
        if np.isnan(v0 + v1).any():
            c[1] = way / t
        elif np.isnan(a0 + a1).any():
            c[1] = v0
            c[2] = (3 * way - (2 * v0 + v1) * t) / t**2
            c[3] = (-2 * way + (v0 + v1) * t) / t**3
        else:
            c[1], c[2] = v0, a0 / 2
            c[3] = (20 * way - (12 * v0 + 8 * v1) * t - (3 * a0 - a1) * t**2) / (2 * t**3)
            c[4] = (-30 * way + (16 * v0 + 14 * v1) * t + (3 * a0 - 2 * a1) * t**2) / (2 * t**4)
            c[5] = (12 * way - 6 * (v0 + v1) * t - (a0 - a1) * t**2) / (2 * t**5)
        return c


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """Largest |desired - measured| of each joint; 0 for none."""

    path_rad: Array
    """(n,)"""
    path_rad_s: Array
    """(n,)"""
    goal_rad: Array
    """(n,)"""
    goal_rad_s: Array
    """(n,)"""
    goal_time_s: float
    """0 for ever."""


def tolerances(goal: Any, joints: Sequence[str], rules: TrajectoryRules) -> Tolerances | Verdict:
    """Returns the tolerances of a control_msgs/action/FollowJointTrajectory goal; None is one from the topic.

    In a goal, 0 leaves the controller's own tolerance, and -1 sets none.
    """
    full = np.ones(len(joints))
    found = {
        "path_rad": rules.path_tolerance_rad * full,
        "path_rad_s": 0.0 * full,
        "goal_rad": rules.goal_tolerance_rad * full,
        "goal_rad_s": rules.stopped_velocity_tolerance_rad_s * full,
    }
    if goal is None:
        return Tolerances(**found, goal_time_s=rules.goal_time_s)
    for part, asked in (("path", goal.path_tolerance), ("goal", goal.goal_tolerance)):
        for entry in asked:
            if entry.name not in joints:
                return Verdict(
                    Code.INVALID_GOAL, f"{part}_tolerance of {entry.name}: the controller has no such joint."
                )
            for unit, value in (("rad", entry.position), ("rad_s", entry.velocity)):
                if value < 0 and value != -1:
                    return Verdict(
                        Code.INVALID_GOAL,
                        f"{part}_tolerance of {entry.name}: got {value:g}, allowed: above 0, 0 for the "
                        "default, -1 for none.",
                    )
                if value:
                    found[f"{part}_{unit}"][list(joints).index(entry.name)] = max(0.0, value)
    asked_s = seconds(goal.goal_time_tolerance)
    return Tolerances(**found, goal_time_s=rules.goal_time_s if asked_s == 0 else max(0.0, asked_s))


def exceeds(error: Array, allowed: Array) -> Array:
    """Returns (n,), where an error is over its tolerance, if there is one."""
    return (allowed > 0) & (np.abs(error) > allowed)
