"""Partial assemblies: a random walk of the thing, without hand and friction, out of its place at the goal.

What comes out can go in again: every pose on the way is one of a thing that fits. B simulations, M poses.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.resets.accept import NoStartsError, Tolerances, counted
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
        NoStartsError: the thing does not fit into its place, or no pose out of it passes.
    """
    bench.begin()
    bench.command_arm_home()
    place = bench.goal_pose()
    bench.put_thing(place)
    bench.forward()
    put, deep_m = bench.backend.read_states().copy(), bench.backend.penetration_m(bench.all)
    alive = deep_m < limits.penetration_m
    if not alive.any():
        raise NoStartsError(
            f"resets of {bench.task.name}: {bench.declared.thing!r} does not fit into its place in "
            f"{bench.declared.goal!r}: penetrating {bench.num} of {bench.num}, by at least "
            f"{1e3 * deep_m.min():.1f} mm. Check `at_goal_m` of its `resets`.",
            put,
        )
    friction = bench.backend.expand("geom_friction")
    before = friction.copy()
    friction[:] = 0.0
    far = np.asarray(bench.declared.near_goal_m)
    found, rejected = list[Array](), Counter(penetrating=int((~alive).sum()))
    for _ in range(_STEPS):
        push = _PUSH * rng.standard_normal((bench.num, 3)) + np.array([0.0, 0.0, 1.0 + _UP])
        bench.push_thing(push - _DRAG * bench.thing_velocity() / 9.81)
        diverged = bench.step(1)
        pose = compose(inverse(place), bench.thing_pose())
        away = (np.abs(pose[:, :3]) > far).any(axis=1)
        rejected["diverged"] += int((alive & diverged).sum())
        rejected["away"] += int((alive & ~diverged & away).sum())
        alive &= ~(diverged | away)
        ids = np.nonzero(alive)[0]
        if not len(ids):
            break
        deep = bench.backend.penetration_m(ids) >= limits.penetration_m
        leans = 1.0 - 2.0 * (pose[ids, 4] ** 2 + pose[ids, 5] ** 2) <= math.cos(_TILT_RAD)
        rejected["penetrating"] += int(deep.sum())
        rejected["leaning"] += int((leans & ~deep).sum())
        found.append(pose[ids[~(deep | leans)]])
    bench.push_thing(np.zeros(3))
    friction[:] = before
    if not sum(map(len, found)):
        raise NoStartsError(
            f"resets of {bench.task.name}: {bench.num} walks of {bench.declared.thing!r} out of its place in "
            f"{bench.declared.goal!r} leave no pose; rejected first by: {counted(rejected)}. Check "
            "`near_goal_m` (`away`: further off than that) and `at_goal_m` of its `resets`.",
            put,
        )
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
