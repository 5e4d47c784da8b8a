"""flow_noise and flow_cfm by hand, and other processes on the weights of one base."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.core.policy import Chain, DemoBatch
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chain import denoise, score
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, DiffusionPolicy, FlowPolicy, ProcessConfig
from robot_rl.policies.networks import NoiseNet
from robot_rl.policies.processes import DDPM, FlowCFM, FlowNoise, FlowODE

META = PolicyMeta(
    task="t",
    robot="r",
    control_hz=20.0,
    state_names=("a", "b", "c"),
    action_names=("x", "y"),
    instruction="i",
    n_exec=2,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def base(kind: str = "flow", **options: Any) -> Any:
    config = ChunkPolicyConfig(kind=kind, horizon=4, width=16, depth=2, time_dim=8, **options)
    rng = np.random.default_rng(0)
    obs, actions = rng.normal(size=(50, 3)), rng.uniform(-0.8, 0.6, (50, 2))
    normaliser = Normaliser.fit({"state": obs.astype(np.float32)}, actions.astype(np.float32))
    policy = FlowPolicy if kind == "flow" else DiffusionPolicy
    return policy(config, state_dim=3, action_dim=2, normaliser=normaliser, generator=seeded())


def observed(rows: int = 16) -> dict[str, Tensor]:
    return {"state": torch.randn(rows, 3, generator=seeded(1))}


def recorded(policy: Any, obs: dict[str, Tensor]) -> Chain:
    chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded(2)).chain
    assert chain is not None
    return chain


def test_flow_noise_step_by_hand() -> None:
    # One element, K = 2, velocity 0.6, sigma 0.1 in step 0 and 0.2 in step 1; path 0.5, 0.3, -0.2.
    # Step 0: mean 0.5 - 0.5 * 0.6 = 0.2, one sigma away: -0.5 - log 0.1 - log sqrt(2 pi) = 0.8836465.
    # Step 1: mean 0.3 - 0.3 = 0, one sigma away:         -0.5 - log 0.2 - log sqrt(2 pi) = 0.1904994.
    process = FlowNoise()
    grid = process.grid(2)
    path = torch.tensor([0.5, 0.3, -0.2]).view(1, 3, 1, 1)
    chain = Chain(path, torch.tensor([[0, 1]]), torch.zeros(1, 2), grid)

    def std(k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        return torch.tensor([0.1, 0.2])[k].view(-1, 1, 1)

    found, entropy = score(
        lambda x, k, rows=None: torch.full_like(x, 0.6), process, grid, chain, learned_std=std
    )
    assert found.tolist()[0] == pytest.approx([0.8836465, 0.1904994], abs=1e-6)
    # Entropy of a normal: 0.5 + log sqrt(2 pi) + log sigma.
    assert entropy.tolist()[0] == pytest.approx([1.4189385 + math.log(0.1), 1.4189385 + math.log(0.2)])


def test_flow_noise_with_little_noise_is_the_ode() -> None:
    policy, obs = (
        base().with_process(
            ProcessConfig(process="flow_noise", sigma_min=1e-6, sigma_max=2e-6), generator=seeded()
        ),
        observed(),
    )
    z = torch.randn(16, 4, 2, generator=seeded(3))
    explored = policy.sample(policy.encode(obs), z=z, mode="explore", generator=seeded(4)).actions
    assert torch.allclose(explored, base().sample(base().encode(obs), z=z).actions, atol=1e-4)
    # Mode ode leaves the noise out altogether.
    loud = base().with_process(ProcessConfig(process="flow_noise", sigma_min=0.5, sigma_max=0.6))
    assert torch.equal(
        loud.sample(loud.encode(obs), z=z).actions, base().sample(base().encode(obs), z=z).actions
    )


def test_noise_stays_within_its_bounds_and_begins_in_their_middle() -> None:
    net = NoiseNet(3, 8, 4, 2, bounds=(0.04, 0.16))
    net.begin()
    features, times = torch.randn(5, 3, generator=seeded()), torch.randn(5, 8, generator=seeded(1))
    assert torch.allclose(net(features, times), torch.full((5, 4, 2), 0.08))  # sqrt(0.04 * 0.16)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0.0, 30.0, generator=seeded(2))
    std = net(features, times).detach()
    assert 0.04 - 1e-6 <= float(std.min()) < 0.05
    assert 0.15 < float(std.max()) <= 0.16 + 1e-6


def test_the_noise_net_learns_from_the_likelihood_and_is_saved(tmp_path: Path) -> None:
    policy = base().with_process(ProcessConfig(process="flow_noise"), generator=seeded(7))
    obs = observed()
    chain = recorded(policy, obs)
    policy.log_prob(policy.encode(obs), chain)[0].mean().backward()
    assert policy.noise_net.net.trunk.out.weight.grad.abs().max() > 0
    with torch.no_grad():
        policy.noise_net.net.trunk.out.bias += 0.3
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded: Any = load_policy(tmp_path / "policy")[0]
    assert torch.equal(
        loaded.log_prob(loaded.encode(obs), chain)[0], policy.log_prob(policy.encode(obs), chain)[0]
    )


def test_flow_cfm_pair_by_hand() -> None:
    # A network that says 0.25 everywhere: the chunk a, noise e, error (0.25 - (e - a))^2, whatever t.
    policy = base().with_process(ProcessConfig(process="flow_cfm", pairs=3))
    with torch.no_grad():
        policy.net.trunk.out.weight.zero_()
        policy.net.trunk.out.bias.fill_(0.25)
    obs = observed(2)
    chain = recorded(policy, obs)
    assert chain.noise is not None
    assert chain.time is not None
    assert (chain.noise.shape, chain.time.shape) == ((2, 3, 4, 2), (2, 3))
    error = (0.25 - (chain.noise - chain.x[:, None, -1])).square().mean(dim=(-2, -1))
    assert torch.allclose(chain.log_prob, -error, atol=1e-6)
    assert torch.equal(policy.log_prob(policy.encode(obs), chain)[1], torch.zeros(2, 3))


def test_flow_cfm_sees_the_point_on_the_line_at_its_time() -> None:
    # The velocity of data at c is (x - c) / t: at x = (1 - t) a + t e that is (e - a) + (a - c) / t,
    # so a network that knows it errs by (a - c) / t; here the chunk is c, and it does not err.
    policy = base().with_process(ProcessConfig(process="flow_cfm", pairs=4))
    obs = observed(8)
    seen: list[Tensor] = []
    policy.net.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    chain = recorded(policy, obs)
    assert chain.noise is not None
    assert chain.time is not None
    t = chain.time.view(8, 4, 1, 1)
    expected = (1 - t) * chain.x[:, None, -1] + t * chain.noise
    assert torch.allclose(seen[-1].view(8, 4, 4, 2), expected, atol=1e-6)


def test_flow_cfm_acts_as_the_ode() -> None:
    policy, z = (
        base().with_process(ProcessConfig(process="flow_cfm")),
        torch.randn(16, 4, 2, generator=seeded(3)),
    )
    explored = policy.sample(policy.encode(observed()), z=z, mode="explore", generator=seeded(4)).actions
    assert torch.equal(explored, base().sample(base().encode(observed()), z=z).actions)


@pytest.mark.parametrize("name", ["flow_sde", "flow_noise", "flow_cfm"])
def test_another_process_shares_the_weights_and_acts_as_the_base(name: str) -> None:
    cloned, obs, z = base(), observed(), torch.randn(16, 4, 2, generator=seeded(3))
    policy = cloned.with_process(ProcessConfig(process=name), generator=seeded())
    assert torch.equal(
        policy.sample(policy.encode(obs), z=z).actions, cloned.sample(cloned.encode(obs), z=z).actions
    )
    recorded(policy, obs)  # it explores
    assert {id(p) for p in cloned.parameters()} <= {id(p) for p in policy.parameters()}
    assert cloned.config.process is None


def test_frozen_steps_keep_their_weights() -> None:
    cloned, obs = base("diffusion", steps=6, train_steps=6), observed()
    policy = cloned.with_process(ProcessConfig(process="ddpm", tuned_steps=2))
    chain = recorded(policy, obs)
    assert chain.index.tolist() == [[4, 5]] * 16
    frozen = {name: value.clone() for name, value in policy.frozen_net.state_dict().items()}
    optimiser = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    policy.log_prob(policy.encode(obs), chain)[0].mean().backward()
    optimiser.step()
    assert all(torch.equal(frozen[name], value) for name, value in policy.frozen_net.state_dict().items())
    # The first four steps are those of the base before it learned; the last two are not.
    moved, z = recorded(policy, obs), chain.x[:, 0]
    assert torch.equal(moved.x[:, :5], chain.x[:, :5])
    assert not torch.allclose(moved.x[:, 5], chain.x[:, 5], atol=1e-3)
    original = base("diffusion", steps=6, train_steps=6)
    grid = original.grid
    ode = denoise(
        original._net(original.encode(obs)["features"]),
        DDPM(train_steps=6),
        grid,
        z,
        explore=False,
        record=True,
    )
    assert ode.chain is not None
    assert torch.allclose(ode.chain.x[:, :5], chain.x[:, :5], atol=1e-6)


def test_only_executed_actions_are_scored() -> None:
    policy = base().with_process(ProcessConfig(process="flow_sde", scored=2, stochastic_steps="all"))
    obs = observed()
    chain = recorded(policy, obs)
    last = chain.index[:, -1:]  # no step after it reads what it did
    altered = chain.x.clone()
    altered[:, -1, 2:] += 1.0
    same = Chain(altered, last, chain.log_prob[:, -1:], chain.grid)
    assert torch.allclose(policy.log_prob(policy.encode(obs), same)[0], same.log_prob, atol=1e-5)
    altered[:, -1, 1] += 1.0
    assert not torch.allclose(policy.log_prob(policy.encode(obs), same)[0], same.log_prob, atol=1e-2)
    everything = base().with_process(ProcessConfig(process="flow_sde", stochastic_steps="all"))
    with pytest.raises(ValueError, match="Score it with the policy that made it"):
        everything.log_prob(everything.encode(obs), chain)


def test_processes_refuse_what_they_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"got sigma_min 0\.2 and sigma_max 0\.1, allowed"):
        FlowNoise(sigma_min=0.2, sigma_max=0.1)
    with pytest.raises(ValueError, match="pairs must be at least 1, got 0"):
        FlowCFM(pairs=0)
    with pytest.raises(ValueError, match="tuned_steps 7, allowed 0 to 5, the denoising steps"):
        DDPM(tuned_steps=7).grid(5)
    with pytest.raises(ValueError, match="policy tuned_steps: got 2, allowed 0 for kind 'flow'"):
        base().with_process(ProcessConfig(tuned_steps=2))
    with pytest.raises(ValueError, match="policy scored: got 5, allowed 1 to the horizon, 4"):
        base().with_process(ProcessConfig(scored=5))
    with pytest.raises(ValueError, match="'ddpm' does not fit kind 'flow'"):
        base().with_process(ProcessConfig(process="ddpm"))


def test_cloning_is_the_same_under_every_flow_process() -> None:
    demo = DemoBatch(observed(), torch.zeros(16, 4, 2), torch.ones(16, 4, dtype=torch.bool))
    losses = {
        name: base(process=name).bc_loss(demo, seeded(5)).item()
        for name in ("flow_ode", "flow_sde", "flow_noise", "flow_cfm")
    }
    assert len(set(losses.values())) == 1, losses
    assert isinstance(base().process, FlowODE)
