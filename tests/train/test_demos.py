"""Demonstrations: whole episodes in the order of their seeds, and what the base makes of them."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robot_rl.config import load
from robot_rl.core.errors import ConfigError
from robot_rl.core.policy import ChunkSample, Policy
from robot_rl.data.demos import Episodes, save_episodes
from robot_rl.hal.vector import Array
from robot_rl.rollout.envs import make_expert
from robot_rl.testing.devices import FakeEnv
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import collect_episodes, executed, first_seed, load_demonstrations, relabelled
from robot_rl.train.recorded import DemosConfig
from tests.plain import Plain


class Steady:
    """An expert that always does the same."""

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs

    def act(self) -> Array:
        return np.full((self._num_envs, 2), 0.5, np.float32)


class Planner(Plain, nn.Module):
    """Plans (step + h) / 100 for the h-th action of its chunk."""

    horizon, action_dim = 5, 2

    def sample(self, obs: dict[str, Tensor], **_: Any) -> ChunkSample:
        step = obs["state"][:, :1] + torch.arange(self.horizon)
        return ChunkSample(torch.stack([step, step], dim=-1) / 100.0)


def collected() -> Episodes:
    # Env 0 succeeds after 3 steps, env 1 runs out of time after 4; seeds 20, 21, 22 make 3 + 4 + 3 steps.
    env = FakeEnv(2, terminate_after=[3, None], truncate_after=[None, 4], autoreset="disabled")
    return collect_episodes(env, Steady(2), np.arange(20, 23, dtype=np.uint64))


def test_episodes_are_whole_and_in_the_order_of_their_seeds() -> None:
    episodes = collected()
    episodes.check()
    assert episodes.num_episodes == 3
    assert episodes.episode_index.tolist() == [0] * 3 + [1] * 4 + [2] * 3
    # state = (step, episode, seed, ...)
    assert episodes.obs["state"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert episodes.obs["state"][[0, 3, 7], 2].tolist() == [20, 21, 22]
    assert episodes.final_obs["state"][:, 0].tolist() == [3, 4, 3]
    assert episodes.reward.tolist() == [1, 2, 3, 1, 2, 3, 4, 1, 2, 3]
    assert np.flatnonzero(episodes.terminated).tolist() == [2, 9]
    assert np.flatnonzero(episodes.truncated).tolist() == [6]
    assert episodes.episode_success().tolist() == [True, False, True]
    assert (episodes.action == 0.5).all()


def sent_and_episodes(disturb: float, num_envs: int = 40, last_steps: int = 20) -> tuple[Array, Episodes]:
    """Returns the actions (T, B, A) that the envs got, and the episodes, of 20 steps but for the last."""
    ends = [20] * (num_envs - 1) + [last_steps]
    env = FakeEnv(num_envs, truncate_after=ends, autoreset="disabled")
    env.action_names = ("arm", "gripper")
    sent, step = list[Array](), env.step_masked

    def spied(actions: Array, active: Array | None) -> Any:
        sent.append(actions.copy())
        return step(actions, active)

    env.step_masked = spied
    seeds = first_seed(7) + np.arange(num_envs, dtype=np.uint64)
    episodes = collect_episodes(env, Steady(num_envs), seeds, disturb=disturb)
    return np.stack(sent), episodes


def sent_and_kept(disturb: float, num_envs: int = 40) -> tuple[Array, Array]:
    """Returns the actions (T, B, A) that the envs got, and those (B, T, A) that were kept, of 20 steps."""
    sent, episodes = sent_and_episodes(disturb, num_envs)
    return sent, episodes.action.reshape(num_envs, 20, 2)


def test_of_a_pushed_expert_what_it_wanted_is_kept() -> None:
    sent, kept = sent_and_kept(0.2)
    assert (kept == 0.5).all()
    assert (sent[..., 1] == 0.5).all()  # nobody pushes the gripper
    push = sent[..., 0] - 0.5
    pushed = (push != 0).any(axis=0)
    # 28 of 40 episodes are expected to be pushed, with a standard deviation of sqrt(40 * 0.7 * 0.3) = 2.9.
    assert 28 - 3 * 2.9 < pushed.sum() < 28 + 3 * 2.9
    # The push begins at 0 and stays for 5 steps or so: after 10, its standard deviation is 0.2 (of some 280
    # draws, of which about 1 in 9 is independent: 5 sigma are 0.2 * 5 / sqrt(2 * 31) = 0.13), and a step
    # changes it by 0.2 * sqrt(2 * (1 - 0.8)) = 0.126.
    late = push[10:, pushed]
    assert late.std() == pytest.approx(0.2, abs=0.13)
    assert np.diff(late, axis=0).std() == pytest.approx(0.126, abs=0.04)
    again, _ = sent_and_kept(0.2)
    assert np.array_equal(again, sent)
    alone, _ = sent_and_kept(0.2, num_envs=3)
    assert np.array_equal(alone, sent[:, :3])


def test_what_was_executed_is_found_again() -> None:
    # 10 episodes of 20 steps, and one of 8.
    sent, kept = sent_and_episodes(0.2, num_envs=11, last_steps=8)
    found = executed(kept, DemosConfig(disturb=0.2), run_seed=7)
    assert np.array_equal(found.action[:200].reshape(10, 20, 2), sent[:, :10].swapaxes(0, 1))
    assert np.array_equal(found.action[200:], sent[:8, 10])
    assert (kept.action == 0.5).all()  # what is cloned stays as it was
    assert executed(kept, DemosConfig(), run_seed=7) is kept


def test_a_replay_reads_what_was_executed_and_a_clone_what_was_wanted(tmp_path: Path) -> None:
    sent, kept = sent_and_episodes(0.2, num_envs=4)
    save_episodes(tmp_path / "demos", kept)
    config = load(RunConfig, ["recipe=smoke", "seed=7", "demos.disturb=0.2"], config_name="train")
    wanted = load_demonstrations(tmp_path / "demos", config)
    assert np.array_equal(wanted.action, kept.action)
    found = load_demonstrations(tmp_path / "demos", config, as_executed=True)
    assert np.array_equal(found.action.reshape(4, 20, 2), sent.swapaxes(0, 1))


def test_without_a_push_the_envs_get_what_is_kept() -> None:
    sent, _ = sent_and_kept(0.0)
    assert (sent == 0.5).all()


@pytest.mark.parametrize("n_exec", [1, 2, 5])
def test_base_actions_follow_chunks_planned_every_n_exec_steps(n_exec: int) -> None:
    replay = relabelled(collected(), cast(Policy, Planner()), n_exec=n_exec, seed=0)
    assert len(replay) == 10
    batch = replay.sample(200, n_step=1, gamma_step=0.9, rng=np.random.default_rng(0))
    # The planner says which step each action is for, whichever decision it comes from.
    np.testing.assert_allclose(batch.base_action[:, 0], batch.obs["state"][:, 0] / 100.0, atol=1e-7)
    np.testing.assert_allclose(batch.next_base_action[:, 0], batch.next_obs["state"][:, 0] / 100.0, atol=1e-7)
    assert (batch.source == 0).all()  # demo


def test_an_env_without_an_expert_says_what_to_give_instead() -> None:
    with pytest.raises(ConfigError, match=r"no scripted expert\. Give recorded episodes: demos\.path"):
        make_expert(FakeEnv(1), bias_m=0.0, noise_m=0.0, noise_seed=0)
