"""Real-time chunking: the formula by hand, cases whose optimum is known, and the adapter."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.core.policy import ContinuingPolicy, DemoBatch
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chain import Net, denoise
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, DiffusionPolicy, FlowPolicy
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.executor import ChunkExecutor
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.policies.networks import initialise
from robot_rl.policies.processes import FlowODE, TimeGrid
from robot_rl.policies.real_time import RealTimeChunks, RealTimeConfig, guidance_weight, guided, soft_mask
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.policies.vla.config import SmallVLAConfig
from robot_rl.policies.vla.small import SmallVLA

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


def flow(**options: Any) -> FlowPolicy:
    actions = np.random.default_rng(0).uniform(-0.6, 0.9, (50, 2)).astype(np.float32)
    normaliser = Normaliser.fit({"state": np.zeros((50, 4), np.float32)}, actions)
    normaliser.get_buffer("std_state").fill_(1.0)
    config = ChunkPolicyConfig(horizon=6, width=32, depth=2, time_dim=8, **options)
    return FlowPolicy(config, state_dim=4, action_dim=2, normaliser=normaliser, generator=seeded())


def inputs(batch: int = 5) -> dict[str, Any]:
    return {
        "obs": {"state": torch.randn(batch, 4, generator=seeded(1))},
        "before": torch.rand(batch, 6, 2, generator=seeded(2)) - 0.5,
        "known": torch.full((batch,), 4),
        "z": torch.randn(batch, 6, 2, generator=seeded(3)),
    }


def continued(policy: RealTimeChunks, given: dict[str, Any], *, frozen: int) -> Tensor:
    rest = {name: value for name, value in given.items() if name != "obs"}
    return policy.sample_after(policy.encode(given["obs"]), **rest, frozen=frozen).actions


def gaussian_flow(covariance: Tensor, grid: TimeGrid) -> Net:
    """Returns the exact velocity of actions N(0, covariance) over two steps of a chunk."""

    def velocity(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        t = grid.times[int(k)]
        spread = (1 - t) ** 2 * covariance + t**2 * torch.eye(2)
        action = torch.einsum("ij,bja->bia", (1 - t) * covariance @ spread.inverse(), x)
        noise = torch.einsum("ij,bja->bia", t * spread.inverse(), x)
        return noise - action

    return velocity


# --- the formula ---------------------------------------------------------------------------------


def test_one_step_by_hand() -> None:
    # t = 1/2, v = M x with M = [[.5, .4], [.4, .5]], x = (1, 0): v = (.5, .4), a = x - v / 2 = (.75, -.2).
    # The first action shall be .6: it misses by -.15. da/dx = [[.75, -.2], [-.2, .75]], pull = (-.1125, .03).
    # The weight is (1/4 + 1/4) / (1/4) = 2, so v becomes (.5 + .225, .4 - .06). A guidance without the
    # derivative would leave the second element alone.
    matrix = torch.tensor([[0.5, 0.4], [0.4, 0.5]])

    def net(x: Tensor, k: int | Tensor, rows: Tensor | None = None) -> Tensor:
        return torch.einsum("ij,bja->bia", matrix, x)

    target, weights = torch.tensor([[[0.6], [9.0]]]), torch.tensor([[[1.0], [0.0]]])
    steered = guided(net, FlowODE().grid(2), target, weights, max_guidance=5.0)
    velocity = steered(torch.tensor([[[1.0], [0.0]]]), 1)
    assert velocity.flatten().tolist() == pytest.approx([0.725, 0.34])
    halved = guided(net, FlowODE().grid(2), target, weights, max_guidance=1.0)
    velocity = halved(torch.tensor([[[1.0], [0.0]]]), 1)
    assert velocity.flatten().tolist() == pytest.approx([0.6125, 0.37])


def test_guidance_weight() -> None:
    # t / ((1 - t) r^2), r^2 = t^2 / (t^2 + (1 - t)^2). t = 3/4: 3 * (9 + 1) / 9 = 10 / 3.
    assert guidance_weight(0.75, 5.0) == pytest.approx(10 / 3)
    assert guidance_weight(0.5, 5.0) == pytest.approx(2.0)
    assert guidance_weight(0.25, 5.0) == pytest.approx(10 / 3)
    assert guidance_weight(1.0, 5.0) == 5.0
    assert guidance_weight(0.05, 5.0) == 5.0


def test_soft_mask_by_hand() -> None:
    # Two of five frozen: c = (5 - i) / (5 - 2 + 1) = .75, .5, .25, weighed c (e^c - 1) / (e - 1).
    soft = [c * math.expm1(c) / (math.e - 1) for c in (0.75, 0.5, 0.25)]
    assert soft == pytest.approx([0.48754, 0.18877, 0.04132], abs=1e-4)
    masks = soft_mask(torch.tensor([5, 0, 1, 8]), frozen=2, horizon=8)
    assert masks[0].tolist() == pytest.approx([1, 1, *soft, 0, 0, 0])
    assert masks[1].tolist() == [0] * 8
    assert masks[2].tolist() == [1] + [0] * 7
    assert masks[3, :2].tolist() == [1, 1]
    assert masks[3, -1] > 0
    assert (masks[3].diff()[1:] < 0).all()
    free = soft_mask(torch.tensor([3]), frozen=0, horizon=4)
    assert free[0].tolist() == pytest.approx([*soft, 0.0])  # c = 3/4, 2/4, 1/4
    whole = soft_mask(torch.tensor([4]), frozen=4, horizon=4)
    assert whole[0].tolist() == [1, 1, 1, 1]


def test_independent_normal_actions_meet_the_target_exactly() -> None:
    # For N(0, 1) the guidance is exact: the frozen action ends on its target, the free one where it would.
    grid = FlowODE().grid(8)
    net = gaussian_flow(torch.eye(2), grid)
    z = torch.randn(100, 2, 1, generator=seeded())
    target = torch.randn(100, 2, 1, generator=seeded(1))
    weights = torch.tensor([1.0, 0.0]).view(1, 2, 1)
    steered = guided(net, grid, target, weights, max_guidance=math.inf)
    for k in range(1, grid.steps):
        estimate = z - grid.times[k] * steered(z, k)
        assert torch.allclose(estimate[:, 0], target[:, 0], atol=1e-5)
    noiseless = guided(net, grid, target, weights, max_guidance=1e9)
    ends = [
        denoise(velocity, FlowODE(), grid, z, explore=False, record=False).x for velocity in (net, noiseless)
    ]
    assert torch.allclose(ends[1][:, 0], target[:, 0], atol=1e-4)
    assert torch.allclose(ends[1][:, 1], ends[0][:, 1], atol=1e-5)


def test_a_free_action_follows_the_frozen_one_it_goes_with() -> None:
    # Correlation .9: given that the first action is 1, the second has mean .9 (without guidance 0)
    # and variance 1 - .81. The guidance takes r^2 for a variance that the correlation makes smaller, so
    # it pulls too little: .84 at any number of steps. Without the derivative it would be 1.6.
    grid = FlowODE().grid(50)
    net = gaussian_flow(torch.tensor([[1.0, 0.9], [0.9, 1.0]]), grid)
    z = torch.randn(2000, 2, 1, generator=seeded())
    weights = torch.tensor([1.0, 0.0]).view(1, 2, 1)
    steered = guided(net, grid, torch.ones(2000, 2, 1), weights, max_guidance=100.0)
    x = denoise(steered, FlowODE(), grid, z, explore=False, record=False).x[..., 0]
    assert x[:, 0].mean().item() == pytest.approx(1.0, abs=0.02)
    assert x[:, 1].mean().item() == pytest.approx(0.9, abs=0.08)
    assert x[:, 1].var().item() < 0.3


# --- the adapter ---------------------------------------------------------------------------------


def test_the_new_chunk_keeps_to_the_old_where_it_is_frozen() -> None:
    policy = flow(steps=10)
    given = inputs(64)
    free = policy.sample(policy.encode(given["obs"]), z=given["z"]).actions
    held = continued(RealTimeChunks(policy), given, frozen=2)
    miss = [(chunk - given["before"]).abs().mean(dim=(0, 2)) for chunk in (free, held)]
    assert (miss[1][:2] < 0.3 * miss[0][:2]).all()  # frozen
    assert (miss[1][2:4] < miss[0][2:4]).all()  # known
    assert held.abs().max() <= 1.0
    none = continued(RealTimeChunks(policy, RealTimeConfig(max_guidance=0.0)), given, frozen=2)
    assert torch.equal(none, free)


def test_rows_without_an_old_chunk_are_the_bases_bit_for_bit() -> None:
    policy, given = flow(), inputs()
    given["known"] = torch.tensor([4, 0, 4, 0, 0])
    free = policy.sample(policy.encode(given["obs"]), z=given["z"]).actions
    held = continued(RealTimeChunks(policy), given, frozen=2)
    same = (held == free).flatten(1).all(dim=1)
    assert same.tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("mode", ["ode", "explore", "mean"])
def test_it_acts_where_derivatives_are_switched_off(mode: Any) -> None:
    policy = flow(process="flow_sde")
    executor = ChunkExecutor(RealTimeChunks(policy), 3, n_exec=2, delay=2, mode=mode, seed=5)
    rng = np.random.default_rng(0)
    actions = [executor.act({"state": rng.normal(size=(3, 4)).astype(np.float32)}).action for _ in range(9)]
    assert np.isfinite(actions).all()
    assert all(parameter.grad is None for parameter in policy.parameters())
    policy.bc_loss(
        DemoBatch(inputs()["obs"], inputs()["before"], torch.ones(5, 6, dtype=torch.bool))
    ).backward()


def test_a_row_acts_the_same_alone_and_among_many() -> None:
    policy = RealTimeChunks(flow())
    seeds = np.arange(100, 108, dtype=np.uint64)
    many, alone = (ChunkExecutor(policy, n, n_exec=3, delay=2) for n in (8, 1))
    many.reset(seeds=seeds)
    alone.reset(seeds=seeds[5:6])
    rng = np.random.default_rng(0)
    for step in range(12):
        if step == 7:  # other rows begin an episode
            many.reset(np.arange(8) < 3)
        state = rng.normal(size=(8, 4)).astype(np.float32)
        wide = many.act({"state": state}).action[5]
        assert wide == pytest.approx(alone.act({"state": state[5:6]}).action[0], abs=1e-5)


def test_without_an_old_chunk_it_is_its_base() -> None:
    base = flow(process="flow_sde")
    policy, given = RealTimeChunks(base), inputs()
    obs, z = given["obs"], given["z"]
    batch = DemoBatch(obs, given["before"], torch.ones(5, 6, dtype=torch.bool))
    assert torch.equal(
        policy.sample(policy.encode(obs), z=z).actions, base.sample(base.encode(obs), z=z).actions
    )
    assert torch.equal(policy.encode(obs)["features"], base.encode(obs)["features"])
    assert torch.equal(policy.bc_loss(batch, seeded()), base.bc_loss(batch, seeded()))
    chain = policy.sample(policy.encode(obs), mode="explore", record=True, generator=seeded()).chain
    assert chain is not None
    assert torch.equal(
        policy.log_prob(policy.encode(obs), chain)[0], base.log_prob(base.encode(obs), chain)[0]
    )
    assert isinstance(policy, ContinuingPolicy)
    assert not isinstance(base, ContinuingPolicy)


def test_a_residual_stays_inside_and_corrects(tmp_path: Path) -> None:
    residual = ResidualPolicy(flow(), ResidualHeadConfig(width=16), 0.2)
    initialise(residual.head, seeded(5))
    policy, given = RealTimeChunks(residual, RealTimeConfig(max_guidance=3.0)), inputs()
    action = given["before"][:, 0]
    assert torch.equal(
        policy.refine(policy.encode(given["obs"]), action),
        residual.refine(residual.encode(given["obs"]), action),
    )
    assert not torch.equal(policy.refine(policy.encode(given["obs"]), action), action)
    save_policy(tmp_path / "policy", policy, meta=META)
    loaded, _ = load_policy(tmp_path / "policy", expect=META)
    assert isinstance(loaded, RealTimeChunks)
    assert loaded.config == policy.config
    assert torch.equal(continued(loaded, given, frozen=1), continued(policy, given, frozen=1))
    with pytest.raises(ValueError, match="base is RealTimeChunks, whose chunks would no longer continue"):
        ResidualPolicy(policy, ResidualHeadConfig())


def test_bad_inputs_are_named() -> None:
    gaussian = GaussianPolicy(GaussianPolicyConfig(horizon=6), state_dim=4, action_dim=2)
    assert not hasattr(DiffusionPolicy, "velocity")  # it predicts the noise
    for base in (gaussian, ResidualPolicy(gaussian, ResidualHeadConfig())):
        with pytest.raises(ValueError, match=r"Policy shows no velocity field to steer\. Allowed: flow"):
            RealTimeChunks(base)
    vla = SmallVLAConfig(horizon=6, cameras=(), width=16, heads=2, depth=1, context_depth=1, text_depth=1)
    sizes: dict[str, Any] = {"state_dim": 4, "action_dim": 2}
    RealTimeChunks(SmallVLA(vla, **sizes))
    with pytest.raises(
        ValueError, match=r"SmallVLA acts by its regression, got decodes=regression\. Allowed:"
    ):
        RealTimeChunks(SmallVLA(replace(vla, decodes="regression"), **sizes))
    with pytest.raises(ValueError, match=r"got chunks of 1 step, which leave nothing to continue"):
        RealTimeChunks(SmallVLA(replace(vla, horizon=1), **sizes))
    for value in (-1.0, math.nan):
        with pytest.raises(ValueError, match=rf"max_guidance: got {value}, allowed: 0 or more"):
            RealTimeConfig(max_guidance=value)
    policy, given = RealTimeChunks(flow()), inputs()
    with pytest.raises(ValueError, match=r"before has shape \(5, 3, 2\), allowed \(5, 6, 2\)"):
        continued(policy, {**given, "before": given["before"][:, :3]}, frozen=1)
    given["mode"] = "best"
    with pytest.raises(ValueError, match=r"no mode 'best'"):
        continued(policy, given, frozen=1)
