"""A peer of `bench pixels_peers`: Stable-Baselines3's SAC with its CNN, from pictures and a dense reward.

Like DrQ-v2 it shifts the pictures it learns from. Its returns have one step: Stable-Baselines3 has no longer
ones for observations in a dict.

`python -m robot_rl.bench.pixels_peer <settings as JSON>` learns until its processor time is spent, plays the
held-out episodes of the seed, and writes what it found.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import CombinedExtractor

from robot_rl.config import build
from robot_rl.core.files import write_json
from robot_rl.core.seeding import eval_seeds, train_seed
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.networks import random_shift
from robot_rl.rollout.envs import simulation
from robot_rl.rollout.stepping import lockstep, seed_batches
from robot_rl.sched.opened import opened
from robot_rl.sim.registration import env_id, register_envs
from robot_rl.sim.stable_baselines import StableBaselinesEnv, spelled
from robot_rl.sim.vector import EnvConfig

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Settings of the program. What is not here is Stable-Baselines3's default."""

    task: str
    seed: int
    result: str
    """File of what was found."""
    cpu_minutes: float
    """Processor minutes of learning, environment included, start of the program and evaluation left out."""
    env: dict[str, Any]
    """Keywords of `gymnasium.make_vec`: `state`, `cameras`, `image_size`."""
    episodes: int = 200
    """Held-out episodes."""
    num_envs: int = 8
    updates: int = 2
    """After each step of all envs: one for 4 control steps, as DrQ-v2 has it."""
    batch: int = 64
    """256 there, which is too slow for a core."""
    shift_px: int = 3
    """Largest shift of training pictures: DrQ-v2's 4 of 84 pixels."""
    learning_rate: float = 3e-4
    learning_starts: int = 500
    capacity: int = 20_000
    """1e6 there, which is 150 GB of pictures."""


class ShiftedExtractor(CombinedExtractor):
    """Stable-Baselines3's CNN for each picture, which is shifted at random while training (DrQ)."""

    def __init__(self, space: gymnasium.spaces.Dict, shift_px: int) -> None:
        super().__init__(space)
        self._shift_px = shift_px

    def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns features (B, F) of pictures (B, 3, h, w) and vectors."""
        if self.training:
            observations = {
                name: random_shift(values.movedim(1, -1), pad_px=self._shift_px).movedim(-1, 1)
                if values.ndim == 4
                else values
                for name, values in observations.items()
            }
        return super().forward(observations)


class _Spent(BaseCallback):
    """Ends learning when its processor time is spent."""

    def __init__(self, cpu_minutes: float) -> None:
        super().__init__()
        self._ends_s = time.process_time() + 60.0 * cpu_minutes

    def _on_step(self) -> bool:
        return time.process_time() < self._ends_s


def solved_by(env: VectorEnv, model: Any, seeds: NDArray[np.uint64]) -> int:
    """Returns how many episodes, one for each seed, the mean action solves."""

    def act(obs: dict[str, Array]) -> Array:
        return model.predict(spelled(obs), deterministic=True)[0]

    solved = 0
    for where, batch in seed_batches(seeds, env.num_envs):
        won = np.zeros(env.num_envs, bool)
        for moment in lockstep(env, batch, lambda obs, infos: None, act):
            won |= moment.live & moment.infos["success"]
        solved += int(won[: where.stop - where.start].sum())
    return solved


def learn(cfg: PeerConfig) -> dict[str, Any]:
    """Learns, plays the held-out episodes, and returns success and cost, which `result` has too."""
    torch.set_num_threads(1)
    register_envs()
    config = build(EnvConfig, {"task": cfg.task, "num_threads": 1, **cfg.env})  # JSON has no tuples
    how = {name: getattr(config, name) for name in cfg.env}
    made: Any = gymnasium.make_vec(env_id(cfg.task), num_envs=cfg.num_envs, num_threads=1, **how)
    model = SAC(
        "MultiInputPolicy",
        StableBaselinesEnv(made),
        policy_kwargs={
            "features_extractor_class": ShiftedExtractor,
            "features_extractor_kwargs": {"shift_px": cfg.shift_px},
        },
        batch_size=cfg.batch,
        buffer_size=cfg.capacity,
        learning_rate=cfg.learning_rate,
        learning_starts=cfg.learning_starts,
        gradient_steps=cfg.updates,
        seed=train_seed(cfg.seed, "pixels"),
        device="cpu",
    )
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    model.learn(10**9, callback=_Spent(cfg.cpu_minutes))
    spent = {
        "minutes": round((time.perf_counter() - began_s) / 60.0, 3),
        "cpu_minutes": round((time.process_time() - began_cpu_s) / 60.0, 3),
    }
    with opened(simulation(config, min(50, cfg.episodes)), holder="bench pixels_peers", wait_s=1e6) as env:
        success = solved_by(env, model, eval_seeds(cfg.seed, cfg.episodes))
    found = {
        "success": success / cfg.episodes,
        "episodes": cfg.episodes,
        "env_steps": model.num_timesteps,
        "updates": model._n_updates,
        "weights": sum(values.numel() for values in model.policy.parameters()),
        **spent,
    }
    write_json(Path(cfg.result), found)
    return found


if __name__ == "__main__":
    learn(PeerConfig(**json.loads(sys.argv[1])))
