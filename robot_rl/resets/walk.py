"""Partial assemblies: a random walk of the thing, without hand and friction, out of its place at the goal.

What comes out can go in again: every pose on the way is one of a thing that fits. B simulations, M poses.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.resets.accept import Tolerances
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.poses import compose, inverse

Array = NDArray[Any]

_STEPS = 60
"""Control steps of a walk, at 20 Hz 3 s."""
_PUSH, _UP = 0.15, 0.03
"""Deviation of the force that pushes, drawn each control step, and the mean force up, in weights."""
_DRAG = 4.0
"""Of the force that slows the thing, per second."""
_TILT_RAD = 0.2
"""Things that lean further, once they are out, are not held so."""
_CELL_M, _CELL = 0.001, 0.01
"""Poses in the same cell, of positions and of quaternions, count once."""


def walk_out(bench: Workbench, rng: np.random.Generator, limits: Tolerances) -> Array:
    """Returns poses (M, 7) of the thing in the frame of its place, the nearest first.

    Raises:
        ConfigError: the thing does not fit into its place, or nothing moves it out.
    """
    bench.begin()
    bench.command_arm_home()
    place = bench.goal_pose()
    bench.put_thing(place)
    bench.forward()
    friction = bench.backend.expand("geom_friction")
    before = friction.copy()
    friction[:] = 0.0
    far = np.asarray(bench.declared.near_goal_m)
    alive = bench.backend.penetration_m(bench.all) < limits.penetration_m
    found = list[Array]()
    if not alive.any():
        raise ConfigError(
            f"resets of {bench.task.name}: {bench.declared.thing!r} does not fit into its place in "
            f"{bench.declared.goal!r}. Check `at_goal_m` of its `resets`."
        )
    for _ in range(_STEPS):
        push = _PUSH * rng.standard_normal((bench.num, 3)) + np.array([0.0, 0.0, 1.0 + _UP])
        bench.push_thing(push - _DRAG * bench.thing_velocity() / 9.81)
        alive &= ~bench.step(1)
        pose = compose(inverse(place), bench.thing_pose())
        alive &= (np.abs(pose[:, :3]) <= far).all(axis=1)
        ids = np.nonzero(alive)[0]
        if not len(ids):
            break
        fits = bench.backend.penetration_m(ids) < limits.penetration_m
        fits &= 1.0 - 2.0 * (pose[ids, 4] ** 2 + pose[ids, 5] ** 2) > math.cos(_TILT_RAD)
        found.append(pose[ids[fits]])
    bench.push_thing(np.zeros(3))
    friction[:] = before
    poses = np.concatenate(found)
    cells = np.concatenate([np.round(poses[:, :3] / _CELL_M), np.round(poses[:, 3:] / _CELL)], axis=1)
    _, first = np.unique(cells, axis=0, return_index=True)
    poses = poses[np.sort(first)]
    return poses[np.argsort(np.linalg.norm(poses[:, :3], axis=1), kind="stable")]


def draw_way(walk: Array, rng: np.random.Generator, num: int) -> Array:
    """Returns poses (num, 7) of a walk, drawn so that all distances from the place are as likely."""
    away = np.linalg.norm(walk[:, :3], axis=1)
    at = np.searchsorted(away, rng.uniform(0.0, away[-1], num))
    return walk[np.minimum(at, len(walk) - 1)]
