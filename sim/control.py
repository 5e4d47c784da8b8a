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

from robot_rl.core.errors import ConfigError
from robot_rl.sim.backends.backend import Backend
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

    def __init__(self, control: Control, robot: Robot, backend: Backend) -> None:
        model = backend.model
        joints = [model.joint(name).id for name in robot.arm_joints]
        kinds = {int(model.jnt_type[j]) for j in joints}
        if not kinds <= {int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)}:
            raise ConfigError(f"robot {robot.name}: arm joints must be hinges or slides")
        self.control, self.num_joints = control, len(joints)
        self._joints = np.array(joints)
        self._qpos_index = np.array([int(model.jnt_qposadr[j]) for j in joints])
        self._is_hinge = (model.jnt_type[joints] == int(mujoco.mjtJoint.mjJNT_HINGE)).astype(float)
        self._axis, self._anchor = backend.bind("xaxis"), backend.bind("xanchor")
        self._site_pos, self._site_mat = backend.bind("site_xpos"), backend.bind("site_xmat")
        self._site = model.site(robot.tool_site).id
        self._qpos = backend.bind("qpos")
        self._home = np.asarray(robot.home_rad)
        self._gripper = (robot.gripper_open + robot.gripper_closed) / 2, (
            robot.gripper_open - robot.gripper_closed
        ) / 2
        self._names = _action_names(control, robot)
        self._home_mat = _home_orientation(model, robot)

    @property
    def action_names(self) -> tuple[str, ...]:
        return self._names

    def joint_positions(self) -> Array:
        """Returns measured arm joint positions, (B, n)."""
        return self._qpos[:, self._qpos_index]

    def targets(self, action: Array, position: Array) -> Array:
        """Returns joint position targets (B, n) for the arm part of (B, A) actions."""
        if self.control.kind == "joint_delta":
            return position + self.control.joint_rad * action[:, : self.num_joints]
        return position + self._inverse_kinematics(action, position)

    def gripper(self, action: Array) -> Array:
        """Returns the gripper command (B,): the last action, +1 open, -1 closed."""
        middle, half = self._gripper
        return middle + half * action[:, -1]

    def _inverse_kinematics(self, action: Array, position: Array) -> Array:
        axis = self._axis[:, self._joints]
        lever = self._site_pos[:, self._site, None, :] - self._anchor[:, self._joints]
        hinge = self._is_hinge[:, None]
        jacobian = np.empty((len(action), 6, self.num_joints))
        jacobian[:, :3] = (hinge * _cross(axis, lever) + (1.0 - hinge) * axis).transpose(0, 2, 1)
        jacobian[:, 3:] = (hinge * axis).transpose(0, 2, 1)
        twist = np.empty((len(action), 6))
        twist[:, :3] = self.control.linear_m * action[:, :3]
        twist[:, 3:] = self._rotation(action)
        posture = _POSTURE_GAIN * (self._home - position)
        twist -= np.einsum("bij,bj->bi", jacobian, posture)
        gram = jacobian @ jacobian.transpose(0, 2, 1)
        gram[:, range(6), range(6)] += _DAMPING**2
        solved = np.linalg.solve(gram, twist[..., None])
        return posture + (jacobian.transpose(0, 2, 1) @ solved)[..., 0]

    def _rotation(self, action: Array) -> Array:
        """Returns the world-frame rotation vector (B, 3): the commanded part, and the hold of the rest."""
        rotation = self._site_mat[:, self._site].reshape(-1, 3, 3)
        commanded = self.control.angular_rad * action[:, 3:6]
        if self.control.rotation == "full":
            return commanded
        if self.control.rotation == "yaw":
            # Only the approach axis is held; the error that turns it home has no z component.
            hold = np.cross(rotation[:, :, 2], self._home_mat[:, 2])
            out = _ROTATION_GAIN * hold
            out[:, 2] = commanded[:, 0]
            return out
        columns = np.cross(rotation.transpose(0, 2, 1), self._home_mat.T)
        return _ROTATION_GAIN * 0.5 * columns.sum(axis=1)


def _cross(a: Array, b: Array) -> Array:
    """Returns a x b over the last axis; np.cross costs three times as much on small arrays."""
    out = np.empty_like(a)
    out[..., 0] = a[..., 1] * b[..., 2] - a[..., 2] * b[..., 1]
    out[..., 1] = a[..., 2] * b[..., 0] - a[..., 0] * b[..., 2]
    out[..., 2] = a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
    return out


def _action_names(control: Control, robot: Robot) -> tuple[str, ...]:
    if control.kind == "joint_delta":
        return (*(f"{joint}.delta" for joint in robot.arm_joints), "gripper")
    turns = {"none": (), "yaw": ("tool.yaw",), "full": ("tool.rx", "tool.ry", "tool.rz")}
    return ("tool.dx", "tool.dy", "tool.dz", *turns[control.rotation], "gripper")


def _home_orientation(model: mujoco.MjModel, robot: Robot) -> Array:
    """Returns the tool's orientation at the home posture, (3, 3), world from tool."""
    scratch = mujoco.MjData(model)
    for joint, angle in zip(robot.arm_joints, robot.home_rad, strict=True):
        scratch.joint(joint).qpos[:] = angle
    mujoco.mj_kinematics(model, scratch)
    return scratch.site(robot.tool_site).xmat.reshape(3, 3).copy()
