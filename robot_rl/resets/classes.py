"""The generators: each puts the thing and the tool where a start of its class has them.

B simulations. Whether what is put is a start at all, `accept` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.resets.accept import Put
from robot_rl.resets.grasps import Grasps
from robot_rl.resets.walk import draw_way
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.poses import compose, inverse, quaternion_product, rotate, yaw_quaternion

Array = NDArray[Any]

_STILL_M, _HELD_M = 0.01, 0.02
"""How far a thing may move that rests, and one that a hand holds in a place."""
_DRAWS = 8
"""Of so many grasps the one is taken for which the hand turns least."""
_TURN_RAD = 0.2
"""How far the hand of `near_object` is turned from a grasp."""
_APART_M = 0.02
"""From the box of a pushed thing to the tool: half a hand."""
_NEARLY_SHUT = 0.1
"""Least opening of a hand that does not hold the thing yet, from one that does to an open one."""
_LOWEST_M = 0.01
"""Of a tool near the thing, above the table."""


@dataclass(kw_only=True)
class Materials:
    """What the generators draw from."""

    rng: np.random.Generator
    grasps: Grasps | None
    """None where nothing is grasped."""
    walk: Array | None
    """(M, 7) poses in the frame of the thing's place, where the task's way is a walk."""


def reaching(bench: Workbench, use: Materials) -> Put:
    """The thing where the task puts it, the tool anywhere; a held thing as the task begins."""
    tool = bench.begin()
    if bench.hold == "held":
        return _put_tool(bench, tool, shut=True, in_hand=True, most_m=_HELD_M)
    return _put_tool(bench, _anywhere(bench, use.rng), shut=False, in_hand=False, most_m=_STILL_M)


def near_object(bench: Workbench, use: Materials) -> Put:
    """The tool on its way to a grasp, or next to a pushed thing; a held thing around its place.

    Half of the hands come to the thing with open fingers, half of these in the nearest quarter; half are
    there and shut, none holds it yet. Without the latter hardly any random action gets from here to a
    grasp: fingers must shut for several steps before the hand has moved away or pushed the thing over.
    """
    bench.begin()
    if bench.hold == "held":
        far = bench.declared.near_object_m
        return _put_in_hand(bench, use, _displaced(bench, use.rng, (-far, -far, 0.0), (far, far, 2 * far)))
    return _put_near(bench, use)


def grasped(bench: Workbench, use: Materials) -> Put:
    """The thing in the hand anywhere; one on a slide at any of its positions."""
    bench.begin()
    if bench.is_slide:
        bench.put_slide(use.rng.uniform(*bench.slide_range(), bench.num))
        bench.forward()
        return _put_in_hand(bench, use, bench.thing_pose())
    assert use.grasps is not None
    grasp, fingers = use.grasps.draw(use.rng, bench.num)
    put = _put_tool(bench, _anywhere(bench, use.rng), shut=True, in_hand=True, most_m=np.inf)
    bench.put_thing(compose(bench.tool_pose(), grasp))
    bench.put_fingers(fingers)
    return put


def carried(bench: Workbench, use: Materials) -> Put:
    """The thing in the hand between its place, raised, and anywhere: half of them in the nearest quarter."""
    bench.begin()
    assert use.grasps is not None
    goal = bench.goal_pose()
    goal[:, 2] += bench.declared.near_goal_m[2]
    above, grasp, fingers = _at_grasp(bench, use, goal)
    share = use.rng.uniform(0.0, 1.0, (bench.num, 1)) ** 2
    tool = _anywhere(bench, use.rng)
    tool[:, :3] = above[:, :3] + share * (tool[:, :3] - above[:, :3])
    put = _put_tool(bench, tool, shut=True, in_hand=True, most_m=np.inf)
    bench.put_thing(compose(bench.tool_pose(), grasp))
    bench.put_fingers(fingers)
    return put


def near_goal(bench: Workbench, use: Materials) -> Put:
    """The thing near its place, in the hand or let go; the tool near the goal where there is no thing."""
    tool = bench.begin()
    declared, rng = bench.declared, use.rng
    far = np.asarray(declared.near_goal_m)
    let_go = np.arange(bench.num) % 2 == 0 if declared.rests_at_goal and bench.can_grip else None
    if bench.thing is None:
        tool[:, :3] = bench.goal_pose()[:, :3] + rng.uniform(-far, far, (bench.num, 3))
        return _put_tool(bench, tool, shut=False, in_hand=False, most_m=np.inf)
    if bench.is_slide:
        bench.put_slide(declared.slide_goal_m - rng.uniform(0.0, far[0], bench.num))
        bench.forward()
        pose = bench.thing_pose()
    elif use.walk is not None:
        pose = compose(bench.goal_pose(), draw_way(use.walk, rng, bench.num))
    else:
        pose = _displaced(bench, rng, (-far[0], -far[1], 0.0 if declared.rests_at_goal else -far[2]), far)
        if let_go is not None:
            pose[let_go, 2] = bench.goal_pose()[let_go, 2]
    if bench.hold == "none":
        if not bench.is_slide:
            bench.put_thing(pose)
            bench.forward()
        return _put_near(bench, use)
    return _put_in_hand(bench, use, pose, let_go)


GENERATORS: dict[str, Callable[[Workbench, Materials], Put]] = {
    "reaching": reaching,
    "near_object": near_object,
    "grasped": grasped,
    "near_goal": near_goal,
    "carried": carried,
}


def _anywhere(bench: Workbench, rng: np.random.Generator) -> Array:
    """Returns tools (B, 7) that point down, anywhere in the workspace, turned as far as actions turn them."""
    at = rng.uniform(*bench.declared.workspace_m, (bench.num, 3))
    turn = rng.uniform(-1.0, 1.0, bench.num) * bench.declared.yaw_rad * (bench.control.rotation != "none")
    return np.concatenate([at, bench.pointing_down(bench.home_yaw + turn)], axis=1)


def _displaced(bench: Workbench, rng: np.random.Generator, low: Any, high: Any) -> Array:
    """Returns poses (B, 7) of the thing off its place, in the world's axes, and turned about z."""
    pose = bench.goal_pose()
    pose[:, :3] += rng.uniform(low, high, (bench.num, 3))
    if bench.control.rotation != "none":
        turn = rng.uniform(-bench.declared.yaw_rad, bench.declared.yaw_rad, bench.num)
        pose[:, 3:] = quaternion_product(yaw_quaternion(turn), pose[:, 3:])
    return pose


def _put_tool(bench: Workbench, tool: Array, *, shut: Any, in_hand: Any, most_m: float) -> Put:
    """Puts the tool, and commands the gripper: `shut` and `in_hand` are (B,) bool, or one for all."""
    everywhere = np.ones(bench.num, bool)
    left = bench.put_tool(tool)
    bench.command_gripper(everywhere & shut | (bench.control.gripper == "shut"))
    return Put(tool=tool, left=left, in_hand=everywhere & in_hand, moves_at_most_m=most_m)


def _put_near(bench: Workbench, use: Materials) -> Put:
    """Puts the tool near the thing, where that is: displaced from a grasp, or next to it."""
    rng, far = use.rng, bench.declared.near_object_m
    if bench.hold == "none":
        return _put_tool(bench, _next_to(bench, rng), shut=True, in_hand=False, most_m=_STILL_M)
    tool, _, held = _at_grasp(bench, use, bench.thing_pose())
    is_there = np.arange(bench.num)[:, None] % 2 == 0
    share = np.where(is_there, 0.0, rng.uniform(0.0, 1.0, (bench.num, 1)) ** 2)
    tool[:, :3] += share * rng.uniform((-far, -far, -0.2 * far), far, (bench.num, 3))
    tool[:, 2] = np.maximum(tool[:, 2], _LOWEST_M)
    turn = yaw_quaternion(share[:, 0] * rng.uniform(-_TURN_RAD, _TURN_RAD, bench.num))
    tool[:, 3:] = quaternion_product(turn, tool[:, 3:])
    put = _put_tool(bench, tool, shut=False, in_hand=False, most_m=_STILL_M)
    opened = np.where(is_there, rng.uniform(_NEARLY_SHUT, 1.0, (bench.num, 1)), 1.0)
    fingers = held + opened * (bench.robot.gripper_open - held)
    bench.put_fingers(fingers)
    bench.command_fingers(fingers.mean(axis=1))
    return put


def _put_in_hand(bench: Workbench, use: Materials, pose: Array, let_go: Array | None = None) -> Put:
    """Puts the thing at poses (B, 7) and the hand around it; open where it is let go."""
    tool, _, fingers = _at_grasp(bench, use, pose)
    shut = np.ones(bench.num, bool) if let_go is None else ~let_go
    put = _put_tool(bench, tool, shut=shut, in_hand=shut, most_m=_HELD_M)
    if not bench.is_slide:
        bench.put_thing(pose)
    bench.put_fingers(np.where(shut[:, None], fingers, bench.robot.gripper_open))
    return put


def _at_grasp(bench: Workbench, use: Materials, pose: Array) -> tuple[Array, Array, Array]:
    """Returns the tools (B, 7) that grasp things at poses (B, 7), those grasps, and their fingers."""
    assert use.grasps is not None
    best = use.grasps.draw(use.rng, bench.num)
    tool = compose(pose, inverse(best[0]))
    for _ in range(_DRAWS - 1):
        grasp, fingers = use.grasps.draw(use.rng, bench.num)
        other = compose(pose, inverse(grasp))
        nearer = (np.abs(bench.turn_of(other)) < np.abs(bench.turn_of(tool)))[:, None]
        tool = np.where(nearer, other, tool)
        best = np.where(nearer, grasp, best[0]), np.where(nearer, fingers, best[1])
    return bench.upright(tool), *best


def _next_to(bench: Workbench, rng: np.random.Generator) -> Array:
    """Returns tools (B, 7) at any side of the box that is pushed, at its height."""
    num, half = bench.num, bench.declared.grip_half_m
    box = bench.grip_pose()
    angle = rng.uniform(-np.pi, np.pi, num)
    way = np.stack([np.cos(angle), np.sin(angle), 0 * angle], axis=1)
    edge = np.minimum(
        half[0] / np.maximum(np.abs(way[:, 0]), 1e-9), half[1] / np.maximum(np.abs(way[:, 1]), 1e-9)
    )
    away = edge + _APART_M + rng.uniform(0.0, bench.declared.near_object_m, num)
    at = box[:, :3] + rotate(box[:, 3:], away[:, None] * way)
    at[:, 2] = np.maximum(box[:, 2] + rng.uniform(-half[2], half[2], num), _LOWEST_M)
    turn = rng.uniform(-1.0, 1.0, num) * bench.declared.yaw_rad
    return np.concatenate([at, bench.pointing_down(bench.home_yaw + turn)], axis=1)
