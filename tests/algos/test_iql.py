"""IQL over chunks: expectiles and targets by hand, gradients against autograd, exact resume."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from robot_rl.algos.chunk_critics import ChunkCriticConfig
from robot_rl.algos.iql import IQL, IQLConfig
from robot_rl.algos.losses import expectile_weight
from robot_rl.core.errors import ConfigError
from robot_rl.data.replay import ReplayBuffer, StepBatch
from robot_rl.data.transitions import ChunkBatch

GAMMA = 0.5


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def build(steps: int = 2, *, seed: int = 1, prefix: bool = False, **options: Any) -> IQL:
    critics = ChunkCriticConfig(width=16, depth=2, aggregate="min", prefix=prefix, matmul="fp32")
    usual: dict[str, Any] = {"critics": critics, "gamma_step": GAMMA, "grad_clip": 0.0}
    return IQL(IQLConfig(**(usual | options)), feature_dim=1, action_dim=1, steps=steps, seed=seed)


def drawn(steps: int, *, rows: int = 32, seed: int = 0, prefixes: tuple[int, ...] = ()) -> ChunkBatch:
    """Rewards = observations: 1 2 3 ends the task, 11 12 is cut by the clock, 21 22 goes on."""
    buffer = ReplayBuffer(40, 1, {"state": ((1,), np.float32)}, 1)
    for value in (1, 2, 3, 11, 12, 21, 22):
        one = np.array([[value]], np.float32)
        buffer.add(
            StepBatch(
                obs={"state": one},
                base_action=one,
                action=one / 100,
                reward=one[0],
                terminated=np.array([value == 3]),
                truncated=np.array([value == 12]),
                next_obs={"state": one + 1},
                next_base_action=one,
            )
        )
    rng = np.random.default_rng(seed)
    return buffer.sample_chunks(rows, horizon=4, gamma_step=GAMMA, rng=rng, prefixes=prefixes or (steps,))


def after(batch: ChunkBatch) -> Tensor:
    assert batch.prefix is not None
    return batch.prefix.next_obs["state"]


def updated(learner: IQL, first: int, last: int, prefixes: tuple[int, ...] = ()) -> IQL:
    for seed in range(first, last):
        batch = drawn(2, seed=seed, prefixes=prefixes)
        learner.update(batch.obs["state"], batch, after(batch))
    return learner


def test_an_expectile_weighs_what_was_better_more() -> None:
    # u = 1, -2 at 0.7: 0.7 * 1 and 0.3 * 4, of which the mean is 0.95.
    error = torch.tensor([1.0, -2.0])
    weight = expectile_weight(error, 0.7)
    assert weight.tolist() == pytest.approx([0.7, 0.3])
    assert float((weight * error.square()).mean()) == pytest.approx(0.95)
    assert expectile_weight(error, 0.5).tolist() == [0.5, 0.5]


def test_the_value_is_the_expectile_of_the_datas_chunks() -> None:
    # Half of the chunks are worth 1, half 0: tau (1 - v) = (1 - tau) v, so v = tau.
    learner: Any = build(1, expectile=0.8, lr=1e-2)
    learner.target_critics.score = lambda features, actions: actions[:, 0, 0]
    batch: Any = drawn(1, rows=64)
    batch.action = torch.arange(64).remainder(2).float().view(64, 1, 1).repeat(1, 4, 1)
    batch.prefix.is_whole[:] = True
    features = torch.zeros(64, 1)
    for _ in range(400):
        learner.update(features, batch, torch.zeros(64, 1, 1))
    assert learner.value(features[:1]).item() == pytest.approx(0.8, abs=0.01)
    assert learner.advantage(features[:2], batch.action[:2]).tolist() == pytest.approx([-0.8, 0.2], abs=0.01)


@pytest.mark.parametrize("prefix", [False, True])
def test_both_losses_follow_autograds_gradient(prefix: bool) -> None:
    learner: Any = build(2, prefix=prefix, expectile=0.7)
    lengths = learner.critics.lengths
    batch = drawn(2, prefixes=lengths)
    ends, features = batch.prefix, batch.obs["state"]
    assert ends is not None
    assert not ends.is_whole.all()  # 22 is the newest step: no chunk of two begins there
    found: dict[str, list[Tensor]] = {}
    learner._value_optimiser.apply = lambda gradients: found.update(value=list(gradients))
    learner._critic_optimiser.apply = lambda gradients: found.update(critics=list(gradients))
    # Before `follow`, the targets are the critics.
    q = learner.target_critics.values(features, batch.action)[..., -1].amin(dim=0)
    value = learner._value(features).flatten()
    u = q - value
    weight = torch.where(u.detach() > 0, 0.7, 0.3) * ends.is_whole[:, -1]
    to_value = torch.autograd.grad((weight * u.square()).mean(), list(learner._value.parameters()))
    # y = R + gamma^m V(s'); the chunk 2 3 ends the task: 2 + 0.5 * 3, and nothing after it.
    next_value = learner._value(ends.next_obs["state"].flatten(0, 1)).view(ends.reward.shape).detach()
    target = ends.reward + ends.bootstrap * next_value
    row = features[:, 0].tolist().index(2.0)
    assert float(target[row, -1]) == pytest.approx(3.5)
    # 11 12 is cut by the clock: 11 + 0.5 * 12 + 0.25 V(13).
    row = features[:, 0].tolist().index(11.0)
    bootstrapped = 17 + 0.25 * float(learner.value(torch.tensor([[13.0]])))
    assert float(target[row, -1]) == pytest.approx(bootstrapped, rel=1e-5)
    rows = learner.critics._beginnings(batch.action, learner.critics.flags)
    inputs = torch.cat([features.repeat_interleave(len(lengths), dim=0), rows], dim=1)
    values = learner.critics.net(inputs).squeeze(-1).unflatten(1, (len(features), -1))
    wrong = (values - target).square()[:, ends.is_whole]
    to_critics = torch.autograd.grad(wrong.mean(dim=1).sum(), list(learner.critics.parameters()))
    learner.update(features, batch, ends.next_obs["state"])
    for ours, theirs in zip(found["value"] + found["critics"], to_value + to_critics, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_it_learns_what_the_chunks_are_worth() -> None:
    # One action at each state: Q = V = the return. From 1: 1 + 2/2 + 3/4; from 2: 2 + 3/2; from 3: 3.
    learner = build(2, lr=3e-3, tau=0.1)
    features = torch.tensor([[1.0], [2.0], [3.0]])
    actions = (features / 100).view(3, 1, 1).repeat(1, 4, 1)
    actions[0, 1:], actions[1, 1:] = 0.02, 0.03
    updated(learner, 0, 3000)
    assert learner.value(features).tolist() == pytest.approx([2.75, 3.5, 3.0], abs=0.1)
    assert learner.advantage(features, actions).abs().max() < 0.1


def test_the_target_critics_follow_slowly() -> None:
    learner = build(2, tau=0.25)
    before = [parameter.clone() for parameter in learner.target_critics.parameters()]
    updated(learner, 0, 1)
    for was, target, online in zip(
        before, learner.target_critics.parameters(), learner.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(target, 0.75 * was + 0.25 * online.detach())
        assert not online.equal(was)


def test_a_resumed_learner_is_the_unbroken_one() -> None:
    whole, first, second = updated(build(), 0, 9), updated(build(), 0, 5), build(seed=4)
    second.load_state_dict(first.state_dict())
    updated(second, 5, 9)
    for name in ("critics", "target_critics", "value"):
        for key, value in whole.state_dict()[name].items():
            assert value.equal(second.state_dict()[name][key]), (name, key)
    batch = drawn(2, seed=9)
    report = second.update(batch.obs["state"], batch, after(batch))
    assert set(report) == {"critic_loss", "value_loss", "value"}


def test_bad_settings_are_named() -> None:
    wrong: dict[str, Any] = {"expectile": 1.0, "gamma_step": 1.1, "tau": 0.0, "lr": 0.0, "grad_clip": -1.0}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"iql\.{name}: got {value!r}"):
            IQLConfig(**{name: value})
