"""Where the tool is, along which axis fingers open, and how far: measured on the shapes of a model.

N points; all vectors are in the frame of the body that carries the tool, unless their name says so.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ModelError
from robot_rl.sim.robots.anatomy import Anatomy, Skeleton

Array = NDArray[Any]

_SHORT_M = 0.01
"""How far the tool is short of the ends of the fingers: between the pads, not at their edge."""
_TIP_M = 0.02
"""Length of the part of a finger that grasps."""
_WIDE_M = 0.10
"""A jaw that turns is opened until its tip is as far from the other one, or to its end."""
_ALONG = math.cos(math.radians(35.0))
"""An axis that is nearer to one of the body's than this is that one."""
_SAME_M, _SAME_RAD = 0.001, 1e-6


@dataclass(frozen=True, kw_only=True)
class HandShape:
    """The tool's frame, and the gripper's numbers if there is one."""

    pos_m: Array
    """(3,)"""
    approach: Array
    """(3,) out of the hand."""
    openings: tuple[Array, ...]
    """Axes along which fingers open that suit the shape; home decides between them."""
    why: str
    """How the place and the axis were found."""
    opened: float = 0.0
    """Position of the fingers when they are open; of slides, from where they touch."""
    closed: float = 0.0
    gap_m: float = 0.0
    """Between slides at their closed end."""


class HandRuler:
    """Measures a compiled model in the posture that its file has; `at` begins the message of an error."""

    def __init__(self, model: mujoco.MjModel, found: Anatomy, at: str) -> None:
        self._at = at
        self._model, self._found = model, found
        self._bones = Skeleton(model)
        self._data = mujoco.MjData(model)
        low, high = model.jnt_range[list(found.arm)].T
        limited = model.jnt_limited[list(found.arm)] > 0
        at = model.jnt_qposadr[list(found.arm)]
        self._data.qpos[at] = np.where(limited, np.clip(self._data.qpos[at], low, high), self._data.qpos[at])

    def shape(self) -> HandShape:
        """Returns what is measured.

        Raises:
            ModelError: a robot file cannot say how these fingers open.
        """
        if not self._found.fingers:
            return self._bare()
        bare = [
            finger for finger in self._found.fingers if not len(self._points(self._finger_bodies(finger)))
        ]
        if bare:
            raise ModelError(
                f"{self._at}: {self._names(tuple(bare))}: a finger without shapes: nothing can be measured, "
                "and nothing grasps. Give it a collision shape in the model."
            )
        if self._model.jnt_type[self._found.fingers[0]] == mujoco.mjtJoint.mjJNT_SLIDE:
            return self._sliding()
        return self._turning()

    # A tool without fingers

    def _bare(self) -> HandShape:
        """The frame's own place; out along the last joint's axis if the tool is on it, else away from it."""
        self._forward()
        model, data, last = self._model, self._data, self._found.arm[-1]
        hand, link = self._found.hand, int(model.jnt_bodyid[last])
        points = self._points([hand])
        away = self._turned(data.xpos[hand] - data.xanchor[last])
        axis = self._turned(data.xaxis[last])
        length = float(np.linalg.norm(away))
        if model.jnt_type[last] == mujoco.mjtJoint.mjJNT_SLIDE or length < _SAME_M:
            away, length = -self._in_hand(data.xipos[link]), 1.0  # from the link's mass to the frame
        if abs(away @ axis) > _ALONG * np.linalg.norm(away) or float(np.linalg.norm(away)) < _SAME_M:
            approach = axis if away @ axis >= 0 else -axis
            why = "along the last joint's axis, away from the arm"
        else:
            approach, why = away, "away from the last joint"
        approach = _snapped(approach)
        end_m = float((points @ approach).max()) if len(points) and hand == link else 0.0
        at = f"at the end of its shapes, {end_m:.3f} m out" if end_m > _SAME_M else "at its origin"
        across = _snapped(_across(approach))
        openings = (across, np.cross(approach, across))
        return HandShape(
            pos_m=max(end_m, 0.0) * approach,
            approach=approach,
            openings=tuple(sign * each for each in openings for sign in (1.0, -1.0)),
            why=f"{at}, {why}",
        )

    # Fingers

    def _sliding(self) -> HandShape:
        """The middle between the tips of fingers that slide; their closed end is the one nearer to zero."""
        model, fingers = self._model, self._found.fingers
        ranges = model.jnt_range[list(fingers)]
        closed = [float(low if abs(low) < abs(high) else high) for low, high in ranges]
        opened = [float(high if abs(low) < abs(high) else low) for low, high in ranges]
        self._put(fingers, closed)
        opening = _snapped(self._turned(self._data.xaxis[fingers[0]]))
        approach = self._approach(opening)
        if self._width(fingers, approach, opened) <= self._width(fingers, approach, closed):
            raise ModelError(
                f"{self._at}: {self._names(fingers)}: the fingers are nearer to each other at {opened} than "
                f"at {closed}, and robot files take the end nearer to zero for closed. Move the zeros of "
                "these joints in the model (<origin>, and <limit>), so that they count from closed."
            )
        self._put(fingers, closed)
        tips = [self._tip(finger, approach) for finger in fingers]
        gap_m = max(0.0, self._gap(fingers)) if len(fingers) == 2 else 0.0
        gap_m = round(gap_m, 4) if gap_m > _SAME_M else 0.0
        travel_m = float(ranges[0, 1] - ranges[0, 0])
        return self._between(
            tips, approach, opening, opened=travel_m + gap_m / 2, closed=gap_m / 2, gap_m=gap_m
        )

    def _turning(self) -> HandShape:
        """The place where jaws that turn meet; the closed end of their range is where they are nearer."""
        fingers, model = self._found.fingers, self._model
        low, high = (model.jnt_range[list(fingers), end] for end in (0, 1))
        if np.ptp(low) > _SAME_RAD or np.ptp(high) > _SAME_RAD:
            raise ModelError(
                f"{self._at}: {self._names(fingers)}: their ranges differ, from {low.tolist()} to "
                f"{high.tolist()}, and one servo gives both the same angle. Reverse the axis of one in "
                "the model."
            )
        self._put(fingers, low)
        hinge = self._turned(self._data.xaxis[fingers[0]])
        approach = self._approach(hinge)
        ends = [self._width(fingers, approach, end) for end in (low, high)]
        closed, far = (low, high) if ends[0] <= ends[1] else (high, low)
        way = np.linspace(closed, far, 50)
        wide = (each for each in way if self._width(fingers, approach, each) >= min(ends) + _WIDE_M)
        opened = next(wide, far)
        self._put(fingers, closed)
        tips = [self._tip(finger, approach) for finger in fingers]
        if len(fingers) == 1:
            tips.append(self._still(approach))
        opening = _snapped(np.cross(approach, hinge))
        return self._between(
            tips, approach, opening, opened=round(float(opened[0]), 3), closed=float(closed[0]), gap_m=0.0
        )

    def _between(
        self,
        tips: list[Array],
        approach: Array,
        opening: Array,
        *,
        opened: float,
        closed: float,
        gap_m: float,
    ) -> HandShape:
        """Returns the shape of a gripper whose tips these are: each (N, 3)."""
        reach_m = min(float((tip @ approach).max()) for tip in tips) - _SHORT_M
        middle = np.mean([0.5 * (tip.min(axis=0) + tip.max(axis=0)) for tip in tips], axis=0)
        pos_m = middle + (reach_m - middle @ approach) * approach
        return HandShape(
            pos_m=pos_m,
            approach=approach,
            openings=(opening, -opening),
            why=f"between the finger tips, {100 * _SHORT_M:g} cm short of their ends",
            opened=opened,
            closed=closed,
            gap_m=gap_m,
        )

    def _approach(self, hinge: Array) -> Array:
        """Returns the axis across another one along which the fingers reach from the arm's last joint."""
        fingers, data = self._found.fingers, self._data
        points = np.vstack([self._points(self._finger_bodies(finger)) for finger in fingers])
        middle = 0.5 * (points.min(axis=0) + points.max(axis=0))
        away = middle - self._in_hand(data.xanchor[self._found.arm[-1]])
        away = away - (away @ hinge) * hinge
        return _snapped(away if np.linalg.norm(away) > _SAME_M else _across(hinge))

    def _tip(self, finger: int, approach: Array) -> Array:
        """Returns the points (N, 3) at the end of a finger."""
        return _end_of(self._points(self._finger_bodies(finger)), approach)

    def _names(self, joints: tuple[int, ...]) -> str:
        return ", ".join(self._model.joint(joint).name for joint in joints)

    def _width(self, fingers: tuple[int, ...], approach: Array, position: Array | list[float]) -> float:
        """Returns how far the tip of the first finger is from the other's, or from the hand's own."""
        self._put(fingers, position)
        tips = [self._far(finger).mean(axis=0) for finger in fingers]
        tips.append(self._still(approach).mean(axis=0))
        return float(np.linalg.norm(tips[0] - tips[1]))

    def _still(self, approach: Array) -> Array:
        """Returns the points (N, 3) at the end of the hand itself; its origin if it has no shapes."""
        points = self._points([self._found.hand])
        return _end_of(points, approach) if len(points) else np.zeros((1, 3))

    def _far(self, finger: int) -> Array:
        """Returns the points (N, 3) of a finger that are farthest from its hinge, the same in any posture."""
        points = self._points(self._finger_bodies(finger))
        lever = points - self._in_hand(self._data.xanchor[finger])
        axis = self._turned(self._data.xaxis[finger])
        radius = np.linalg.norm(lever - np.outer(lever @ axis, axis), axis=1)
        return points[radius > radius.max() - _TIP_M]

    def _gap(self, fingers: tuple[int, ...]) -> float:
        """Returns the distance between the shapes of two fingers as they are, those that touch if any do."""
        shapes = [self._geoms(self._finger_bodies(finger)) for finger in fingers]
        between = np.zeros(6)
        pairs = itertools.product(*shapes)
        distances = [mujoco.mj_geomDistance(self._model, self._data, a, b, 1.0, between) for a, b in pairs]
        return min(distances, default=0.0)

    def _geoms(self, bodies: list[int]) -> list[int]:
        model = self._model
        every = [geom for geom in range(model.ngeom) if model.geom_bodyid[geom] in bodies]
        return [g for g in every if model.geom_contype[g] or model.geom_conaffinity[g]] or every

    def _finger_bodies(self, finger: int) -> list[int]:
        return list(self._bones.below(int(self._model.jnt_bodyid[finger])))

    # Frames

    def _put(self, joints: tuple[int, ...], positions: Any) -> None:
        for joint, position in zip(joints, positions, strict=True):
            self._data.qpos[self._model.jnt_qposadr[joint]] = position
        self._forward()

    def _forward(self) -> None:
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)

    def _turned(self, world: Array) -> Array:
        """Returns a direction of the world in the hand's frame."""
        return self._data.xmat[self._found.hand].reshape(3, 3).T @ world

    def _in_hand(self, world_m: Array) -> Array:
        """Returns points (..., 3) of the world in the hand's frame."""
        return (world_m - self._data.xpos[self._found.hand]) @ self._data.xmat[self._found.hand].reshape(3, 3)

    def _points(self, bodies: list[int]) -> Array:
        """Returns points (N, 3) that span the shapes of bodies: vertices of meshes, corners of the others."""
        model, data = self._model, self._data
        found: list[Array] = [np.zeros((0, 3))]
        for geom in range(model.ngeom):
            if model.geom_bodyid[geom] not in bodies:
                continue
            mesh = int(model.geom_dataid[geom])
            if model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH:
                first = int(model.mesh_vertadr[mesh])
                local = np.asarray(model.mesh_vert[first : first + int(model.mesh_vertnum[mesh])], float)
            else:
                middle, half = model.geom_aabb[geom, :3], model.geom_aabb[geom, 3:]
                local = middle + half * np.array(list(itertools.product((-1.0, 1.0), repeat=3)))
            rotation = data.geom_xmat[geom].reshape(3, 3)
            found.append(self._in_hand(local @ rotation.T + data.geom_xpos[geom]))
        return np.vstack(found)


def _end_of(points: Array, approach: Array) -> Array:
    """Returns the points (N, 3) near the end along an axis."""
    along = points @ approach
    return points[along > along.max() - _TIP_M]


def _snapped(axis: Array) -> Array:
    """Returns a unit vector: one of the body's axes where it is near to it."""
    unit = axis / np.linalg.norm(axis)
    most = int(np.abs(unit).argmax())
    return float(np.sign(unit[most])) * np.eye(3)[most] if abs(unit[most]) > _ALONG else unit


def _across(axis: Array) -> Array:
    """Returns a unit vector at a right angle."""
    least = np.eye(3)[int(np.abs(axis).argmin())]
    across = least - (least @ axis) * axis
    return across / np.linalg.norm(across)
