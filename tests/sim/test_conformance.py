"""Tasks that break a rule are refused, and the message names it."""

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import TABLE
from robot_rl.core.seeding import EpisodeRng
from robot_rl.hal.vector import Array
from robot_rl.sim.backends.backend import View
from robot_rl.sim.conformance import ConformanceError, check_task
from robot_rl.sim.task import Aim, Start
from robot_rl.sim.tasks.reach import Reach


class Wordless(Reach):
    """Randomised: all. Success: the tool at the goal."""

    name = "wordless"
    instruction = "go"


class Solved(Reach):
    """Randomised: all. Success: always."""

    name = "solved"

    def evaluate(self, view: View) -> dict[str, Array]:
        return {"success": view["tool.pos"][:, 2] > 0}


class Counts(Reach):
    """Keeps a number outside the state. Randomised: all. Success: the tool at the goal."""

    name = "counts"

    def __init__(self) -> None:
        self.starts = 0

    def start(self, rng: EpisodeRng) -> Start:
        self.starts += 1
        goal = rng.uniform((0.4, -0.2, 0.1), (0.6, 0.2, 0.3), size=3)
        goal[:, 2] += 0.001 * self.starts
        return Start(mocap={"goal": goal})


class Misled(Reach):
    """Has an expert that aims 30 cm too far. Randomised: all. Success: the tool at the goal."""

    name = "misled"

    def expert(self, view: View, offset_m: Array) -> Aim:
        return super().expert(view, offset_m + np.array([0.3, 0.0, 0.0]))


class Generous(Reach):
    """Pays more than 1. Randomised: all. Success: the tool at the goal."""

    name = "generous"

    def dense_reward(self, view: View) -> Array:
        return 1.0 + super().dense_reward(view)


class Taken(Reach):
    """Has a name that is taken. Randomised: all. Success: the tool at the goal."""


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("Wordless", r"task wordless: instruction: got 'go', need three words or more"),
        ("Solved", r"task solved: episodes that begin solved: got 100%, need 1 % or less"),
        ("Counts", r"reset\(seed=.*'state' differs: got"),
        ("Misled", r"task misled: success of the expert: got [1-3]?\d%, need 90% or more"),
        ("Generous", r"task generous: dense reward: got 1\.\d+ to [12]\.?\d*, need 0 to 1"),
    ],
)
def test_a_task_that_breaks_a_rule_is_refused(task: str, message: str) -> None:
    before = dict(TABLE["task"])
    with pytest.raises(ConformanceError, match=message):
        check_task(f"{__name__}:{task}")
    assert TABLE["task"] == before


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the task 'reach' is robot_rl\.sim\.tasks\.reach:Reach already"):
        check_task(f"{__name__}:Taken")


def test_a_task_of_the_registry_is_checked_on_another_robot() -> None:
    check_task("reach", robot="gantry")
