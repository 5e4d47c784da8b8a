"""Take a square peg from the table and put it into a square hole."""

import mujoco

from robot_rl.core.arrays import namespace, norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.poses import free_pose
from robot_rl.sim.randomize import Vary
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import add_free_box, add_hole_block
from robot_rl.sim.start_classes import CLASSES, Resets
from robot_rl.sim.task import Aim, Array, Start, Task, View, closeness
from robot_rl.sim.tasks.grasping import carry_to, grasp_aim, heading, quarter_turn

PEG_HALF_M = (0.015, 0.015, 0.06)
CLEARANCE_M = 0.0025
"""Of each side: the hole is 5 mm wider than the peg."""
BLOCK_HEIGHT_M = 0.05
INSERTED_M = 0.01
"""The peg's lower end must be this near to the hole's floor."""
_GRIP_M = 0.04
"""Height above the peg's centre at which the expert grasps it."""


class PegInsert(Task):
    """Grasp the upright peg, lift it and put it into the hole of the block.

    Peg 3 cm square and 12 cm long, hole 3.5 cm square and 5 cm deep. Randomised: peg position and
    yaw, block position, arm posture; with `randomize`, friction and mass. Success: the peg's lower
    end within 1 cm of the hole's floor and inside of its walls.
    """

    name = "peg_insert"
    instruction = "put the red peg into the hole of the blue block"
    horizon_s = 7.0
    cup_serves = True
    observation = (
        "tool.linvel",
        "peg.pos",
        "peg.xaxis",
        "peg.zaxis",
        "peg_in_tool.pos",
        "peg_in_tool.xaxis",
        "tip_in_hole.pos",
    )
    privileged = ("tip.pos", "grip.pos", "grip.xaxis", "hole.pos")
    resets = Resets(
        thing="peg",
        goal="hole",
        at_goal_m=(0.0, 0.0, PEG_HALF_M[2]),
        way="walk",
        near_goal_m=(0.03, 0.03, 0.06),
        grip_m=(0.0, 0.0, _GRIP_M),
        grip_half_m=(*PEG_HALF_M[:2], 0.02),
        classes=CLASSES,
    )
    vary = (
        Vary(field="geom_friction", element="peg", low=0.8, high=1.3, component=0),
        Vary(field="body_mass", element="peg", low=0.5, high=2.0),
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        peg = add_free_box(spec, "peg", half_size_m=PEG_HALF_M, mass_kg=0.1)
        peg.add_site(name="grip", pos=[0.0, 0.0, _GRIP_M], group=4)
        peg.add_site(name="tip", pos=[0.0, 0.0, -PEG_HALF_M[2]], group=4)
        add_hole_block(spec, "hole", hole_half_m=PEG_HALF_M[0] + CLEARANCE_M, height_m=BLOCK_HEIGHT_M)

    def start(self, rng: EpisodeRng) -> Start:
        peg = rng.uniform((0.42, -0.18, PEG_HALF_M[2]), (0.56, -0.04, PEG_HALF_M[2]), size=3)
        yaw = rng.uniform(-0.5, 0.5)
        hole = rng.uniform((0.42, 0.08, 0.0), (0.56, 0.20, 0.0), size=3)
        return Start(joints={"peg": free_pose(peg, yaw)}, mocap={"hole": hole})

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": inserted(view["tip_in_hole.pos"])}

    def dense_reward(self, view: View) -> Array:
        reach = closeness(norm(view["grip.pos"] - view["tool.pos"]), 0.1)
        return 0.3 * reach + 0.7 * insertion_reward(view["tip_in_hole.pos"])

    def expert(self, view: View, offset_m: Array) -> Aim:
        lift = carry_to(
            view["tip.pos"], view["hole.pos"] + offset_m, clearance_m=BLOCK_HEIGHT_M + 0.015, aligned_m=0.0015
        )
        yaw = quarter_turn(-heading(view["peg.xaxis"]))
        return grasp_aim(
            view, "grip", 0.0 * offset_m,
            carry_to_m=view["tool.pos"] + lift, carry_yaw_rad=yaw, shut_width_m=0.032, centred_m=0.008,
        )  # fmt: skip


def inserted(tip_in_hole_m: Array) -> Array:
    """Returns where the peg's lower end is near the hole's floor and between its walls, (B,) bool."""
    xp = namespace(tip_in_hole_m)
    inside = xp.max(xp.abs(tip_in_hole_m[:, :2]), axis=1) < 2 * CLEARANCE_M
    return inside & (tip_in_hole_m[:, 2] < INSERTED_M)


def insertion_reward(tip_in_hole_m: Array) -> Array:
    """Returns a reward in [0, 1] for coming over the hole and then down."""
    sideways = norm(tip_in_hole_m[:, :2])
    over = closeness(sideways, 0.05)
    depth = namespace(sideways).clip(1.0 - tip_in_hole_m[:, 2] / (BLOCK_HEIGHT_M + 0.02), 0.0, 1.0)
    return 0.5 * over + 0.5 * depth * (sideways < 4 * CLEARANCE_M)
