"""The actor-critic core: targets by hand, every setting learns a bandit, resume, cloning, what acts."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, nn

from robot_rl.algos.actor_critic import ActorCritic
from robot_rl.algos.actors import Deterministic, TanhGaussian
from robot_rl.algos.config.off_policy import ActorConfig, ActorCriticConfig, CriticConfig
from robot_rl.algos.losses import td_loss
from robot_rl.core.policy import Encoded
from robot_rl.data.transitions import TransitionBatch
from tests.algos.test_batch_renorm import usual


def batch(seed: int, size: int = 64) -> TransitionBatch:
    """Reward -(a - 0.5)^2 on one-step episodes."""
    generator = Generator().manual_seed(seed)
    state = torch.randn(size, 3, generator=generator)
    action = 2 * torch.rand(size, 1, generator=generator) - 1
    reward = -(action - 0.5).square()[:, 0]
    kind = torch.zeros(size, dtype=torch.uint8)
    after = {"state": torch.randn(size, 3, generator=generator)}
    return TransitionBatch({"state": state}, action, action, reward, torch.zeros(size), after, action, kind)


def build(
    *,
    actor: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    seed: int = 0,
    **changes: Any,
) -> ActorCritic:
    rates: dict[str, Any] = {"actor_lr": 1e-3, "critic_lr": 5e-3, "initial_temperature": 0.01}
    rates |= {"target_entropy_per_action": -3.0}
    values: dict[str, Any] = {"width": 64, "low": -3.0, "high": 1.0, "atoms": 21}
    cfg = ActorCriticConfig(
        actor=ActorConfig(width=64, **(actor or {})),
        critic=CriticConfig(**(values | (critic or {}))),
        **(rates | changes),
    )
    return ActorCritic(3, 1, cfg, seed)


CROSSQ: dict[str, Any] = {"norm": "batch", "target": "none"}
XQC: dict[str, Any] = {**CROSSQ, "value": "c51", "unit_weights": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "sac": {},
    "td3": {"actor": {"kind": "deterministic"}, "actor_every": 2},
    "rlpd": {"critic": {"norm": "layer", "num": 4, "drawn": 2, "actor_aggregate": "mean"}},
    "crossq": {"actor": {"norm": "batch"}, "critic": CROSSQ, "beta1": 0.5},
    "xqc": {"actor": {"norm": "batch"}, "critic": XQC, "beta1": 0.5},
    "crossq_td3": {"actor": {"kind": "deterministic", "norm": "batch"}, "critic": CROSSQ},
    "td3_batch": {"actor": {"kind": "deterministic", "norm": "batch"}},
    "fast_sac": {
        "actor": {"norm": "layer"},
        "critic": {"value": "c51", "aggregate": "mean", "norm": "layer"},
    },
    "fast_td3": {"actor": {"kind": "deterministic"}, "critic": {"value": "c51"}, "weight_decay": 0.1},
    "hl_gauss": {"critic": {"value": "hl_gauss"}},
    "bro": {"critic": {"value": "quantile", "aggregate": "mean", "actor_aggregate": "mean"}},
    "dsac": {"critic": {"value": "gaussian"}, "actor_every": 2, "grad_clip": 10.0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_finds_the_best_action(name: str) -> None:
    learner = build(**SETTINGS[name])
    for seed in range(400):
        learner.update(batch(seed))
    states = torch.randn(16, 3, generator=Generator().manual_seed(1000))
    assert (learner.act(states, explore=False) - 0.5).abs().mean().item() < 0.12


def learner_of(name: str, seed: int) -> ActorCritic:
    """Returns one of `SETTINGS` with critics that are drawn, or one whose encoder learns."""
    if name == "encoder":
        return seeing(Seeing(seed=seed), seed=seed)
    settings = SETTINGS[name] | {"critic": {"num": 3, "drawn": 2} | SETTINGS[name].get("critic", {})}
    return build(**settings, seed=seed)


@pytest.mark.parametrize("name", ["sac", "td3", "crossq", "xqc", "dsac", "encoder"])
def test_a_resumed_learner_is_the_unbroken_one(name: str) -> None:
    whole, first, second = (learner_of(name, seed) for seed in (0, 0, 7))
    for seed in range(12):
        whole.update(batch(seed))
    for seed in range(5):
        first.update(batch(seed))
    second.load_state_dict(first.state_dict())
    for seed in range(5, 12):
        second.update(batch(seed))
    weights = whole.policy_weights()
    for key, value in weights.items():
        assert value.equal(second.policy_weights()[key]), key
    for key, value in whole.critics.state_dict().items():
        assert value.equal(second.critics.state_dict()[key]), key
    if name == "encoder":
        assert not weights["encoder.weight"].equal(Seeing(seed=0).encoder.weight)


def test_a_targets_averages_follow_as_its_weights_do() -> None:
    """Features are 1, -2 and 3 everywhere, so each batch's mean is that, and its variance 0.

    The actor's averages go 1 % of the way at each update, from 0 and 1: mean (1 - 0.99^n) f, variance 0.99^n.
    The target's go tau = 0.5 of the way to those: after two updates 0.5 (0.5 * 0.01 + 0.0199) f = 0.01245 f.
    """
    learner = build(actor={"kind": "deterministic", "norm": "batch"}, critic={"tau": 0.5})
    assert learner._target_actor is not None
    norm: Any = learner._target_actor.net.renorms[0]
    feature = torch.tensor([1.0, -2.0, 3.0])
    means, variances = [], []
    for seed in range(2):
        rows = batch(seed)
        rows.obs["state"] = feature.expand(64, 3)
        learner.update(rows)
        means.append(norm.mean[0].clone())
        variances.append(norm.variance[0].clone())
    torch.testing.assert_close(means[0], 0.005 * feature)
    torch.testing.assert_close(means[1], 0.01245 * feature)
    # 0.5 (1 + 0.99) = 0.995; 0.5 (0.995 + 0.9801) = 0.98755
    torch.testing.assert_close(variances[1], torch.full((3,), 0.98755))
    # Where all weights are the same, target and actor say the same once the averages have followed for long.
    for _ in range(400):
        learner._target_actor.net.follow_online(learner.actor.net, 0.5)
    states = torch.randn(8, 3, generator=Generator().manual_seed(1))
    torch.testing.assert_close(learner._target_actor.mean(states), learner.actor.mean(states))


def test_unit_weights_are_units_after_each_update_and_the_last_layer_is_free() -> None:
    learner = build(**SETTINGS["xqc"])
    assert learner._targets is None  # present and next rows are normalised as one: no slow averages to scale
    for seed in range(5):
        before = [layer.clone() for layer in learner.critics.layers]
        learner.update(batch(seed))
        first, _, second, _, last, _ = learner.critics.layers
        for weight, old in ((first, before[0]), (second, before[2])):
            assert not weight.equal(old)
            for each in (weight, old):
                torch.testing.assert_close(torch.linalg.vector_norm(each, dim=1), torch.ones(2, 64))
        # Drawn from +-1/8 with 64 inputs: about sqrt(1/3).
        assert 0.2 < torch.linalg.vector_norm(last, dim=1).mean() < 0.9


class Recorded(ActorCritic):
    """Keeps the target of its last update."""

    target: torch.Tensor

    def _update_critics(self, steps: Any, after: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        self.after, self.bonus = after, bonus
        q = self.critics.q(steps.features, steps.action)
        error = super()._update_critics(steps, after, bonus)
        self.target = q - error
        return error


def recorded(constant: float = 4.0, **changes: Any) -> Recorded:
    """A learner whose target critics answer a constant."""
    cfg = ActorCriticConfig(actor=ActorConfig(width=8), critic=CriticConfig(width=8), matmul="fp32")
    learner = Recorded(3, 1, replace(cfg, **changes), 0)
    targets = learner._targets
    assert targets is not None
    with torch.no_grad():
        for layer in targets.layers:
            layer.zero_()
        targets.layers[-1].fill_(constant)
    return learner


@pytest.mark.parametrize("backup", [True, False])
def test_the_entropy_counts_in_the_target_if_asked(backup: bool) -> None:
    learner, rows = recorded(entropy_backup=backup, initial_temperature=2.0), batch(0)
    rows.bootstrap = torch.full((64,), 0.5)
    rows.bootstrap[0] = 0.0  # here the task ended
    actor = TanhGaussian(3, 1, width=8)
    actor.load_state_dict(learner.actor.state_dict())
    generator = Generator()
    generator.set_state(learner._generator.get_state())
    learner.update(rows)
    both = actor.sample(torch.cat([rows.obs["state"], rows.next_obs["state"]]), generator)
    # reward + (4 - 2 log pi) / 2, or without its entropy reward + 4 / 2
    after = 4.0 - 2.0 * both.log_prob[64:] if backup else torch.full((64,), 4.0)
    expected = rows.reward + rows.bootstrap * after
    torch.testing.assert_close(learner.target, expected.expand(2, 64), rtol=1e-4, atol=1e-4)
    assert learner.target[0, 0].item() == pytest.approx(rows.reward[0].item(), abs=1e-5)


def test_the_deterministic_target_acts_with_clipped_noise() -> None:
    learner = recorded(
        actor=ActorConfig(width=8, kind="deterministic"), target_noise_std=10.0, target_noise_clip=0.25
    )
    rows = batch(0)
    target_actor = learner._target_actor
    assert target_actor is not None
    mean = target_actor.mean(rows.next_obs["state"])
    learner.update(rows)
    assert learner.bonus.abs().max() == 0
    difference = (learner.after - mean).abs()
    assert difference.max().item() == pytest.approx(0.25, abs=1e-6)
    assert (difference > 0.24).float().mean() > 0.9


def test_the_actor_moves_every_third_update() -> None:
    learner = build(actor_every=3, temperature_lr=0.1)
    moved = []
    for seed in range(6):
        before, temperature = learner.policy_weights()["layers.0"].clone(), learner._log_temperature.item()
        learner.update(batch(seed))
        moved.append(not before.equal(learner.policy_weights()["layers.0"]))
        assert moved[-1] == (temperature != learner._log_temperature.item())
    assert moved == [False, False, True, False, False, True]


def test_a_fixed_temperature_stays() -> None:
    learner = build(temperature_lr=0.0, initial_temperature=0.25)
    for seed in range(5):
        learner.update(batch(seed))
    assert learner._log_temperature.item() == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("kind", ["gaussian", "deterministic"])
def test_the_clones_gradient_is_autograds(kind: str) -> None:
    actor = (TanhGaussian if kind == "gaussian" else Deterministic)(3, 2, width=8, matmul="fp32").double()
    generator = Generator().manual_seed(1)
    state = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    action = 1.8 * torch.rand(8, 2, dtype=torch.float64, generator=generator) - 0.9
    out = actor.net(state)[0]
    if kind == "gaussian":
        mean, log_std = out.chunk(2, dim=-1)
        density = torch.distributions.Normal(mean, log_std.exp()).log_prob(action.atanh())
        expected = -density.mean() - 0.5 * math.log(2 * math.pi)
    else:
        expected = (out.tanh() - action).square().mean()
    with torch.no_grad():
        loss, gradients = actor.cloning_gradients(state, action)
    torch.testing.assert_close(loss, expected.detach())
    for mine, peer in zip(gradients, torch.autograd.grad(expected, actor.net.in_order), strict=True):
        torch.testing.assert_close(mine, peer)


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_pretraining_clones_and_values_the_clone(name: str) -> None:
    learner = build(**SETTINGS[name])
    for seed in range(300):
        rows = batch(seed)
        rows.action = (0.5 * rows.obs["state"][:, :1]).tanh()
        rows.reward = torch.full((64,), 0.7)
        learner.pretrain(rows)
    state = torch.randn(32, 3, generator=Generator().manual_seed(1000))
    action = learner.act(state, explore=False)
    assert (action - (0.5 * state[:, :1]).tanh()).abs().mean().item() < 0.05
    assert (learner.critics.q(state, action) - 0.7).abs().mean().item() < 0.1


@pytest.mark.parametrize("name", ["sac", "td3", "crossq"])
def test_the_weights_that_act_are_a_plain_network(name: str) -> None:
    learner = build(**SETTINGS[name])
    for seed in range(6):
        learner.update(batch(seed))
    state = torch.randn(16, 3, generator=Generator().manual_seed(1000))
    layers, hidden = list(learner.policy_weights().values()), state
    for i in range(0, len(layers), 2):
        hidden = (hidden if i == 0 else hidden.relu()) @ layers[i] + layers[i + 1]
    torch.testing.assert_close(learner.act(state, explore=False), hidden[:, :1].tanh(), rtol=1e-4, atol=1e-4)


class Seeing:
    """A linear encoder of the state; a shift adds one number to all of it, the guess is the first feature."""

    def __init__(self, *, seed: int = 1, guess_weight: float = 0.0) -> None:
        self.encoder = nn.Linear(3, 4)
        self.guess_weight, self.shifts = guess_weight, list[torch.Tensor]()
        with torch.no_grad():
            for parameter in self.encoder.parameters():
                parameter.normal_(generator=Generator().manual_seed(seed))

    def encode(self, obs: dict[str, torch.Tensor]) -> Encoded:
        return Encoded({"features": self.encoder(obs["state"])})

    def shifted(self, obs: Any, generator: Generator | None) -> dict[str, torch.Tensor]:
        self.shifts.append(0.01 * torch.randn(1, generator=generator))
        return {"state": obs["state"] + self.shifts[-1]}

    def guess_loss(self, features: torch.Tensor, obs: Any) -> torch.Tensor:
        return self.guess_weight * (features[:, 0] - obs["state"].sum(dim=1)).abs().mean()


def seeing(own: Seeing, kind: type[ActorCritic] = ActorCritic, seed: int = 0, **changes: Any) -> Any:
    values: dict[str, Any] = {"actor": ActorConfig(width=32), "critic": CriticConfig(width=32)}
    values |= {"critic_lr": 5e-3, "actor_lr": 1e-3, "encoder_lr": 1e-3, "initial_temperature": 0.01}
    values |= {"matmul": "fp32", "target_entropy_per_action": -3.0}
    cfg = ActorCriticConfig(**(values | changes))
    return kind(4, 1, cfg, seed, encode=own.encode, seeing=own)


@pytest.mark.parametrize("guess_weight", [0.0, 0.5])
@pytest.mark.parametrize("target", ["ema", "none"])
def test_the_encoders_gradient_is_that_of_the_critics_loss(
    target: Any, guess_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor's loss, whose step is in the same update, adds nothing to it, and next rows add nothing."""
    own, rows = Seeing(guess_weight=guess_weight), batch(0)
    rows.bootstrap = torch.full((64,), 0.9)
    critic = CriticConfig(width=32, target=target, norm="batch" if target == "none" else "none")
    learner, found = seeing(own, Recorded, critic=critic), list[torch.Tensor]()
    critics = copy.deepcopy(learner.critics)
    monkeypatch.setattr(learner._optimisers["encoder"], "apply", lambda g, **how: found.extend(g))
    learner.update(rows)
    obs, after = (
        {"state": each["state"] + s} for each, s in zip((rows.obs, rows.next_obs), own.shifts, strict=True)
    )
    features, following = own.encode(obs)["features"], own.encode(after)["features"].detach()
    both = torch.cat([torch.cat([features, rows.action], 1), torch.cat([following, learner.after], 1)])
    q = (
        critics(both).squeeze(-1)
        if target == "ema"
        else torch.stack([usual(critics, critics.in_order, both, n, warm=False)[:, 0] for n in range(2)])
    )
    # The slow copy of the critics is still what they were.
    aim = rows.reward + 0.9 * (q[:, 64:].amin(dim=0).detach() + learner.bonus)
    loss = td_loss(q[:, :64], aim) + own.guess_loss(features, obs)
    for mine, peer in zip(found, torch.autograd.grad(loss, list(own.encoder.parameters())), strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-4, atol=1e-5)
    assert not own.shifts[0].equal(own.shifts[1])  # present and next observations have their own shifts


def test_the_target_reads_the_encoder_that_learns() -> None:
    """Target critics that answer 4 and no entropy: the target is reward + 0.9 * 4, whatever is encoded.

    The next action is the actor's, in the features of the next observation, shifted, by the same encoder.
    """
    own, rows = Seeing(), batch(0)
    learner = seeing(own, Recorded, actor=ActorConfig(width=8, kind="deterministic"), target_noise_std=0.0)
    rows.bootstrap = torch.full((64,), 0.9)
    with torch.no_grad():
        for layer in learner._targets.layers:
            layer.zero_()
        learner._targets.layers[-1].fill_(4.0)
        own.encoder.weight.mul_(-1.0)  # what a copy made in the beginning would not know
        state, generator = rows.next_obs["state"], Generator()
        generator.set_state(learner._generator.get_state())
        shifts = [0.01 * torch.randn(1, generator=generator) for _ in range(2)]
        expected = learner.actor.mean(own.encoder(state + shifts[1]))
    learner.update(rows)
    torch.testing.assert_close(learner.after, expected)
    torch.testing.assert_close(learner.target, (rows.reward + 3.6).expand(2, 64), rtol=1e-4, atol=1e-4)


def test_an_encoder_that_begins_blind_learns_to_see() -> None:
    """The best action is tanh(s_0): without the state no action is closer than 0.5 in the mean."""
    errors = list[float]()
    for encoder_lr in (0.0, 1e-2):
        own = Seeing()
        with torch.no_grad():
            for parameter in own.encoder.parameters():
                parameter.zero_()
        learner = seeing(own, encoder_lr=encoder_lr, actor_lr=3e-3)
        for seed in range(200):
            rows = batch(seed)
            rows.reward = -(rows.action - rows.obs["state"][:, :1].tanh()).square()[:, 0]
            learner.update(rows)
        state = torch.randn(64, 3, generator=Generator().manual_seed(1000))
        with torch.no_grad():
            action = learner.act(own.encoder(state), explore=False)
        errors.append((action - state[:, :1].tanh()).abs().mean().item())
        assert any(p.abs().sum() > 0 for p in own.encoder.parameters()) == (encoder_lr > 0)
    assert errors[0] > 0.4
    assert errors[1] < 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CriticConfig(drawn=3), "critic.drawn: got 3, allowed: at most critic.num, which is 2"),
        (
            lambda: CriticConfig(norm="batch"),
            "critic.target: got 'ema', allowed: none with critic.norm batch",
        ),
        (
            lambda: CriticConfig(unit_weights=True),
            "critic.unit_weights: got True, allowed: false without critic.norm batch",
        ),
        (lambda: CriticConfig(low=1.0, high=1.0), "critic.low: got 1.0, allowed: below critic.high"),
        (lambda: CriticConfig(atoms=1), "critic.atoms: got 1, allowed: 2 or more"),
        (lambda: ActorConfig(log_std_range=(0.0, -1.0)), "actor.log_std_range"),
        (lambda: ActorCriticConfig(actor_every=0), "algorithm.actor_every: got 0, allowed: 1 or more"),
        (lambda: ActorCriticConfig(encoder_lr=-1.0), "algorithm.encoder_lr: got -1.0, allowed: 0 or more"),
        (lambda: ActorCriticConfig(beta1=1.0), "algorithm.beta1: got 1.0, allowed: 0 to below 1"),
    ],
)
def test_bad_configs(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
