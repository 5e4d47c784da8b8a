"""From actions in [-1, 1] to joint position targets, for all simulations at once.

B envs, n arm joints, A action dim. The target is the measured position plus a step, so the
controller has no state of its own: what a simulation will do next is in its state row alone.
The servo closes part of the step (kp / kd = 10 per second for the Panda), like an impedance
controller with its set-point on a short lead.
"""

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.model_index import ModelIndex, cross
from robot_rl.sim.poses import compose
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.task import Control

Array = NDArray[Any]

_DAMPING = 0.05
"""Damping of the least squares, in metres and radians: 0.5 % error at unit gain, finite at singularities."""
_ROTATION_GAIN = 0.5
"""Share of the orientation error that one step corrects."""
_POSTURE_GAIN = 0.1
"""Share of the distance to the home posture that one step corrects in the null space."""


class Controller:
    """Damped least squares on the geometric Jacobian, which the joint frames give directly.

    Buss, "Introduction to Inverse Kinematics" (2009), section 5; the null-space posture term is
    section 4 of the same text. Deviation: the posture is weighted, not optimised.
    """

    def __init__(self, control: Control, robot: Robot, backend: Backend, index: ModelIndex) -> None:
        self.control, self._index = control, index
        self.num_joints = index.num_joints
        self._damping = _DAMPING**2 * np.eye(6)
        self._axis, self._anchor = backend.bind("xaxis"), backend.bind("xanchor")
        self._site_pos, self._site_mat = backend.bind("site_xpos"), backend.bind("site_xmat")
        self._body_pos, self._body_quat = backend.bind("xpos"), backend.bind("xquat")
        self._qpos = backend.bind("qpos")
        self._home = np.asarray(robot.home_rad)
        self._gripper = (
            (robot.gripper_open + robot.gripper_closed) / 2,
            (robot.gripper_open - robot.gripper_closed) / 2,
        )
        self._names = action_names(control, robot)
        self._home_mat = _home_orientation(backend.model, robot)

    @property
    def action_names(self) -> tuple[str, ...]:
        return self._names

    def joint_positions(self) -> Array:
        """Returns measured arm joint positions, (B, n)."""
        return self._qpos[:, self._index.arm_qpos]

    def tool_poses(self, ids: Array) -> Array:
        """Returns where the tools of some simulations are, (n, 7) in the world."""
        body = self._index.tool_body
        pose = np.concatenate([self._body_pos[ids, body], self._body_quat[ids, body]], axis=1)
        return compose(pose, self._index.body_from_tool[None])

    def targets(self, action: Array, position: Array) -> Array:
        """Returns joint position targets (B, n) for the arm part of (B, A) actions."""
        if self.control.kind == "joint_delta":
            return position + self.control.joint_rad * action[:, : self.num_joints]
        return position + self._inverse_kinematics(action, position)

    def gripper(self, action: Array) -> Array:
        """Returns the gripper command (B,): the last action, +1 open, -1 closed."""
        middle, half = self._gripper
        if self.control.gripper == "shut":
            return np.full(len(action), middle - half)
        return middle + half * action[:, -1]

    def towards(self, target: Array, opening: Array) -> Array:
        """Returns actions (B, A) that move the arm from where it is towards joint targets (B, n).

        What `targets` does, the other way round and to first order: for a person's leader arm, whose
        targets are never far. `opening` (B,) of the gripper is -1 closed to +1 open.
        """
        control, step = self.control, target - self.joint_positions()
        if control.kind == "joint_delta":
            parts = [step / control.joint_rad]
        else:
            twist = np.einsum("bnk,bn->bk", self._jacobian_rows(), step)
            turns = {"none": slice(6, 6), "yaw": slice(5, 6), "full": slice(3, 6)}[control.rotation]
            parts = [twist[:, :3] / control.linear_m, twist[:, turns] / control.angular_rad]
        if control.gripper == "action":
            parts.append(opening[:, None])
        return np.clip(np.concatenate(parts, axis=1), -1.0, 1.0)

    def _inverse_kinematics(self, action: Array, position: Array) -> Array:
        rows = self._jacobian_rows()
        jacobian = np.ascontiguousarray(rows.transpose(0, 2, 1))
        twist = np.empty((len(action), 6))
        np.multiply(self.control.linear_m, action[:, :3], out=twist[:, :3])
        self._rotation(action, out=twist[:, 3:])
        posture = _POSTURE_GAIN * (self._home - position)
        gram = jacobian @ rows
        gram += self._damping
        rest = twist[:, :, None] - jacobian @ posture[:, :, None]
        return posture + (rows @ np.linalg.solve(gram, rest))[:, :, 0]

    def _jacobian_rows(self) -> Array:
        """Returns the transposed geometric Jacobian of every arm, (B, n, 6)."""
        return self._index.jacobian_rows(self._axis, self._anchor, self._site_pos[:, self._index.site])

    def _rotation(self, action: Array, out: Array) -> None:
        """Writes the world-frame rotation vector (B, 3): the commanded part, and the hold of the rest."""
        rotation = self._site_mat[:, self._index.site].reshape(-1, 3, 3)
        if self.control.rotation == "full":
            np.multiply(self.control.angular_rad, action[:, 3:6], out=out)
            return
        # The error vector between two frames is half the sum of their axes' cross products; to hold
        # the approach axis alone takes its own product, which has no part about that axis.
        cross(rotation[:, :, 2], self._home_mat[:, 2], out=out)
        if self.control.rotation == "yaw":
            out *= _ROTATION_GAIN
            np.multiply(self.control.angular_rad, action[:, 3], out=out[:, 2])
            return
        out += cross(rotation[:, :, 0], self._home_mat[:, 0]) + cross(rotation[:, :, 1], self._home_mat[:, 1])
        out *= 0.5 * _ROTATION_GAIN


def action_names(control: Control, robot: Robot) -> tuple[str, ...]:
    """Returns the names of the elements of an action."""
    gripper = ("gripper",) if control.gripper == "action" else ()
    if control.kind == "joint_delta":
        return (*(f"{joint}.delta" for joint in robot.arm_joints), *gripper)
    turns = {"none": (), "yaw": ("tool.yaw",), "full": ("tool.rx", "tool.ry", "tool.rz")}
    return ("tool.dx", "tool.dy", "tool.dz", *turns[control.rotation], *gripper)


def _home_orientation(model: mujoco.MjModel, robot: Robot) -> Array:
    """Returns the tool's orientation at the home posture, (3, 3), world from tool."""
    scratch = mujoco.MjData(model)
    for joint, angle in zip(robot.arm_joints, robot.home_rad, strict=True):
        scratch.joint(joint).qpos[:] = angle
    mujoco.mj_kinematics(model, scratch)
    return scratch.site(robot.tool_site).xmat.reshape(3, 3).copy()
