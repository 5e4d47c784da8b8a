"""What choosing the best of N chunks by a pseudo-count (TACO) gains over the policy itself.

The expert aims beside its target, by another distance in each episode, so part of the
demonstrations fail. The policy is cloned from all of them; what is counted are the observations
and executed actions of those that succeed.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import numpy as np
import torch

from robot_rl.bench.cloned import clone
from robot_rl.core.seeding import eval_seeds, train_seed
from robot_rl.policies.taco import BestOfN, CoinFlipConfig, fit_coin_flips, successes
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.train.envs import make_env
from robot_rl.train.evaluate import EvalResult, evaluate_in

_NUM_ENVS = 50


def run(
    *,
    task: str = "pick_cube",
    candidates: tuple[int, ...] = (1, 8, 32),
    seeds: tuple[int, ...] = (0, 1, 2),
    episodes: int = 200,
    horizon: int = 16,
    n_exec: int = 8,
    updates: int = 4000,
    demos: int = 300,
    noise_m: float = 0.015,
) -> dict[str, Any]:
    """Clones a policy for every seed and plays held-out episodes with every N.

    Args:
        task: what is played.
        candidates: N; 1 is the policy itself.
        seeds: of the policies; each has its own held-out episodes.
        episodes: held-out episodes for every seed.
        horizon: H.
        n_exec: control steps between two plans.
        updates: of behaviour cloning.
        demos: demonstrations for each seed.
        noise_m: how far the expert aims beside the target, drawn for each demonstration.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    played: dict[int, list[EvalResult]] = {n: [] for n in candidates}
    demo_success: list[float] = []
    fit_s = 0.0
    began_s = time.perf_counter()
    try:
        with closing(make_env(EnvConfig(task=task), min(_NUM_ENVS, episodes), autoreset="disabled")) as env:
            for seed in seeds:
                cloned = clone(
                    task, seed=seed, demos=demos, noise_m=noise_m, updates=updates, horizon=horizon
                )
                demo_success.append(cloned.demo_success)
                fit_began_s = time.perf_counter()
                scorer = fit_coin_flips(
                    cloned.policy,
                    successes(cloned.episodes, horizon),
                    CoinFlipConfig(prefix=n_exec),
                    seed=train_seed(seed, "coin flips"),
                )
                fit_s += time.perf_counter() - fit_began_s
                for n in candidates:
                    policy = BestOfN(cloned.policy, scorer, n)
                    seeds_played = eval_seeds(seed, episodes)
                    played[n].append(evaluate_in(env, policy, seeds=seeds_played, n_exec=n_exec))
    finally:
        torch.set_num_threads(threads)
    return {
        "title": f"{task}: the best of N chunks, a plan every {n_exec} steps",
        "rows": [_row(n, results) for n, results in played.items()],
        "seeds": list(seeds),
        "demo_success": demo_success,
        "fit_s_per_seed": fit_s / len(seeds),
        "minutes": (time.perf_counter() - began_s) / 60.0,
        "notes": [
            "success: of all episodes of all seeds, 95 % Wilson interval; low and high: of single seeds"
        ],
    }


def _row(n: int, results: list[EvalResult]) -> dict[str, Any]:
    success = np.concatenate([result.success for result in results])
    rates = [result.rate for result in results]
    low, high = wilson_interval(int(success.sum()), len(success))
    return {
        "n": n,
        "success": float(success.mean()),
        "ci_low": low,
        "ci_high": high,
        "low": min(rates),
        "high": max(rates),
        "steps": float(np.mean([result.steps.mean() for result in results])),
        "episodes": len(success),
    }
