"""From actions in [-1, 1] to joint targets and commands of end effectors, for all simulations at once.

An action has, in this order: a step for each joint that is in no arm, for each arm a step of its tool, and
the command of each end effector. With `kind=joint_delta` every joint has a step of its own.
B envs, n arm joints, k joints of one arm, E end effectors, A action dim.

The target is the measured position plus a step, and with `gripper=step` the command of an end effector is
the last one, which a state row has, plus a step. So the controller has no state: the state row of a
simulation alone determines its future.
The servo closes part of the step (kp / kd = 10 per second for the Panda), like an impedance
controller with its set-point on a short lead.
"""

from dataclasses import dataclass

import numpy as np

from robot_rl.core.arrays import Array, namespace, solve
from robot_rl.sim.backends.backend import Backend
from robot_rl.sim.poses import compose, cross
from robot_rl.sim.robots.robot import Arm, RobotNames
from robot_rl.sim.task import Control

_DAMPING = 0.05
"""Damping of the least squares, in metres and radians: 0.5 % error at unit gain, finite at singularities."""
_ROTATION_GAIN = 0.5
"""Share of the orientation error that one step corrects."""
_POSTURE_GAIN = 0.1
"""Share of the distance to the home posture that one step corrects in the null space."""


_TURNS = {"none": (), "yaw": ("yaw",), "full": ("rx", "ry", "rz")}
"""Names of the rotations in an action, by `Control.rotation`."""


@dataclass(frozen=True)
class _Reach:
    """Where an arm is in the arrays."""

    site: int
    """Row of its tool."""
    joints: slice
    """Of the arm joints."""
    action: slice
    """Of the action."""


class Controller:
    """Damped least squares on the geometric Jacobian, which the joint frames give directly.

    Buss, "Introduction to Inverse Kinematics" (2009), section 5; the null-space posture term is
    section 4 of the same text. Deviation: the posture has a weight and is not optimised.
    """

    def __init__(self, control: Control, robot: RobotNames, backend: Backend) -> None:
        self.control, self._index = control, backend.index
        self.num_joints = self._index.num_joints
        arms = _arms_of(control, robot)
        size = 3 + len(_TURNS[control.rotation])
        self._num_direct = first = self.num_joints - sum(len(arm.joints) for arm in arms)
        self._arms: list[_Reach] = []
        for number, arm in enumerate(arms):
            joints, action = slice(first, first + len(arm.joints)), self._num_direct + number * size
            self._arms.append(_Reach(self._index.arm_sites[number], joints, slice(action, action + size)))
            first = joints.stop
        self._effectors = [
            ((each.high + each.low) / 2, (each.high - each.low) / 2, each.idle)
            for each in robot.all_effectors
        ]
        self._first_effector = self._num_direct + len(arms) * size
        self._stroke = 2.0 * control.gripper_strokes_s / control.hz
        """Full-scale step of a gripper's command in a control step, in halves of its range."""
        self._damping = backend.asarray(_DAMPING**2 * np.eye(6))
        self._axis, self._anchor = backend.bind("xaxis"), backend.bind("xanchor")
        self._site_pos, self._site_mat = backend.bind("site_xpos"), backend.bind("site_xmat")
        self._body_pos, self._body_quat = backend.bind("xpos"), backend.bind("xquat")
        self._qpos = backend.bind("qpos")
        self._home = backend.asarray(np.asarray(robot.home_rad))
        self.action_names = action_names(control, robot)
        self._home_mat = backend.tool_orientation(robot.home_rad)
        """Of the tool of every arm: arms are mounted alike (a test says so)."""

    def joint_positions(self) -> Array:
        """Returns measured arm joint positions, (B, n)."""
        return self._qpos[:, self._index.arm_qpos]

    def tool_poses(self, ids: Array) -> Array:
        """Returns where the (first) tools of some simulations are, (n, 7) in the world."""
        body = self._index.tool_body
        pose = namespace(ids).concat([self._body_pos[ids, body], self._body_quat[ids, body]], axis=1)
        return compose(pose, self._index.body_from_tool[None])

    def targets(self, action: Array, position: Array) -> Array:
        """Returns joint position targets (B, n) for the joint part of (B, A) actions."""
        step, direct = namespace(position).empty_like(position), self._num_direct
        step[:, :direct] = self.control.joint_rad * action[:, :direct]
        for arm in self._arms:
            step[:, arm.joints] = self._inverse_kinematics(
                arm, action[:, arm.action], position[:, arm.joints]
            )
        return position + step

    def effectors(self, action: Array, last: Array | None = None) -> Array:
        """Returns the commands of the end effectors (B, E), float64: for the last actions, -1 low, +1 high.

        Where the actions leave them out, grippers are shut and suction cups do not pull.

        Args: last: (B, E), the commands before, from which `gripper=step` goes on.
        """
        xp, mode = namespace(action), self.control.gripper
        shape, first = (len(action), len(self._effectors)), self._first_effector
        commands = xp.empty(shape, dtype=xp.float64, device=action.device)
        for number, (middle, half, idle) in enumerate(self._effectors):
            asked = idle if mode == "shut" else action[:, first + number]
            if mode == "step":
                assert last is not None, "a step goes on from the last command"
                changed, most = last[:, number] + self._stroke * half * asked, abs(half)
                commands[:, number] = xp.clip(changed, middle - most, middle + most)
            else:
                commands[:, number] = middle + half * asked
        return commands

    def is_shut(self, commands: Array) -> Array:
        """Returns where all commands (B, E) of end effectors are those of a shut gripper, (B,) bool."""
        shut = [
            abs(commands[:, number] - (middle - half)) < 1e-9
            for number, (middle, half, _) in enumerate(self._effectors)
        ]
        return namespace(commands).stack(shut).all(axis=0)

    def towards(self, target: Array, opening: Array, last: Array | None = None) -> Array:
        """Returns actions (B, A) that move the arm from where it is towards joint targets (B, n).

        The inverse of `targets`, to first order: for a person's leader arm, whose targets are near.
        `opening` (B,) of every gripper is -1 closed to +1 open; `last` as for `effectors`.
        """
        control, step = self.control, target - self.joint_positions()
        parts = [step[:, : self._num_direct] / control.joint_rad]
        for arm in self._arms:
            twist = (self._jacobian_rows(arm).mT @ step[:, arm.joints, None])[:, :, 0]
            turns = {"none": slice(6, 6), "yaw": slice(5, 6), "full": slice(3, 6)}[control.rotation]
            parts += [twist[:, :3] / control.linear_m, twist[:, turns] / control.angular_rad]
        if control.gripper == "action":
            parts += [opening[:, None]] * len(self._effectors)
        elif control.gripper == "step":
            assert last is not None, "a step goes on from the last command"
            parts += [
                ((middle + half * opening - last[:, number]) / (self._stroke * half))[:, None]
                for number, (middle, half, _) in enumerate(self._effectors)
            ]
        xp = namespace(step)
        return xp.clip(xp.concat(parts, axis=1), -1.0, 1.0)

    def _inverse_kinematics(self, arm: _Reach, action: Array, position: Array) -> Array:
        """Returns the step of an arm's joints (B, k), for its part of the action and its positions (B, k)."""
        xp, rows = namespace(position), self._jacobian_rows(arm)
        num_rows, num_joints, _ = rows.shape
        jacobian = xp.empty((num_rows, 6, num_joints), dtype=rows.dtype, device=rows.device)
        jacobian[...] = rows.mT  # contiguous: products of small matrices are then faster
        twist = xp.empty((num_rows, 6), dtype=rows.dtype, device=rows.device)
        twist[:, :3] = self.control.linear_m * action[:, :3]
        self._rotation(arm, action, out=twist[:, 3:])
        posture = _POSTURE_GAIN * (self._home[arm.joints] - position)
        gram = jacobian @ rows
        gram += self._damping
        rest = twist[:, :, None] - jacobian @ posture[:, :, None]
        return posture + (rows @ solve(gram, rest))[:, :, 0]

    def _jacobian_rows(self, arm: _Reach) -> Array:
        """Returns the transposed geometric Jacobian of an arm, (B, k, 6)."""
        rows = self._index.jacobian_rows(self._axis, self._anchor, self._site_pos[:, arm.site])
        return rows[:, arm.joints]

    def _rotation(self, arm: _Reach, action: Array, out: Array) -> None:
        """Writes the world-frame rotation vector (B, 3): the commanded part, and the hold of the rest."""
        rotation = self._site_mat[:, arm.site].reshape(-1, 3, 3)
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
    arms = _arms_of(control, robot)
    direct = robot.arm_joints[: robot.num_arm_joints - sum(len(arm.joints) for arm in arms)]
    steps = [f"tool.{step}" for step in ("dx", "dy", "dz", *_TURNS[control.rotation])]
    steps_of = ".step" if control.gripper == "step" else ""
    effectors = robot.all_effectors if control.gripper != "shut" else ()
    return (
        *(f"{joint}.delta" for joint in direct),
        *(f"{arm.name}{step}" for arm in arms for step in steps),
        *(f"{each.name}{steps_of}" for each in effectors),
    )


def _arms_of(control: Control, robot: RobotNames) -> tuple[Arm, ...]:
    """Returns the arms whose tools the actions move."""
    return robot.all_arms if control.kind == "ee_delta" else ()
