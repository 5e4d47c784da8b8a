"""The five ways of commanding an arm: where commands go, what they say, how long the arm goes on alone.

n arm joints.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from arm_judge import Array, TrajectorySent
from standstill import BUSY_S

from robot_rl.real.arm.config import SimArmConfig
from robot_rl.real.station import CameraConfig, StationConfig, load_station

Name = Literal["position", "velocity", "trajectory", "twist", "pose"]

VELOCITY_TIMEOUT_S = 0.25
"""Command timeout of the simulated arm's velocity controller."""
RIVAL_FRAME = "rival"
"""header.frame_id of what somebody else commands in this campaign."""
ESTOP_MAX_AGE_S = 0.5
"""`ros2.estop_max_age_s` of stations whose e-stop button reports again and again that it is not pressed."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One `ros2.command`."""

    controller: str
    topic: str
    kind: str
    """Message type."""
    alone_s: float
    """How long the arm may go on when commands cease, because nobody is left to hold it."""
    plan_s: float
    """How far ahead the campaign's policy plans."""
    lag_s: float
    """Time constant with which the arm follows its targets."""
    settle_s: float
    """Time constant with which it comes to rest.

    Where a loop over the driver, or one of Servo, closes the way at rate k over an arm that lags by L and
    a line that takes D, the way x obeys (L + D) x'' + x' + k x = 0: with k (L + D) >= 1/4, as here, it swings
    and decays with 2 (L + D), whatever k is. An arm that has a speed at once, as in `velocity`, is quicker.
    """

    def payload(self, message: Any) -> Any:
        """Returns what a message says, and None of one by somebody else."""
        if self.kind.startswith("std_msgs"):
            return np.array(message.data, float)
        if message.header.frame_id == RIVAL_FRAME:
            return None
        if self.kind.startswith("trajectory_msgs"):
            return TrajectorySent.of(message)
        if self.kind.endswith("TwistStamped"):
            linear, angular = message.twist.linear, message.twist.angular
            return np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])
        at, turned = message.pose.position, message.pose.orientation
        return np.array([at.x, at.y, at.z, turned.w, turned.x, turned.y, turned.z])


_STATION = load_station("sim_arm_trajectory")
_LAG_S = _STATION.limits.lookahead_s
_SERVO_S = SimArmConfig().servo.incoming_command_timeout_s
_LOOP_S = 2.0 * (_LAG_S + BUSY_S)
_LEAD_S = 0.15  # of targets that the arm integrates by itself; robot_rl.real.arm.controllers
_POSITION, _VELOCITY = "forward_position_controller", "forward_velocity_controller"
_TRAJECTORY = "joint_trajectory_controller"

MODES: dict[str, Mode] = {
    "position": Mode(
        controller=_POSITION, topic=f"{_POSITION}/commands", kind="std_msgs/msg/Float64MultiArray",
        alone_s=0.0, plan_s=0.2, lag_s=_LAG_S, settle_s=_LAG_S,
    ),
    "velocity": Mode(
        controller=_VELOCITY, topic=f"{_VELOCITY}/commands", kind="std_msgs/msg/Float64MultiArray",
        alone_s=VELOCITY_TIMEOUT_S, plan_s=0.2, lag_s=_LEAD_S, settle_s=_LOOP_S,
    ),
    "trajectory": Mode(
        controller=_TRAJECTORY, topic=f"{_TRAJECTORY}/joint_trajectory",
        kind="trajectory_msgs/msg/JointTrajectory",
        alone_s=_STATION.supervisor.max_plan_s, plan_s=2.0, lag_s=_LAG_S, settle_s=_LAG_S,
    ),
    "twist": Mode(
        controller=_TRAJECTORY, topic="servo_node/delta_twist_cmds", kind="geometry_msgs/msg/TwistStamped",
        alone_s=_SERVO_S, plan_s=0.2, lag_s=_LEAD_S, settle_s=_LOOP_S,
    ),
    "pose": Mode(
        controller=_TRAJECTORY, topic="servo_node/pose_target_cmds", kind="geometry_msgs/msg/PoseStamped",
        alone_s=_SERVO_S, plan_s=0.2, lag_s=_LEAD_S, settle_s=_LOOP_S,
    ),
}  # fmt: skip
BRAKE_S = {"trajectory": 0.1}
"""Ramp of the driver's hold, where it sends one: robot_rl.real.drivers.ros2_commands."""


def station_of(mode: str, name: str, domain_id: int, *, camera: bool) -> StationConfig:
    """Returns the shipped simulated arm, as this campaign has it."""
    station = _STATION if mode == "trajectory" else load_station("sim_arm")
    assert station.ros2 is not None
    supervisor = replace(station.supervisor, stop_after_s=0.75)  # repeats shall be short
    if mode in ("twist", "pose"):
        # Six numbers do not say where each of seven joints is.
        supervisor = replace(supervisor, tracking_rad=(0.6,) * len(station.joints))
    ros2: dict[str, Any] = {"command": mode, "domain_id": domain_id}
    if mode == "velocity" and hasattr(station.ros2, "command_timeout_s"):
        ros2["command_timeout_s"] = VELOCITY_TIMEOUT_S
    return replace(
        station,
        name=name,
        ros2=replace(station.ros2, **ros2),
        objects={},
        cameras={"front": CameraConfig(topic="front/image_raw/compressed")} if camera else {},
        supervisor=supervisor,
    )


def station_facts(station: StationConfig, *, button: bool) -> dict[str, Any]:
    """Returns a station as its file has it; `button` declares an e-stop button that must not be silent."""
    facts = asdict(station)
    if button:
        facts["ros2"]["estop_max_age_s"] = ESTOP_MAX_AGE_S
    return facts


def rival_message(node: Any, mode: str, position_rad: Array, joints: tuple[str, ...], newest: Any) -> Any:
    """Returns what a second commander sends: it holds the arm where it is, as far as the mode can say that.

    Args:
        node: of the rival.
        mode: of the station.
        position_rad: (n,) where the arm is.
        joints: their names.
        newest: the newest message of ours, for poses.
    """
    header = node.message("std_msgs/msg/Header", frame_id=RIVAL_FRAME)
    kind = MODES[mode].kind
    match mode:
        case "position":
            return node.message(kind, data=position_rad)
        case "velocity":
            return node.message(kind, data=np.zeros(len(position_rad)))
        case "trajectory":
            soon = node.message("builtin_interfaces/msg/Duration", sec=0, nanosec=50_000_000)
            point = node.message(
                "trajectory_msgs/msg/JointTrajectoryPoint", positions=position_rad, time_from_start=soon
            )
            return node.message(kind, header=header, joint_names=list(joints), points=[point])
        case "twist":
            stamp_s, stamp_ns = divmod(node.now_ns(), 1_000_000_000)
            header.stamp.sec, header.stamp.nanosec = stamp_s, stamp_ns
            return node.message(kind, header=header)
        case _:
            newest.header.frame_id = RIVAL_FRAME
            return newest
