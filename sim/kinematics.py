"""Where a robot's tool is, and how it moves, at given joint positions; n arm joints."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.robots.loading import load_robot

Array = NDArray[Any]


class Kinematics:
    """A robot alone, base at the origin; `robot_rl.real` finds it by name for Cartesian commands."""

    def __init__(self, robot: str) -> None:
        """Compiles the model of a robot's name or file."""
        found = load_robot(robot)
        self._model = found.build().compile()
        self._data = mujoco.MjData(self._model)
        self._index = ModelIndex(self._model, found)

    def tool_pose(self, position_rad: Array) -> Array:
        """Returns (7,): metres, quaternion (w, x, y, z), in the base frame."""
        self._place(position_rad)
        quaternion = np.empty(4)
        mujoco.mju_mat2Quat(quaternion, self._data.site_xmat[self._index.site])
        return np.concatenate([self._data.site_xpos[self._index.site], quaternion])

    def jacobian(self, position_rad: Array) -> Array:
        """Returns (6, n): the tool's linear and angular velocity of each joint's, in the base frame."""
        self._place(position_rad)
        data = self._data
        tool_m = data.site_xpos[self._index.site]
        return self._index.jacobian_rows(data.xaxis[None], data.xanchor[None], tool_m[None])[0].T

    def _place(self, position_rad: Array) -> None:
        self._data.qpos[self._index.arm_qpos] = position_rad
        mujoco.mj_kinematics(self._model, self._data)
