"""Forward kinematics of an arm's tool: the chain as in the arm's URDF, numpy only.

n joints, all of which turn, from the base on; joint positions are those of the robot model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import require

Array = NDArray[Any]
Vector = tuple[float, float, float]

_UNIT_SLACK = 1e-3
"""An axis may be this far from length 1, for rounded numbers; it is normalised."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The pose of a frame in the one before it: a URDF's <origin>."""

    xyz: Vector = (0.0, 0.0, 0.0)
    """In m."""
    rpy: Vector = (0.0, 0.0, 0.0)
    """In rad: about x, then y, then z of the frame before."""

    def __post_init__(self) -> None:
        for key in ("xyz", "rpy"):
            given = getattr(self, key)
            require(all(map(math.isfinite, given)), key, given, "finite numbers")


@dataclass(frozen=True, kw_only=True)
class JointConfig(Origin):
    """A joint's frame at 0 rad in the frame of the joint before it, and its axis: a URDF's <joint>."""

    axis: Vector
    """The axis about which the joint turns, in its own frame; of length 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_unit = abs(math.hypot(*self.axis) - 1.0) <= _UNIT_SLACK  # NaN is not
        require(is_unit, "axis", self.axis, "a direction of length 1, such as [0, 0, 1]")


@dataclass(frozen=True, kw_only=True)
class KinematicsConfig:
    """A serial chain from the base to the tool."""

    joints: dict[str, JointConfig]
    """Those of the station by name; the chain is in the order of the station's `joints`, from the base on."""
    tool: Origin
    """In the frame of the last joint: the fixed joints of flange and hand, in one."""


class Kinematics:
    """Forward kinematics of one chain."""

    def __init__(self, config: KinematicsConfig, joint_names: Sequence[str]) -> None:
        joints = [config.joints[name] for name in joint_names]
        # A joint's transform is linear in 1, cos q and sin q (Rodrigues); one (4, 4) of each a joint.
        self._ones, self._cosines, self._sines = np.zeros((3, len(joints), 4, 4))
        for index, joint in enumerate(joints):
            axis = np.asarray(joint.axis) / math.hypot(*joint.axis)
            along = np.outer(axis, axis)
            self._ones[index, :3, :3], self._ones[index, 3, 3] = along, 1.0
            self._cosines[index, :3, :3] = np.eye(3) - along
            self._sines[index, :3, :3] = np.cross(np.eye(3), axis)
            for part in (self._ones, self._cosines, self._sines):
                part[index] = _transform(joint) @ part[index]
        self._tool = _transform(config.tool)

    def base_from_tool(self, position_rad: Array) -> Array:
        """Returns the tool's frame (..., 4, 4) in the base frame, at joint positions (..., n)."""
        angle = np.asarray(position_rad)[..., None, None]
        links = self._ones + np.cos(angle) * self._cosines + np.sin(angle) * self._sines
        frame = links[..., 0, :, :]
        for index in range(1, links.shape[-3]):
            frame = frame @ links[..., index, :, :]
        return frame @ self._tool

    def tool_m(self, position_rad: Array) -> Array:
        """Returns the tool's position (..., 3) in the base frame, at joint positions (..., n)."""
        return self.base_from_tool(position_rad)[..., :3, 3]


def _transform(origin: Origin) -> Array:
    """Returns (4, 4): from a point in the new frame to the point in the frame before."""
    (cr, cp, cy), (sr, sp, sy) = np.cos(origin.rpy), np.sin(origin.rpy)
    about_x = np.array([[1.0, 0.0, 0.0], [0.0, cr, -sr], [0.0, sr, cr]])
    about_y = np.array([[cp, 0.0, sp], [0.0, 1.0, 0.0], [-sp, 0.0, cp]])
    about_z = np.array([[cy, -sy, 0.0], [sy, cy, 0.0], [0.0, 0.0, 1.0]])
    frame = np.eye(4)
    frame[:3, :3], frame[:3, 3] = about_z @ about_y @ about_x, origin.xyz
    return frame
