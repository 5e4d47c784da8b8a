"""Where a robot's joints, servos and tool are in the arrays of a compiled model, and the tool's Jacobian.

B rows, n arm joints. Code above the back ends gets only numbers of rows and columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mujoco
import numpy as np

from robot_rl.core.arrays import Array, namespace
from robot_rl.core.errors import ModelError
from robot_rl.sim.poses import cross
from robot_rl.sim.robots.robot import RobotNames


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """A body that a tracker would see: it moves, or is put somewhere."""

    body: int
    """Row of `xpos` and `xquat`."""
    held_by: Literal["mocap", "free", "slide", "other"]
    """How its pose is set: as a mocap body, by a free joint, by one slide, or by something else."""
    mocap: int = -1
    """Row of `mocap_pos` and `mocap_quat`; -1 if it is no mocap body."""
    joint: int = -1
    """Row of `xaxis`; -1 without a joint. Of several joints the first, as in the next two."""
    qpos: int = -1
    dof: int = -1


class ModelIndex:
    """Columns of `qpos`, `qvel` and `ctrl`, and rows of joints; slices where possible, which copy nothing."""

    def __init__(
        self, model: mujoco.MjModel, robot: RobotNames, asarray: Callable[[Array], Array] = np.asarray
    ) -> None:
        """Looks up the names of the robot; `asarray` makes index arrays of the library that will use them.

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
        """Rows of `xaxis` and `xanchor`, which have one for each joint."""
        self.arm_qpos = columns([int(model.jnt_qposadr[joint]) for joint in joints])
        self.arm_dof = columns([int(model.jnt_dofadr[joint]) for joint in joints])
        self.finger_qpos = columns([int(model.joint(name).qposadr[0]) for name in robot.finger_joints])
        self.arm_ctrl = columns([model.actuator(name).id for name in robot.arm_actuators])
        effectors = [model.actuator(name).id for name in robot.effector_actuators]
        self.effector_ctrl = columns(effectors)
        self.lagging = [number for number, each in enumerate(effectors) if model.actuator_actnum[each]]
        """Numbers of the end effectors that follow their commands with a lag."""
        self.lagging_act = columns([int(model.actuator_actadr[effectors[number]]) for number in self.lagging])
        """Columns of `act`, of these."""
        self.site = int(model.site(robot.tool_site).id)
        self.arm_sites = tuple(int(model.site(arm.tool_site).id) for arm in robot.all_arms)
        """Rows of `site_xpos`: the tool of each arm."""
        self.tool_body = int(model.site_bodyid[self.site])
        self.body_from_tool = asarray(np.concatenate([model.site_pos[self.site], model.site_quat[self.site]]))
        """Pose (7,) of the tool in its body's frame."""
        self.is_hinge = kinds == hinge
        """(n,) bool, numpy; the others slide."""
        self.qpos_of = {model.joint(i).name: int(model.jnt_qposadr[i]) for i in range(model.njnt)}
        """Joint name -> first column of `qpos`."""
        self.dof_of = {model.joint(i).name: int(model.jnt_dofadr[i]) for i in range(model.njnt)}
        """Joint name -> first column of `qvel`."""
        self.joint_of = {model.joint(i).name: i for i in range(model.njnt)}
        """Joint name -> row of `xaxis` and `xanchor`."""
        self.slides = {model.joint(i).name for i in range(model.njnt) if model.jnt_type[i] == slide}
        self.mocap_of = {model.body(i).name: int(model.body_mocapid[i]) for i in range(model.nbody)}
        """Body name -> row of `mocap_pos`; -1 if it is no mocap body."""
        root = model.body_rootid[self.tool_body]
        self.tracked = {
            model.body(i).name: _tracked(model, i)
            for i in range(1, model.nbody)
            if model.body_rootid[i] != root and (model.body_mocapid[i] >= 0 or model.body_jntnum[i] > 0)
        }
        """Body name -> what a tracker would see: all but the robot that moves or is put somewhere."""
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


def _tracked(model: mujoco.MjModel, body: int) -> Tracked:
    joint = int(model.body_jntadr[body])
    if joint < 0:
        return Tracked(body=body, held_by="mocap", mocap=int(model.body_mocapid[body]))
    held_by, kind = "other", model.jnt_type[joint]
    if kind == mujoco.mjtJoint.mjJNT_FREE:
        held_by = "free"
    elif kind == mujoco.mjtJoint.mjJNT_SLIDE and model.body_jntnum[body] == 1:
        held_by = "slide"
    qpos, dof = int(model.jnt_qposadr[joint]), int(model.jnt_dofadr[joint])
    return Tracked(body=body, held_by=held_by, joint=joint, qpos=qpos, dof=dof)


def _slice(index: Sequence[int]) -> slice | None:
    """Returns the slice of consecutive columns, which costs no copy; None where others are between."""
    if not index:
        return slice(0, 0)
    first, last = index[0], index[-1]
    return slice(first, last + 1) if list(index) == list(range(first, last + 1)) else None


def cells(rows: Array, columns: slice | Array) -> tuple[Array, slice | Array]:
    """Returns the index of all given columns of the given rows."""
    return (rows, columns) if isinstance(columns, slice) else (rows[:, None], columns)
