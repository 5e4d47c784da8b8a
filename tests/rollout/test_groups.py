"""Groups of episodes of the counting env: equal starts, what ended stays, what is dropped, exact resume."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from robot_rl.core.policy import Chain, ChunkSample
from robot_rl.data.rollout import EpisodeRollout, PPOBatch, Rollout
from robot_rl.rollout.chunks import GroupSource
from robot_rl.rollout.envs import make_env
from robot_rl.rollout.weights import Publisher
from robot_rl.sim.vector import EnvConfig
from robot_rl.testing.devices import FakeEnv
from robot_rl.train.rollouts import GroupExperience
from tests.plain import Plain

H, A = 4, 2
LENGTHS: dict[str, Any] = {"terminate_after": [5, None, 8, 2], "truncate_after": [None, 4, None, None]}


class Drifting(Plain, nn.Module):
    """Moves a little at random, and writes the step it saw into its chain."""

    def __init__(self) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.zeros(1))

    def sample(self, obs: dict[str, Tensor], *, generator: Generator, **how: Any) -> ChunkSample:
        assert how == {"mode": "explore", "record": True}
        state = obs["state"]
        x = 0.1 * torch.randn(len(state), 2, H, A, generator=generator)
        index = torch.zeros(len(state), 1, dtype=torch.long)
        return ChunkSample(x[:, -1], Chain(x, index, state[:, :1] + self.version.detach(), "grid"))


def make_source(env: FakeEnv, group: int = 2) -> GroupSource:
    return GroupSource(env, Drifting(), group=group, n_exec=3, gamma_step=0.5, seed=70)


def points(**lengths: Any) -> FakeEnv:
    return FakeEnv(4, autoreset="disabled", **(lengths or LENGTHS))


def offered() -> Publisher:
    handle = Publisher()
    handle.offer(0, lambda: {"version": torch.zeros(1)})
    return handle


def test_whole_episodes_by_hand() -> None:
    # Chunks of 3; episodes of 5 (success), 4 (time limit), 8 (success) and 2 steps (success); the reward
    # of step k is k, gamma 0.5. The longest has 3 decisions: at steps 0, 3, 6.
    env = points()
    source = make_source(env)
    rollout = source.collect(offered())
    assert rollout.valid.tolist() == [[True, True, False]] * 2 + [[True, True, True], [True, False, False]]
    assert rollout.steps.tolist() == [[3, 2, 0], [3, 1, 0], [3, 3, 2], [2, 0, 0]]
    assert rollout.success.tolist() == [True, False, True, True]
    assert rollout.score.tolist() == [1.0, 0.0, 1.0, 1.0]
    assert rollout.ended.tolist() == [[False, True, True]] * 2 + [[False, False, True], [True, True, True]]
    # 1 + 2/2 + 3/4 = 2.75;  4 + 5/2 = 6.5;  4;  4 + 5/2 + 6/4 = 8;  7 + 8/2 = 11;  1 + 2/2 = 2.
    assert rollout.reward.tolist() == [[2.75, 6.5, 0], [2.75, 4, 0], [2.75, 8, 11], [2, 0, 0]]
    # Only the time limit bootstraps at an end, and nothing does behind one.
    assert rollout.bootstrap.tolist() == [[0.125, 0, 0], [0.125, 0.5, 0], [0.125, 0.125, 0], [0, 0, 0]]
    # What ended was not moved again.
    assert env.get_state()[:, 0].tolist() == [5, 4, 8, 2]
    assert rollout.next_obs["state"][:, -1, 0].tolist() == [5, 4, 8, 2]
    # Rows of the chain are the decisions, episode after episode.
    assert torch.equal(rollout.chain.log_prob[:, 0], rollout.obs["state"][..., 0].flatten())
    figures = source.episodes.take()
    assert (figures["episodes"], figures["success"]) == (4.0, 0.75)
    assert figures["length"] == (5 + 4 + 8 + 2) / 4


def test_a_group_begins_in_the_same_state_and_no_start_comes_twice() -> None:
    source = make_source(points())
    seeds = list[float]()
    for _ in range(2):
        first = source.collect(offered()).obs["state"][:, 0]
        assert torch.equal(first[0], first[1])
        assert torch.equal(first[2], first[3])
        assert not torch.equal(first[0, 3:], first[2, 3:])
        seeds += first[::2, 2].tolist()
    assert seeds == [70, 71, 72, 73]


@pytest.mark.parametrize("task", ["reach", "pick_cube"])
def test_equal_reset_seeds_are_equal_states_of_the_simulator(task: str) -> None:
    env = make_env(EnvConfig(task=task, num_threads=1), 4, autoreset="disabled")
    try:
        rng = np.random.default_rng(0)
        for _ in range(2):  # also after each env has gone its own way
            obs, _ = env.reset(seed=[5, 5, 6, 6])
            rows = env.get_state()
            assert np.array_equal(rows[0], rows[1])
            assert np.array_equal(rows[2], rows[3])
            assert not np.array_equal(rows[0], rows[2])
            assert np.array_equal(obs["state"][0], obs["state"][1])
            actions = rng.uniform(-1, 1, (4, 1, len(env.action_names))).repeat(8, axis=1)
            env.step_chunk(actions, 8)
            assert not np.array_equal(env.get_state()[0], env.get_state()[1])
            env.reset(seed=[5, 5, 6, 6])
            same = actions[[0, 0, 2, 2]]
            after = env.step_chunk(same, 8).obs["state"]  # and equal actions lead to equal ends
            assert np.array_equal(after[0], after[1])
    finally:
        env.close()


@pytest.mark.parametrize("before", [0, 2])
def test_resume_is_exact(before: int) -> None:
    source = make_source(points())
    for _ in range(before):
        source.collect(offered())
    state = copy.deepcopy(source.state_dict())
    resumed = make_source(points())
    resumed.load_state_dict(state)
    for _ in range(2):
        one, other = source.collect(offered()), resumed.collect(offered())
        for name in ("reward", "bootstrap", "ended", "steps", "valid", "success"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        assert torch.equal(one.obs["state"], other.obs["state"])
        assert torch.equal(one.chain.x, other.chain.x)
    assert source.episodes.take() == resumed.episodes.take()


class Numbering:
    """Prepares the valid decisions of a rollout by numbering all of them."""

    def prepare(self, rollout: Rollout, *, is_stale: bool = False) -> PPOBatch:
        assert isinstance(rollout, EpisodeRollout)
        obs = {key: value.flatten(0, 1) for key, value in rollout.obs.items()}
        number = torch.arange(rollout.reward.numel(), dtype=torch.float32)
        batch = PPOBatch(obs, rollout.chain, obs["state"], number, number, number, number.view(-1, 1))
        return batch.rows(rollout.valid.flatten().nonzero().squeeze(1))


class Constant:
    """Finds every episode worth the same."""

    def judge(self, rollout: EpisodeRollout) -> EpisodeRollout:
        return replace(rollout, score=torch.ones_like(rollout.score))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def make_experience(**options: Any) -> GroupExperience:
    usual: dict[str, Any] = {
        "reward": None,
        "group": 2,
        "keep": (0.1, 0.9),
        "batch": 3,
        "epochs": 2,
        "seed": 0,
    }
    return GroupExperience(Numbering(), **{**usual, **options})


def test_groups_without_contrast_are_dropped_and_their_steps_count() -> None:
    # Successes: 1 of 2, and 2 of 2, which is dropped. Left are 2 + 2 decisions: 2 minibatches of at most 3.
    experience = make_experience()
    episodes = make_source(points()).collect(offered())
    experience.add(episodes)
    assert episodes.cost == 5 + 4 + 8 + 2
    assert experience.owed() == 2 * 2
    assert experience.owed() == 0  # until more is added
    epochs = [sorted(torch.cat([experience.sample().advantage for _ in range(2)]).tolist()) for _ in range(2)]
    assert (
        epochs == [[0.0, 1.0, 3.0, 4.0]] * 2
    )  # of three each: the third of the first two episodes was not made
    assert experience.metrics() == {"collect/groups": 2.0, "collect/groups_dropped": 1.0}
    assert experience.metrics() == {"collect/groups": 0.0, "collect/groups_dropped": 0.0}


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, {"terminate_after": 5}),  # all succeed
        ({}, {"truncate_after": 5}),  # nobody does
        ({"keep": (0.0, 1.0)}, {"truncate_after": 5}),  # kept by its share, but all are worth the same
        ({"reward": Constant()}, LENGTHS),
    ],
)
def test_nothing_is_owed_where_nothing_can_be_learned(options: Any, lengths: Any) -> None:
    experience = make_experience(**options)
    experience.add(make_source(points(**lengths)).collect(offered()))
    assert experience.owed() == 0
    assert experience.metrics()["collect/groups_dropped"] == 2.0


def test_the_order_and_the_figures_survive_a_resume() -> None:
    rollout = make_source(points()).collect(offered())
    experience, resumed = make_experience(), make_experience()
    experience.add(rollout)
    for _ in range(experience.owed()):
        experience.sample()
    resumed.load_state_dict(copy.deepcopy(experience.state_dict()))
    for one in (experience, resumed):
        one.add(rollout)
        assert one.owed() == 4
    for _ in range(4):
        assert torch.equal(experience.sample().advantage, resumed.sample().advantage)
    assert experience.metrics() == resumed.metrics() == {"collect/groups": 4.0, "collect/groups_dropped": 2.0}
