"""Time to sample one action chunk at batch 1, for which a robot waits.

One thread, no gradients, a new observation each time. The policies are untrained, since the time does not
depend on the values of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from robot_rl.bench.trials import one_torch_thread
from robot_rl.core.errors import UnknownComponentError, nearest
from robot_rl.core.policy import Policy
from robot_rl.policies.chunk import ChunkPolicyConfig, DiffusionPolicy, FlowPolicy
from robot_rl.policies.config import GaussianPolicyConfig
from robot_rl.policies.gaussian import GaussianPolicy

STATE, ACTIONS, HORIZON = 40, 8, 16

Factory = Callable[[], Policy]


def factories(
    state_dim: int = STATE, action_dim: int = ACTIONS, horizon: int = HORIZON
) -> dict[str, Factory]:
    """Returns how to build each measured policy, by name."""
    size: dict[str, Any] = {"state_dim": state_dim, "action_dim": action_dim}

    def flow(steps: int) -> Policy:
        return FlowPolicy(ChunkPolicyConfig(kind="flow", horizon=horizon, steps=steps), **size)

    def diffusion(steps: int) -> Policy:
        config = ChunkPolicyConfig(kind="diffusion", process="ddim", horizon=horizon, steps=steps)
        return DiffusionPolicy(config, **size)

    return {
        "flow, 4 steps": lambda: flow(4),
        "flow, 10 steps": lambda: flow(10),
        "DDIM, 5 steps": lambda: diffusion(5),
        "DDIM, 10 steps": lambda: diffusion(10),
        "Gaussian": lambda: GaussianPolicy(GaussianPolicyConfig(horizon=horizon), **size),
    }


def run(*, samples: int = 1000, policy: str | None = None) -> dict[str, Any]:
    """Measures every policy, or the one named; returns rows.

    Args:
        samples: chunks timed for each policy.
        policy: a name in the table; null measures all.

    Raises:
        UnknownComponentError: no policy of that name.
    """
    if samples < 1:
        raise ValueError(f"bench policy: got {samples} samples, allowed: 1 or more")
    chosen: Mapping[str, Factory] = factories()
    if policy is not None:
        if policy not in chosen:
            raise UnknownComponentError(f"bench policy: no policy {policy!r}.{nearest(policy, chosen)}")
        chosen = {policy: chosen[policy]}
    with one_torch_thread():
        rows = [measure(name, factory(), samples) for name, factory in chosen.items()]
    return {
        "title": f"One chunk of {HORIZON} actions at batch 1, state of {STATE}, one thread",
        "rows": rows,
        "notes": ["On a busy machine, p99 is mostly due to other programs."],
    }


@torch.no_grad()
def measure(name: str, policy: Policy, samples: int, *, state_dim: int = STATE) -> dict[str, Any]:
    """Returns median and 99th percentile of the time of one chunk, in milliseconds."""
    states = torch.randn(samples, 1, state_dim, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for state in states[:20]:
        policy.sample(policy.encode({"state": state}), generator=generator)
    times_s = np.empty(samples)
    for i, state in enumerate(states):
        began = time.perf_counter()
        policy.sample(policy.encode({"state": state}), generator=generator)
        times_s[i] = time.perf_counter() - began
    p50, p99 = np.percentile(1e3 * times_s, [50, 99])
    return {"policy": name, "p50_ms": float(p50), "p99_ms": float(p99), "samples": samples}
