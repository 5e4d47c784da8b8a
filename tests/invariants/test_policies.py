"""Invariants of policies, each a bug found in a public repository of this field."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robot_rl.core.policy import Chain
from robot_rl.policies.checkpoint import load_policy, save_policy
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.policies.networks import initialise
from robot_rl.policies.processes import gaussian_log_prob
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from tests.kinds import META, make, normaliser, seeded


def recorded(policy: Any) -> tuple[dict[str, torch.Tensor], Chain]:
    obs = {"state": 1.0 + 3.0 * torch.randn(64, 4, generator=seeded(1))}
    chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded(2)).chain
    assert chain is not None
    return obs, chain


@pytest.mark.parametrize(
    "name",
    ["flow_sde one", "flow_sde all", "flow_sde faint", "flow_noise", "gaussian", "token", "small_vla all"],
)
def test_recorded_density_is_the_sampler_s(name: str) -> None:
    # Standardised noise of the stored path must be standard normal: nothing was clamped or shifted.
    policy = make(name)
    obs = {"state": torch.zeros(4000, 4)}
    chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded(2)).chain
    assert chain is not None
    # E[mean log N] = -entropy per element, for a sampler that draws from what it scores.
    _, entropy = policy.log_prob(policy.encode(obs), chain)
    assert chain.log_prob.mean().item() == pytest.approx(-entropy.mean().item(), abs=0.02)


def test_log_prob_uses_the_unclamped_path() -> None:
    policy = make("flow_sde all")
    obs, chain = recorded(policy)
    clamped = Chain(chain.x.clamp(-1, 1), chain.index, chain.log_prob, chain.grid)
    assert not torch.allclose(policy.log_prob(policy.encode(obs), clamped)[0], chain.log_prob, atol=1e-3)


def test_zero_residual_is_its_base_bit_for_bit() -> None:
    base, copy = make("ddim"), make("ddim")
    executors = [
        ChunkExecutor(policy, 16, n_exec=4, seed=3)
        for policy in (base, ResidualPolicy(copy, ResidualHeadConfig(width=32), 0.3))
    ]
    rng = np.random.default_rng(0)
    for _ in range(9):
        obs = {"state": rng.normal(size=(16, 4)).astype(np.float32)}
        plain, corrected = (executor.act(obs).action for executor in executors)
        assert np.array_equal(plain, corrected)


@pytest.mark.parametrize("name", ["flow_sde one", "ddpm", "gaussian", "token", "small_vla one"])
def test_queue_of_a_new_episode_is_empty(name: str) -> None:
    # After a reset an env acts as if it had never lived: no action of the old chunk is left.
    executor, fresh = (ChunkExecutor(make(name), 2, n_exec=8) for _ in range(2))
    rng = np.random.default_rng(0)
    first, later = ({"state": rng.normal(size=(2, 4)).astype(np.float32)} for _ in range(2))
    executor.reset(seeds=np.array([1, 2], np.uint64))
    for _ in range(3):
        executor.act(first)
    executor.reset(np.array([False, True]), np.array([0, 9], np.uint64))
    fresh.reset(seeds=np.array([1, 9], np.uint64))
    assert executor.act(later).action[1] == pytest.approx(fresh.act(later).action[1], abs=1e-6)


def test_a_row_acts_the_same_alone_and_among_many() -> None:
    policy = make("flow_sde one")
    many, alone = ChunkExecutor(policy, 32, n_exec=2), ChunkExecutor(policy, 1, n_exec=2)
    seeds = np.arange(100, 132, dtype=np.uint64)
    many.reset(seeds=seeds)
    alone.reset(seeds=seeds[20:21])
    rng = np.random.default_rng(0)
    for _ in range(6):
        state = rng.normal(size=(32, 4)).astype(np.float32)
        wide = many.act({"state": state}).action[20]
        assert wide == pytest.approx(alone.act({"state": state[20:21]}).action[0], abs=1e-5)


def test_same_checkpoint_observation_and_seed_give_the_same_bytes(tmp_path: Path) -> None:
    policy = ResidualPolicy(make("ddim"), ResidualHeadConfig(width=32), 0.2)
    initialise(policy.head, seeded(5))
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded, meta = load_policy(tmp_path / "policy", expect=META)
    training, evaluation = (ChunkExecutor(p, 8, n_exec=meta.n_exec) for p in (policy, loaded))
    rng = np.random.default_rng(0)
    for executor in (training, evaluation):
        executor.reset(seeds=np.arange(8, dtype=np.uint64))
    for _ in range(5):
        obs = {"state": rng.normal(size=(8, 4)).astype(np.float32)}
        assert training.act(obs).action.tobytes() == evaluation.act(obs).action.tobytes()


def test_normaliser_travels_in_the_checkpoint(tmp_path: Path) -> None:
    save_policy(tmp_path / "policy", make("flow_sde one"), meta=META)
    loaded, _ = load_policy(tmp_path / "policy")
    expected = normaliser().state_dict()
    found = loaded.normaliser.state_dict()  # pyright: ignore
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_recorded_log_prob_by_hand() -> None:
    policy = make("gaussian")
    assert isinstance(policy, GaussianPolicy)
    obs, chain = recorded(policy)
    mean = policy.net(policy.encode(obs)["features"]).view(64, 8, 3)
    by_hand = gaussian_log_prob(chain.x[:, 1], mean, 0.3)
    assert torch.allclose(by_hand, chain.log_prob[:, 0], atol=1e-5)
