"""SAC: its density against torch's, its resume, and that it learns; bfloat16 learns as well as float32."""

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Generator

from robot_rl.algos.actor_critic import ActorCritic
from robot_rl.algos.actors import TanhGaussian
from robot_rl.algos.config.off_policy import ActorConfig, ActorCriticConfig, CriticConfig
from robot_rl.algos.optim import Matmul
from robot_rl.data.replay import ReplayBuffer, StepBatch, TransitionBatch


def batch(seed: int, size: int = 64) -> TransitionBatch:
    """Reward -(a - 0.5)^2 on one-step episodes."""
    generator = Generator().manual_seed(seed)
    state = torch.randn(size, 3, generator=generator)
    action = 2 * torch.rand(size, 1, generator=generator) - 1
    reward = -(action - 0.5).square()[:, 0]
    done = torch.zeros(size)
    kind = torch.zeros(size, dtype=torch.uint8)
    return TransitionBatch({"state": state}, action, action, reward, done, {"state": state}, action, kind)


def build(seed: int = 0, **changes: Any) -> ActorCritic:
    defaults: dict[str, Any] = {
        "actor": ActorConfig(width=64),
        "critic": CriticConfig(width=64),
        "actor_lr": 3e-3,
        "critic_lr": 3e-3,
    }
    return ActorCritic(3, 1, ActorCriticConfig(**(defaults | changes)), seed)


def test_log_prob_is_the_density_of_the_squashed_gaussian() -> None:
    actor = TanhGaussian(3, 2, width=16, depth=2, generator=Generator().manual_seed(0))
    state = torch.randn(8, 3, generator=Generator().manual_seed(1))
    sample = actor.sample(state, Generator().manual_seed(2))
    mean, log_std = actor.net(state)[0].chunk(2, dim=-1)
    normal = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    torch.testing.assert_close(
        sample.log_prob, squashed.log_prob(sample.action).sum(dim=-1), rtol=1e-3, atol=1e-3
    )


def test_the_actors_gradients_are_autograds() -> None:
    actor = TanhGaussian(3, 2, width=16, depth=2, generator=Generator().manual_seed(0))
    state = torch.randn(8, 3, generator=Generator().manual_seed(1))
    sample = actor.sample(state, Generator().manual_seed(2))
    to_action, to_log_prob = torch.randn(8, 2, generator=Generator().manual_seed(3)), torch.tensor(0.7)
    mine = actor.gradients(sample, to_action, to_log_prob)
    mean, log_std = actor.net(state)[0].chunk(2, dim=-1)
    u = mean + log_std.exp() * sample.noise
    density = -0.5 * sample.noise.square() - log_std - torch.log(1 - u.tanh().square())
    loss = (to_action * u.tanh()).sum() + to_log_prob * density.sum()
    for gradient, peer in zip(mine, torch.autograd.grad(loss, actor.net.in_order), strict=True):
        torch.testing.assert_close(gradient, peer, rtol=1e-4, atol=1e-5)


def test_a_log_std_out_of_range_stands_still() -> None:
    actor = TanhGaussian(3, 1, width=16, depth=1, generator=Generator().manual_seed(0))
    with torch.no_grad():
        actor.net.layers[-1][0, 1] = 100.0  # the bias of the log std, limited to 2
    sample = actor.sample(torch.zeros(4, 3), Generator().manual_seed(2))
    torch.testing.assert_close(sample.std, torch.full((4, 1), math.exp(2.0)))
    to_bias = actor.gradients(sample, torch.ones(4, 1), torch.tensor(1.0))[-1]
    assert to_bias[0, 1].item() == 0.0


def test_it_finds_the_best_action() -> None:
    learner = build(initial_temperature=0.01, target_entropy_per_action=-3.0)
    for seed in range(300):
        learner.update(batch(seed))
    assert (learner.act(torch.zeros(1, 3), explore=False) - 0.5).abs().item() < 0.1


def test_the_temperature_falls_while_entropy_is_high() -> None:
    learner = build(target_entropy_per_action=-5.0, temperature_lr=0.1)
    metrics = [learner.update(batch(seed)) for seed in range(10)]
    assert metrics[:9] == [{}] * 9
    # Adam's first steps are the learning rate: exp(-9 * 0.1) = 0.41 after nine.
    assert metrics[9]["temperature"].item() == pytest.approx(math.exp(-0.9), rel=0.05)


def test_a_resumed_learner_is_the_unbroken_one() -> None:
    whole, first, second = build(), build(), build(seed=7)
    for seed in range(12):
        whole.update(batch(seed))
    for seed in range(5):
        first.update(batch(seed))
    second.load_state_dict(first.state_dict())
    for seed in range(5, 12):
        second.update(batch(seed))
    for name, value in whole.policy_weights().items():
        assert value.equal(second.policy_weights()[name]), name


def test_exploring_depends_on_its_seed_alone() -> None:
    """What ran before in the process has drawn from torch's global generator, and must not matter."""
    actions: list[torch.Tensor] = []
    state = torch.ones(4, 3)
    for drawn_before in (0, 5):
        learner = build()
        torch.randn(drawn_before)
        actions.append(torch.cat([learner.act(state, explore=True) for _ in range(2)]))
    assert actions[0].equal(actions[1])
    assert actions[0].unique().numel() == 8  # two draws of four: none is repeated
    # What is asked for with a generator of the caller's leaves its own alone.
    learner, other = build(), build()
    other.act(state, explore=True, generator=Generator().manual_seed(1))
    assert learner.act(state, explore=True).equal(other.act(state, explore=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: CriticConfig(width=0), "critic.width: got 0, allowed: 1 or more"),
        (lambda: CriticConfig(tau=2.0), "critic.tau: got 2.0, allowed: above 0, at most 1"),
        (lambda: build(matmul="bf8"), "algorithm.matmul: got 'bf8', allowed: bf16, fp32"),
    ],
)
def test_bad_configs(change: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change()


def pendulum_return(matmul: Matmul, *, seed: int = 0, steps: int = 5000) -> float:
    """Trains on Pendulum-v1 and returns the mean return of 20 episodes of the policy's mean action.

    Twenty fixed starts, because an optimal episode earns between 0 and -390 depending on its start:
    the mean of a few training episodes says more about those than about the policy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    env = gymnasium.make("Pendulum-v1")
    rng = np.random.default_rng(seed)
    learner = ActorCritic(3, 1, ActorCriticConfig(matmul=matmul, actor_lr=1e-3, critic_lr=1e-3), seed)
    replay = ReplayBuffer(steps + 50, 1, {"state": ((3,), np.float32)}, 1)
    obs, _ = env.reset(seed=seed)
    for t in range(steps):
        if t < 300:
            action = rng.uniform(-1, 1, (1, 1)).astype(np.float32)
        else:
            action = learner.act(torch.from_numpy(obs[None]), explore=True).numpy()
        next_obs, reward, terminated, truncated, _ = env.step(2.0 * action[0])
        replay.add(
            StepBatch(
                obs={"state": obs[None]},
                base_action=action,
                action=action,
                reward=np.array([float(reward)]),
                terminated=np.array([terminated]),
                truncated=np.array([truncated]),
                next_obs={"state": next_obs[None]},
                next_base_action=action,
            )
        )
        obs = env.reset()[0] if truncated else next_obs
        if t >= 300:
            learner.update(replay.sample(256, n_step=1, gamma_step=0.99, rng=rng))
    total = 0.0
    for start in range(20):
        obs, truncated = env.reset(seed=1000 + start)[0], False
        while not truncated:
            action = learner.act(torch.from_numpy(obs[None]), explore=False).numpy()
            obs, reward, _, truncated, _ = env.step(2.0 * action[0])
            total += float(reward)
    torch.set_num_threads(threads)
    return total / 20


# One seed of one task: it earns -151 in both precisions. The last of the 20 starts are swung up late, at
# 4,100 and 4,800 of 5,000 steps in two runs that were looked into: another noise to explore with can end
# at -304, as it did once. It takes a minute, so that it is run by `make bench`, and not in CI.
@pytest.mark.benchmark
@pytest.mark.parametrize("matmul", ["bf16", "fp32"])
def test_both_precisions_solve_the_pendulum(matmul: Matmul) -> None:
    # A random policy earns some -1200; -200 is commonly called solved, the best are near -140.
    assert pendulum_return(matmul) > -200
