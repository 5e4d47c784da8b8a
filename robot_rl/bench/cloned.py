"""Policies cloned from scripted demonstrations, one for each seed, for benchmarks of acting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.trials import Training, one_torch_thread, successes_of
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

_TRIVIAL = ("random", "hold", "expert")
"""Policies without learning: random actions, no motion, and the expert without noise."""

TRIVIAL_NOTE = "trivial: policies without learning on the same episodes; the expert acts without noise_m"

_NUM_ENVS = 50


@dataclass(frozen=True, kw_only=True)
class Cloned:
    """A policy and its demonstrations."""

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
    """Clones a policy for every seed by `robot-rl train`, and evaluates it, with one torch thread.

    Args:
        play: evaluates a policy; it gets the env, the policy, and the seeds of its held-out episodes.
        task: name of the task.
        seeds: of the policies.
        episodes: held-out episodes for every seed.
        horizon: length of a chunk, H.
        updates: of behaviour cloning.
        demos: demonstrations for each seed.
        noise_m: standard deviation of the expert's aim, drawn for each demonstration.
        out: folder of the runs; finished runs are used again, interrupted runs are resumed.

    Returns:
        Seeds, success of the demonstrations of each, success without learning on the same episodes, and
        the minutes of this call without the last.

    Raises:
        ConfigError: a run in `out` was begun with other settings.
        DeviceError: a run failed; the message names its log.
    """
    demo_success: list[float] = []
    began_s = time.perf_counter()
    device = simulation(EnvConfig(task=task), min(_NUM_ENVS, episodes))
    with one_torch_thread(), opened(device, holder=f"a benchmark of {task}") as env:
        for seed in seeds:
            learning: dict[str, Any] = {"demos": demos, "noise_m": noise_m, "updates": updates}
            cloned = _clone(task, seed, **learning, horizon=horizon, out=out)
            demo_success.append(cloned.demo_success)
            play(env, cloned, eval_seeds(seed, episodes))
        minutes = (time.perf_counter() - began_s) / 60.0
        trivial = [
            {"policy": name, **successes_of([solved(env, name, seed, episodes) for seed in seeds])}
            for name in _TRIVIAL
        ]
    return {"seeds": list(seeds), "demo_success": demo_success, "trivial": trivial, "minutes": minutes}


def _clone(
    task: str, seed: int, *, demos: int, noise_m: float, updates: int, horizon: int, out: str
) -> Cloned:
    """Clones a flow policy from all demonstrations, failures included."""
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
