"""Push a cube over the table to a mark, with the gripper shut."""

import math
from collections.abc import Callable

import mujoco

from robot_rl.core.arrays import namespace, norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.poses import free_pose
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import add_free_box, add_mark
from robot_rl.sim.start_classes import Resets
from robot_rl.sim.task import Aim, Array, Control, Start, Task, View, closeness
from robot_rl.sim.tasks.grasping import half_turn, heading, level
from robot_rl.sim.variation import Variation

HALF_SIZE_M = 0.025
GOAL_RADIUS_M = 0.025
_AT_REST_M_S = 0.05
_NEAR_GOAL_M = 0.06
_TOOL_HEIGHT_M = 0.02
_ABOVE_M = 0.09
_BEHIND_M = 0.02
"""From the cube's side to the tool's centre before a push: the pads and a little air lie between."""
_GENTLE_M = 0.02
"""Longest lead of the tool that pushes a cylinder, which a fast push, or one below its middle, tips over."""


class PushCube(Task):
    """Push the cube to the mark on the table; the gripper stays shut.

    Randomised: cube position and yaw, direction and distance (8 to 14 cm) of the mark, arm posture;
    with `randomize`, the table's friction and the cube's mass. Success: the cube's centre within
    2.5 cm of the mark's and slower than 5 cm/s.
    """

    name = "push_cube"
    instruction = "push the cube onto the green mark"
    horizon_s = 5.0
    control = Control(gripper="shut")
    needs_gripper = False
    symmetric = True
    observation = (
        "tool.linvel",
        "cube.pos",
        "cube.xaxis",
        "cube.linvel",
        "cube_in_tool.pos",
        "goal.pos",
        "goal_in_tool.pos",
    )
    resets = Resets(
        thing="cube",
        goal="goal",
        at_goal_m=(0.0, 0.0, HALF_SIZE_M),
        near_goal_m=(0.06, 0.06, 0.0),
        hold="none",
        grip_half_m=(HALF_SIZE_M,) * 3,
        rests_at_goal=True,
        classes=("reaching", "near_object", "near_goal"),
    )
    vary = (
        Vary(field="geom_friction", element="table", low=0.6, high=1.3, component=0),
        Vary(field="body_mass", element="cube", low=0.5, high=2.0),
    )

    variation = Variation(
        things=("cube",),
        shapes=("box", "cylinder"),
        goal="goal",
        goals_m=((0.0, 0.0, 0.0), (0.0, -0.03, 0.0), (0.0, 0.03, 0.0)),
        path=("cube", "goal"),
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        add_free_box(spec, "cube", half_size_m=[HALF_SIZE_M] * 3, mass_kg=0.1, friction=0.5)
        add_mark(spec, radius_m=2 * GOAL_RADIUS_M)  # a cube on its centre leaves a part of it in sight

    def start(self, rng: EpisodeRng) -> Start:
        cube = rng.uniform((0.47, -0.12, HALF_SIZE_M), (0.57, 0.12, HALF_SIZE_M), size=3)
        yaw = rng.uniform(-0.75, 0.75)
        direction, distance = rng.uniform(-math.pi, math.pi), rng.uniform(0.08, 0.14)
        goal = cube + distance * level(direction)
        goal[:, 2] = 0.0
        return Start(joints={"cube": free_pose(cube, yaw)}, mocap={"goal": goal}, fingers=0.0)

    def evaluate(self, view: View) -> dict[str, Array]:
        slow = norm(view["cube.linvel"]) < _AT_REST_M_S
        return {"success": (self._distance(view) < GOAL_RADIUS_M) & slow}

    def dense_reward(self, view: View) -> Array:
        apart = norm(view["cube_in_tool.pos"]) - _half_width(view)
        near = namespace(apart).clip(apart, 0.0, None)
        return 0.3 * closeness(near, 0.1) + 0.7 * closeness(self._distance(view), 0.1)

    def predicates(self) -> dict[str, Callable[[View], Array]]:
        return {
            "near_goal": lambda view: self._distance(view) < _NEAR_GOAL_M,
            "at_goal": lambda view: self._distance(view) < GOAL_RADIUS_M,
        }

    def assist(self, view: View) -> dict[str, Array]:
        way = view["goal.pos"] - view["cube.pos"]
        way[:, 2] = 0.0
        return {"cube": way}

    def expert(self, view: View, offset_m: Array) -> Aim:
        """Goes behind the cube, seen from the mark, and pushes until it is there."""
        tool, cube = view["tool.pos"], view["cube.pos"]
        xp = namespace(tool)
        way = view["goal.pos"][:, :2] + offset_m[:, :2] - cube[:, :2]
        distance = norm(way)
        ahead = way / xp.clip(distance, 1e-6, None)[:, None]
        from_cube = tool[:, :2] - cube[:, :2]
        along = from_cube[:, 0] * ahead[:, 0] + from_cube[:, 1] * ahead[:, 1]
        across = xp.abs(from_cube[:, 0] * ahead[:, 1] - from_cube[:, 1] * ahead[:, 0])
        half_m = _half_width(view)
        low = tool[:, 2] < 2 * HALF_SIZE_M
        behind = cube[:, :2] - (half_m + _BEHIND_M)[:, None] * ahead
        at_start = norm(tool[:, :2] - behind) < 0.015
        pushing = low & (along < -0.5 * half_m) & (across < 0.02)
        down = at_start | pushing
        at_centre = xp.where(view["cube.is_round"][:, 0], view["cube.half_size"][:, 2], _TOOL_HEIGHT_M)
        height = xp.where(down, at_centre, 0.0 * distance + _ABOVE_M)
        # Out of the cube's way first: sideways only where the tool is above it.
        sideways = xp.where((down | (tool[:, 2] > 0.7 * _ABOVE_M))[:, None], behind, tool[:, :2])
        reached = cube[:, :2] + xp.clip(distance, None, 0.04)[:, None] * ahead
        target = xp.where(pushing[:, None], reached - (half_m + _BEHIND_M - 0.02)[:, None] * ahead, sideways)
        lead = target - tool[:, :2]
        gentle = tool[:, :2] + lead * xp.clip(_GENTLE_M / (norm(lead) + 1e-9), None, 1.0)[:, None]
        target = xp.where(pushing[:, None] & view["cube.is_round"], gentle, target)
        there = distance < 0.5 * GOAL_RADIUS_M
        position = xp.where(there[:, None], tool, xp.concat([target, height[:, None]], axis=1))
        yaw = half_turn(heading(ahead) - heading(view["tool.xaxis"]))
        return Aim(
            position_m=position,
            yaw_rad=xp.where(low | there, 0.0, yaw),
            closed=xp.full_like(low, view.has_fingers),  # a cup would hold the cube
        )

    @staticmethod
    def _distance(view: View) -> Array:
        return norm((view["cube.pos"] - view["goal.pos"])[:, :2])


def _half_width(view: View) -> Array:
    """Returns half the larger of the cube's two widths, (B,)."""
    half_m = view["cube.half_size"]
    return namespace(half_m).maximum(half_m[:, 0], half_m[:, 1])
