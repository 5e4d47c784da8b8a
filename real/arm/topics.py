"""Topics of the simulated arm: commands in, states out, under ros2_control's names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from robot_rl.real.arm.arm import SimArm
from robot_rl.real.arm.controllers import (
    Cycle,
    Execution,
    ForwardPositionController,
    ForwardVelocityController,
)
from robot_rl.real.arm.servo import PoseTarget, Twist
from robot_rl.real.arm.trajectory import Verdict, refusal, tolerances
from robot_rl.real.messages import Array
from robot_rl.real.ros2.api import LATCHED, Message, Node, Publisher, nanoseconds

logger = logging.getLogger(__name__)

BASE_FRAME = "base_link"
TOOL_FRAME = "tool"
_CONTROLLER_STATE_HZ = 20.0
_STATUS_HZ = 2.0


def set_stamp(stamp: Message, time_ns: int) -> None:
    """Writes nanoseconds into a Time or Duration."""
    stamp.sec, stamp.nanosec = divmod(time_ns, 1_000_000_000)


def where_known(message: Message, /, **fields: Any) -> Message:
    """Sets fields that not every ROS distribution has."""
    for name, value in fields.items():
        if hasattr(message, name):
            setattr(message, name, value)
    return message


def fill_pose(pose: Message, values: Array) -> None:
    """Writes (7,) position and quaternion (w, x, y, z) into a geometry_msgs/Pose."""
    at, turned = pose.position, pose.orientation
    at.x, at.y, at.z, turned.w, turned.x, turned.y, turned.z = values.tolist()


class Commands:
    """Subscriptions; every message passes the bad line first."""

    def __init__(self, node: Node, arm: SimArm, ros_ns: Callable[[], int]) -> None:
        self._arm, self._ros_ns = arm, ros_ns
        array, trajectory = "std_msgs/msg/Float64MultiArray", "trajectory_msgs/msg/JointTrajectory"
        for kind, topic, handler in (
            (array, f"{arm.position.name}/commands", self._forwarded(arm.position)),
            (array, f"{arm.velocity.name}/commands", self._forwarded(arm.velocity)),
            (array, f"{arm.gripper.name}/commands", self._on_gripper),
            (trajectory, f"{arm.trajectory.name}/joint_trajectory", self._on_trajectory),
            ("geometry_msgs/msg/TwistStamped", "servo_node/delta_twist_cmds", self._on_twist),
            ("geometry_msgs/msg/PoseStamped", "servo_node/pose_target_cmds", self._on_pose),
        ):
            node.create_subscription(kind, topic, self._through_line(handler))

    def _through_line(self, handler: Any) -> Any:
        def on_message(message: Message) -> None:
            self._arm.commands.send((handler, message), time.monotonic_ns())

        return on_message

    def _forwarded(self, controller: ForwardPositionController | ForwardVelocityController) -> Any:
        def on_message(message: Message) -> None:
            if self._fits(controller.name, message, len(controller.joints)):
                controller.set(message.data)

        return on_message

    def _on_gripper(self, message: Message) -> None:
        if self._fits(self._arm.gripper.name, message, 1):
            self._arm.gripper.set(float(message.data[0]))

    def _on_trajectory(self, message: Message) -> None:
        controller = self._arm.trajectory
        if not self._arm.listens(controller.name):
            return
        why = refusal(message, controller.joints, self._ros_ns(), controller.rules)
        if why is not None:
            self._arm.num_ignored += 1
            logger.error("%s: %s", controller.name, why.text)
            return
        allowed = tolerances(None, controller.joints, controller.rules)
        assert not isinstance(allowed, Verdict), "there is nothing to refuse without a goal"
        controller.follow(Execution(message, allowed))

    def _on_twist(self, message: Message) -> None:
        linear, angular = message.twist.linear, message.twist.angular
        velocity = np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])
        in_tool = message.header.frame_id == TOOL_FRAME
        self._arm.servo.take(Twist(nanoseconds(message.header.stamp), velocity, in_tool))

    def _on_pose(self, message: Message) -> None:
        at, turned = message.pose.position, message.pose.orientation
        pose = np.array([at.x, at.y, at.z, turned.w, turned.x, turned.y, turned.z])
        self._arm.servo.take(PoseTarget(nanoseconds(message.header.stamp), pose))

    def _fits(self, controller: str, message: Message, length: int) -> bool:
        if not self._arm.listens(controller):
            return False
        if len(message.data) != length:
            self._arm.num_ignored += 1
            logger.error(
                "%s: command size (%d) does not match number of interfaces (%d).",
                controller, len(message.data), length,
            )  # fmt: skip
            return False
        return True


class States:
    """Publishers; joint states every cycle, the rest at their own rates."""

    def __init__(self, node: Node, arm: SimArm) -> None:
        self._node, self._arm = node, arm
        config = arm.config
        self._names = [*arm.plant.joint_names, *arm.plant.finger_names]
        make = node.create_publisher
        self._joints = make("sensor_msgs/msg/JointState", "joint_states")
        self._controller = make(
            "control_msgs/msg/JointTrajectoryControllerState", f"{arm.trajectory.name}/controller_state"
        )
        self._objects: dict[str, Publisher] = {
            name: make("geometry_msgs/msg/PoseStamped", f"objects/{name}/pose") for name in arm.objects
        }
        self._status = make("std_msgs/msg/String", "~/safety_status", LATCHED)
        self._clock = make("rosgraph_msgs/msg/Clock", "/clock") if config.use_sim_time else None
        self._description = make("std_msgs/msg/String", "robot_description", LATCHED)
        self._description.publish(node.message("std_msgs/msg/String", data=urdf(arm)))
        self._published: str | None = None
        self._fingers = arm.fingers
        self._every = {
            what: max(1, round(config.rate_hz / hz))
            for what, hz in (
                ("objects", config.object_hz),
                ("controller", _CONTROLLER_STATE_HZ),
                ("status", _STATUS_HZ),
            )
        }

    def publish(self, cycle: Cycle) -> None:
        """Sends the messages of this cycle, and publishes those that the line has delayed long enough."""
        if self._clock is not None:
            message = self._node.message("rosgraph_msgs/msg/Clock")
            set_stamp(message.clock, cycle.ros_ns)
            self._clock.publish(message)
        if self._arm.manager.is_active("joint_state_broadcaster"):
            self._send(self._joints, self._joint_state(cycle))
        if self._is_due("objects"):
            for name, pose in self._arm.objects.items():
                message = self._stamped("geometry_msgs/msg/PoseStamped", cycle)
                fill_pose(message.pose, pose)
                self._send(self._objects[name], message)
        if self._is_due("controller") and self._arm.manager.is_active(self._arm.trajectory.name):
            self._send(self._controller, self._controller_state(cycle))
        reason = self._arm.body.stop_reason
        if reason != self._published or self._is_due("status"):
            self._published = reason
            self._send(self._status, self._node.message("std_msgs/msg/String", data=reason))
        for publish, message in self._arm.states.receive(time.monotonic_ns()):
            publish(message)

    def _is_due(self, what: str) -> bool:
        return self._arm.num_cycles % self._every[what] == 0

    def _send(self, publisher: Publisher, message: Message) -> None:
        self._arm.states.send((publisher.publish, message), time.monotonic_ns())

    def _stamped(self, kind: str, cycle: Cycle, **fields: Any) -> Message:
        message = self._node.message(kind, **fields)
        message.header.frame_id = BASE_FRAME
        set_stamp(message.header.stamp, cycle.ros_ns)
        return message

    def _joint_state(self, cycle: Cycle) -> Message:
        state = cycle.state
        fingers = self._arm.fingers
        speed, self._fingers = (fingers - self._fingers) / cycle.dt_s, fingers
        # NaN is a value that is not measured, as usual in ROS.
        effort = np.full(len(state.position_rad), np.nan) if state.effort_n_m is None else state.effort_n_m
        return self._stamped(
            "sensor_msgs/msg/JointState",
            cycle,
            name=self._names,
            position=np.concatenate([state.position_rad, fingers]),
            velocity=np.concatenate([state.velocity_rad_s, speed]),
            effort=np.concatenate([effort, np.full(len(fingers), np.nan)]),
        )

    def _controller_state(self, cycle: Cycle) -> Message:
        controller, state = self._arm.trajectory, cycle.state
        wanted = controller.reference
        message = self._stamped(
            "control_msgs/msg/JointTrajectoryControllerState",
            cycle,
            joint_names=list(controller.joints),
            **points(
                self._node,
                ("reference", "feedback", "error"),
                (wanted.position_rad, wanted.velocity_rad_s),
                (state.position_rad, state.velocity_rad_s),
            ),
        )
        return where_known(message, speed_scaling_factor=1.0)


def points(
    node: Node, names: Sequence[str], wanted: tuple[Array, Array], measured: tuple[Array, Array]
) -> dict[str, Message]:
    """Returns JointTrajectoryPoints: wanted, measured and their difference, under three names."""
    error = (wanted[0] - measured[0], wanted[1] - measured[1])
    kind = "trajectory_msgs/msg/JointTrajectoryPoint"
    return {
        name: node.message(kind, positions=position, velocities=velocity)
        for name, (position, velocity) in zip(names, (wanted, measured, error), strict=True)
    }


def urdf(arm: SimArm) -> str:
    """Returns joint names and limits as a URDF, in which programs look limits up."""
    plant = arm.plant
    low, high = plant.position_limits_rad
    closed, opened = sorted(plant.gripper_range)
    rows = [
        (joint, "revolute", *numbers)
        for joint, *numbers in zip(
            plant.joint_names, low, high, plant.velocity_limits_rad_s, plant.effort_limits_n_m, strict=True
        )
    ]
    rows += [(finger, "prismatic", closed, opened, 1.0, 100.0) for finger in plant.finger_names]
    lines = [
        '<robot name="sim_arm">',
        "<!-- Names and limits of the simulated arm. Origins, axes and shapes are not the arm's. -->",
        f'<link name="{BASE_FRAME}"/>',
    ]
    parent = BASE_FRAME
    for joint, kind, lowest, highest, speed, effort in rows:
        child = f"{joint}_link"
        lines.append(
            f'<link name="{child}"/><joint name="{joint}" type="{kind}"><parent link="{parent}"/>'
            f'<child link="{child}"/><axis xyz="0 0 1"/><limit lower="{lowest:g}" upper="{highest:g}" '
            f'velocity="{speed:g}" effort="{effort:g}"/></joint>'
        )
        parent = child
    return "\n".join([*lines, "</robot>"])
