"""Rewards made from the episodes, by hand."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from robot_rl.algos.config.on_policy import GRPOConfig
from robot_rl.algos.episode_rewards import ProcessReward, ProgressReward
from robot_rl.core.policy import Chain
from robot_rl.data.rollout import EpisodeRollout
from tests.plain import Plain


class Seeing(Plain):
    feature_dim = 1


def seeing() -> Any:
    return Seeing()


def episodes(
    after: list[list[float]], valid: list[list[bool]], success: list[bool], **parts: Any
) -> EpisodeRollout:
    next_state, made, solved = torch.tensor(after), torch.tensor(valid), torch.tensor(success)
    state = torch.cat([torch.zeros(len(after), 1), next_state[:, :-1]], dim=1)
    zeros, count = torch.zeros_like(next_state), next_state.numel()
    chain = Chain(
        torch.zeros(count, 1, 1, 1), torch.zeros(count, 1, dtype=torch.long), torch.zeros(count, 1), None
    )
    usual: dict[str, Any] = {
        "reward": zeros,
        "bootstrap": zeros,
        "ended": ~made,
        "steps": made.long(),
        "score": solved.float(),
    }
    return EpisodeRollout(
        obs={"state": state.unsqueeze(-1)},
        chain=chain,
        next_obs={"state": next_state.unsqueeze(-1)},
        valid=made,
        success=solved,
        **(usual | parts),
    )


def test_a_failure_is_worth_how_near_its_last_observation_came_to_a_success() -> None:
    # Last observations: successes 0 and 10; failures 1, 4 and 8, which are 1, 4 and 2 from the nearest
    # success: d = 0, 1, 1/3 whatever the spread of the features. What stands behind an end does not count.
    rollout = episodes(
        [[5.0, 0.0], [5.0, 10.0], [1.0, 99.0], [3.0, 4.0], [8.0, 77.0]],
        [[True, True], [True, True], [True, False], [True, True], [True, False]],
        [True, True, False, False, False],
    )
    score = ProgressReward(seeing()).judge(rollout).score
    expected = [1.0, 1.0, *(0.6 / (1 + math.exp(-10 * (0.5 - d))) for d in (0.0, 1.0, 1 / 3))]
    assert score.tolist() == pytest.approx(expected, abs=1e-5)
    assert expected[2:] == pytest.approx([0.59598, 0.00402, 0.50468], abs=1e-5)


def make_process(**options: Any) -> ProcessReward:
    return ProcessReward(seeing(), GRPOConfig(width=16, depth=1, critic_lr=1e-2, **options), seed=0)


def test_the_chance_of_success_is_a_potential(monkeypatch: pytest.MonkeyPatch) -> None:
    process = make_process()
    chances = {0.0: 0.5, 1.0: 0.75, 2.0: 0.25, 9.0: 1.0}

    def chance(features: Tensor) -> Tensor:
        return torch.tensor([chances[float(x)] for x in features[:, 0]])

    monkeypatch.setattr(process, "chance", chance)
    # Episode 0: 0 -> 1 -> 2 with rewards 0 and 1; the task ends there. Episode 1: 0 -> 1, cut by the clock.
    #   0 + 0.5 * 0.75 - 0.5 = -0.125;   1 + 0 * 0.25 - 0.75 = 0.25;   0 + 0.5 * 0.75 - 0.5 = -0.125.
    rollout = episodes(
        [[1.0, 2.0], [1.0, 9.0]],
        [[True, True], [True, False]],
        [True, False],
        reward=torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        bootstrap=torch.tensor([[0.5, 0.0], [0.5, 0.0]]),
    )
    judged = process.judge(rollout)
    assert judged.reward.tolist() == [[-0.125, 0.25], [-0.125, 0.0]]
    assert judged.score.tolist() == [0.125, -0.125]


def falling_apart() -> EpisodeRollout:
    """Returns successes that went up, and failures that went down."""
    sign = torch.tensor([1.0, -1.0]).repeat(8)
    after = (sign[:, None] * torch.tensor([1.0, 2.0])).tolist()
    return episodes(after, [[True, True]] * 16, (sign > 0).tolist())


def test_the_chance_is_learned_after_it_was_asked() -> None:
    process, asked = make_process(), torch.tensor([[-1.0], [0.0], [1.0]])
    before = process.chance(asked)
    first = process.judge(falling_apart())
    # bootstrap 0: minus the chance before anything was learned
    assert torch.allclose(first.reward[:2, 1], -before[[2, 0]])
    for _ in range(10):
        process.judge(falling_apart())
    low, middle, high = process.chance(asked).tolist()
    assert low < 0.1
    assert high > 0.9
    assert 0.3 < middle < 0.7  # both began there


def test_resume_is_exact() -> None:
    process, resumed = make_process(), make_process()
    process.judge(falling_apart())
    resumed.load_state_dict(copy.deepcopy(process.state_dict()))
    for _ in range(2):
        one, other = (each.judge(falling_apart()) for each in (process, resumed))
        assert torch.equal(one.reward, other.reward)
