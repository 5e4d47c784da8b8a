"""Gymnasium's environments by hand, where the conformance suite (tests/conformance) is silent."""

from collections.abc import Callable, Generator
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from robot_rl.core.errors import ConfigError, RobotRLError
from robot_rl.envs.gym import GymVectorEnv
from robot_rl.hal.conformance import check_vector_env

Autoreset = Literal["same_step", "disabled"]
SHORT = {"max_episode_steps": 20}
PICTURE = Box(0, 255, (4, 6, 3), np.uint8)


class Counting(gymnasium.Env[Any, Any]):
    """Counts steps; shows a number, a choice and a picture; says what it was commanded."""

    observation_space = Dict(
        count=Box(-10.0, 10.0, (2,)), which=Discrete(3), wrist=Box(0, 255, (4, 6, 3), np.uint8)
    )
    action_space = Box(np.array([0.0, -4.0], np.float32), np.array([10.0, 4.0], np.float32))

    def __init__(self, spoil: str = "", **how: Any) -> None:
        self.spoil = spoil

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.first, self.count, self.got = float(self.np_random.uniform()), 0, np.zeros(2)
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.count, self.got = self.count + 1, action
        reward = np.nan if self.spoil == "reward" else float(action[0])
        return self._look(), reward, self.count == 7, False, {"is_success": self.count == 7}

    def _look(self) -> dict[str, Any]:
        count = np.nan if self.spoil == "state" else self.first + self.count
        numbers = np.array([count, self.got[1]], np.float32)
        picture = np.full((4, 6, 3), self.count, np.uint8)
        return {"count": numbers, "which": self.count % 3, "wrist": picture}


@pytest.fixture(autouse=True)
def counting() -> Generator[str]:
    """Registers the environment above under a name."""
    gymnasium.register("robot_rl_tests/Counting-v0", Counting, max_episode_steps=9)
    yield "robot_rl_tests/Counting-v0"
    gymnasium.registry.pop("robot_rl_tests/Counting-v0")


class Slashed(Counting):
    """Has a slash in a key, and two pictures whose last keys are equal."""

    observation_space = Dict(
        {"arm/count": Box(-10.0, 10.0, (2,)), "a": Dict(rgb=PICTURE), "b": Dict(rgb=PICTURE)}
    )

    def _look(self) -> dict[str, Any]:
        seen = super()._look()
        return {"arm/count": seen["count"], "a": {"rgb": seen["wrist"]}, "b": {"rgb": seen["wrist"] + 1}}


def test_keys_may_have_slashes_and_pictures_of_one_name_get_all_their_keys() -> None:
    gymnasium.register("robot_rl_tests/Slashed-v0", Slashed, max_episode_steps=9)
    try:
        env = GymVectorEnv("robot_rl_tests/Slashed-v0", settings={"disable_env_checker": True})
    finally:
        gymnasium.registry.pop("robot_rl_tests/Slashed-v0")
    obs, _ = env.reset(seed=5)
    assert env.state_names == ("arm/count_0", "arm/count_1")
    assert [int(obs[f"{camera}.rgb"].max()) for camera in ("a_rgb", "b_rgb")] == [0, 1]


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_one_of_pictures_and_choices_keeps_the_contract(counting: str, autoreset: Autoreset) -> None:
    check_vector_env(lambda num_envs: GymVectorEnv(counting, num_envs, autoreset=autoreset))


def test_the_first_episode_of_a_seed_is_gymnasiums_own() -> None:
    ours, theirs = GymVectorEnv("Hopper-v5", 2), gymnasium.make("Hopper-v5")
    obs, _ = ours.reset(seed=[3, 11])
    truth, _ = theirs.reset(seed=11)
    np.testing.assert_array_equal(obs["state"][1], truth.astype(np.float32))
    for action in np.random.default_rng(0).uniform(-1, 1, (5, 2, 3)).astype(np.float32):
        obs, reward, *_ = ours.step(action)
        truth, true_reward, *_ = theirs.step(action[1])
        np.testing.assert_array_equal(obs["state"][1], truth.astype(np.float32))
        assert reward[1] == true_reward


def test_actions_are_shares_of_the_range_and_numbers_stand_in_order(counting: str) -> None:
    env = GymVectorEnv(counting)
    assert env.state_names == ("count_0", "count_1", "which_0", "which_1", "which_2")
    assert (env.horizon, env.action_names) == (9, ("action_0", "action_1"))
    first = env.reset(seed=5)[0]["state"][0, 0]
    obs, reward, *_ = env.step(np.array([[0.5, -2.0]], np.float32))  # the second is clipped to -1
    np.testing.assert_allclose(obs["state"][0], [first + 1, -4.0, 0, 1, 0], rtol=1e-6)
    assert reward[0] == 7.5
    assert (obs["wrist.rgb"] == 1).all()


def test_the_end_is_told_with_its_success_and_the_next_begins(counting: str) -> None:
    env = GymVectorEnv(counting)
    first = env.reset(seed=5)[0]["state"][0, 0]
    for _ in range(6):
        env.step(np.zeros((1, 2)))
    obs, _, terminated, truncated, infos = env.step(np.zeros((1, 2)))
    assert terminated[0]
    assert not truncated[0]
    assert infos["success"][0]
    assert infos["final_obs"]["state"][0, 0] == pytest.approx(first + 7)
    assert obs["state"][0, 0] not in (first, first + 7)
    assert obs["state"][0, 0] < 1.0
    others = [env.reset()[0]["state"][0, 0] for _ in range(5)]
    assert len(set(others)) == 5


@pytest.mark.parametrize("env_id", ["Hopper-v5", "robot_rl_tests/Counting-v0"])
def test_a_state_dict_goes_on_to_the_same_bytes(env_id: str) -> None:
    env, fresh = GymVectorEnv(env_id, 3), GymVectorEnv(env_id, 3)
    actions = np.random.default_rng(1).uniform(-1, 1, (40, 3, len(env.action_names))).astype(np.float32)
    env.reset(seed=2)
    now = [env.step(action)[0] for action in actions[:11]][-1]
    np.testing.assert_array_equal(fresh.load_state_dict(env.state_dict())["state"], now["state"])
    for action in actions[11:]:
        one, two = env.step(action), fresh.step(action)
        for key in one[0]:
            np.testing.assert_array_equal(one[0][key], two[0][key])
        for a, b in zip(one[1:4], two[1:4], strict=True):
            np.testing.assert_array_equal(a, b)


class Endless(Counting):
    """Nobody ends its episodes where it does not."""


class Touchy(Counting):
    """Takes what is in its space and nothing else; terminates at its time limit."""

    action_space = Box(np.float32(-1.7), np.float32(2.9), (2,))

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        seen, reward, _, truncated, info = super().step(action)
        return seen, reward, self.count == 3, truncated, info


def test_an_end_of_the_range_is_in_it_and_an_episode_ends_once() -> None:
    gymnasium.register("robot_rl_tests/Touchy-v0", lambda **how: Touchy(), max_episode_steps=3)
    try:
        env = GymVectorEnv("robot_rl_tests/Touchy-v0", settings={"disable_env_checker": True})
        env.reset(seed=0)
        ends = [env.step(np.full((1, 2), action, np.float32)) for action in (1.0, -1.0, 1.0)]
    finally:
        gymnasium.registry.pop("robot_rl_tests/Touchy-v0")
    assert [bool(end[2][0]) for end in ends] == [False, False, True]
    assert [bool(end[3][0]) for end in ends] == [False, False, False]


def test_what_the_caller_changes_is_not_what_was_played(counting: str) -> None:
    env = GymVectorEnv(counting)
    env.reset(seed=0)
    env.step(np.ones((1, 2)))[4]["commanded_action"][:] = 0.0
    assert (env.state_dict()["played"][0] == 1.0).all()


class Listed(Counting):
    """Takes one of three actions."""

    action_space = Discrete(3)


class Boundless(Counting):
    """Takes any number."""

    action_space = Box(-np.inf, np.inf, (2,))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Listed, r"Odd-v0: actions are Discrete\(3\), allowed: a Box of real numbers"),
        (Endless, r"Odd-v0: nothing ends its episodes\. Give max_episode_steps"),
        (Boundless, r"Odd-v0: actions have no bounds: .*RescaleAction"),
    ],
)
def test_spaces_that_no_policy_serves_are_named(kind: Callable[..., Any], message: str) -> None:
    steps = None if kind is Endless else 9
    gymnasium.register("robot_rl_tests/Odd-v0", kind, max_episode_steps=steps)
    try:
        with pytest.raises(ConfigError, match=message):
            GymVectorEnv("robot_rl_tests/Odd-v0")
    finally:
        gymnasium.registry.pop("robot_rl_tests/Odd-v0")


def test_what_cannot_be_made_is_answered(counting: str) -> None:
    with pytest.raises(ConfigError, match=r"env 'Hoper-v5': .*package:Name-v0"):
        GymVectorEnv("Hoper-v5")
    with pytest.raises(ConfigError, match=r"env 'Pendulum-v1': .*unexpected keyword argument 'speed'"):
        GymVectorEnv("Pendulum-v1", settings={"speed": 3})
    with pytest.raises(ConfigError, match="num_envs: got 0, allowed: 1 or more"):
        GymVectorEnv(counting, 0)
    env = GymVectorEnv(counting)
    with pytest.raises(RobotRLError, match="step before the first reset"):
        env.step(np.zeros((1, 2)))
    two = GymVectorEnv(counting, 2)
    two.reset(seed=0)
    with pytest.raises(ConfigError, match="envs in the state: got 2, allowed: 1"):
        env.load_state_dict(two.state_dict())
    with pytest.raises(ConfigError, match="allowed: reset_mask"):
        env.reset(options={"states": np.zeros((1, 2))})


@pytest.mark.parametrize(
    ("spoil", "message"), [("state", "env 0: count_0 is not finite"), ("reward", "env 0: the reward is nan")]
)
def test_what_is_not_finite_ends_nothing_in_silence(counting: str, spoil: str, message: str) -> None:
    env = GymVectorEnv(counting, settings={"spoil": spoil, "disable_env_checker": True})

    def play() -> None:
        env.reset(seed=0)
        env.step(np.zeros((1, 2)))

    with pytest.raises(RobotRLError, match=message):
        play()
