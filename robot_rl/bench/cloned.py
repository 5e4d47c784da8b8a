"""A policy cloned from scripted demonstrations: what benchmarks of acting begin with."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.core.seeding import train_seed
from robot_rl.data.demos import ChunkSampler
from robot_rl.data.episodes import Episodes
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import DemosConfig
from robot_rl.train.demos import collect_demonstrations
from robot_rl.train.envs import make_env

_NUM_ENVS = 50
_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Cloned:
    """A policy and what it was cloned from."""

    policy: FlowPolicy
    episodes: Episodes

    @property
    def demo_success(self) -> float:
        return float(self.episodes.episode_success().mean())


def clone(
    task: str, *, seed: int, demos: int, noise_m: float, updates: int, horizon: int, width: int = 256
) -> Cloned:
    """Collects demonstrations and clones a flow policy from all of them, failures included.

    Args:
        task: of `robot-rl doctor --list task`.
        seed: of demonstrations, first weights and batches.
        demos: episodes of the scripted expert.
        noise_m: how far the expert aims beside the target, drawn for each episode.
        updates: of behaviour cloning.
        horizon: H.
        width: units of a hidden layer.
    """
    with closing(make_env(EnvConfig(task=task), min(_NUM_ENVS, demos), autoreset="disabled")) as env:
        episodes = collect_demonstrations(env, DemosConfig(episodes=demos, noise_m=noise_m), seed)
    policy = FlowPolicy(
        ChunkPolicyConfig(horizon=horizon, width=width),
        state_dim=len(episodes.meta.state_names),
        action_dim=len(episodes.meta.action_names),
        normaliser=Normaliser.fit(episodes.obs, episodes.action),
        generator=torch.Generator().manual_seed(train_seed(seed, "policy")),
    )
    learner = BehaviourCloning(policy, BCConfig(), train_seed(seed, "bc"), total_updates=updates)
    sampler, rng = ChunkSampler(episodes, horizon), np.random.default_rng(train_seed(seed, "bc batches"))
    for _ in range(updates):
        learner.update(sampler.sample(_BATCH, rng))
    policy.load_state_dict(learner.policy_weights())
    return Cloned(policy=policy.eval(), episodes=episodes)
