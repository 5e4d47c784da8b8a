"""Drive to a point that the arm does not reach from where it stands, and bring the tool there."""

import mujoco

from robot_rl.core.arrays import norm
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.robots.robot import Robot
from robot_rl.sim.scene import add_camera, add_goal
from robot_rl.sim.task import Array, Control, Start, Task, View, closeness

GOAL_RADIUS_M = 0.03


class MobileReach(Task):
    """Drive the base and move the tool, until the tool is at the goal point.

    Randomised: goal position (0.9 to 1.8 m ahead, 0.8 m to either side, 30 to 80 cm high), posture of base
    and arm. Success: the tool within 3 cm of the goal.
    """

    name = "mobile_reach"
    instruction = "drive to the green point and touch it with the gripper"
    horizon_s = 6.0
    control = Control(rotation="none", gripper="shut")
    default_robot = "mobile_panda"
    body = "mobile_arm"
    camera = "far"
    needs_gripper = False
    observation = ("tool.linvel", "goal.pos", "goal_in_tool.pos")

    def scene(self, spec: mujoco.MjSpec, robot: Robot) -> None:
        add_goal(spec, radius_m=GOAL_RADIUS_M)
        add_camera(spec, "far", position_m=(3.2, -2.8, 2.2), target_m=(0.8, 0.0, 0.4))

    def start(self, rng: EpisodeRng) -> Start:
        return Start(mocap={"goal": rng.uniform((0.9, -0.8, 0.3), (1.8, 0.8, 0.8), size=3)})

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": self._distance(view) < GOAL_RADIUS_M}

    def dense_reward(self, view: View) -> Array:
        return closeness(self._distance(view), 0.5)

    @staticmethod
    def _distance(view: View) -> Array:
        return norm(view["tool.pos"] - view["goal.pos"])
