"""A task of its own."""

from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.task import Start
from robot_rl.sim.tasks.reach import Reach


class ReachHigh(Reach):
    """Move the tool to a goal point 35 to 55 cm above the table.

    Randomised: goal position, arm posture. Success: the tool within 2 cm of the goal.
    """

    name = "reach_high"

    def start(self, rng: EpisodeRng) -> Start:
        return Start(mocap={"goal": rng.uniform((0.35, -0.2, 0.35), (0.55, 0.2, 0.55), size=3)})
