"""Grasp a cube from the table and bring it to a point in the air."""

from collections.abc import Callable

import mujoco

from robot_rl.core.arrays import norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.poses import free_pose
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import add_free_box, add_goal
from robot_rl.sim.start_classes import Resets
from robot_rl.sim.task import Aim, Array, Start, Task, View, closeness
from robot_rl.sim.tasks.grasping import centring, finger_width, grasp_aim, grip_width, shut_width
from robot_rl.sim.variation import Variation

HALF_SIZE_M = 0.02
GOAL_RADIUS_M = 0.025
_NEAR_GOAL_M = 0.06
_LIFTED_M = 0.03
_GRASPED_M = 0.025


class PickCube(Task):
    """Pick up the cube and hold it at the goal point.

    Randomised: cube position and yaw, goal position, arm posture; with `randomize`, friction and
    mass. Success: the cube's centre within 2.5 cm of the goal, which is always in the air.
    """

    name = "pick_cube"
    instruction = "pick up the cube and bring it to the green point"
    horizon_s = 5.0
    symmetric = True
    cup_serves = True
    observation = (
        "tool.linvel",
        "cube.pos",
        "cube.xaxis",
        "cube_in_tool.pos",
        "cube_in_tool.xaxis",
        "goal_in_tool.pos",
    )
    privileged = ("goal.pos",)
    resets = Resets(thing="cube", goal="goal", near_goal_m=(0.06, 0.06, 0.06), grip_half_m=(HALF_SIZE_M,) * 3)
    vary = (
        Vary(field="geom_friction", element="cube", low=0.7, high=1.3, component=0),
        Vary(field="body_mass", element="cube", low=0.5, high=2.0),
    )

    variation = Variation(
        things=("cube",),
        shapes=("box", "cylinder"),
        goal="goal",
        goals_m=((0.0, 0.0, 0.0), (0.0, -0.06, 0.05), (0.0, 0.06, 0.05)),
        path=("cube", "goal"),
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        add_free_box(spec, "cube", half_size_m=[HALF_SIZE_M] * 3, mass_kg=0.05)
        add_goal(spec)

    def start(self, rng: EpisodeRng) -> Start:
        low, high = (0.40, -0.15, HALF_SIZE_M), (0.60, 0.15, HALF_SIZE_M)
        cube = rng.uniform(low, high, size=3)
        yaw = rng.uniform(-0.5, 0.5)
        return Start(joints={"cube": free_pose(cube, yaw)}, mocap={"goal": goal_in_the_air(rng)})

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": is_at_goal(view, "cube")}

    def dense_reward(self, view: View) -> Array:
        return picking_reward(view, "cube")

    def predicates(self) -> dict[str, Callable[[View], Array]]:
        return {"grasped": _is_grasped, "lifted": _is_lifted, "near_goal": _is_near_goal}

    def assist(self, view: View) -> dict[str, Array]:
        return {"cube": view["goal.pos"] - view["cube.pos"]}

    def expert(self, view: View, offset_m: Array) -> Aim:
        return picking_aim(view, "cube", offset_m)


def _is_grasped(view: View) -> Array:
    """Returns whether the tool is at the cube with fingers as far apart as the cube is wide, within 1 cm."""
    error_m = finger_width(view) - grip_width(view, "cube")
    return (error_m > -0.01) & (error_m < 0.01) & (norm(view["cube_in_tool.pos"]) < _GRASPED_M)


def _is_lifted(view: View) -> Array:
    return view["cube.pos"][:, 2] > view["cube.half_size"][:, 2] + _LIFTED_M


def _is_near_goal(view: View) -> Array:
    return norm(view["cube.pos"] - view["goal.pos"]) < _NEAR_GOAL_M


def goal_in_the_air(rng: EpisodeRng) -> Array:
    """Draws goal points (n, 3) above the table."""
    return rng.uniform((0.40, -0.15, 0.12), (0.60, 0.15, 0.25), size=3)


def is_at_goal(view: View, cube: str) -> Array:
    """Returns whether the cube of this name is at the goal, (B,) bool."""
    return norm(view[f"{cube}.pos"] - view["goal.pos"]) < GOAL_RADIUS_M


def picking_reward(view: View, cube: str) -> Array:
    """Returns the dense reward (B,) of bringing the cube of this name to the goal."""
    reach = closeness(norm(view[f"{cube}_in_tool.pos"]), 0.1)
    carry = closeness(norm(view[f"{cube}.pos"] - view["goal.pos"]), 0.1)
    return 0.3 * reach + 0.7 * carry


def picking_aim(view: View, cube: str, offset_m: Array) -> Aim:
    """Returns the expert's aim for the cube of this name: grasp it, bring it to the goal."""
    carried_to = view["tool.pos"] + view["goal.pos"] - view[f"{cube}.pos"]
    return grasp_aim(
        view, cube, offset_m,
        carry_to_m=carried_to, shut_width_m=shut_width(view, cube), top_m=view[f"{cube}.half_size"][:, 2],
        centred_m=centring(view, cube),
    )  # fmt: skip
