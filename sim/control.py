"""From actions in [-1, 1] to joint position targets, for all simulations at once.

B envs, n arm joints, A action dim. The target is the measured position plus a step, so the
controller has no state of its own: what a simulation will do next is in its state row alone.
The servo closes part of the step (kp / kd = 10 per second for the Panda), like an impedance
controller with its set-point on a short lead.
"""

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.sim.backends.backend import Backend
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

    def __init__(self, control: Control, robot: Robot, backend: Backend) -> None:
        model = backend.model
        joints = [model.joint(name).id for name in robot.arm_joints]
        kinds = {int(model.jnt_type[j]) for j in joints}
        if not kinds <= {int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)}:
            raise ConfigError(f"robot {robot.name}: arm joints must be hinges or slides")
        self.control, self.num_joints = control, len(joints)
        self._joints = columns(joints)
        self._qpos_index = columns([int(model.jnt_qposadr[j]) for j in joints])
        self._is_hinge = (model.jnt_type[joints] == int(mujoco.mjtJoint.mjJNT_HINGE)).astype(float)[:, None]
        self._all_hinges = bool(self._is_hinge.all())
        self._damping = _DAMPING**2 * np.eye(6)
        self._axis, self._anchor = backend.bind("xaxis"), backend.bind("xanchor")
        self._site_pos, self._site_mat = backend.bind("site_xpos"), backend.bind("site_xmat")
        self._site = model.site(robot.tool_site).id
        self._tool_body = int(model.site_bodyid[self._site])
        self._body_from_tool = np.concatenate([model.site_pos[self._site], model.site_quat[self._site]])[None]
        self._body_pos, self._body_quat = backend.bind("xpos"), backend.bind("xquat")
        self._qpos = backend.bind("qpos")
        self._home = np.asarray(robot.home_rad)
        self._gripper = (
            (robot.gripper_open + robot.gripper_closed) / 2,
            (robot.gripper_open - robot.gripper_closed) / 2,
        )
        self._names = action_names(control, robot)
        self._home_mat = _home_orientation(model, robot)

    @property
    def action_names(self) -> tuple[str, ...]:
        return self._names

    def joint_positions(self) -> Array:
        """Returns measured arm joint positions, (B, n)."""
        return self._qpos[:, self._qpos_index]

    def tool_poses(self, ids: Array) -> Array:
        """Returns where the tools of some simulations are, (n, 7) in the world."""
        body = [self._body_pos[ids, self._tool_body], self._body_quat[ids, self._tool_body]]
        return compose(np.concatenate(body, axis=1), self._body_from_tool)

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
        axis = self._axis[:, self._joints]
        lever = self._site_pos[:, self._site, None, :] - self._anchor[:, self._joints]
        rows = np.empty((len(axis), self.num_joints, 6))
        if self._all_hinges:
            _cross(axis, lever, out=rows[:, :, :3])
            rows[:, :, 3:] = axis
        else:
            rows[:, :, :3] = self._is_hinge * _cross(axis, lever) + (1.0 - self._is_hinge) * axis
            rows[:, :, 3:] = self._is_hinge * axis
        return rows

    def _rotation(self, action: Array, out: Array) -> None:
        """Writes the world-frame rotation vector (B, 3): the commanded part, and the hold of the rest."""
        rotation = self._site_mat[:, self._site].reshape(-1, 3, 3)
        if self.control.rotation == "full":
            np.multiply(self.control.angular_rad, action[:, 3:6], out=out)
            return
        # The error vector between two frames is half the sum of their axes' cross products; to hold
        # the approach axis alone takes its own product, which has no part about that axis.
        _cross(rotation[:, :, 2], self._home_mat[:, 2], out=out)
        if self.control.rotation == "yaw":
            out *= _ROTATION_GAIN
            np.multiply(self.control.angular_rad, action[:, 3], out=out[:, 2])
            return
        out += _cross(rotation[:, :, 0], self._home_mat[:, 0]) + _cross(
            rotation[:, :, 1], self._home_mat[:, 1]
        )
        out *= 0.5 * _ROTATION_GAIN


def columns(index: Sequence[int]) -> slice | Array:
    """Returns a slice for consecutive columns, which costs no copy, or else an array of them."""
    if not index:
        return slice(0, 0)
    first, last = index[0], index[-1]
    return slice(first, last + 1) if list(index) == list(range(first, last + 1)) else np.array(index)


def cells(rows: Array, columns: slice | Array) -> tuple[Array, slice | Array]:
    """Returns the index of all given columns of the given rows."""
    return (rows, columns) if isinstance(columns, slice) else (rows[:, None], columns)


def _cross(a: Array, b: Array, out: Array | None = None) -> Array:
    """Returns a x b over the last axis; np.cross costs three times as much on small arrays."""
    out = np.empty_like(a) if out is None else out
    np.subtract(a[..., 1] * b[..., 2], a[..., 2] * b[..., 1], out=out[..., 0])
    np.subtract(a[..., 2] * b[..., 0], a[..., 0] * b[..., 2], out=out[..., 1])
    np.subtract(a[..., 0] * b[..., 1], a[..., 1] * b[..., 0], out=out[..., 2])
    return out


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
