"""Residual TD on a problem of one step whose best correction is known."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.residual import ResidualConfig, ResidualTD
from robot_rl.core.names import PRIVILEGED
from robot_rl.data.episode import SOURCES
from robot_rl.data.normalize import Normaliser
from robot_rl.data.replay import TransitionBatch
from tests.plain import Plain

SCALE = 0.5


class TinyPolicy(Plain, nn.Module):
    """A base whose features are the state, and a linear head that starts at zero."""

    action_dim, feature_dim = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(3, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def residual(self, obs_features: Tensor, base_action: Tensor) -> Tensor:
        return SCALE * self.head(torch.cat([obs_features, base_action], dim=-1)).tanh()


def batch(seed: int, *, bootstrap: float = 0.0) -> TransitionBatch:
    """Reward 1 - 4 (action - base - 0.3)^2: the best correction is 0.3 everywhere.

    The base is a function of the state, as it is in a run: the critic sees the state alone.
    """
    generator = Generator().manual_seed(seed)
    state = torch.randn(64, 2, generator=generator)
    base = 0.5 * state[:, :1].tanh()
    action = base + SCALE * (2 * torch.rand(64, 1, generator=generator) - 1)
    reward = 1 - 4 * (action - base - 0.3).square()[:, 0]
    return TransitionBatch(
        {"state": state},
        base,
        action,
        reward,
        torch.full((64,), bootstrap),
        {"state": state},
        base,
        torch.zeros(64, dtype=torch.uint8),
    )


def build(seed: int = 0, **changes: Any) -> tuple[Any, ResidualTD]:
    torch.manual_seed(9)
    policy: Any = TinyPolicy()
    defaults: dict[str, Any] = {"width": 64, "actor_lr": 1e-2, "critic_lr": 3e-3, "critic_warmup": 5}
    return policy, ResidualTD(policy, ResidualConfig(**(defaults | changes)), seed)


def learn(algorithm: ResidualTD, first: int, last: int) -> None:
    for seed in range(first, last):
        algorithm.update(batch(seed))


def test_it_finds_the_best_correction() -> None:
    policy, algorithm = build()
    learn(algorithm, 0, 250)
    rows = batch(1000)
    correction = policy.residual(rows.obs["state"], rows.base_action)
    assert (correction - 0.3).abs().mean().item() < 0.05


def test_the_head_rests_during_the_warm_up() -> None:
    policy, algorithm = build(critic_warmup=10, actor_every=1)
    learn(algorithm, 0, 10)
    assert policy.head.weight.abs().max().item() == 0.0
    learn(algorithm, 10, 11)
    assert policy.head.weight.abs().max().item() > 0.0


def test_the_actor_moves_every_so_often() -> None:
    policy, algorithm = build(critic_warmup=0, actor_every=3)
    moved = []
    for seed in range(6):
        before = policy.head.weight.detach().clone()
        algorithm.update(batch(seed))
        moved.append(not before.equal(policy.head.weight))
    assert moved == [False, False, True, False, False, True]


def test_the_base_is_frozen_and_only_the_head_is_handed_out() -> None:
    policy, algorithm = build(critic_warmup=0)
    before = policy.base.weight.clone()
    learn(algorithm, 0, 4)
    assert before.equal(policy.base.weight)
    weights = algorithm.policy_weights()
    assert set(weights) == {"head.weight", "head.bias"}
    assert weights["head.weight"].equal(policy.head.weight)
    assert policy.load_state_dict(dict(weights), strict=False).unexpected_keys == []


def test_every_tenth_update_reports() -> None:
    _, algorithm = build(critic_warmup=15)
    metrics = [set(algorithm.update(batch(seed))) for seed in range(20)]
    assert metrics[9] == {"critic_loss", "target"}
    assert metrics[19] == {"critic_loss", "target", "value", "residual_rms"}
    assert not any(metrics[:9] + metrics[10:19])


def test_targets_bootstrap() -> None:
    # Noise off and critics at zero but for their last bias: every value is that bias, 2.
    _, algorithm = build(target_noise_std=0.0)
    for layer in algorithm._target_critics.layers:
        layer.data.zero_()
    algorithm._target_critics.layers[-1].data.fill_(2.0)
    rows = batch(0, bootstrap=0.25)
    torch.testing.assert_close(algorithm._target(rows), rows.reward + 0.5)  # reward + 0.25 * 2


def test_a_resumed_learner_is_the_unbroken_one() -> None:
    _, whole = build()
    _, first = build()
    _, second = build(seed=5)
    learn(whole, 0, 30)
    learn(first, 0, 17)
    second.load_state_dict(first.state_dict())
    learn(second, 17, 30)
    for name in ("head", "target_head", "critics", "target_critics"):
        for key, value in whole.state_dict()[name].items():
            assert value.equal(second.state_dict()[name][key]), (name, key)


def test_the_l2_term_holds_the_correction_back() -> None:
    sizes = []
    for residual_l2 in (0.0, 100.0):
        policy, algorithm = build(residual_l2=residual_l2)
        learn(algorithm, 0, 100)
        rows = batch(1000)
        sizes.append(policy.residual(rows.obs["state"], rows.base_action).abs().mean().item())
    assert sizes[1] < 0.2 * sizes[0]


def test_the_l2_term_is_weighed_against_the_return() -> None:
    # The largest 1 - 4 (c - 0.3)^2 - 4 c^2 is where 8 (0.3 - c) = 8 c: half of the best correction, 0.15.
    policy, algorithm = build(residual_l2=4.0)
    learn(algorithm, 0, 250)
    rows = batch(1000)
    correction = policy.residual(rows.obs["state"], rows.base_action)
    assert (correction - 0.15).abs().mean().item() < 0.03


def test_critics_that_know_nothing_move_the_head_little() -> None:
    # Adam steps as far for a small slope as for a large one. The L2 term makes the size count: the largest
    # slope c - c^2 is at c = slope / 2. The drawn critics, which do not learn here, have a slope of 0.066.
    sizes = []
    for residual_l2 in (0.0, 1.0):
        still: dict[str, Any] = {"critic_lr": 1e-12, "critic_warmup": 0, "actor_every": 1, "actor_lr": 3e-2}
        policy, algorithm = build(residual_l2=residual_l2, **still)
        learn(algorithm, 0, 60)
        state, base = batch(1000).obs["state"], batch(1000).base_action
        correction = policy.residual(state, base)
        slope = algorithm.critics.action_gradient(state, base, "mean")[1].abs().mean().item()
        assert slope == pytest.approx(0.066, abs=0.005)
        sizes.append(correction.abs().mean().item())
    assert sizes[0] > 0.3  # of the 0.5 that it may
    assert sizes[1] == pytest.approx(0.033, abs=0.006)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_critics": 0}, "method.algorithm.num_critics: got 0, allowed: 1 or more"),
        ({"gamma_step": 1.5}, "method.algorithm.gamma_step: got 1.5, allowed: 0 to 1"),
        ({"tau": 0.0}, "method.algorithm.tau: got 0.0, allowed: above 0, at most 1"),
        ({"actor_lr": 0.0}, "method.algorithm.actor_lr: got 0.0, allowed: above 0"),
        ({"critic_warmup": -1}, "method.algorithm.critic_warmup: got -1, allowed: 0 or more"),
        ({"residual_l2": -1.0}, "method.algorithm.residual_l2: got -1.0, allowed: 0 or more"),
        ({"matmul": "fp16"}, "method.algorithm.matmul: got 'fp16', allowed: bf16, fp32"),
    ],
)
def test_bad_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResidualConfig(**change)


def test_a_person_shows_the_way_before_the_critic_knows_it() -> None:
    # The reward alone pulls to 0.3 (the first test); the person's steps, every other, all correct by -0.2.
    def lesson(seed: int) -> TransitionBatch:
        rows = batch(seed)
        by_person = torch.arange(64) % 2 == 0
        rows.source[by_person] = SOURCES.index("human")
        rows.action[by_person] = (rows.base_action - 0.2)[by_person]
        return rows

    policy, algorithm = build(human_weight=100.0)
    for seed in range(120):
        algorithm.update(lesson(seed))
    rows = batch(1000)
    assert policy.residual(rows.obs["state"], rows.base_action).mean().item() == pytest.approx(-0.2, abs=0.05)


def test_critics_that_read_the_privileged_state_know_what_the_policy_cannot() -> None:
    """A hidden number h = -1 or 1 adds 2 h to the reward: without it a critic's error is 4 at least."""
    hidden = torch.tensor([-1.0, 1.0]).repeat(32)[:, None]

    def shown(seed: int) -> TransitionBatch:
        rows = batch(seed)
        rows.reward += 2 * hidden[:, 0]
        rows.obs[PRIVILEGED] = rows.next_obs[PRIVILEGED] = 5 + 3 * hidden
        return rows

    errors: dict[bool, float] = {}
    scale = Normaliser.fit({PRIVILEGED: (5 + 3 * hidden).numpy()}, np.zeros((64, 1), np.float32))
    for reads in (False, True):
        policy, algorithm = build()
        if reads:
            algorithm = ResidualTD(policy, algorithm._cfg, 0, privileged=scale)
        found = [algorithm.update(shown(seed)) for seed in range(200)]
        errors[reads] = float(found[-1]["critic_loss"]) / algorithm._cfg.num_critics
        correction = policy.residual(batch(1000).obs["state"], batch(1000).base_action)
        if reads:  # and the policy, which cannot read it, learns the same correction
            assert correction.mean().item() == pytest.approx(0.3, abs=0.05)
    assert errors[False] > 3.0
    assert errors[True] < 0.3
