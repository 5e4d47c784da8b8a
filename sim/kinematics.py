"""Where a robot's tool is, and how it moves, at given joint positions; n arm joints."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.sim.control import columns
from robot_rl.sim.robots.loading import load_robot

Array = NDArray[Any]


class Kinematics:
    """A robot alone, base at the origin; `robot_rl.real` finds it by name for Cartesian commands."""

    def __init__(self, robot: str) -> None:
        """Compiles the model of a robot's name or file."""
        found = load_robot(robot)
        self._model = found.build().compile()
        self._data = mujoco.MjData(self._model)
        joints = [self._model.joint(name).id for name in found.arm_joints]
        self._qpos = columns([int(self._model.jnt_qposadr[j]) for j in joints])
        self._dof = columns([int(self._model.jnt_dofadr[j]) for j in joints])
        self._site = self._model.site(found.tool_site).id

    def tool_pose(self, position_rad: Array) -> Array:
        """Returns (7,): metres, quaternion (w, x, y, z), in the base frame."""
        self._place(position_rad)
        quaternion = np.empty(4)
        mujoco.mju_mat2Quat(quaternion, self._data.site_xmat[self._site])
        return np.concatenate([self._data.site_xpos[self._site], quaternion])

    def jacobian(self, position_rad: Array) -> Array:
        """Returns (6, n): the tool's linear and angular velocity of each joint's, in the base frame."""
        self._place(position_rad)
        whole = np.empty((6, self._model.nv))
        mujoco.mj_jacSite(self._model, self._data, whole[:3], whole[3:], self._site)
        return whole[:, self._dof]

    def _place(self, position_rad: Array) -> None:
        self._data.qpos[self._qpos] = position_rad
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)  # the Jacobian is about the centre of mass
