"""From actions in [-1, 1] to joint position targets, for all simulations at once.

B envs, n arm joints, A action dim. The target is the measured position plus a step, so the
controller has no state: the state row of a simulation alone determines its future.
The servo closes part of the step (kp / kd = 10 per second for the Panda), like an impedance
controller with its set-point on a short lead.
"""

import numpy as np

from robot_rl.core.arrays import Array, namespace
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.poses import compose, cross
from robot_rl.sim.robots.robot import RobotNames
from robot_rl.sim.task import Control

_DAMPING = 0.05
"""Damping of the least squares, in metres and radians: 0.5 % error at unit gain, finite at singularities."""
_ROTATION_GAIN = 0.5
"""Share of the orientation error that one step corrects."""
_POSTURE_GAIN = 0.1
"""Share of the distance to the home posture that one step corrects in the null space."""


class Controller:
    """Damped least squares on the geometric Jacobian, which the joint frames give directly.

    Buss, "Introduction to Inverse Kinematics" (2009), section 5; the null-space posture term is
    section 4 of the same text. Deviation: the posture has a weight and is not optimised.
    """

    def __init__(self, control: Control, robot: RobotNames, backend: Backend) -> None:
        self.control, self._index = control, backend.index
        self.num_joints = self._index.num_joints
        self._damping = backend.asarray(_DAMPING**2 * np.eye(6))
        self._axis, self._anchor = backend.bind("xaxis"), backend.bind("xanchor")
        self._site_pos, self._site_mat = backend.bind("site_xpos"), backend.bind("site_xmat")
        self._body_pos, self._body_quat = backend.bind("xpos"), backend.bind("xquat")
        self._qpos = backend.bind("qpos")
        self._home = backend.asarray(np.asarray(robot.home_rad))
        self._gripper = (
            (robot.gripper_open + robot.gripper_closed) / 2,
            (robot.gripper_open - robot.gripper_closed) / 2,
        )
        self.action_names = action_names(control, robot)
        self._home_mat = backend.tool_orientation(robot.home_rad)

    def joint_positions(self) -> Array:
        """Returns measured arm joint positions, (B, n)."""
        return self._qpos[:, self._index.arm_qpos]

    def tool_poses(self, ids: Array) -> Array:
        """Returns where the tools of some simulations are, (n, 7) in the world."""
        body = self._index.tool_body
        pose = namespace(ids).concat([self._body_pos[ids, body], self._body_quat[ids, body]], axis=1)
        return compose(pose, self._index.body_from_tool[None])

    def targets(self, action: Array, position: Array) -> Array:
        """Returns joint position targets (B, n) for the arm part of (B, A) actions."""
        if self.control.kind == "joint_delta":
            return position + self.control.joint_rad * action[:, : self.num_joints]
        return position + self._inverse_kinematics(action, position)

    def gripper(self, action: Array) -> Array:
        """Returns the gripper command (B,), float64: the last action, +1 open, -1 closed."""
        middle, half = self._gripper
        xp = namespace(action)
        if self.control.gripper == "shut":
            return xp.full(len(action), middle - half, dtype=xp.float64, device=action.device)
        return xp.asarray(middle + half * action[:, -1], dtype=xp.float64)

    def towards(self, target: Array, opening: Array) -> Array:
        """Returns actions (B, A) that move the arm from where it is towards joint targets (B, n).

        The inverse of `targets`, to first order: for a person's leader arm, whose targets are near.
        `opening` (B,) of the gripper is -1 closed to +1 open.
        """
        control, step = self.control, target - self.joint_positions()
        if control.kind == "joint_delta":
            parts = [step / control.joint_rad]
        else:
            twist = (self._jacobian_rows().mT @ step[:, :, None])[:, :, 0]
            turns = {"none": slice(6, 6), "yaw": slice(5, 6), "full": slice(3, 6)}[control.rotation]
            parts = [twist[:, :3] / control.linear_m, twist[:, turns] / control.angular_rad]
        if control.gripper == "action":
            parts.append(opening[:, None])
        xp = namespace(step)
        return xp.clip(xp.concat(parts, axis=1), -1.0, 1.0)

    def _inverse_kinematics(self, action: Array, position: Array) -> Array:
        xp, rows = namespace(position), self._jacobian_rows()
        num_rows, num_joints, _ = rows.shape
        jacobian = xp.empty((num_rows, 6, num_joints), dtype=rows.dtype, device=rows.device)
        jacobian[...] = rows.mT  # contiguous: products of small matrices are then faster
        twist = xp.empty((num_rows, 6), dtype=rows.dtype, device=rows.device)
        twist[:, :3] = self.control.linear_m * action[:, :3]
        self._rotation(action, out=twist[:, 3:])
        posture = _POSTURE_GAIN * (self._home - position)
        gram = jacobian @ rows
        gram += self._damping
        rest = twist[:, :, None] - jacobian @ posture[:, :, None]
        return posture + (rows @ xp.linalg.solve(gram, rest))[:, :, 0]

    def _jacobian_rows(self) -> Array:
        """Returns the transposed geometric Jacobian of every arm, (B, n, 6)."""
        return self._index.jacobian_rows(self._axis, self._anchor, self._site_pos[:, self._index.site])

    def _rotation(self, action: Array, out: Array) -> None:
        """Writes the world-frame rotation vector (B, 3): the commanded part, and the hold of the rest."""
        rotation = self._site_mat[:, self._index.site].reshape(-1, 3, 3)
        if self.control.rotation == "full":
            out[...] = self.control.angular_rad * action[:, 3:6]
            return
        # The error vector between two frames is half the sum of their axes' cross products; to hold
        # the approach axis alone takes its own product, which has no part about that axis.
        cross(rotation[:, :, 2], self._home_mat[:, 2], out=out)
        if self.control.rotation == "yaw":
            out *= _ROTATION_GAIN
            out[:, 2] = self.control.angular_rad * action[:, 3]
            return
        out += cross(rotation[:, :, 0], self._home_mat[:, 0]) + cross(rotation[:, :, 1], self._home_mat[:, 1])
        out *= 0.5 * _ROTATION_GAIN


def action_names(control: Control, robot: RobotNames) -> tuple[str, ...]:
    """Returns the names of the elements of an action."""
    gripper = ("gripper",) if control.gripper == "action" else ()
    if control.kind == "joint_delta":
        return (*(f"{joint}.delta" for joint in robot.arm_joints), *gripper)
    turns = {"none": (), "yaw": ("tool.yaw",), "full": ("tool.rx", "tool.ry", "tool.rz")}
    return ("tool.dx", "tool.dy", "tool.dz", *turns[control.rotation], *gripper)
