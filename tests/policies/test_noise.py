"""Noise: even over [-1, 1], the same for the same episode, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from robot_rl.core.policy import DemoBatch
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.noise import NoisePolicy, NoisePolicyConfig
from tests.policies.test_policy_checkpoint import META


def make(horizon: int = 2) -> NoisePolicy:
    rng = np.random.default_rng(0)
    fitted = Normaliser.fit({"state": rng.normal(3.0, 2.0, (50, 4))}, rng.uniform(-1, 1, (50, 3)))
    return NoisePolicy(NoisePolicyConfig(horizon=horizon), state_dim=4, action_dim=3, normaliser=fitted)


def test_actions_are_even_over_their_range() -> None:
    obs = {"state": torch.zeros(20_000, 4)}
    policy = make(1)
    drawn = policy.sample(policy.encode(obs), generator=torch.Generator().manual_seed(0)).actions
    assert drawn.shape == (20_000, 1, 3)
    counts = torch.histc(drawn, bins=10, min=-1.0, max=1.0) / drawn.numel()
    assert (counts - 0.1).abs().max() < 0.005


def test_it_is_the_share_below_what_it_is_given() -> None:
    """Of a normal distribution 84.13 % is below 1: 2 x 0.8413 - 1 = 0.6827."""
    z = torch.tensor([0.0, 1.0, -1.0]).expand(1, 2, 3)
    policy = make()
    chunk = policy.sample(policy.encode({"state": torch.ones(1, 4)}), z=z).actions
    torch.testing.assert_close(chunk[0, 0], torch.tensor([0.0, 0.6827, -0.6827]), atol=1e-4, rtol=0)


def test_it_is_the_same_after_loading(tmp_path: Path) -> None:
    policy, obs, z = make(), {"state": torch.ones(5, 4)}, torch.randn(5, 2, 3)
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded, _ = load_policy(tmp_path / "policy", expect=META)
    assert torch.equal(
        loaded.sample(loaded.encode(obs), z=z).actions, policy.sample(policy.encode(obs), z=z).actions
    )
    assert torch.equal(loaded.encode(obs)["features"], policy.encode(obs)["features"])
    assert policy.encode(obs)["features"].abs().max() < 2.0  # normalised: 1 is a deviation below the mean


def test_what_it_refuses() -> None:
    policy, obs = make(), {"state": torch.zeros(1, 4)}
    with pytest.raises(ValueError, match="noise has no chain"):
        policy.sample(policy.encode(obs), record=True)
    with pytest.raises(ValueError, match="noise learns nothing"):
        policy.bc_loss(DemoBatch(obs=obs, actions=torch.zeros(1, 2, 3), valid=torch.ones(1, 2)))
    with pytest.raises(ValueError, match="noise horizon: got 0, allowed: 1 or more"):
        NoisePolicyConfig(horizon=0)
