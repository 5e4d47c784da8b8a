"""Two tasks in one scene: everything is the same in both, but for the words and the cube that counts."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.language import INSTRUCTION, decode_text
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.scene import BLUE, RED
from robot_rl.sim.task import Task
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]
TASKS = {"red": "pick_red_cube", "blue": "pick_blue_cube"}
OWN = ("joint", "finger", "tool.pos", "tool.xaxis")


def make(colour: str, num_envs: int = 4, **options: Any) -> SimVectorEnv:
    config = EnvConfig(task=TASKS[colour], num_threads=1, **options)
    return SimVectorEnv(config, num_envs, autoreset="disabled")


def task_of(colour: str) -> Task:
    return resolve("task", TASKS[colour])()


class Drawn:
    """Draws what a test says, in order, in the place of random numbers."""

    num_rows = 1

    def __init__(self, *draws: Any) -> None:
        self._draws = [np.atleast_2d(np.asarray(draw, float)) for draw in draws]

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: int = 1) -> Array:
        drawn = self._draws.pop(0)
        assert drawn.shape == (1, size)
        assert (np.asarray(low) <= drawn).all()
        assert (drawn <= np.asarray(high)).all()
        return drawn


def start(direction_rad: float, distance_m: float) -> Any:
    """Returns where an episode of both tasks begins; the middle is 0.5, 0.05."""
    rows = []
    for colour in TASKS:
        drawn: Any = Drawn([0.5, 0.05, 0.02], direction_rad, distance_m, 0.3, -0.2, [0.45, 0.1, 0.2])
        rows.append(task_of(colour).start(drawn))
    for name in TASKS:
        np.testing.assert_array_equal(rows[0].joints[name], rows[1].joints[name])
    return rows[0]


def test_the_cubes_lie_on_both_sides_of_the_middle() -> None:
    # From blue to red it is 0.14 m along +y: red is at 0.05 + 0.07, blue at 0.05 - 0.07. Half of the yaw of
    # 0.3 is 0.15: a quaternion (cos 0.15, 0, 0, sin 0.15).
    found = start(0.5 * math.pi, 0.14)
    turned = [math.cos(0.15), 0, 0, math.sin(0.15)]
    np.testing.assert_allclose(found.joints["red"], [[0.5, 0.12, 0.02, *turned]], atol=1e-12)
    turned = [math.cos(-0.1), 0, 0, math.sin(-0.1)]
    np.testing.assert_allclose(found.joints["blue"], [[0.5, -0.02, 0.02, *turned]], atol=1e-12)
    np.testing.assert_allclose(found.mocap["goal"], [[0.45, 0.1, 0.2]])


def test_half_a_turn_of_the_direction_exchanges_the_places() -> None:
    ahead, behind = start(-0.5 * math.pi, 0.1).joints, start(0.5 * math.pi, 0.1).joints
    np.testing.assert_allclose(ahead["red"][:, :3], behind["blue"][:, :3], atol=1e-12)
    np.testing.assert_allclose(ahead["blue"][:, :3], behind["red"][:, :3], atol=1e-12)


def test_neither_colour_has_a_place_of_its_own() -> None:
    found = task_of("red").start(EpisodeRng(np.arange(4000), np.zeros(4000, int))).joints
    red, blue = found["red"], found["blue"]
    apart = np.linalg.norm(red[:, :2] - blue[:, :2], axis=1)
    assert 0.10 <= apart.min() < 0.101
    assert 0.159 < apart.max() <= 0.16
    # An axis of a place has a deviation of at most 0.08 m: the difference of two means of 4000 has one of
    # 0.08 * sqrt(2 / 4000) = 1.8 mm.
    np.testing.assert_allclose(red.mean(axis=0)[:3], blue.mean(axis=0)[:3], atol=0.006)
    np.testing.assert_allclose(red.std(axis=0)[:3], blue.std(axis=0)[:3], atol=0.004)


def test_the_wanted_cube_at_the_goal_is_success_whatever_the_other_does() -> None:
    far, near = [0.40, 0.0, 0.02], [0.50, 0.1, 0.224]  # 24 mm above the goal, of at most 25
    view: Any = {
        "red.pos": np.array([far, near, far, near]),
        "blue.pos": np.array([far, far, near, near]),
        "goal.pos": np.array([[0.50, 0.1, 0.2]] * 4),
    }
    assert task_of("red").evaluate(view)["success"].tolist() == [False, True, False, True]
    assert task_of("blue").evaluate(view)["success"].tolist() == [False, False, True, True]


def test_the_reward_counts_the_wanted_cube_alone() -> None:
    view: Any = {
        "red.pos": np.array([[0.5, 0.0, 0.2]]),
        "red_in_tool.pos": np.zeros((1, 3)),
        "blue.pos": np.array([[0.5, 0.1, 0.2]]),
        "blue_in_tool.pos": np.array([[0.0, 0.1, 0.0]]),
        "goal.pos": np.array([[0.5, 0.0, 0.2]]),
    }
    # Red is held at the goal: 0.3 + 0.7. Blue is 10 cm from both: (0.3 + 0.7) * (1 - tanh 1).
    assert task_of("red").dense_reward(view) == pytest.approx([1.0])
    assert task_of("blue").dense_reward(view) == pytest.approx([1.0 - math.tanh(1.0)])


def test_the_expert_goes_above_the_wanted_cube() -> None:
    for colour in TASKS:
        env = make(colour)
        env.reset(seed=0)
        expert = env.expert()
        expert.act()
        assert expert.aim is not None
        np.testing.assert_allclose(expert.aim.position_m[:, :2], env.view[f"{colour}.pos"][:, :2])
        np.testing.assert_allclose(
            expert.aim.position_m[:, 2], 0.02 + 0.09
        )  # the cube's centre, and above it


def test_every_episode_of_one_task_is_one_of_the_other() -> None:
    """So success of a task with its own words is how often the other's wrong words are obeyed."""
    shown: dict[str, Any] = {
        "cameras": ("left", "wrist"),
        "image_size": (32, 32),
        "privileged": True,
        "state": OWN,
    }
    red, blue = (make(colour, instruction="task", randomize=True, **shown) for colour in TASKS)
    assert (red.state_names, red.privileged_names) == (blue.state_names, blue.privileged_names)
    assert red.horizon == blue.horizon
    pairs = [(red.reset(seed=2**31)[0], blue.reset(seed=2**31)[0])]
    rng = np.random.default_rng(0)
    for _ in range(6):
        action = rng.uniform(-1, 1, (4, len(red.action_names))).astype(np.float32)
        pairs.append((red.step(action)[0], blue.step(action)[0]))
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {INSTRUCTION}:
            np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
        assert decode_text(ours[INSTRUCTION]) == ["pick up the red cube and bring it to the green point"] * 4
        assert (
            decode_text(theirs[INSTRUCTION]) == ["pick up the blue cube and bring it to the green point"] * 4
        )


def test_the_names_are_the_colours() -> None:
    model = on_cpu(make("red", 1).backend).model
    for colour, rgba in (("red", RED), ("blue", BLUE)):
        np.testing.assert_allclose(model.geom(colour).rgba, rgba, atol=1e-7)


def test_the_policy_guesses_both_cubes_whatever_it_is_told() -> None:
    hidden = make("blue", 1, state=OWN, privileged=True).privileged_names
    for thing in ("red_in_tool", "blue_in_tool", "goal_in_tool"):
        assert {f"{thing}.pos.{axis}" for axis in range(3)} <= set(hidden)
