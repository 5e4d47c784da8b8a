"""The per-step policy: the learner's actor in another place, its noise, its checkpoint."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from robot_rl.algos.actor_critic import ActorCritic, ActorCriticConfig
from robot_rl.algos.config.off_policy import ActorConfig, CriticConfig
from robot_rl.core.policy import DemoBatch, Encoded
from robot_rl.data.normalize import Normaliser
from robot_rl.data.transitions import TransitionBatch
from robot_rl.policies.actor import ActorPolicy, ActorPolicyConfig
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.rollout.weights import Publisher, Subscriber


def build(**changes: Any) -> ActorPolicy:
    rng = np.random.default_rng(0)
    normaliser = Normaliser.fit(
        {"state": rng.normal(3.0, 2.0, (50, 3)).astype(np.float32)},
        rng.uniform(-1, 1, (50, 2)).astype(np.float32),
    )
    settings: dict[str, Any] = {"horizon": 4, "width": 16} | changes
    policy = ActorPolicy(ActorPolicyConfig(**settings), state_dim=3, action_dim=2, normaliser=normaliser)
    generator = Generator().manual_seed(1)
    with torch.no_grad():
        for layer in policy.layers:
            layer.normal_(0.0, 0.3, generator=generator)
    return policy


def states(rows: int = 6) -> dict[str, Tensor]:
    return {"state": 3 + 2 * torch.randn(rows, 3, generator=Generator().manual_seed(2))}


@pytest.mark.parametrize("kind", ["gaussian", "deterministic"])
@pytest.mark.parametrize("norm", ["none", "layer"])
def test_it_acts_as_the_learner_does(kind: Any, norm: Any) -> None:
    policy = build(is_gaussian=kind == "gaussian", layernorm=norm == "layer")
    cfg = ActorCriticConfig(actor=ActorConfig(kind=kind, norm=norm, width=16), matmul="fp32")
    learner = ActorCritic(3, 2, cfg, 0, encode=policy.encode)
    policy.load_state_dict(learner.policy_weights(), strict=False)
    chunk = policy.sample(policy.encode(states())).actions
    assert chunk.shape == (6, 4, 2)
    torch.testing.assert_close(chunk[:, 0], learner.act(policy.encode(states())["features"], explore=False))
    if kind == "gaussian":
        ours = policy.sample(
            policy.encode(states()), mode="explore", generator=Generator().manual_seed(3)
        ).actions[:, 0]
        features = policy.encode(states())["features"]
        theirs = learner.act(features, explore=True, generator=Generator().manual_seed(3))
        torch.testing.assert_close(ours, theirs)


def seeing(seed: int = 1, **changes: Any) -> ActorPolicy:
    config = ActorPolicyConfig(width=16, cameras=("front",), image_features=8, **changes)
    return ActorPolicy(config, state_dim=3, action_dim=2, generator=Generator().manual_seed(seed))


def pictures(seed: int, rows: int = 6) -> dict[str, Tensor]:
    generator = Generator().manual_seed(seed)
    picture = torch.randint(0, 256, (rows, 16, 16, 3), dtype=torch.uint8, generator=generator)
    return {"state": torch.randn(rows, 3, generator=generator), "front.rgb": picture}


def test_what_acts_sees_with_the_encoder_that_learned() -> None:
    policy, acting = seeing(), copy.deepcopy(seeing())
    cfg = ActorCriticConfig(actor=ActorConfig(width=16), critic=CriticConfig(width=16), matmul="fp32")
    learner = ActorCritic(policy.feature_dim, 2, cfg, 0, encode=policy.encode, seeing=policy)
    publisher, subscriber = Publisher(), Subscriber(acting)
    publisher.offer(0, learner.policy_weights)
    subscriber.refresh(publisher)
    begun = acting.encode(pictures(5))["features"]
    assert begun.equal(policy.encode(pictures(5))["features"])
    flat, ones = torch.zeros(6, 2), torch.ones(6)
    for seed in range(3):
        learner.update(
            TransitionBatch(pictures(seed), flat, flat, ones, ones, pictures(9), flat, ones.to(torch.uint8))
        )
    assert acting.encode(pictures(5))["features"].equal(begun)  # not before it has the new weights
    publisher.offer(3, learner.policy_weights)
    subscriber.refresh(publisher)
    features = acting.encode(pictures(5))["features"]
    assert features.equal(policy.encode(pictures(5))["features"])
    assert (features - begun).abs().max() > 1e-3
    assert features[:, :3].equal(begun[:, :3])  # the measured state is normalised, and nothing of it learns
    action = acting.sample(Encoded({"features": features})).actions[:, 0]
    torch.testing.assert_close(action, learner.act(features, explore=False))


def test_its_encoder_is_drawn_from_the_generator() -> None:
    mine, same, other = (seeing(seed).encode(pictures(0))["features"] for seed in (1, 1, 2))
    assert mine.equal(same)
    assert not mine.equal(other)


def test_cloning_shifts_the_pictures_while_training() -> None:
    policy = seeing(random_shift_px=2)
    with torch.no_grad():
        for layer in policy.layers:
            layer.normal_(0.0, 0.3, generator=Generator().manual_seed(1))
    demo = DemoBatch(pictures(0), torch.zeros(6, 1, 2), torch.ones(6, 1, dtype=torch.bool))
    trained = [policy.bc_loss(demo, Generator().manual_seed(seed)).item() for seed in (1, 1, 2)]
    assert trained[0] == trained[1] != trained[2]
    policy.eval()
    assert policy.bc_loss(demo, Generator().manual_seed(1)).item() == policy.bc_loss(demo).item()


def test_the_noise_steps_from_env_to_env() -> None:
    policy = build(is_gaussian=False, explore_std=(0.0, 0.02))
    obs = {"state": states(1)["state"].expand(3, 3)}
    mean = policy.sample(policy.encode(obs)).actions[:, 0]
    generator = Generator().manual_seed(0)
    draws = [
        policy.sample(policy.encode(obs), mode="explore", generator=generator).actions[:, 0]
        for _ in range(4000)
    ]
    std = (torch.stack(draws) - mean).std(dim=0)
    torch.testing.assert_close(std[0], torch.zeros(2))
    torch.testing.assert_close(std[1], torch.full((2,), 0.01), rtol=0.05, atol=0)
    torch.testing.assert_close(std[2], torch.full((2,), 0.02), rtol=0.05, atol=0)


def test_it_decides_at_every_step_whatever_the_chunk() -> None:
    policy = build()
    executor = ChunkExecutor(policy, 2, n_exec=4)
    for seed in range(3):
        obs = 3 + 2 * torch.randn(2, 3, generator=Generator().manual_seed(seed))
        action = executor.act({"state": obs.numpy()}).action
        np.testing.assert_array_equal(
            action, policy.sample(policy.encode({"state": obs})).actions[:, 0].detach().numpy()
        )


def test_it_decides_on_several_steps_if_asked() -> None:
    policy = build(decides=3, is_gaussian=False)
    decided = policy.sample(policy.encode(states())).actions
    features = policy.encode(states())["features"]
    torch.testing.assert_close(decided[:, :3].flatten(1), policy._net(features).tanh())
    assert decided[:, 3].equal(decided[:, 2])  # it vouches for three
    executor = ChunkExecutor(policy, 6, n_exec=4)
    for step in range(5):
        obs = {"state": states()["state"].numpy() + (0.0 if step == 0 else 9.0 * (step < 3))}
        action = executor.act(obs).action  # what is seen at steps 1 and 2 changes nothing
        np.testing.assert_array_equal(action, decided[:, step % 3].detach().numpy())


def test_cloning_is_of_the_actions_that_it_decides() -> None:
    policy = build(decides=2, is_gaussian=False)
    actions = torch.zeros(6, 4, 2)
    actions[:, :2] = policy.sample(policy.encode(states())).actions[:, :2].detach()
    actions[:, 0] += 0.2
    actions[:, 1] -= 0.4
    valid = torch.tensor([[True, True, True, True]] * 3 + [[True, False, False, False]] * 3)
    # (6 * 0.04 + 3 * 0.16) / 9
    loss = policy.bc_loss(DemoBatch(states(), actions, valid))
    assert loss.item() == pytest.approx(0.08, abs=1e-6)


def test_a_saved_policy_is_the_same(tmp_path: Path) -> None:
    policy = build(is_gaussian=False, explore_std=(0.1, 0.2), log_std_range=(-5.0, 0.0))
    meta = PolicyMeta(
        task="reach",
        robot="panda",
        control_hz=20.0,
        state_names=("a", "b", "c"),
        action_names=("x", "y"),
        instruction="",
        n_exec=4,
    )
    save_policy(tmp_path / "policy", policy, meta=meta)
    loaded: Any = load_policy(tmp_path / "policy")[0]
    assert loaded.config == policy.config
    assert loaded.sample(loaded.encode(states())).actions.equal(
        policy.sample(policy.encode(states())).actions
    )


def test_it_has_no_chain() -> None:
    policy = build()
    with pytest.raises(ValueError, match="no chain to record"):
        policy.sample(policy.encode(states()), record=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_encoder": "keypoint"}, "policy image_encoder: 'keypoint' is unknown. Did you mean"),
        ({"random_shift_px": -1}, "policy random_shift_px: got -1, allowed: 0 or more"),
        ({"width": 0}, "actor width: got 0, allowed: 1 or more"),
        ({"horizon": 4, "decides": 5}, "actor decides must be at most horizon, 4, got 5"),
        ({"log_std_range": (1.0, 0.0)}, "actor log_std_range must have the smaller first"),
        ({"explore_std": (0.1, -0.1)}, "actor explore_std must be at least 0"),
    ],
)
def test_bad_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActorPolicyConfig(**change)
