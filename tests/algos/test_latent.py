"""RL on the noise of a frozen policy: targets by hand, gradients by autograd, and what it finds."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from robot_rl.algos.latent import LatentConfig, LatentSAC
from robot_rl.core.names import PRIVILEGED
from robot_rl.core.policy import Encoded
from robot_rl.data.normalize import Normaliser
from robot_rl.data.parts import AtDecisions
from robot_rl.data.replay import ReplayBuffer, StepBatch
from robot_rl.data.transitions import ChunkBatch
from robot_rl.policies.latent import LatentActorConfig
from tests.plain import Plain


class TinyPolicy(Plain, nn.Module):
    """A base that decodes noise w to the actions (w / 2, -w / 2), and a linear actor; H 2, A 1, L 1."""

    feature_dim, latent_dim, action_dim = 2, 1, 1

    def __init__(self, bound: float = 1.5) -> None:
        super().__init__()
        self.config = LatentActorConfig(bound=bound)
        self.actor = nn.Linear(2, 2)
        self.register_buffer("steers", torch.tensor(False))
        self.steers: Tensor
        self.decoded: list[Tensor] = []

    def choose(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(features).chunk(2, dim=-1)
        return (mean + log_std.exp() * noise).tanh(), log_std

    def decode(self, encoded: Encoded, flat: Tensor) -> Tensor:
        self.decoded.append(flat)
        return torch.stack([flat / 2, -flat / 2], dim=1)

    def flat(self, z: Tensor) -> Tensor:
        return z[:, 0]

    def unflat(self, flat: Tensor) -> Tensor:
        return flat[:, None].expand(-1, 2, -1)


def build(seed: int = 0, *, n_exec: int = 1, bound: float = 1.5, **changes: Any) -> tuple[Any, LatentSAC]:
    torch.manual_seed(9)
    policy: Any = TinyPolicy(bound)
    defaults: dict[str, Any] = {"width": 64, "actor_lr": 1e-2, "critic_lr": 3e-3, "matmul": "fp32"}
    return policy, LatentSAC(policy, LatentConfig(**(defaults | changes)), seed, n_exec=n_exec)


def batch(seed: int, size: int = 64) -> ChunkBatch:
    """Chunks of one action, w / 2, that earn 1 - 4 (w / 2 - 0.4)^2 and end: the best noise is 0.8."""
    generator = Generator().manual_seed(seed)
    state = torch.randn(size, 2, generator=generator)
    noise = torch.randn(size, 1, generator=generator)
    action = noise[:, None] / 2
    return ChunkBatch(
        obs={"state": state},
        action=action,
        valid=torch.ones(size, 1, dtype=torch.bool),
        reward=1 - 4 * (action[:, 0, 0] - 0.4).square(),
        bootstrap=torch.zeros(size),
        next_obs={"state": state},
        source=torch.zeros(size, dtype=torch.uint8),
        latent=noise.expand(-1, 2),
    )


def learn(algorithm: LatentSAC, first: int, last: int) -> None:
    for seed in range(first, last):
        algorithm.update(batch(seed))


def step(reward: float, *, decides: bool, terminated: bool = False, truncated: bool = False) -> StepBatch:
    row = np.full((1, 1), reward, np.float32)
    obs = {"state": np.full((1, 2), reward, np.float32)}
    return StepBatch(
        obs=obs,
        base_action=row,
        action=row,
        reward=np.array([reward]),
        terminated=np.array([terminated]),
        truncated=np.array([truncated]),
        next_obs=obs,
        next_base_action=row,
        latent=np.full((1, 2), reward, np.float32),
        decides=np.array([decides]),
    )


def four_chunks() -> ChunkBatch:
    """Chunks of two steps that go on, are truncated at once, end, and end at once; gamma_step 1/2."""
    replay = ReplayBuffer(40, 1, {"state": ((2,), np.float32)}, 1, latent_dim=2)
    replay.add(step(1, decides=True))
    replay.add(step(2, decides=False))
    replay.add(step(4, decides=True, truncated=True))
    replay.add(step(3, decides=True))
    replay.add(step(6, decides=False, terminated=True))
    replay.add(step(8, decides=True, terminated=True))
    replay.add(step(0, decides=True))
    rows = replay.decisions(2)
    assert len(rows) == 4
    batches = AtDecisions(replay).sample_chunks(64, horizon=2, gamma_step=0.5, rng=np.random.default_rng(0))
    first = [batches.obs["state"][:, 0].tolist().index(value) for value in (1.0, 4.0, 3.0, 8.0)]
    batches.obs = {"state": batches.obs["state"][first]}
    batches.next_obs = {"state": batches.next_obs["state"][first]}
    for name in ("action", "valid", "reward", "bootstrap", "latent"):
        setattr(batches, name, getattr(batches, name)[first])
    return batches


def answer(critics: Any, value: float) -> None:
    """Makes critics answer one value whatever they are asked."""
    for layer in critics.layers:
        layer.data.zero_()
    critics.layers[-1].data.fill_(value)


@torch.no_grad()
def target_of(learner: LatentSAC, rows: ChunkBatch) -> Tensor:
    return learner._target(rows, learner._policy.encode(rows.obs), torch.zeros(len(rows.reward), 1))[0]


@pytest.mark.parametrize("variant", ["sac", "na"])
def test_targets_by_hand(variant: Any) -> None:
    # Next value 4. Goes on: 1 + 2/2 + 4/4 = 3. Truncated after one step: 4 + 4/2 = 6.
    # Terminated after two: 3 + 6/2 = 6. Terminated after one: 8. While the base acts there is no entropy.
    policy, learner = build(variant=variant, n_exec=2)
    answer(learner._targets, 4.0)
    assert target_of(learner, four_chunks()).tolist() == [3.0, 6.0, 6.0, 8.0]
    assert len(policy.decoded) == (variant == "na")


def test_the_target_of_sac_has_the_entropy_of_the_next_noise() -> None:
    # std 1, mean 0, temperature 2: value 4 - 2 log p, counted a quarter, a half, and not at all after an end.
    policy, learner = build(initial_temperature=2.0)
    nn.init.zeros_(policy.actor.weight)
    nn.init.zeros_(policy.actor.bias)
    learner._updates = 1  # the actor acts
    answer(learner._targets, 4.0)
    chance = torch.empty(4, 1).normal_(generator=copy_of(learner._generator))
    soft = 4.0 - 2.0 * log_density(chance, torch.zeros(4, 1), chance)
    expected = torch.tensor([2.0, 4.0, 6.0, 8.0]) + torch.tensor([0.25, 0.5, 0.0, 0.0]) * soft
    torch.testing.assert_close(target_of(learner, four_chunks()), expected, rtol=1e-4, atol=1e-4)


def log_density(u: Tensor, log_std: Tensor, chance: Tensor) -> Tensor:
    """Returns the log-density of tanh(u), one element, u = mean + std chance, by change of variables."""
    normal = -0.5 * chance.square() - log_std - 0.5 * np.log(2 * np.pi)
    return (normal - torch.log(1 - u.tanh().square()))[:, 0]


def copy_of(generator: Generator) -> Generator:
    return Generator().set_state(generator.get_state())


def test_the_target_of_na_values_what_is_executed_of_the_decoded_chunk() -> None:
    # Critics that answer the sum of the executed actions: with m = 1 that is w' / 2, with m = 2 it is 0.
    for n_exec, factor in ((1, 0.5), (2, 0.0)):
        policy, learner = build(variant="na", n_exec=n_exec, depth=1, layernorm=False, width=2)
        learner._updates = 1
        answer(learner._targets, 0.0)
        weights = learner._targets.layers
        for action in range(n_exec):  # relu(x) - relu(-x) = x
            weights[0].data[:, 2 + action] = torch.tensor([1.0, -1.0])
        weights[2].data[:] = torch.tensor([[1.0], [-1.0]])
        rows = four_chunks()
        target = target_of(learner, rows)
        (both,) = policy.decoded  # the present noise, then the next
        noise = both[4:]
        assert 0 < noise.abs().min() <= noise.abs().max() <= 1.5
        expected = rows.reward + rows.bootstrap * factor * noise[:, 0]
        torch.testing.assert_close(target, expected, rtol=0.0, atol=1e-6)


def layers_of(learner: LatentSAC) -> list[Tensor]:
    assert learner._of_chunks is not None
    return [layer.detach() for layer in learner._of_chunks.layers]


def test_a_chunk_that_the_newest_step_cuts_short_teaches_no_critic_of_chunks() -> None:
    """Of three chunks of two steps the last is cut: the critics of chunks move as by the first two alone."""
    every = four_chunks()

    def first(count: int) -> ChunkBatch:
        columns = {name: getattr(every, name)[:count] for name in ("action", "valid", "reward", "source")}
        obs, after = ({"state": seen["state"][:count]} for seen in (every.obs, every.next_obs))
        return ChunkBatch(obs=obs, next_obs=after, bootstrap=torch.zeros(count), **columns)

    learned = []
    for whole in ([True, True, False], [True, True], [False, False, False]):
        _, learner = build(variant="na", n_exec=2)
        learner.update(replace(first(len(whole)), whole=torch.tensor(whole)))
        learned.append(layers_of(learner))
        assert all(layer.isfinite().all() for layer in learner._of_noise.layers)
    cut, without, nothing = learned
    _, fresh = build(variant="na", n_exec=2)
    for a, b, c, before in zip(cut, without, nothing, layers_of(fresh), strict=True):
        torch.testing.assert_close(a, b)
        assert c.equal(before)


def test_the_actors_gradient_is_that_of_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, learner = build(initial_temperature=0.3)
    features = torch.randn(8, 2, generator=Generator().manual_seed(1))
    chance = torch.empty(8, 1).normal_(generator=copy_of(learner._generator))
    mean, log_std = policy.actor(features).chunk(2, dim=-1)
    u = mean + log_std.exp() * chance
    log_prob = log_density(u, log_std, chance)
    value = learner._of_noise(torch.cat([features, 1.5 * u.tanh()], dim=-1)).amin(dim=0)[:, 0]
    loss = (0.3 * log_prob - value).mean()
    expected = torch.autograd.grad(loss, list(policy.actor.parameters()))
    taken: list[list[Tensor]] = []
    monkeypatch.setattr(learner._optimisers["actor"], "apply", lambda found: taken.append(list(found)))
    with torch.no_grad():
        learner._improve_actor(features, features)
    for gradient, peer in zip(taken[0], expected, strict=True):
        torch.testing.assert_close(gradient, peer, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("variant", ["sac", "na"])
def test_it_finds_the_best_noise(variant: Any) -> None:
    policy, learner = build(variant=variant, initial_temperature=0.01, target_entropy=-2.0)
    learn(learner, 0, 400)
    share, _ = policy.choose(torch.randn(64, 2, generator=Generator().manual_seed(1)), torch.zeros(64, 1))
    assert (1.5 * share - 0.8).abs().mean().item() < 0.15


def test_a_best_noise_beyond_the_bound_is_not_reached() -> None:
    policy, learner = build(initial_temperature=0.01, target_entropy=-2.0, bound=0.5)
    learn(learner, 0, 400)
    share, _ = policy.choose(torch.zeros(1, 2), torch.zeros(1, 1))
    assert 0.35 < 0.5 * share.item() < 0.5


def test_the_critics_of_noise_learn_what_those_of_chunks_say_of_the_decoded() -> None:
    _, learner = build(variant="na")
    for seed in range(400):
        learner.update(batch(seed))
    noise = torch.linspace(-1.5, 1.5, 31)[:, None]
    features = torch.zeros(31, 2)
    assert learner._of_chunks is not None
    of_chunks = learner._of_chunks.q(features, noise / 2).amin(dim=0)
    of_noise = learner._of_noise.q(features, noise).mean(dim=0)
    assert of_chunks.std() > 1.0
    assert (of_noise - of_chunks).abs().mean() < 0.1 * of_chunks.std()


@pytest.mark.parametrize("variant", ["sac", "na"])
def test_critics_that_read_the_privileged_state_know_what_the_policy_cannot(variant: Any) -> None:
    """A hidden number h = -1 or 1 adds 2 h to the reward: without it a critic's error is 4 at least."""
    hidden = torch.tensor([-1.0, 1.0]).repeat(32)[:, None]
    scale = Normaliser.fit({PRIVILEGED: (5 + 3 * hidden).numpy()}, np.zeros((64, 1), np.float32))

    def error(algorithm: LatentSAC) -> float:
        found: Any = {}
        for seed in range(400):
            rows = batch(seed)
            rows.reward += 2 * hidden[:, 0]
            rows.obs[PRIVILEGED] = rows.next_obs[PRIVILEGED] = 5 + 3 * hidden
            found = algorithm.update(rows)
        return float(found["critic_loss"]) / algorithm._cfg.num_critics

    assert error(build(variant=variant)[1]) > 3.0
    policy, algorithm = build(variant=variant)
    assert error(LatentSAC(policy, algorithm._cfg, 0, n_exec=1, privileged=scale)) < 0.3
    with torch.no_grad():  # and the actor, which cannot read it, finds the best noise
        chosen = 1.5 * policy.choose(batch(1000).obs["state"], torch.zeros(64, 1))[0]
    assert chosen.mean().item() == pytest.approx(0.8, abs=0.25)


def test_the_base_acts_during_the_warm_up() -> None:
    policy, learner = build(actor_warmup=3)
    before = copy.deepcopy(policy.actor.state_dict())
    learn(learner, 0, 3)
    assert not learner.policy_weights()["steers"]
    assert all(torch.equal(value, before[name]) for name, value in policy.actor.state_dict().items())
    learn(learner, 3, 4)
    assert learner.policy_weights()["steers"]
    assert not torch.equal(policy.actor.weight, before["weight"])


def test_the_temperature_moves_towards_the_target_entropy() -> None:
    # Adam's first steps are the learning rate: exp(-/+ 9 * 0.1) after nine.
    for target, expected in ((-5.0, np.exp(-0.9)), (5.0, np.exp(0.9))):
        _, learner = build(initial_temperature=1.0, target_entropy=target, temperature_lr=0.1, actor_lr=1e-5)
        metrics = [learner.update(batch(seed)) for seed in range(10)]
        assert metrics[:9] == [{}] * 9
        assert float(metrics[9]["temperature"]) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("variant", ["sac", "na"])
@pytest.mark.parametrize("saved_at", [2, 5])
def test_a_resumed_learner_is_the_unbroken_one(variant: Any, saved_at: int) -> None:
    (_, whole), (_, first), (policy, second) = (
        build(seed, variant=variant, actor_warmup=3) for seed in (0, 0, 7)
    )
    learn(whole, 0, 12)
    learn(first, 0, saved_at)
    second.load_state_dict(first.state_dict())
    assert bool(policy.steers) == (saved_at > 3)
    learn(second, saved_at, 12)
    for name, value in whole.policy_weights().items():
        assert value.equal(second.policy_weights()[name]), name
    for name, value in whole._parts()["targets"].state_dict().items():
        assert value.equal(second._parts()["targets"].state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": "naa"}, "method.algorithm.variant: got 'naa', allowed: sac, na"),
        ({"width": 0}, "method.algorithm.width: got 0, allowed: 1 or more"),
        ({"tau": 2.0}, "method.algorithm.tau: got 2.0, allowed: above 0, at most 1"),
        ({"initial_temperature": 0.0}, "method.algorithm.initial_temperature: got 0.0, allowed: above 0"),
        ({"actor_warmup": -1}, "method.algorithm.actor_warmup: got -1, allowed: 0 or more"),
        ({"gamma_step": 1.5}, "method.algorithm.gamma_step: got 1.5, allowed: 0 to 1"),
    ],
)
def test_bad_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentConfig(**change)
