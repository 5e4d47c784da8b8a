"""Bring the tool to a point in the air."""

from collections.abc import Callable

import mujoco

from robot_rl.core.arrays import namespace, norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import add_goal
from robot_rl.sim.start_classes import Resets
from robot_rl.sim.task import Aim, Array, Control, Start, Task, View, closeness

GOAL_RADIUS_M = 0.02
_RAISED_M = 0.4
"""The highest goal; the tool begins 12 cm lower."""


class Reach(Task):
    """Move the tool to the goal point.

    Randomised: goal position, arm posture. Success: the tool within 2 cm of the goal.
    """

    name = "reach"
    instruction = "move the gripper to the green point"
    horizon_s = 2.5
    control = Control(rotation="none")
    needs_gripper = False
    symmetric = True
    observation = ("tool.linvel", "goal.pos", "goal_in_tool.pos")

    resets = Resets(
        goal="goal", near_goal_m=(0.06, 0.06, 0.06), hold="none", classes=("reaching", "near_goal")
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        add_goal(spec)

    def start(self, rng: EpisodeRng) -> Start:
        return Start(mocap={"goal": rng.uniform((0.35, -0.25, 0.08), (0.65, 0.25, 0.40), size=3)})

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": self._distance(view) < GOAL_RADIUS_M}

    def dense_reward(self, view: View) -> Array:
        return closeness(self._distance(view), 0.1)

    def predicates(self) -> dict[str, Callable[[View], Array]]:
        return {"raised": lambda view: view["tool.pos"][:, 2] > _RAISED_M}

    def expert(self, view: View, offset_m: Array) -> Aim:
        still = namespace(offset_m).zeros_like(offset_m[:, 0])
        return Aim(position_m=view["goal.pos"] + offset_m, yaw_rad=still, closed=still > 0)

    @staticmethod
    def _distance(view: View) -> Array:
        return norm(view["tool.pos"] - view["goal.pos"])
