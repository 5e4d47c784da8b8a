"""Put a peg that is held already into a hole: the light task, for experiments that take seconds."""

from collections.abc import Callable

import mujoco

from robot_rl.core.arrays import like, namespace, norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import add_free_box, add_hole_block
from robot_rl.sim.start_classes import Resets
from robot_rl.sim.task import Aim, Array, Control, Start, Task, View
from robot_rl.sim.tasks.grasping import carry_to
from robot_rl.sim.tasks.peg_insert import BLOCK_HEIGHT_M, CLEARANCE_M, inserted, insertion_reward

PEG_HALF_M = (0.01, 0.01, 0.04)
_LOST_M = 0.06
_OVER_HOLE_M = 0.005


class GantryPeg(Task):
    """Put the peg that the shut gripper holds into the hole of the block.

    Peg 2 cm square and 8 cm long, hole 2.5 cm square and 5 cm deep. Randomised: block position, how
    the peg sits in the gripper (4 mm along, 5 mm up and down), arm posture; with `randomize`,
    friction and mass. Success: the peg's lower end within 1 cm of the hole's floor and inside of
    its walls. Fail: the peg more than 6 cm away from the tool.
    """

    name = "gantry_peg"
    instruction = "put the peg into the hole"
    horizon_s = 4.0
    camera = "side"
    default_robot = "gantry"
    control = Control(rotation="none", gripper="shut")
    symmetric = True
    observation = ("tool.linvel", "peg_in_tool.pos", "peg.zaxis", "tip_in_hole.pos")
    privileged = ("tip.pos", "hole.pos")
    resets = Resets(
        thing="peg",
        goal="hole",
        at_goal_m=(0.0, 0.0, PEG_HALF_M[2]),
        hold="held",
        way="walk",
        near_goal_m=(0.03, 0.03, 0.06),
        near_object_m=0.07,
        workspace_m=((0.30, -0.22, 0.05), (0.66, 0.22, 0.32)),
    )
    vary = (
        Vary(field="geom_friction", element="peg", low=0.8, high=1.3, component=0),
        Vary(field="body_mass", element="peg", low=0.5, high=2.0),
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        peg = add_free_box(spec, "peg", half_size_m=PEG_HALF_M, mass_kg=0.03)
        peg.add_site(name="tip", pos=[0.0, 0.0, -PEG_HALF_M[2]], group=4)
        add_hole_block(spec, "hole", hole_half_m=PEG_HALF_M[0] + CLEARANCE_M, height_m=BLOCK_HEIGHT_M)

    def start(self, rng: EpisodeRng) -> Start:
        hole = rng.uniform((0.40, -0.12, 0.0), (0.56, 0.12, 0.0), size=3)
        # The tool's z axis points down, so half a turn about its x axis stands the peg upright.
        at = rng.uniform((-0.004, 0.0, 0.010), (0.004, 0.0, 0.020), size=3)
        xp = namespace(at)
        upright = xp.tile(like([0.0, 1.0, 0.0, 0.0], at), (rng.num_rows, 1))
        return Start(
            held={"peg": xp.concat([at, upright], axis=1)},
            fingers=PEG_HALF_M[1],
            mocap={"hole": hole},
        )

    def evaluate(self, view: View) -> dict[str, Array]:
        lost = _is_lost(view)
        success = inserted(view["tip_in_hole.pos"])
        return {"success": success, "fail": lost & ~success}

    def dense_reward(self, view: View) -> Array:
        return insertion_reward(view["tip_in_hole.pos"])

    def predicates(self) -> dict[str, Callable[[View], Array]]:
        return {"lost": _is_lost, "over_hole": _is_over_hole}

    def expert(self, view: View, offset_m: Array) -> Aim:
        lift = carry_to(
            view["tip.pos"], view["hole.pos"] + offset_m, clearance_m=BLOCK_HEIGHT_M + 0.015, aligned_m=0.0015
        )
        still = namespace(lift).zeros_like(lift[:, 0])
        return Aim(position_m=view["tool.pos"] + lift, yaw_rad=still, closed=still == 0)


def _is_lost(view: View) -> Array:
    return norm(view["peg_in_tool.pos"]) > _LOST_M


def _is_over_hole(view: View) -> Array:
    """Returns whether the peg's lower end is within 5 mm of the hole's axis, at any height."""
    return norm(view["tip_in_hole.pos"][:, :2]) < _OVER_HOLE_M
