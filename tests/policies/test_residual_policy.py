"""The residual: formula, exploration, what learns, and delegation to the frozen base."""

import pytest
import torch

from robot_rl.core.policy import DemoBatch
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.policies.networks import initialise
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def base_policy() -> FlowPolicy:
    config = ChunkPolicyConfig(horizon=3, width=16, depth=1, time_dim=8, process="flow_sde")
    return FlowPolicy(config, state_dim=4, action_dim=2, generator=seeded())


def make(scale: float = 0.1, **options: float) -> ResidualPolicy:
    head = ResidualHeadConfig(width=16, **options)  # pyright: ignore[reportArgumentType]
    return ResidualPolicy(base_policy(), head, scale, generator=seeded(1))


def trained(scale: float = 0.1, **options: float) -> ResidualPolicy:
    policy = make(scale, **options)
    initialise(policy.head, seeded(2))
    return policy


def observation(batch: int = 6) -> dict[str, torch.Tensor]:
    return {"state": torch.randn(batch, 4, generator=seeded(3))}


def test_formula() -> None:
    # A head that returns atanh(0.5) corrects by 0.2 * 0.5 = 0.1; at 0.95 the sum is clipped to 1.
    policy = make(scale=0.2)
    torch.nn.init.constant_(policy.head.trunk.out.bias, 0.5493061)
    out = policy.refine(policy.encode(observation(1)), torch.tensor([[0.3, 0.95]]))
    assert out[0].tolist() == pytest.approx([0.4, 1.0])


def test_it_starts_as_its_base() -> None:
    policy, obs = make(), observation()
    action = torch.rand(6, 2, generator=seeded()) * 2 - 1
    assert torch.equal(policy.refine(policy.encode(obs), action), action)


def test_correction_stays_within_the_scale_and_depends_on_state_and_base() -> None:
    policy = trained(scale=0.05)
    features = policy.encode(observation())["features"]
    action = torch.zeros(6, 2)
    correction = policy.residual(features, action)
    assert 0 < correction.abs().max() <= 0.05
    assert not torch.equal(correction, policy.residual(features, action + 0.5))
    assert not torch.equal(correction, policy.residual(features + 1, action))
    wide = policy.residual(features.expand(3, 6, -1), action.expand(3, 6, -1))
    assert wide.shape == (3, 6, 2)


def test_exploration_noise_has_its_std_and_is_clipped() -> None:
    policy, obs, still = make(explore_std=0.05), observation(4000), torch.zeros(4000, 2)
    noise = policy.refine(policy.encode(obs), still, mode="explore", generator=seeded())
    assert noise.std().item() == pytest.approx(0.05, rel=0.05)
    assert torch.equal(noise, policy.refine(policy.encode(obs), still, mode="explore", generator=seeded()))
    encoded, loud = policy.encode(obs), make(explore_std=5.0)
    wide = loud.refine(encoded, still, mode="explore", generator=seeded())
    assert wide.abs().max().item() == pytest.approx(0.3)
    border = loud.refine(encoded, still + 1.0, mode="explore", generator=seeded())
    assert border.max() == 1.0


def test_only_the_head_learns() -> None:
    policy, obs = trained(), observation()
    policy.train()
    assert not policy.base.training
    assert policy.head.training
    trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trainable
    assert all(name.startswith("head.") for name in trainable)
    policy.residual(policy.encode(obs)["features"], torch.zeros(6, 2)).sum().backward()
    assert all(p.grad is None for p in policy.base.parameters())
    assert all(p.grad is not None for p in policy.head.parameters())


def test_no_tensor_is_held_twice() -> None:
    assert {name.split(".")[0] for name in make().state_dict()} == {"base", "head"}


def test_sample_and_log_prob_are_the_base_s() -> None:
    policy, obs = trained(), observation()
    z = torch.randn(6, 3, 2, generator=seeded())
    expected = policy.policy.sample(policy.policy.encode(obs), z=z).actions
    assert torch.equal(policy.sample(policy.encode(obs), z=z).actions, expected)
    assert torch.equal(policy.sample(policy.encode(obs), z=z, mode="explore").actions, expected)
    chain = policy.policy.sample(
        policy.policy.encode(obs), mode="explore", record=True, generator=seeded()
    ).chain
    assert chain is not None
    ours, theirs = (
        policy.log_prob(policy.encode(obs), chain)[0],
        policy.policy.log_prob(policy.policy.encode(obs), chain)[0],
    )
    assert torch.equal(ours, theirs)


def test_bc_loss_teaches_the_correction() -> None:
    # Demonstrations lie 0.05 above the base: reachable with scale 0.1.
    policy, obs = make(scale=0.1), observation(32)
    with torch.no_grad():
        chunk = policy.sample(policy.encode(obs), generator=seeded(7)).actions
    batch = DemoBatch(obs, (chunk + 0.05).clamp(-1, 1), torch.ones(32, 3, dtype=torch.bool))
    optimiser = torch.optim.Adam(policy.head.parameters(), lr=1e-3)
    losses = []
    for _ in range(100):
        loss = policy.bc_loss(batch, seeded(7))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(0.05**2, rel=0.2)
    assert losses[-1] < 0.2 * losses[0]


def test_bad_inputs_are_named() -> None:
    for scale in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"scale must be in \(0, 1\], got {scale}"):
            make(scale)
    with pytest.raises(ValueError, match=r"explore_std: got -0.1, allowed: 0 or more"):
        ResidualHeadConfig(explore_std=-0.1)
    with pytest.raises(ValueError, match=r"noise_clip: got 0, allowed: above 0"):
        ResidualHeadConfig(noise_clip=0)
    with pytest.raises(ValueError, match=r"depth: got 0, allowed: 1 or more"):
        ResidualHeadConfig(depth=0)
    with pytest.raises(ValueError, match=r"the base is a residual itself, whose correction"):
        ResidualPolicy(make(), ResidualHeadConfig())
    batch = DemoBatch(observation(), torch.zeros(6, 2, 2), torch.ones(6, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"actions has shape \(6, 2, 2\), allowed \(6, 3, 2\)"):
        make().bc_loss(batch)
