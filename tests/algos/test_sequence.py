"""Sequence RL: what the model imagines, which state judges which action, the target, resume."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from robot_rl.algos.actors import TanhGaussian, squashed_log_prob
from robot_rl.algos.config.off_policy import ActorConfig, CriticConfig
from robot_rl.algos.sequence import SequenceActorCritic, SequenceConfig
from robot_rl.data.transitions import ChunkBatch, Prefixes


def build(*, kind: Any = "gaussian", seed: int = 0, **changes: Any) -> SequenceActorCritic:
    """One state element, one action element, two actions at once."""
    cfg = SequenceConfig(
        actor=ActorConfig(kind=kind, width=32),
        critic=CriticConfig(width=32),
        actor_lr=1e-3,
        critic_lr=5e-3,
        model_width=32,
        matmul="fp32",
        initial_temperature=0.01,
        target_entropy_per_action=-3.0,
    )
    return SequenceActorCritic(1, 1, replace(cfg, **changes), seed, decides=2)


def batch(seed: int, size: int = 64) -> ChunkBatch:
    """Steps of a system that flips its state whatever is done, with reward -(a + s / 2)^2, and no future."""
    generator = Generator().manual_seed(seed)
    state = 2 * torch.rand(size, 1, generator=generator) - 1
    action = 2 * torch.rand(size, 1, 1, generator=generator) - 1
    reward = -(action[:, 0, 0] + state[:, 0] / 2).square()
    after, nothing = {"state": -state}, torch.zeros(size)
    prefix = Prefixes(
        reward[:, None], nothing[:, None], torch.ones(size, 1, dtype=torch.bool), {"state": -state[:, None]}
    )
    kind, valid = torch.zeros(size, dtype=torch.uint8), torch.ones(size, 1, dtype=torch.bool)
    return ChunkBatch({"state": state}, action, valid, reward, nothing, after, kind, prefix=prefix)


@pytest.mark.parametrize("kind", ["gaussian", "deterministic"])
def test_each_action_is_judged_where_it_acts(kind: str) -> None:
    learner = build(kind=kind)
    for seed in range(600):
        learner.update(batch(seed))
    state = torch.linspace(-0.9, 0.9, 7)[:, None]
    first, second = learner.act(state, explore=False).unbind(dim=1)
    # Best at s is -s / 2. The second action acts at -s: judged at s it would be -s / 2 as well.
    assert (first + state[:, 0] / 2).abs().max().item() < 0.12
    assert (second - state[:, 0] / 2).abs().max().item() < 0.12


def test_the_model_foretells_the_change() -> None:
    learner = build()
    with torch.no_grad():
        for layer in learner.model.layers:
            layer.zero_()
        learner.model.layers[-1].fill_(0.5)
    states = learner.imagined(torch.tensor([[1.0], [-2.0]]), torch.zeros(2, 2))
    assert states.tolist() == [[[1.0], [1.5]], [[-2.0], [-1.5]]]


def test_the_models_loss_is_that_of_the_first_step() -> None:
    learner, rows = build(), batch(0)
    with torch.no_grad():
        for layer in learner.model.layers:
            layer.zero_()
    # It foretells no change, and the state s becomes -s: the error is 2 s.
    loss = learner._learn_model(rows)
    assert loss.item() == pytest.approx(4 * rows.obs["state"].square().mean().item(), rel=1e-5)


def test_the_derivative_is_autograds_with_the_states_as_given() -> None:
    learner = build()
    state, action = torch.tensor([[0.3], [-0.7]]), torch.tensor([[0.1, 0.2], [-0.5, 0.4]])
    with torch.no_grad():
        value, by_action = learner._action_value(state, action)
        met = learner.imagined(state, action)
    leaf = action.clone().requires_grad_()
    q = [learner.critics(torch.cat([met[:, j], leaf[:, j : j + 1]], dim=1))[..., 0] for j in range(2)]
    total = q[0].amin(dim=0) + q[1].amin(dim=0)
    torch.testing.assert_close(value, total.detach())
    torch.testing.assert_close(by_action, torch.autograd.grad(total.sum(), leaf)[0])


def test_the_target_is_of_the_next_first_action() -> None:
    learner = build()
    assert isinstance(learner.actor, TanhGaussian)
    sample = learner.actor.sample(torch.randn(5, 1), Generator().manual_seed(0))
    action, log_prob = learner._next_action(sample)
    assert action.equal(sample.action[:, :1])
    rest = squashed_log_prob(sample.action[:, 1:], sample.std.log()[:, 1:], sample.noise[:, 1:])
    torch.testing.assert_close(log_prob + rest, sample.log_prob)


def test_entropy_is_aimed_at_for_the_whole_sequence() -> None:
    assert build(target_entropy_per_action=-0.5)._target_entropy == -1.0


def test_a_resumed_learner_is_the_unbroken_one() -> None:
    def weights(learner: SequenceActorCritic) -> dict[str, Tensor]:
        return {**learner.policy_weights(), **learner.model.state_dict()}

    whole, first, second = build(), build(), build(seed=7)
    for seed in range(12):
        whole.update(batch(seed))
    for seed in range(5):
        first.update(batch(seed))
    second.load_state_dict(first.state_dict())
    for seed in range(5, 12):
        second.update(batch(seed))
    for key, value in weights(whole).items():
        assert value.equal(weights(second)[key]), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_lr": 0.0}, "algorithm.model_lr: got 0.0, allowed: above 0"),
        ({"model_width": 0}, "algorithm.model_width: got 0, allowed: 1 or more"),
        ({"gamma_step": 2.0}, "algorithm.gamma_step: got 2.0"),
    ],
)
def test_bad_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceConfig(**change)
