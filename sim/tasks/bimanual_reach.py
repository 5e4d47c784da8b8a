"""Bring two tools to two points at the same time."""

import mujoco

from robot_rl.core.arrays import namespace, norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import BLUE, GREEN, add_camera, add_goal
from robot_rl.sim.task import Array, Control, Start, Task, View, closeness

GOAL_RADIUS_M = 0.03
_SIDES = (("left", 1.0), ("right", -1.0))


class BimanualReach(Task):
    """Move both tools to their goal points, green on the left and blue on the right, and hold them there.

    Randomised: both goal positions, posture of both arms. Success: each tool within 3 cm of its goal,
    both for a quarter of a second.
    """

    name = "bimanual_reach"
    instruction = "hold the left gripper at the green point and the right one at the blue point"
    horizon_s = 4.0
    control = Control(rotation="none", gripper="shut")
    default_robot = "two_pandas"
    body = "two_arms"
    camera = "wide"
    needs_gripper = False
    hold_s = 0.25
    observation = tuple(
        f"{thing}.{kind}"
        for side, _ in _SIDES
        for thing, kind in (
            (f"{side}_tool", "linvel"),
            (f"{side}_goal", "pos"),
            (f"{side}_goal_in_{side}_tool", "pos"),
        )
    )

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        for (side, _), (*rgb, _) in zip(_SIDES, (GREEN, BLUE), strict=True):
            add_goal(spec, f"{side}_goal", radius_m=GOAL_RADIUS_M, rgba=(rgb[0], rgb[1], rgb[2], 0.45))
        add_camera(spec, "wide", position_m=(1.9, 0.0, 1.2), target_m=(0.3, 0.0, 0.2))

    def start(self, rng: EpisodeRng) -> Start:
        low, high = (0.35, 0.1, 0.08), (0.65, 0.5, 0.40)
        drawn = {side: rng.uniform(low, high, size=3) for side, _ in _SIDES}
        for side, sign in _SIDES:
            drawn[side][:, 1] *= sign
        return Start(mocap={f"{side}_goal": place for side, place in drawn.items()})

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": self._farthest(view) < GOAL_RADIUS_M}

    def dense_reward(self, view: View) -> Array:
        left, right = self._distances(view)
        return 0.5 * (closeness(left, 0.1) + closeness(right, 0.1))

    def _farthest(self, view: View) -> Array:
        left, right = self._distances(view)
        return namespace(left).maximum(left, right)

    @staticmethod
    def _distances(view: View) -> tuple[Array, Array]:
        left, right = (norm(view[f"{side}_tool.pos"] - view[f"{side}_goal.pos"]) for side, _ in _SIDES)
        return left, right
