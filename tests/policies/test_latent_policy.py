"""Steering by noise: formula, first policy, one decoding per chunk, what learns, and its checkpoint."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.core.policy import ChunkSample, Encoded
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.latent import LatentActorConfig, LatentSteer
from robot_rl.policies.real_time import RealTimeChunks
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy

META = PolicyMeta(
    task="t",
    robot="r",
    control_hz=20.0,
    state_names=("a", "b", "c", "d"),
    action_names=("x", "y"),
    instruction="i",
    n_exec=2,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Counting(FlowPolicy):
    """A base that writes down the noise it is asked to decode."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[Tensor] = []

    def sample(self, encoded: Encoded, **how: Any) -> ChunkSample:
        assert how["mode"] == "ode"
        self.asked.append(how["z"])
        return super().sample(encoded, **how)


def base_policy(kind: type[FlowPolicy] = FlowPolicy) -> FlowPolicy:
    config = ChunkPolicyConfig(horizon=3, width=16, depth=1, time_dim=8, steps=2, process="flow_sde")
    return kind(config, state_dim=4, action_dim=2, generator=seeded())


def make(
    *, steers: bool = True, kind: type[FlowPolicy] = FlowPolicy, width: int = 16, **options: Any
) -> LatentSteer:
    config = LatentActorConfig(width=width, **options)
    policy = LatentSteer(base_policy(kind), config, generator=seeded(1)).eval()
    policy.steers.fill_(steers)
    return policy


def observation(batch: int = 6) -> dict[str, Tensor]:
    return {"state": torch.randn(batch, 4, generator=seeded(3))}


def noise(batch: int = 6) -> Tensor:
    return torch.randn(batch, 3, 2, generator=seeded(4))


def test_formula() -> None:
    # mean atanh(0.5), std 2: 0.5 at noise 0, and (3 e - 1) / (3 e + 1) = 0.781536 at noise 0.25; times 1.5.
    policy = make(bound=1.5)
    torch.nn.init.zeros_(policy.actor.trunk.out.weight)
    with torch.no_grad():
        policy.actor.trunk.out.bias[:6] = 0.5493061
        policy.actor.trunk.out.bias[6:] = np.log(2.0)
    z = torch.full((6, 3, 2), 0.25)
    found = policy.sample(policy.encode(observation()), z=z, mode="explore")
    assert found.latent is not None
    torch.testing.assert_close(found.latent, torch.full((6, 3, 2), 1.5 * 0.781536), rtol=1e-5, atol=0.0)
    mean = policy.sample(policy.encode(observation()), z=z, mode="ode").latent
    assert mean is not None
    torch.testing.assert_close(mean, torch.full((6, 3, 2), 0.75), rtol=1e-5, atol=0.0)


def test_the_chunk_is_the_base_s_of_the_latent() -> None:
    policy, obs = make(), observation()
    for mode in ("ode", "explore", "mean"):
        found = policy.sample(policy.encode(obs), z=noise(), mode=mode)
        assert found.latent is not None
        assert torch.equal(
            found.actions, policy.policy.sample(policy.policy.encode(obs), z=found.latent, mode="ode").actions
        )


@pytest.mark.parametrize("mode", ["ode", "explore", "mean"])
def test_it_starts_as_its_base(mode: Any) -> None:
    policy, obs = make(steers=False), observation()
    expected = policy.policy.sample(
        policy.policy.encode(obs), z=noise(), mode="mean" if mode == "mean" else "ode"
    )
    found = policy.sample(policy.encode(obs), z=noise(), mode=mode)
    assert torch.equal(found.actions, expected.actions)
    assert found.latent is not None
    assert torch.equal(found.latent, torch.zeros(6, 3, 2) if mode == "mean" else noise())


@pytest.mark.parametrize("mode", ["ode", "explore", "mean"])
def test_a_bound_of_zero_decodes_zero_noise(mode: Any) -> None:
    policy, obs = make(bound=0.0), observation()
    expected = policy.policy.sample(policy.policy.encode(obs), z=torch.zeros(6, 3, 2), mode="mean").actions
    assert torch.equal(policy.sample(policy.encode(obs), z=noise(), mode=mode).actions, expected)


@pytest.mark.parametrize("steers", [False, True])
@pytest.mark.parametrize("mode", ["ode", "explore", "mean"])
def test_it_decodes_once_per_chunk(mode: Any, steers: bool) -> None:
    policy = make(steers=steers, kind=Counting)
    assert isinstance(policy.base, Counting)
    executor = ChunkExecutor(policy, 4, n_exec=2, mode=mode)
    obs = {"state": observation(4)["state"].numpy()}
    acts = [executor.act(obs) for _ in range(6)]
    assert len(policy.base.asked) == 3
    for number, z in enumerate(policy.base.asked):
        latent = acts[2 * number].latent
        assert latent is not None
        assert latent.tobytes() == z.reshape(4, 6).numpy().tobytes()


def test_exploration_repeats_with_the_executors_noise_and_the_mean_ignores_it() -> None:
    policy, obs = make(), observation()
    first = policy.sample(policy.encode(obs), z=noise(), mode="explore", generator=seeded(1)).actions
    assert torch.equal(
        first, policy.sample(policy.encode(obs), z=noise(), mode="explore", generator=seeded(2)).actions
    )
    assert not torch.equal(first, policy.sample(policy.encode(obs), z=-noise(), mode="explore").actions)
    mean = policy.sample(policy.encode(obs), z=noise(), mode="ode").actions
    assert torch.equal(mean, policy.sample(policy.encode(obs), z=-noise(), mode="ode").actions)
    drawn = [
        policy.sample(policy.encode(obs), mode="explore", generator=seeded(seed)).actions
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_the_latent_stays_within_the_bound() -> None:
    policy = make(bound=2.5)
    with torch.no_grad():
        policy.actor.trunk.out.weight.mul_(100.0)
    latent = policy.sample(policy.encode(observation()), z=10 * noise(), mode="explore").latent
    assert latent is not None
    assert 2.4 < latent.abs().max() <= 2.5


@pytest.mark.parametrize("steers", [False, True])
def test_repeated_noise_is_one_vector_for_all_steps(steers: bool) -> None:
    policy, obs = make(repeat=True, steers=steers), observation()
    assert policy.latent_dim == 2
    latent = policy.sample(policy.encode(obs), z=noise(), mode="explore").latent
    assert latent is not None
    assert torch.equal(latent, latent[:, :1].expand(-1, 3, -1))
    assert torch.equal(policy.unflat(policy.flat(latent)), latent)
    assert torch.equal(latent[:, 0], noise()[:, 0]) is not steers


def test_flat_latents_are_the_noise() -> None:
    policy = make()
    assert policy.latent_dim == 6
    assert torch.equal(policy.unflat(policy.flat(noise())), noise())
    encoded = policy.encode(observation())
    expected = policy.policy.sample(encoded, z=noise(), mode="ode").actions
    assert torch.equal(policy.decode(encoded, policy.flat(noise())), expected)


def test_only_the_actor_learns() -> None:
    policy = make()
    policy.train()
    assert not policy.base.training
    assert policy.actor.training
    trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trainable
    assert all(name.startswith("actor.") for name in trainable)
    share, log_std = policy.choose(policy.encode(observation())["features"], torch.ones(6, 6))
    (share.sum() + log_std.sum()).backward()
    assert all(p.grad is None for p in policy.base.parameters())
    assert all(p.grad is not None for p in policy.actor.parameters())


def test_a_base_that_refines_does_not_explore() -> None:
    residual = ResidualPolicy(base_policy(), ResidualHeadConfig(width=16, explore_std=0.5), 0.1)
    policy = LatentSteer(residual, LatentActorConfig(width=16), generator=seeded())
    action = torch.zeros(6, 2)
    assert torch.equal(policy.refine(policy.encode(observation()), action, mode="explore"), action)


def digest(policy: Any, mode: Any) -> str:
    executor = ChunkExecutor(policy, 4, n_exec=2, mode=mode, seed=5)
    rng, found = np.random.default_rng(0), hashlib.sha256()
    for _ in range(7):
        found.update(executor.act({"state": rng.normal(size=(4, 4)).astype(np.float32)}).action.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("change", [dict[str, Any](), {"repeat": True, "bound": 2.5, "layernorm": True}])
@pytest.mark.parametrize("steers", [False, True])
def test_a_loaded_policy_acts_as_the_saved_one(tmp_path: Path, change: dict[str, Any], steers: bool) -> None:
    policy = make(steers=steers, **change)
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded, _ = load_policy(tmp_path / "policy", expect=META)
    assert isinstance(loaded, LatentSteer)
    assert loaded.config == policy.config
    for mode in ("ode", "explore"):
        assert digest(loaded, mode) == digest(policy, mode)
    other = make(steers=not steers, **change)
    assert digest(other, "ode") != digest(policy, "ode")  # whether it steers is in the checkpoint


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make(bound=-1.0), "latent bound must be at least 0 and finite, got -1.0"),
        (lambda: make(bound=float("nan")), "latent bound must be at least 0 and finite, got nan"),
        (lambda: make(depth=0), "latent depth: got 0, allowed: 1 or more"),
        (
            lambda: LatentSteer(RealTimeChunks(base_policy()), LatentActorConfig()),
            "latent: the base is RealTimeChunks, whose chunks would no longer continue each other",
        ),
        (
            lambda: make().sample(make().encode(observation()), z=torch.zeros(6, 2, 2)),
            r"sample: z has shape \(6, 2, 2\), allowed \(6, 3, 2\)",
        ),
        (
            lambda: make().sample(make().encode(observation()), mode=cast(Any, "oed")),
            "sample: no mode 'oed'. Did you mean",
        ),
    ],
)
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
