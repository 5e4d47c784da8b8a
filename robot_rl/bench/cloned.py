"""Policies cloned from scripted demonstrations, one for each seed: what benchmarks of acting play with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.algos.bc import BCConfig, BehaviourCloning
from robot_rl.bench.trials import successes_of
from robot_rl.bench.trivial import solved
from robot_rl.core.seeding import eval_seeds, train_seed
from robot_rl.data.demos import ChunkSampler
from robot_rl.data.episodes import Episodes
from robot_rl.data.normalize import Normaliser
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import DemosConfig
from robot_rl.train.demos import collect_demonstrations

_BESIDE = ("random", "hold", "expert")
"""What needs no learning: noise, standing still, and the expert without the noise of its demonstrations."""

TRIVIAL_NOTE = "trivial: what needs no learning, on the same episodes; the expert as it is without noise_m"

_NUM_ENVS = 50
_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Cloned:
    """A policy and what it was cloned from."""

    seed: int
    policy: FlowPolicy
    episodes: Episodes

    @property
    def demo_success(self) -> float:
        return float(self.episodes.episode_success().mean())


def play_clones(
    play: Callable[[VectorEnv, Cloned, NDArray[np.uint64]], None],
    *,
    task: str,
    seeds: Sequence[int],
    episodes: int,
    horizon: int,
    updates: int,
    demos: int,
    noise_m: float,
) -> dict[str, Any]:
    """Clones a policy for every seed and has it played with, all on one thread of torch.

    Args:
        play: is given the env, a policy, and the seeds of its own held-out episodes.
        task: what is played.
        seeds: of the policies.
        episodes: held-out episodes for every seed.
        horizon: H.
        updates: of behaviour cloning.
        demos: demonstrations for each seed.
        noise_m: how far the expert aims beside the target, drawn for each demonstration.

    Returns:
        Seeds, share of the demonstrations that succeeded for each, what needs no learning on the same
        episodes, and minutes that all took but the latter.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    demo_success: list[float] = []
    beside: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in _BESIDE}
    began_s = time.perf_counter()
    try:
        with _opened(task, episodes) as env:
            for seed in seeds:
                cloned = _clone(task, seed, demos=demos, noise_m=noise_m, updates=updates, horizon=horizon)
                demo_success.append(cloned.demo_success)
                play(env, cloned, eval_seeds(seed, episodes))
            minutes = (time.perf_counter() - began_s) / 60.0
            for name, seed in itertools.product(_BESIDE, seeds):
                beside[name].append(solved(env, name, seed, episodes))
    finally:
        torch.set_num_threads(threads)
    trivial = [{"policy": name, **successes_of(played)} for name, played in beside.items()]
    return {"seeds": list(seeds), "demo_success": demo_success, "trivial": trivial, "minutes": minutes}


def _opened(task: str, episodes: int) -> AbstractContextManager[VectorEnv]:
    return opened(simulation(EnvConfig(task=task), min(_NUM_ENVS, episodes)), holder=f"a benchmark of {task}")


def _clone(task: str, seed: int, *, demos: int, noise_m: float, updates: int, horizon: int) -> Cloned:
    """Collects demonstrations and clones a flow policy from all of them, failures included."""
    with _opened(task, demos) as env:
        episodes = collect_demonstrations(env, DemosConfig(episodes=demos, noise_m=noise_m), seed)
    policy = FlowPolicy(
        ChunkPolicyConfig(horizon=horizon, width=256),
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
    return Cloned(seed=seed, policy=policy.eval(), episodes=episodes)
