"""Put one cube on another and let go."""

import math

import mujoco

from robot_rl.core.arrays import like, namespace, norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.poses import free_pose
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import BLUE, RED, add_free_box
from robot_rl.sim.start_classes import Resets
from robot_rl.sim.task import Aim, Array, Start, Task, View, closeness
from robot_rl.sim.tasks.grasping import (
    SHUT_M,
    carry_to,
    centring,
    finger_width,
    grasp_aim,
    grip_width,
    level,
    shut_width,
)
from robot_rl.sim.variation import Variation

HALF_SIZE_M = 0.02
ALIGNED_M = 0.015
_HEIGHT_TOLERANCE_M = 0.004
_RELEASED_M = 0.04
_AT_REST_M_S = 0.03
_ON_TOP_M = (0.0, 0.0, 2 * HALF_SIZE_M)


class StackCube(Task):
    """Put the red cube on the blue one, release it and leave it at rest.

    Randomised: position and yaw of both cubes (10 to 16 cm apart), arm posture; with `randomize`,
    friction and masses. Success: the red cube's centre over the blue's within 1.5 cm, one cube
    higher within 4 mm, slower than 3 cm/s, and the tool more than 4 cm away from it.
    """

    name = "stack_cube"
    instruction = "put the red cube on the blue cube and let go"
    horizon_s = 6.0
    symmetric = True
    cup_serves = True
    observation = (
        "tool.linvel",
        "red.pos",
        "red.xaxis",
        "red_in_tool.pos",
        "red_in_tool.xaxis",
        "blue.pos",
        "blue.xaxis",
        "red_in_blue.pos",
    )
    privileged = ("red.linvel",)
    resets = Resets(
        thing="red",
        goal="blue",
        at_goal_m=_ON_TOP_M,
        near_goal_m=(0.03, 0.03, 0.04),
        grip_half_m=(HALF_SIZE_M,) * 3,
        rests_at_goal=True,
    )
    vary = (
        Vary(field="geom_friction", element="red", low=0.7, high=1.3, component=0),
        Vary(field="body_mass", element="red", low=0.5, high=2.0),
        Vary(field="body_mass", element="blue", low=0.5, high=2.0),
    )

    variation = Variation(
        things=("red", "blue"),
        shapes=("box", "cylinder"),
        heights=(0.8, 1.0, 1.25),
        path=("red", "blue"),
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        add_free_box(spec, "red", half_size_m=[HALF_SIZE_M] * 3, mass_kg=0.05, rgba=RED)
        add_free_box(spec, "blue", half_size_m=[HALF_SIZE_M] * 3, mass_kg=0.05, rgba=BLUE)

    def start(self, rng: EpisodeRng) -> Start:
        blue = rng.uniform((0.44, -0.10, HALF_SIZE_M), (0.54, 0.10, HALF_SIZE_M), size=3)
        direction, distance = rng.uniform(-math.pi, math.pi), rng.uniform(0.10, 0.16)
        red = blue + distance * level(direction)
        turned = {"red": rng.uniform(-0.5, 0.5), "blue": rng.uniform(-0.5, 0.5)}
        return Start(joints={"red": free_pose(red, turned["red"]), "blue": free_pose(blue, turned["blue"])})

    def evaluate(self, view: View) -> dict[str, Array]:
        at_rest = norm(view["red.linvel"]) < _AT_REST_M_S
        released = norm(view["red_in_tool.pos"]) > _RELEASED_M
        stacked = _stacked(_error(view), ALIGNED_M, _HEIGHT_TOLERANCE_M)
        return {"success": stacked & at_rest & released}

    def dense_reward(self, view: View) -> Array:
        error, away = _error(view), norm(view["red_in_tool.pos"])
        xp = namespace(away)
        stacked = _stacked(error, ALIGNED_M, _HEIGHT_TOLERANCE_M)
        carry = closeness(norm(error), 0.1)
        left = xp.clip(away / _RELEASED_M, None, 1.0)
        reach_or_leave = xp.where(stacked, left, 0.5 * closeness(away, 0.1))
        return 0.5 * carry + 0.5 * reach_or_leave

    def expert(self, view: View, offset_m: Array) -> Aim:
        tool = view["tool.pos"]
        place = view["blue.pos"] + _on_top(view) + offset_m
        error = view["red.pos"] - place
        carry = tool + carry_to(view["red.pos"], place, clearance_m=0.04, aligned_m=0.008)
        aim = grasp_aim(
            view, "red", offset_m * 0.0,
            carry_to_m=carry, shut_width_m=shut_width(view, "red"), top_m=view["red.half_size"][:, 2],
            centred_m=centring(view, "red"),
        )  # fmt: skip
        placed = _stacked(error, 0.015, 1.5 * _HEIGHT_TOLERANCE_M)
        rise = like((0.0, 0.0, 0.06), tool) * ~_waits(view)[:, None]
        aim.position_m[placed] = (tool + rise)[placed]
        aim.yaw_rad[placed] = 0.0
        return Aim(position_m=aim.position_m, yaw_rad=aim.yaw_rad, closed=aim.closed & ~placed)


def _waits(view: View) -> Array:
    """Returns where the hand stays until the fingers are open, (B,): rising drags things off a cylinder."""
    is_round = (view["red.is_round"] | view["blue.is_round"])[:, 0]
    if not view.has_fingers:
        return is_round & False
    return is_round & (finger_width(view) < grip_width(view, "red") + SHUT_M)


def _error(view: View) -> Array:
    """Returns by how much the red cube misses its place on the blue one, (B, 3)."""
    red = view["red.pos"]
    return red - view["blue.pos"] - _on_top(view)


def _on_top(view: View) -> Array:
    """Returns the way from the blue cube's centre to the red one's place, (B, 3): half of each height."""
    red, blue = view["red.half_size"], view["blue.half_size"]
    return (red + blue) * like((0.0, 0.0, 1.0), red)


def _stacked(error_m: Array, aligned_m: float, height_m: float) -> Array:
    return (norm(error_m[:, :2]) < aligned_m) & (abs(error_m[:, 2]) < height_m)
