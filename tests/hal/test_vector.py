"""Chunks: what `step_chunk` does with the steps of an env, told by an env that counts."""

from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.hal.vector import Array, given_seeds, row_mask
from robot_rl.testing.devices import FakeEnv


def chunk(num_envs: int, length: int) -> Array:
    return np.zeros((num_envs, length, 2), np.float32)


def test_a_chunk_counts_like_its_steps() -> None:
    # The reward of step k is k: 1, 2, 3; the state's first entry is the step.
    env = FakeEnv(2)
    env.reset(seed=5)
    done = env.step_chunk(chunk(2, 4), 3)
    assert done.reward.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert done.valid.all()
    assert done.obs["state"][:, 0].tolist() == [3, 3]
    assert not done.terminated.any()
    assert not done.truncated.any()
    assert "final_obs" not in done.infos


def test_a_row_whose_episode_ends_waits_for_the_others() -> None:
    # Env 0 terminates at step 2, env 1 is truncated at step 3, env 2 goes on to step 4.
    env = FakeEnv(3, terminate_after=[2, None, None], truncate_after=[9, 3, 9])
    env.reset(seed=5)
    done = env.step_chunk(chunk(3, 4), 4)
    assert done.valid.tolist() == [[True, True, False, False], [True, True, True, False], [True] * 4]
    assert done.reward.tolist() == [[1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]]
    assert done.terminated.tolist() == [True, False, False]
    assert done.truncated.tolist() == [False, True, False]
    assert done.infos["success"].tolist() == [True, False, False]
    # What is returned is (step, episode): rows 0 and 1 wait at the beginning of episode 1.
    assert done.obs["state"][:, :2].tolist() == [[0, 1], [0, 1], [4, 0]]
    # final_obs holds each row where its own episode ended, although that was at different steps.
    assert done.infos["_final_obs"].tolist() == [True, True, False]
    assert done.infos["final_obs"]["state"][:2, :2].tolist() == [[2, 0], [3, 0]]


def test_a_chunk_ends_early_when_nobody_is_left() -> None:
    env = FakeEnv(2, truncate_after=2)
    env.reset(seed=5)
    done = env.step_chunk(chunk(2, 5), 5)
    assert done.valid.sum(axis=1).tolist() == [2, 2]
    assert done.obs["state"][:, :2].tolist() == [[0, 1], [0, 1]]


def test_without_autoreset_the_last_observation_stays_until_the_caller_resets() -> None:
    env = FakeEnv(2, truncate_after=[2, 9], autoreset="disabled")
    env.reset(seed=5)
    done = env.step_chunk(chunk(2, 3), 3)
    assert "final_obs" not in done.infos
    assert done.obs["state"][:, :2].tolist() == [[2, 0], [3, 0]]
    obs, _ = env.reset(options={"reset_mask": done.truncated})
    assert obs["state"][:, :2].tolist() == [[0, 1], [3, 0]]


def test_commanded_actions_are_kept_by_step_and_clipped() -> None:
    # Actions 0.5 and 3.0, the latter clipped to 1; row 0 ends after one step.
    env = FakeEnv(2, truncate_after=[1, 9])
    env.reset(seed=5)
    actions = np.stack([np.full((2, 2), 0.5), np.full((2, 2), 3.0)], axis=1).astype(np.float32)
    executed = env.step_chunk(actions, 2).infos["commanded_action"]
    assert executed[:, :, 0].tolist() == [[0.5, 0.0], [0.5, 1.0]]


class Talkative(FakeEnv):
    """Adds infos of other kinds: a flag, a number a row, and a word."""

    def step_masked(self, actions: Array, active: Array | None) -> Any:
        obs, reward, terminated, truncated, infos = super().step_masked(actions, active)
        infos["limited"] = obs["state"][:, 0] == 1  # at the first step only
        infos["force"] = reward * 10.0
        infos["note"] = "hello"
        return obs, reward, terminated, truncated, infos


def test_other_infos_are_merged_by_their_kind() -> None:
    env = Talkative(2, truncate_after=[2, 9])
    env.reset(seed=5)
    infos = env.step_chunk(chunk(2, 3), 3).infos
    assert infos["limited"].tolist() == [True, True]  # at some step
    assert infos["force"].tolist() == [20.0, 30.0]  # at each row's last executed step
    assert infos["note"] == "hello"


@pytest.mark.parametrize(
    ("shape", "n_exec", "message"),
    [
        ((2, 4, 3), 2, r"got actions of shape \(2, 4, 3\), need \(2, H, 2\)"),
        ((3, 4, 2), 2, r"got actions of shape \(3, 4, 2\), need \(2, H, 2\)"),
        ((2, 2), 2, r"got actions of shape \(2, 2\)"),
        ((2, 4, 2), 5, "got n_exec 5, allowed 1 to 4, the chunk length"),
        ((2, 4, 2), 0, "got n_exec 0, allowed 1 to 4"),
    ],
)
def test_a_wrong_chunk_is_named(shape: tuple[int, ...], n_exec: int, message: str) -> None:
    env = FakeEnv(2)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=f"count.step_chunk: {message}"):
        env.step_chunk(np.zeros(shape, np.float32), n_exec)


def test_no_mask_means_every_row() -> None:
    assert row_mask(None, 2).tolist() == [True, True]
    assert row_mask(np.array([0, 1]), 2).tolist() == [False, True]


def test_only_active_envs_move() -> None:
    env = FakeEnv(3, truncate_after=[9, 9, 2], autoreset="disabled")
    env.reset(seed=5)
    active = np.array([True, False, True])
    done = env.step_chunk(chunk(3, 4), 4, active)
    assert done.valid.sum(axis=1).tolist() == [4, 0, 2]
    assert done.reward.sum(axis=1).tolist() == [10, 0, 3]
    assert done.obs["state"][:, 0].tolist() == [4, 0, 2]
    assert done.truncated.tolist() == [False, False, True]
    assert active.tolist() == [True, False, True]  # the caller's own


def test_seeds_are_those_given() -> None:
    large = 2**63 + 5
    seeds, given = given_seeds([None, large, 3], 3, at="reach")
    assert (seeds.tolist(), given.tolist(), seeds.dtype) == ([0, large, 3], [False, True, True], np.uint64)
    assert [value.tolist() for value in given_seeds(7, 2, at="reach")] == [[7, 8], [True, True]]
    assert [value.tolist() for value in given_seeds(None, 2, at="reach")] == [[0, 0], [False, False]]
    with pytest.raises(ConfigError, match=r"reach\.reset: got 1 seeds, need 2, one an env"):
        given_seeds([None], 2, at="reach")
