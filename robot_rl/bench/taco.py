"""Compares the best of N chunks by a pseudo-count (TACO) with the policy alone.

The expert aims next to its target, with another error in each episode: some demonstrations fail. The policy
is cloned from all of them. The pseudo-count is of the observations and executed actions of the successful
ones.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.cloned import TRIVIAL_NOTE, Cloned, play_clones
from robot_rl.bench.trials import SUCCESS_NOTE, successes_of
from robot_rl.core.seeding import train_seed
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.best_of_n import BestOfN
from robot_rl.policies.taco import CoinFlipConfig, fit_coin_flips, successes
from robot_rl.rollout.evaluate import EvalResult, evaluate_in


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
    out: str = "runs/taco",
) -> dict[str, Any]:
    """Clones a policy for every seed and plays held-out episodes with every N.

    Args:
        task: see `play_clones`, also for the settings that are not listed here.
        candidates: N; 1 is the policy alone.
        n_exec: control steps between two plans.
    """
    played: dict[int, list[EvalResult]] = {n: [] for n in candidates}
    fit_s = 0.0

    def play_candidates(env: VectorEnv, cloned: Cloned, held_out: NDArray[np.uint64]) -> None:
        nonlocal fit_s
        began_s = time.perf_counter()
        scorer = fit_coin_flips(
            cloned.policy,
            successes(cloned.episodes, horizon),
            CoinFlipConfig(prefix=n_exec),
            seed=train_seed(cloned.seed, "coin flips"),
        )
        fit_s += time.perf_counter() - began_s
        for n in candidates:
            policy = BestOfN(cloned.policy, scorer, n)
            played[n].append(evaluate_in(env, policy, seeds=held_out, n_exec=n_exec))

    common = play_clones(
        play_candidates,
        task=task,
        seeds=seeds,
        episodes=episodes,
        horizon=horizon,
        updates=updates,
        demos=demos,
        noise_m=noise_m,
        out=out,
    )
    return {
        "title": f"{task}: the best of N chunks, a plan every {n_exec} steps",
        "rows": [_row(n, results) for n, results in played.items()],
        **common,
        "fit_s_per_seed": fit_s / len(seeds),
        "notes": [SUCCESS_NOTE, TRIVIAL_NOTE],
    }


def _row(n: int, results: list[EvalResult]) -> dict[str, Any]:
    return {
        "n": n,
        **successes_of([result.success for result in results]),
        "steps": float(np.mean([result.steps.mean() for result in results])),
        "episodes": sum(len(result.success) for result in results),
    }
