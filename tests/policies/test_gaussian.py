"""The Gaussian policy: likelihood by hand, exploration, learning, messages."""

import math

import pytest
import torch

from robot_rl.core.policy import DemoBatch
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.gaussian import GaussianPolicy


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(**options: object) -> GaussianPolicy:
    config = GaussianPolicyConfig(width=16, depth=2, **options)  # pyright: ignore[reportArgumentType]
    return GaussianPolicy(config, state_dim=3, action_dim=2, generator=seeded())


def obs(batch: int = 6) -> dict[str, torch.Tensor]:
    return {"state": torch.randn(batch, 3, generator=seeded(1))}


def test_ode_and_mean_return_the_mean() -> None:
    policy = make()
    z = torch.randn(6, 1, 2, generator=seeded())
    mean = policy.sample(policy.encode(obs()), mode="mean").actions
    assert mean.shape == (6, 1, 2)
    assert torch.equal(mean, policy.sample(policy.encode(obs()), z=z).actions)


def test_exploration_has_the_configured_spread() -> None:
    policy = make(initial_std=0.2)
    state = {"state": torch.zeros(4000, 3)}
    sample = policy.sample(policy.encode(state), mode="explore", record=True, generator=seeded())
    assert sample.chain is not None
    spread = (sample.chain.x[:, 1] - policy.sample(policy.encode(state)).actions).std().item()
    assert spread == pytest.approx(0.2, rel=0.05)


def test_log_prob_by_hand() -> None:
    # One std (0.5) above the mean in both elements:
    # -0.5 - ln 0.5 - 0.9189385 = -0.5 + 0.6931472 - 0.9189385 = -0.7257913.
    # Entropy 0.5 + 0.9189385 - 0.6931472 = 0.7257913.
    policy = make(initial_std=0.5)
    sample = policy.sample(policy.encode(obs()), mode="explore", record=True, generator=seeded())
    assert sample.chain is not None
    sample.chain.x[:, 1] = policy.sample(policy.encode(obs()), mode="mean").actions + 0.5
    log_prob, entropy = policy.log_prob(policy.encode(obs()), sample.chain)
    assert log_prob.shape == (6, 1)
    assert log_prob.flatten().tolist() == pytest.approx([-0.7257913] * 6, abs=1e-5)
    assert entropy.flatten().tolist() == pytest.approx([0.7257913] * 6, abs=1e-5)


def test_bc_loss_by_hand() -> None:
    # At the mean the negative log-likelihood is ln std + 0.9189385; std 0.3: -0.2850343.
    policy = make(initial_std=0.3)
    actions = policy.sample(policy.encode(obs()), mode="mean").actions.detach()
    batch = DemoBatch(obs(), actions, torch.ones(6, 1, dtype=torch.bool))
    expected = math.log(0.3) + 0.5 * math.log(2 * math.pi)
    assert policy.bc_loss(batch).item() == pytest.approx(expected, abs=1e-5)


def test_it_learns_mean_and_spread() -> None:
    policy, generator = make(), seeded(2)
    optimiser = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(300):
        state = torch.randn(128, 3, generator=generator)
        actions = 0.3 * state[:, None, :2].tanh() + 0.05 * torch.randn(128, 1, 2, generator=generator)
        batch = DemoBatch({"state": state}, actions, torch.ones(128, 1, dtype=torch.bool))
        loss = policy.bc_loss(batch, generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert policy.log_std.exp().tolist() == pytest.approx([0.05, 0.05], abs=0.02)


def test_std_is_bounded() -> None:
    policy = make(min_std=0.1)
    torch.nn.init.constant_(policy.log_std, -20.0)
    sample = policy.sample(policy.encode(obs()), mode="explore", record=True, generator=seeded())
    assert sample.chain is not None
    _, entropy = policy.log_prob(policy.encode(obs()), sample.chain)
    assert entropy[0].item() == pytest.approx(0.5 + 0.9189385 + math.log(0.1), abs=1e-5)


def test_output_is_clamped_and_chain_is_not() -> None:
    policy = make(initial_std=2.0)
    sample = policy.sample(policy.encode(obs(64)), mode="explore", record=True, generator=seeded())
    assert sample.chain is not None
    assert sample.actions.abs().max() == 1
    assert sample.chain.x[:, 1].abs().max() > 1


def test_bad_inputs_are_named() -> None:
    policy = make()
    with pytest.raises(ValueError, match=r"z has shape \(6, 2, 2\), allowed \(6, 1, 2\)"):
        policy.sample(policy.encode(obs()), z=torch.zeros(6, 2, 2))
    with pytest.raises(ValueError, match=r"no mode 'sde'"):
        policy.sample(policy.encode(obs()), mode="sde")  # pyright: ignore[reportArgumentType]
    still = policy.sample(policy.encode(obs()), record=True).chain
    assert still is not None
    with pytest.raises(ValueError, match=r"no stochastic step. Sample with mode='explore'"):
        policy.log_prob(policy.encode(obs()), still)
    still.grid = type("Grid", (), {"process": "FlowODE()"})()
    with pytest.raises(ValueError, match=r"sampled by FlowODE\(\), this policy is Gaussian"):
        policy.log_prob(policy.encode(obs()), still)
    with pytest.raises(ValueError, match=r"actions has shape \(6, 2, 2\), allowed \(6, 1, 2\)"):
        policy.bc_loss(DemoBatch(obs(), torch.zeros(6, 2, 2), torch.ones(6, 2, dtype=torch.bool)))
    with pytest.raises(ValueError, match=r"initial_std must be between min_std and max_std"):
        GaussianPolicyConfig(initial_std=3.0)
    with pytest.raises(ValueError, match=r"width: got 0, allowed: 1 or more"):
        GaussianPolicyConfig(width=0)
    with pytest.raises(ValueError, match=r"random_shift_px: got -2, allowed: 0 or more"):
        GaussianPolicyConfig(random_shift_px=-2)
