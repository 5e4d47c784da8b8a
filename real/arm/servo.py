"""Cartesian commands as in MoveIt Servo: fresh twists and poses become joint targets.

The arm halts `incoming_command_timeout_s` after the last stamp. Names and defaults are those of MoveIt
Servo's parameters. n joints.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from robot_rl.core.errors import require
from robot_rl.real.arm.body import Body
from robot_rl.real.arm.controllers import LEAD_S, Cycle
from robot_rl.real.messages import Array

_DAMPING = 0.05
"""Of the least squares, in metres and radians; it keeps them finite at singularities."""


@dataclass(frozen=True, kw_only=True)
class ServoConfig:
    """Settings of Cartesian commands."""

    command_in_type: str = "unitless"
    """`unitless`: -1 to 1 times the scales below; `speed_units`: m/s and rad/s."""
    linear_scale_m_s: float = 0.4
    rotational_scale_rad_s: float = 0.8
    incoming_command_timeout_s: float = 0.1
    joint_limit_margin_rad: float = 0.1
    """Closer to a limit, no joint moves towards it."""
    pose_gain_hz: float = 5.0
    """Speed towards a pose over the distance to it."""

    def __post_init__(self) -> None:
        kind, kinds = self.command_in_type, ("unitless", "speed_units")
        require(kind in kinds, "servo.command_in_type", kind, " or ".join(kinds))


@dataclass(frozen=True)
class Twist:
    """One message of `delta_twist_cmds`."""

    stamp_ns: int
    """ROS time."""
    velocity: Array = field(repr=False)
    """(6,) linear, angular."""
    in_tool_frame: bool = False


@dataclass(frozen=True)
class PoseTarget:
    """One message of `pose_target_cmds`."""

    stamp_ns: int
    """ROS time."""
    pose: Array = field(repr=False)
    """(7,) position and quaternion (w, x, y, z) of the tool in the base frame."""


class Servo:
    """Turns the newest Cartesian command into joint targets."""

    def __init__(self, config: ServoConfig | None = None) -> None:
        self._config = config or ServoConfig()
        self._newest: Twist | PoseTarget | None = None
        self._target: Array | None = None
        self._takes: type[Twist | PoseTarget] | None = None
        self._is_paused = False
        self.num_stale = 0
        """Commands that were too old when they were to be followed."""
        self.num_refused = 0
        """Commands of a type that is not switched on, or during a pause."""

    def take(self, command: Twist | PoseTarget) -> None:
        if self._is_paused or not isinstance(command, self._takes or (Twist, PoseTarget)):
            self.num_refused += 1
        else:
            self._newest = command

    def switch(self, kind: type[Twist | PoseTarget]) -> None:
        """Takes commands of one type only; before the first switch both types count, as in older Servos."""
        self._takes = kind
        self.stop()

    def pause(self, *, is_on: bool) -> None:
        """Ignores all commands while it is on."""
        self._is_paused = is_on
        self.stop()

    def stop(self) -> None:
        """Forgets the command."""
        self._newest = self._target = None

    def update(self, cycle: Cycle, body: Body) -> Array | None:
        """Returns the joint targets (n,) of this cycle; None while there is nothing to follow."""
        command = self._newest
        if command is None:
            return None
        # As in MoveIt Servo, a command without a stamp is always too old.
        if cycle.ros_ns - command.stamp_ns > 1e9 * self._config.incoming_command_timeout_s:
            self.num_stale += self._target is None
            held, self._newest, self._target = self._target, None, None
            return None if held is None else cycle.state.position_rad.copy()
        if self._target is None:
            self._target = cycle.state.position_rad.copy()
        self._target = self._moved(self._target, self._twist(command, body), cycle, body)
        return self._target

    def _twist(self, command: Twist | PoseTarget, body: Body) -> Array:
        """Returns the wanted velocity (6,) of the tool in the base frame."""
        config = self._config
        tool = body.plant.tool_pose()
        if isinstance(command, PoseTarget):
            error = np.concatenate(
                [command.pose[:3] - tool[:3], _rotation_vector(command.pose[3:], tool[3:])]
            )
            twist = config.pose_gain_hz * error
            for part, largest in (
                (twist[:3], config.linear_scale_m_s),
                (twist[3:], config.rotational_scale_rad_s),
            ):
                part *= min(1.0, largest / max(1e-12, float(np.linalg.norm(part))))
            return twist
        twist = np.array(command.velocity, float)
        if config.command_in_type == "unitless":
            twist[:3] *= config.linear_scale_m_s
            twist[3:] *= config.rotational_scale_rad_s
        if command.in_tool_frame:
            twist = np.concatenate([_rotate(tool[3:], twist[:3]), _rotate(tool[3:], twist[3:])])
        return twist

    def _moved(self, target: Array, twist: Array, cycle: Cycle, body: Body) -> Array:
        plant = body.plant
        jacobian, largest = plant.jacobian(), plant.velocity_limits_rad_s
        gram = jacobian @ jacobian.T + _DAMPING**2 * np.eye(6)
        speed = jacobian.T @ np.linalg.solve(gram, twist)
        speed /= max(1.0, float(np.max(np.abs(speed) / largest)))  # the direction stays
        low, high = plant.position_limits_rad
        margin = self._config.joint_limit_margin_rad
        measured = cycle.state.position_rad
        if (((measured < low + margin) & (speed < 0)) | ((measured > high - margin) & (speed > 0))).any():
            return measured.copy()
        wanted = target + cycle.dt_s * speed
        return measured + np.clip(wanted - measured, -LEAD_S * largest, LEAD_S * largest)


def _rotate(quaternion: Array, vector: Array) -> Array:
    axis = quaternion[1:]
    twice = 2.0 * np.cross(axis, vector)
    return vector + quaternion[0] * twice + np.cross(axis, twice)


def _rotation_vector(to: Array, of: Array) -> Array:
    """Returns the rotation (3,) in the base frame that turns one orientation into another."""
    scalar = float(to @ of)
    # Of the product of `to` with the inverse of `of`.
    axis = of[0] * to[1:] - to[0] * of[1:] - np.cross(to[1:], of[1:])
    if scalar < 0:
        scalar, axis = -scalar, -axis
    sine = float(np.linalg.norm(axis))
    return np.zeros(3) if sine < 1e-9 else axis / sine * 2.0 * np.arctan2(sine, scalar)
