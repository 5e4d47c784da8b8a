"""Every kind of policy but LeRobot's, small: a state of 4 elements, chunks of 8 actions of 3 elements."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Generator, nn

from robot_rl.core.registry import resolve
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.actor import ActorPolicy, ActorPolicyConfig
from robot_rl.policies.best_of_n import BestOfN
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.policies.chunk import ChunkPolicyConfig
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.contested import ContestedPolicy
from robot_rl.policies.gaussian import GaussianPolicy
from robot_rl.policies.latent import LatentActorConfig, LatentSteer
from robot_rl.policies.linear import LinearPolicy
from robot_rl.policies.networks import initialise
from robot_rl.policies.noise import NoisePolicy, NoisePolicyConfig
from robot_rl.policies.one_step import OneStepPolicy
from robot_rl.policies.real_time import RealTimeChunks
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.policies.taco import CoinFlipConfig, CoinFlips
from robot_rl.policies.vla.config import SmallVLAConfig
from robot_rl.policies.vla.small import SmallVLA

META = PolicyMeta(
    task="t",
    robot="r",
    control_hz=20.0,
    state_names=("a", "b", "c", "d"),
    action_names=("x", "y", "z"),
    instruction="i",
    n_exec=2,
)
PROCESSES: dict[str, dict[str, Any]] = {
    "flow_sde one": {"kind": "flow", "process": "flow_sde", "stochastic_steps": "one"},
    "flow_sde all": {"kind": "flow", "process": "flow_sde", "stochastic_steps": "all", "steps": 5},
    "flow_sde faint": {
        "kind": "flow",
        "process": "flow_sde",
        "stochastic_steps": "all",
        "eta": 0.1,
    },
    "flow_sde scored": {"kind": "flow", "process": "flow_sde", "scored": 3},
    "flow_noise": {"kind": "flow", "process": "flow_noise", "steps": 5},
    "flow_cfm": {"kind": "flow", "process": "flow_cfm", "pairs": 6},
    "ddpm": {"kind": "diffusion", "process": "ddpm", "steps": 20},
    "ddpm tuned": {"kind": "diffusion", "process": "ddpm", "steps": 20, "tuned_steps": 10},
    "ddpm strided": {"kind": "diffusion", "process": "ddpm", "steps": 4},
    "ddim": {"kind": "diffusion", "process": "ddim", "eta": 0.5, "steps": 5},
    "gaussian": {"kind": "gaussian"},
    "token": {"kind": "token", "steps": 1, "bins": 16},
    "token hot": {"kind": "token", "steps": 1, "bins": 16, "temperature": 1.6, "scored": 3},
    "small_vla one": {"kind": "small_vla", "process": "flow_sde"},
    "small_vla all": {"kind": "small_vla", "process": "flow_sde", "stochastic_steps": "all"},
    "small_vla horizons": {"kind": "small_vla", "process": "flow_sde", "horizons": (2, 4, 8)},
}
"""What is improved by its likelihood, or cloned."""


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def normaliser() -> Normaliser:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-0.6, 0.9, (50, 3)).astype(np.float32)
    return Normaliser.fit({"state": rng.normal(1.0, 3.0, (50, 4)).astype(np.float32)}, actions)


def observe(rows: int) -> dict[str, torch.Tensor]:
    pictures = torch.randint(0, 256, (rows, 12, 16, 3), dtype=torch.uint8, generator=seeded(2))
    return {"state": 1.0 + 3.0 * torch.randn(rows, 4, generator=seeded(1)), "front.rgb": pictures}


def make(name: str) -> Any:
    """Returns one of `PROCESSES`."""
    options = dict(PROCESSES[name])
    kind = options["kind"]
    if kind == "small_vla":
        del options["kind"]
        config = SmallVLAConfig(horizon=8, width=32, depth=1, heads=2, context_depth=1, **options)
        policy = SmallVLA(config, state_dim=4, action_dim=3, relative_to=(1, -1, 0), generator=seeded())
        return _drawn(policy)  # its velocity starts at zero, whatever the observation
    sizes: dict[str, Any] = {**_SIZES, "normaliser": normaliser(), "generator": seeded()}
    if kind == "gaussian":
        return GaussianPolicy(GaussianPolicyConfig(width=64, horizon=8), **sizes)
    return resolve("policy", kind)(ChunkPolicyConfig(horizon=8, width=64, depth=3, **options), **sizes)


_SIZES: dict[str, Any] = {"state_dim": 4, "action_dim": 3}


def _drawn(policy: Any) -> Any:
    initialise(policy, seeded(1))
    return policy


def _actor(**options: Any) -> ActorPolicy:
    config = ActorPolicyConfig(horizon=8, width=16, depth=1, **options)
    policy = ActorPolicy(config, **_SIZES, normaliser=normaliser(), generator=seeded())
    with torch.no_grad():
        for layer in policy.layers:
            layer.normal_(0.0, 0.3, generator=seeded(1))
    return policy


def _residual() -> nn.Module:
    policy = ResidualPolicy(
        make("ddim"), ResidualHeadConfig(width=32, explore_std=0.1), 0.2, generator=seeded()
    )
    _drawn(policy.head)
    return policy


def _latent() -> nn.Module:
    policy = LatentSteer(make("flow_sde one"), LatentActorConfig(width=16), generator=seeded(1))
    policy.steers.fill_(True)
    return policy


def _best_of_n() -> nn.Module:
    base = make("flow_sde one")
    sizes: dict[str, Any] = {"feature_dim": base.feature_dim, "action_dim": 3, "horizon": 8}
    return BestOfN(base, CoinFlips(CoinFlipConfig(width=8, depth=1), **sizes, generator=seeded()), 3)


ADAPTERS: dict[str, Callable[[], Any]] = {
    "actor": _actor,
    "actor, plain": lambda: _actor(cameras=("front",), image_features=8),
    "actor, keypoints": lambda: _actor(cameras=("front",), image_encoder="keypoints"),
    "best_of_n": _best_of_n,
    "contested": lambda: ContestedPolicy(_actor(), _actor(), 0.3),
    "latent": _latent,
    "linear": lambda: LinearPolicy(0.05 * torch.randn(4, 8, 3, generator=seeded()), torch.zeros(8, 3)),
    "noise": lambda: NoisePolicy(NoisePolicyConfig(horizon=8), **_SIZES, normaliser=normaliser()),
    "one_step": lambda: OneStepPolicy.student_of(make("flow_sde one")),
    "real_time": lambda: RealTimeChunks(make("flow_sde one")),
    "residual": _residual,
}
"""What acts alone, or around another policy."""
