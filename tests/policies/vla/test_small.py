"""The small VLA: units, modes, what it reads, how it learns, and that every learner can use it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.language import encode_text
from robot_rl.core.policy import DemoBatch
from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.facts import DatasetFacts
from robot_rl.policies.checkpoint import PolicyMeta, load_policy, save_policy
from robot_rl.policies.residual import ResidualHeadConfig, ResidualPolicy
from robot_rl.policies.vla.small import SmallVLA

NAMES = ("shoulder", "elbow", "grip")
TEXT = "lift the cube"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def facts(**changes: Any) -> DatasetFacts:
    """Returns facts of a made-up arm: joints in radians, actions in [-0.2, 0.6]."""
    meta = EpisodesMeta(
        task="t", robot="r", control_hz=30.0, instruction=TEXT, state_names=NAMES, action_names=NAMES
    )
    state = {"mean": np.full(3, 0.1), "std": np.full(3, 0.2)}
    action = {
        "min": np.full(3, -0.2),
        "max": np.full(3, 0.6),
        "q01": np.full(3, -0.1),
        "q99": np.full(3, 0.5),
    }
    known = DatasetFacts(
        meta=meta,
        features={"state": Feature("float32", (3,)), "front.rgb": Feature("uint8", (32, 48, 3))},
        stats={"state": state, "action": action},
        instructions=(TEXT,),
    )
    return replace(known, **changes)


def make(**options: Any) -> SmallVLA:
    return SmallVLA.create(facts(), {"preset": "tiny", "horizon": 8, **options}, generator=seeded())


def observation(batch: int = 6, *, seed: int = 1) -> dict[str, Tensor]:
    generator = seeded(seed)
    return {
        "state": 0.1 + 0.2 * torch.randn(batch, 3, generator=generator),
        "front.rgb": torch.randint(0, 255, (batch, 32, 48, 3), dtype=torch.uint8, generator=generator),
        "instruction": torch.from_numpy(encode_text([TEXT] * batch)),
    }


def demonstration(batch: int = 6, horizon: int = 8) -> DemoBatch:
    actions = 0.2 + 0.2 * torch.randn(batch, horizon, 3, generator=seeded(2)).clamp(-2, 2)
    valid = torch.ones(batch, horizon, dtype=torch.bool)
    valid[0, 5:] = False
    return DemoBatch(observation(batch), actions, valid)


def test_smoke(tmp_path: Path) -> None:
    for options in ({}, {"horizons": (2, 4, 8)}, {"process": "flow_sde"}):
        policy = make(**options)
        assert sum(p.numel() for p in policy.parameters()) < 300_000
        bc = BehaviourCloning(policy, BCConfig(lr=3e-3, warmup_updates=5), 0)
        losses = [float(bc.update(demonstration())["loss"]) for _ in range(60)]
        assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
        obs = observation()
        policy.eval()
        z = torch.randn(6, 8, 3, generator=seeded())
        out = policy.sample(obs, z=z)
        assert out.actions.shape == (6, 8, 3)
        save_policy(
            tmp_path / "p",
            policy,
            meta=PolicyMeta(
                task="t",
                robot="r",
                control_hz=30.0,
                state_names=NAMES,
                action_names=NAMES,
                instruction=TEXT,
                n_exec=4,
            ),
        )
        loaded, _ = load_policy(tmp_path / "p")
        assert torch.equal(loaded.sample(obs, z=z).actions, out.actions)
        if "process" in options:
            chain = policy.sample(obs, mode="explore", record=True, generator=seeded()).chain
            ratio = (policy.log_prob(obs, chain)[0] - chain.log_prob).exp()
            assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
