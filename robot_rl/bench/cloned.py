"""Policies cloned from scripted demonstrations, one for each seed: what benchmarks of acting play with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.bench.trials import Training, successes_of
from robot_rl.bench.trivial import solved
from robot_rl.core.seeding import eval_seeds
from robot_rl.data.demos import load_episodes
from robot_rl.data.episodes import Episodes
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.chunk import ChunkPolicyConfig, FlowPolicy
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig

_BESIDE = ("random", "hold", "expert")
"""What needs no learning: noise, standing still, and the expert without the noise of its demonstrations."""

TRIVIAL_NOTE = "trivial: what needs no learning, on the same episodes; the expert as it is without noise_m"

_NUM_ENVS = 50


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
    out: str,
) -> dict[str, Any]:
    """Has `robot-rl train` clone a policy for every seed, and plays with it, all on one thread of torch.

    Args:
        play: is given the env, a policy, and the seeds of its own held-out episodes.
        task: what is played.
        seeds: of the policies.
        episodes: held-out episodes for every seed.
        horizon: H.
        updates: of behaviour cloning.
        demos: demonstrations for each seed.
        noise_m: how far the expert aims beside the target, drawn for each demonstration.
        out: folder of the runs that clone; one that is done is taken, one that was cut short goes on.

    Returns:
        Seeds, share of the demonstrations that succeeded for each, what needs no learning on the same
        episodes, and minutes of this call that all took but the latter.

    Raises:
        ConfigError: a run in `out` was begun with other settings.
        DeviceError: a run failed; its log is named.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    demo_success: list[float] = []
    beside: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in _BESIDE}
    began_s = time.perf_counter()
    try:
        with _opened(task, episodes) as env:
            for seed in seeds:
                learning: dict[str, Any] = {"demos": demos, "noise_m": noise_m, "updates": updates}
                cloned = _clone(task, seed, **learning, horizon=horizon, out=out)
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


def _clone(
    task: str, seed: int, *, demos: int, noise_m: float, updates: int, horizon: int, out: str
) -> Cloned:
    """Has a run clone a flow policy from all of its demonstrations, failures included."""
    usual = ChunkPolicyConfig(horizon=horizon, width=256)
    words = (
        *("recipe=residual", "stages=[demos,clone,evaluate]", f"seed={seed}", f"env.task={task}", "n_exec=1"),
        *(f"demos.episodes={demos}", "demos.bias_m=0", f"demos.noise_m={noise_m}"),
        *(f"policy.{name}={getattr(usual, name)}" for name in ("horizon", "width", "depth", "steps")),
        *(f"bc.updates={updates}", "evaluate.episodes=1", f"evaluate.num_envs={min(_NUM_ENVS, demos)}"),
        *("video.episodes=0", "video.failures=0", "lease_wait_s=1e6"),
    )
    training = Training(f"{task}, seed {seed}", Path(out).resolve() / f"{task}-seed{seed}", words)
    training.check()
    if training.done() is None:
        training.train()
    folder, _ = training.finished()
    policy, _ = load_policy(folder / "policy/base")
    assert isinstance(policy, FlowPolicy)
    return Cloned(seed=seed, policy=policy, episodes=load_episodes(folder / "demos"))
