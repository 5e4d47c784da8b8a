"""Behaviour cloning on a linear policy whose answer is known."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.bc import BCConfig, BehaviourCloning, LossScaler
from robot_rl.core.policy import DemoBatch


class LinearPolicy(nn.Module):
    """Predicts a chunk of one action; its loss draws noise, as denoisers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(1))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        noise = 0.01 * torch.randn(batch.actions.shape, generator=generator)
        return (self.linear(batch.obs["state"])[:, None] - batch.actions - noise).square().mean()


def linear() -> Any:
    """Only the imitation loss of a policy is there."""
    return LinearPolicy()


def batch(seed: int) -> DemoBatch:
    """The action is 2 x_0 - x_1 + 0.5."""
    state = torch.randn(64, 2, generator=Generator().manual_seed(seed))
    action = state @ torch.tensor([[2.0], [-1.0]]) + 0.5
    return DemoBatch({"state": state}, action[:, None], torch.ones(64, 1, dtype=torch.bool))


def learn(algorithm: BehaviourCloning, first: int, last: int) -> None:
    for seed in range(first, last):
        algorithm.update(batch(seed))


def test_it_learns_the_demonstrated_action() -> None:
    algorithm = BehaviourCloning(linear(), BCConfig(lr=0.05, ema_decay=0.9), 0, total_updates=300)
    learn(algorithm, 0, 300)
    weights = algorithm.policy_weights()
    torch.testing.assert_close(weights["linear.weight"], torch.tensor([[2.0, -1.0]]), atol=0.01, rtol=0)
    torch.testing.assert_close(weights["linear.bias"], torch.tensor([0.5]), atol=0.01, rtol=0)
    assert "scale" in weights


def test_acting_weights_are_the_average() -> None:
    policy: Any = LinearPolicy()
    algorithm = BehaviourCloning(policy, BCConfig(lr=0.1, warmup_updates=0, weight_decay=0.0), 0)
    learn(algorithm, 0, 1)
    # The first average keeps (1 + 1) / (10 + 1) of its start, zero: 9 / 11 of the new weights.
    torch.testing.assert_close(
        algorithm.policy_weights()["linear.bias"], policy.linear.bias.detach() * 9 / 11
    )


def test_a_resumed_learner_is_the_unbroken_one() -> None:
    whole, first, second = (BehaviourCloning(linear(), BCConfig(), 3) for _ in range(3))
    learn(whole, 0, 20)
    learn(first, 0, 11)
    second.load_state_dict(first.state_dict())
    learn(second, 11, 20)
    for name, value in whole.policy_weights().items():
        assert value.equal(second.policy_weights()[name]), name


def test_metrics_stay_tensors() -> None:
    metrics = BehaviourCloning(linear(), BCConfig(lr=0.5, warmup_updates=10), 0).update(batch(0))
    assert isinstance(metrics["loss"], Tensor)
    assert metrics["lr"] == pytest.approx(0.05)  # the first of ten steps up to 0.5


class RaggedPolicy(LinearPolicy):
    """Averages over valid steps and draws no noise, so that two ways to one gradient can be compared."""

    def bc_loss(self, batch: DemoBatch, generator: Generator | None = None) -> Tensor:
        error = (self.linear(batch.obs["state"])[:, None] - batch.actions).square().mean(-1)
        return (error * batch.valid).sum() / batch.valid.sum()


def ragged() -> DemoBatch:
    """Chunks of three steps; the episodes of the first 20 rows end after one."""
    demos = batch(0)
    valid = torch.ones(64, 3, dtype=torch.bool)
    valid[:20, 1:] = False
    return DemoBatch(demos.obs, demos.actions.repeat(1, 3, 1), valid)


@pytest.mark.parametrize("accumulate", [2, 3, 64, 100])
def test_a_batch_in_pieces_is_the_same_update(accumulate: int) -> None:
    whole, pieces = (
        BehaviourCloning(cast("Any", RaggedPolicy()), BCConfig(accumulate=number), 0)._gradients(ragged())
        for number in (1, accumulate)
    )
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_too(precision: Any) -> None:
    config = BCConfig(lr=0.05, ema_decay=0.9, precision=precision)
    algorithm = BehaviourCloning(linear(), config, 0, total_updates=300)
    learn(algorithm, 0, 300)
    weights = algorithm.policy_weights()["linear.weight"]
    assert weights.dtype == torch.float32
    # bfloat16 rounds by up to 1/256 of a value of 2.
    torch.testing.assert_close(weights, torch.tensor([[2.0, -1.0]]), atol=0.03, rtol=0)


def test_half_precision_is_lower_than_full() -> None:
    whole, half = (
        BehaviourCloning(linear(), BCConfig(precision=p, matmul="fp32"), 0) for p in ("fp32", "bf16")
    )
    learn(whole, 0, 3)
    learn(half, 0, 3)
    assert not whole.policy_weights()["linear.weight"].equal(half.policy_weights()["linear.weight"])


def test_the_scale_of_a_float16_loss() -> None:
    scaler = LossScaler(8.0, grow_after=2)
    gradient = torch.tensor([8.0, 16.0])
    assert scaler.unscale([gradient])
    assert gradient.tolist() == [1.0, 2.0]
    assert not scaler.unscale([torch.tensor([math.inf])])
    assert scaler.scale == 4.0
    assert scaler.unscale([torch.ones(1)])
    assert scaler.unscale([torch.ones(1)])  # two good ones after the bad: twice the scale
    assert scaler.scale == 8.0


def test_an_overflow_leaves_the_weights_as_they_are() -> None:
    policy: Any = LinearPolicy()
    algorithm = BehaviourCloning(policy, BCConfig(precision="fp16", warmup_updates=0), 0)
    algorithm.update(DemoBatch({"state": torch.full((4, 2), 1e30)}, *_chunk_of_ones()))
    assert not policy.linear.weight.any()


def _chunk_of_ones() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 1, 1), torch.ones(4, 1, dtype=torch.bool)


def test_the_policy_acts_with_the_average_for_a_while() -> None:
    policy: Any = LinearPolicy()
    algorithm = BehaviourCloning(policy, BCConfig(), 0)
    learn(algorithm, 0, 5)
    learned, averaged = (
        policy.linear.weight.detach().clone(),
        algorithm.policy_weights()["linear.weight"].clone(),
    )
    with algorithm.acting():
        assert policy.linear.weight.equal(averaged)
    assert policy.linear.weight.equal(learned)
    assert algorithm.policy_weights()["linear.weight"].equal(averaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "bc.algorithm.lr: got 0.0, allowed: above 0"),
        ({"ema_decay": 1.0}, "bc.algorithm.ema_decay: got 1.0, allowed: 0 to below 1"),
        ({"final_lr_ratio": 2.0}, "bc.algorithm.final_lr_ratio: got 2.0, allowed: 0 to 1"),
        ({"grad_clip": -1.0}, "bc.algorithm.grad_clip: got -1.0, allowed: 0 or more"),
        ({"weight_decay": -1.0}, "bc.algorithm.weight_decay"),
        ({"warmup_updates": -1}, "bc.algorithm.warmup_updates"),
        ({"accumulate": 0}, "bc.algorithm.accumulate: got 0, allowed: 1 or more"),
        ({"precision": "fp8"}, "bc.algorithm.precision: got 'fp8', allowed: fp32, bf16, fp16"),
    ],
)
def test_bad_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BCConfig(**change)
