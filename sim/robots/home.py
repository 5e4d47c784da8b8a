"""Finds joint positions for a robot's home: the tool over the table, pointing down and forward."""

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.robots.robot import Robot

Array = NDArray[Any]

PLACES_M = ((0.48, 0.0, 0.28), (0.4, 0.0, 0.25), (0.32, 0.0, 0.2), (0.24, 0.0, 0.15), (0.2, 0.0, 0.1))
"""Where the tool may stand, best first: the shipped arms' place, then nearer ones for short arms."""
_STARTS, _STEPS = 12, 80
_NEAR_M, _NEAR_RAD = 0.005, 0.03
_EXACT = 1e-4
"""The search goes on to this share of them, or to its last step."""
_MARGIN_RAD = 0.025
"""Distance of home from the limits: starts of episodes lie around it."""
_TURN_M = 0.1
"""Height of the joints that is worth a radian away from the home that the file has."""
_DAMPING = 0.05
_TOOL = np.diag([1.0, -1.0, -1.0])
"""World from tool: x forward, z down."""


def find_home(robot: Robot, base_m: Sequence[float] | Array = (0.0, 0.0, 0.0)) -> tuple[float, ...] | None:
    """Returns joint positions with the tool at the best place that is found, or None.

    Damped least squares from the file's home and random postures; of those that arrive, one with no shape
    below the table, whose joints are high, and near to those of the file.

    Args:
        robot: an arm.
        base_m: from where the places are counted.
    """
    model = robot.build().compile()
    index, data = ModelIndex(model, robot), mujoco.MjData(model)
    low = np.maximum(np.asarray(robot.limits.position_low_rad) + _MARGIN_RAD, -np.pi)
    high = np.minimum(np.asarray(robot.limits.position_high_rad) - _MARGIN_RAD, np.pi)
    high = np.maximum(low, high)
    starts = np.random.default_rng(0).uniform(low, high, (_STARTS, len(low)))
    starts[0] = np.clip(robot.home_rad, low, high)
    for place_m in PLACES_M:
        found: list[tuple[bool, float, Array]] = []
        for start in starts:
            position = _solve(model, data, index, np.add(place_m, base_m), start, low, high)
            if position is not None:
                height_m, turned_rad = data.xanchor[:, 2].mean(), np.linalg.norm(position - robot.home_rad)
                is_above = _lowest_m(model, data, robot) >= 0.0
                found.append((is_above, float(height_m - _TURN_M * turned_rad), position))
        if found:
            best = max(found, key=lambda each: each[:2])[2]
            return tuple(round(float(value), 4) + 0.0 for value in best)  # no minus zero
    return None


def _lowest_m(model: mujoco.MjModel, data: mujoco.MjData, robot: Robot) -> float:
    """Returns how high the lowest shape is that the second joint or a later one moves, by its box."""
    second = int(model.joint(robot.arm_joints[min(1, robot.num_arm_joints - 1)]).bodyid[0])
    moved = [False] * model.nbody
    for body in range(1, model.nbody):
        moved[body] = body == second or moved[model.body_parentid[body]]
    shapes = np.array(moved)[model.geom_bodyid]
    down = data.geom_xmat.reshape(-1, 3, 3)[:, 2]  # the world's z in each shape's frame
    middle, half = model.geom_aabb[:, :3], model.geom_aabb[:, 3:]
    low_m = data.geom_xpos[:, 2] + (down * middle - np.abs(down) * half).sum(axis=1)
    return float(low_m[shapes].min(initial=np.inf))


def _solve(
    model: mujoco.MjModel, data: mujoco.MjData, index: ModelIndex, place_m: Array, start: Array,
    low: Array, high: Array,
) -> Array | None:  # fmt: skip
    """Returns joint positions near which the tool stands as wanted, or None if it does not get there."""
    position, linear, angular = start, np.zeros((3, model.nv)), np.zeros((3, model.nv))
    best: tuple[float, Array] = (np.inf, start)
    for _ in range(_STEPS):
        data.qpos[index.arm_qpos] = position
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        rotation = data.site_xmat[index.site].reshape(3, 3)
        # The axis of the turn that is left, times the sine of its angle; beyond a right angle, of length 1.
        turn = 0.5 * np.cross(rotation.T, _TOOL.T).sum(axis=0)
        if np.trace(_TOOL.T @ rotation) < 1.0:
            length = float(np.linalg.norm(turn))
            turn = turn / length if length > 1e-3 else np.array([0.0, 1.0, 0.0])  # upside down: any axis
        away_m = place_m - data.site_xpos[index.site]
        error = max(np.linalg.norm(away_m) / _NEAR_M, np.linalg.norm(turn) / _NEAR_RAD)
        best = min(best, (float(error), position), key=lambda pair: pair[0])
        if best[0] < _EXACT:
            break
        mujoco.mj_jacSite(model, data, linear, angular, index.site)
        jacobian = np.vstack([linear, 0.3 * angular])[:, index.arm_dof]
        wanted = np.concatenate([away_m, 0.3 * turn])
        step = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + _DAMPING**2 * np.eye(6), wanted)
        position = np.clip(position + np.clip(step, -0.3, 0.3), low, high)
    if best[0] >= 1.0:
        return None
    data.qpos[index.arm_qpos] = best[1]
    mujoco.mj_kinematics(model, data)
    return best[1]
