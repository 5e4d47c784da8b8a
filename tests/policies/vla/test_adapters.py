"""Real-time chunking and best of N on VLAs: relative actions, padded ones, LeRobot's pipelines."""

from typing import Any

import pytest
import torch
from torch import Tensor

from robot_rl.core.policy import DemoBatch
from robot_rl.policies.best_of_n import BestOfN
from robot_rl.policies.real_time import RealTimeChunks, RealTimeConfig
from robot_rl.policies.taco import CoinFlipConfig, fit_coin_flips
from robot_rl.policies.vla.small import SmallVLA


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def check_continuation(policy: Any, demo: DemoBatch) -> None:
    """Holds for any flow policy: the chunk keeps to the old one, rows without one are the base's."""
    rows, horizon, elements = demo.actions.shape
    z = torch.randn(rows, horizon, elements, generator=seeded())
    before = policy.sample(
        policy.encode(demo.obs), z=torch.randn(z.shape, generator=seeded(1))
    ).actions.detach()
    known = torch.full((rows,), horizon)
    known[-1] = 0
    with torch.inference_mode():  # as the executor acts
        obs = {name: value.clone() for name, value in demo.obs.items()}
        encoded, guided = policy.encode(obs), RealTimeChunks(policy, RealTimeConfig(max_guidance=20.0))
        free = policy.sample(encoded, z=z).actions
        held = guided.sample_after(encoded, before, known, frozen=2, z=z).actions
    assert torch.allclose(held[-1], free[-1], atol=1e-5)
    miss_free, miss_held = ((chunk - before)[:-1, :2].abs().mean() for chunk in (free, held))
    assert miss_held < 0.7 * miss_free
    assert all(parameter.grad is None for parameter in policy.parameters())


def check_choice(policy: Any, demo: DemoBatch) -> None:
    """Holds for any policy: it counts features and chunks in the data's units, and picks a candidate."""
    config = CoinFlipConfig(width=8, depth=1, epochs=1, prefix=2)
    best = BestOfN(policy, fit_coin_flips(policy, [demo], config), 3)
    z = torch.randn(demo.actions.shape, generator=seeded())
    with torch.inference_mode():
        chosen = best.sample(best.encode(demo.obs), z=z)
    assert chosen.actions.shape == demo.actions.shape
    assert torch.isfinite(chosen.actions).all()
    assert (chosen.n_exec is None) == (policy.sample(policy.encode(demo.obs), z=z).n_exec is None)


def small_vla(facts: Any, demo: DemoBatch, **options: Any) -> SmallVLA:
    policy = SmallVLA.create(facts, {"preset": "tiny", "horizon": 8, **options}, generator=seeded())
    policy.measure([demo])
    with torch.no_grad():  # an untrained one predicts next to nothing: nothing to steer
        for parameter in policy.expert.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=seeded(3)))
    return policy


@pytest.mark.parametrize("horizons", [(), (2, 4, 8)])
def test_small_vla(horizons: tuple[int, ...], facts_of: Any, demo_of: Any) -> None:
    demo = demo_of(8, rows=12)
    policy = small_vla(facts_of(), demo, horizons=horizons)
    check_continuation(policy, demo)
    check_choice(policy, demo)


@pytest.mark.slow
@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_lerobot_flow(kind: str, tiny_policy: Any, demo_of: Any) -> None:
    from robot_rl.policies.vla.lerobot_flow import LeRobotFlowPolicy

    policy = tiny_policy(kind, LeRobotFlowPolicy)
    demo = demo_of(policy.horizon, rows=4)
    unit: Tensor = policy.from_chain(
        policy.to_chain(demo.actions, policy.encode(demo.obs)), policy.encode(demo.obs)
    )
    assert torch.allclose(unit, demo.actions, atol=1e-4)
    check_continuation(policy, demo)
    check_choice(policy, demo)
