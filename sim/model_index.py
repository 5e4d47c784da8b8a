"""Where a robot's joints, servos and tool are in the arrays of a compiled model, and the tool's Jacobian.

B rows, n arm joints.
"""

from collections.abc import Callable, Sequence

import mujoco
import numpy as np

from robot_rl.core.arrays import Array, namespace
from robot_rl.core.errors import ModelError
from robot_rl.sim.poses import cross
from robot_rl.sim.robots.robot import RobotNames


class ModelIndex:
    """Columns of `qpos`, `qvel` and `ctrl`, and rows of joints; slices where possible, which copy nothing."""

    def __init__(
        self, model: mujoco.MjModel, robot: RobotNames, asarray: Callable[[Array], Array] = np.asarray
    ) -> None:
        """Looks up the names of the robot; `asarray` makes what it keeps of the kind that it will index.

        Raises:
            ModelError: a joint of the arm is no hinge and no slide.
        """
        joints = [model.joint(name).id for name in robot.arm_joints]
        hinge, slide = int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)
        kinds = model.jnt_type[joints]
        if not np.isin(kinds, (hinge, slide)).all():
            raise ModelError(f"robot {robot.name}: arm joints must be hinges or slides.")
        self.num_joints = len(joints)

        def columns(index: Sequence[int]) -> slice | Array:
            found = _slice(index)
            return asarray(np.array(index)) if found is None else found

        self.joints = columns(joints)
        """Of what has a row for each joint: `xaxis`, `xanchor`."""
        self.arm_qpos = columns([int(model.jnt_qposadr[joint]) for joint in joints])
        self.arm_dof = columns([int(model.jnt_dofadr[joint]) for joint in joints])
        self.finger_qpos = columns([int(model.joint(name).qposadr[0]) for name in robot.finger_joints])
        self.arm_ctrl = columns([model.actuator(name).id for name in robot.arm_actuators])
        self.gripper_ctrl = columns([model.actuator(name).id for name in robot.gripper_actuators])
        self.site = int(model.site(robot.tool_site).id)
        self.tool_body = int(model.site_bodyid[self.site])
        self.body_from_tool = asarray(np.concatenate([model.site_pos[self.site], model.site_quat[self.site]]))
        """Pose (7,) of the tool in its body's frame."""
        self.is_hinge = kinds == hinge
        """(n,) bool, numpy; the others slide."""
        self._turns = asarray(self.is_hinge.astype(float)[:, None])
        self._all_turn = bool(self.is_hinge.all())

    def jacobian_rows(self, axis: Array, anchor: Array, tool_m: Array) -> Array:
        """Returns the transposed geometric Jacobian of every arm, (B, n, 6): linear, then angular.

        Args:
            axis: `xaxis` of all joints, (B, joints, 3).
            anchor: `xanchor` of all joints, (B, joints, 3).
            tool_m: where the tools are, (B, 3).
        """
        axis = axis[:, self.joints]
        lever = tool_m[:, None, :] - anchor[:, self.joints]
        shape = (len(axis), self.num_joints, 6)
        rows = namespace(axis).empty(shape, dtype=axis.dtype, device=axis.device)
        if self._all_turn:
            cross(axis, lever, out=rows[:, :, :3])
            rows[:, :, 3:] = axis
        else:
            rows[:, :, :3] = self._turns * cross(axis, lever) + (1.0 - self._turns) * axis
            rows[:, :, 3:] = self._turns * axis
        return rows


def _slice(index: Sequence[int]) -> slice | None:
    """Returns the slice of consecutive columns, which costs no copy; None where others are between."""
    if not index:
        return slice(0, 0)
    first, last = index[0], index[-1]
    return slice(first, last + 1) if list(index) == list(range(first, last + 1)) else None


def cells(rows: Array, columns: slice | Array) -> tuple[Array, slice | Array]:
    """Returns the index of all given columns of the given rows."""
    return (rows, columns) if isinstance(columns, slice) else (rows[:, None], columns)
