"""Two cubes of different colours and one goal: two tasks, which only the instruction tells apart.

Scene, beginnings and observation are the same in both, seed by seed, so neither pictures nor states show a
policy which cube is wanted.
"""

import math
from typing import ClassVar

import mujoco

from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.poses import free_pose
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import BLUE, RED, add_free_box, add_goal
from robot_rl.sim.start_classes import Resets
from robot_rl.sim.task import Aim, Array, Start, Task, View
from robot_rl.sim.tasks.grasping import level
from robot_rl.sim.tasks.pick_cube import (
    HALF_SIZE_M,
    goal_in_the_air,
    is_at_goal,
    picking_aim,
    picking_reward,
)
from robot_rl.sim.variation import Variation

_CUBES = {"red": RED, "blue": BLUE}


def _resets(cube: str) -> Resets:
    return Resets(thing=cube, goal="goal", near_goal_m=(0.06, 0.06, 0.06), grip_half_m=(HALF_SIZE_M,) * 3)


class _TwoCubes:
    """What both tasks share: all but the instruction and the cube that is wanted."""

    wanted: ClassVar[str]
    """Name of the cube that goes to the goal: `red` or `blue`."""
    horizon_s = 5.0
    symmetric = True
    cup_serves = True
    observation = (
        "tool.linvel",
        *(
            f"{cube}{what}"
            for cube in _CUBES
            for what in (".pos", ".xaxis", "_in_tool.pos", "_in_tool.xaxis")
        ),
        "goal_in_tool.pos",
    )
    privileged = ("goal.pos",)
    vary = (
        *(Vary(field="geom_friction", element=cube, low=0.7, high=1.3, component=0) for cube in _CUBES),
        *(Vary(field="body_mass", element=cube, low=0.5, high=2.0) for cube in _CUBES),
    )

    variation = Variation(
        things=tuple(_CUBES),
        shapes=("box", "cylinder"),
        goal="goal",
        goals_m=((0.0, 0.0, 0.0), (0.0, -0.06, 0.05), (0.0, 0.06, 0.05)),
        path=("blue", "red", "goal"),
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        for cube, rgba in _CUBES.items():
            add_free_box(spec, cube, half_size_m=[HALF_SIZE_M] * 3, mass_kg=0.05, rgba=rgba)
        add_goal(spec)

    def start(self, rng: EpisodeRng) -> Start:
        middle = rng.uniform((0.45, -0.10, HALF_SIZE_M), (0.55, 0.10, HALF_SIZE_M), size=3)
        direction, distance = rng.uniform(-math.pi, math.pi), rng.uniform(0.10, 0.16)
        to_red = 0.5 * distance * level(direction)
        red, blue = (
            free_pose(middle + to_red, rng.uniform(-0.5, 0.5)),
            free_pose(middle - to_red, rng.uniform(-0.5, 0.5)),
        )
        return Start(joints={"red": red, "blue": blue}, mocap={"goal": goal_in_the_air(rng)})

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": is_at_goal(view, self.wanted)}

    def dense_reward(self, view: View) -> Array:
        return picking_reward(view, self.wanted)

    def expert(self, view: View, offset_m: Array) -> Aim:
        return picking_aim(view, self.wanted, offset_m)


class PickRedCube(_TwoCubes, Task):
    """Pick up the red cube, next to which a blue one lies, and hold it at the goal point.

    Randomised: position and yaw of both cubes (10 to 16 cm apart), goal position, arm posture; with
    `randomize`, friction and masses. Success: the red cube's centre within 2.5 cm of the goal, which is
    always in the air.
    """

    name = "pick_red_cube"
    instruction = "pick up the red cube and bring it to the green point"
    wanted = "red"
    resets = _resets("red")


class PickBlueCube(_TwoCubes, Task):
    """Pick up the blue cube, next to which a red one lies, and hold it at the goal point.

    Randomised: position and yaw of both cubes (10 to 16 cm apart), goal position, arm posture; with
    `randomize`, friction and masses. Success: the blue cube's centre within 2.5 cm of the goal, which is
    always in the air.
    """

    name = "pick_blue_cube"
    instruction = "pick up the blue cube and bring it to the green point"
    wanted = "blue"
    resets = _resets("blue")
