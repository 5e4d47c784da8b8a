"""Success and jerk of a policy whose planning takes time, with and without real-time chunking.

The delay is simulated in control steps: a chunk is computed from the observation at its start, and until it
is ready the arm follows the previous chunk. `naive` then switches to the new chunk, `ensemble` averages all
chunks of a step, `rtc` lets the new chunk continue the old one.

The aim of the expert differs between demonstrations, so chunks differ from plan to plan, and a switch makes
the motion jump.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.cloned import TRIVIAL_NOTE, Cloned, play_clones
from robot_rl.bench.trials import SUCCESS_NOTE, successes_of
from robot_rl.core.policy import Policy
from robot_rl.hal.vector import VectorEnv
from robot_rl.policies.real_time import RealTimeChunks
from robot_rl.rollout.evaluate import EvalResult, evaluate_in
from robot_rl.rollout.stepping import Moment

METHODS = ("naive", "ensemble", "rtc")
_ENSEMBLE = 0.01
"""m of the temporal ensemble (Zhao et al. 2023)."""


def run(
    *,
    task: str = "pick_cube",
    delays: tuple[int, ...] = (0, 2, 4, 8),
    seeds: tuple[int, ...] = (0, 1, 2),
    episodes: int = 100,
    horizon: int = 16,
    n_exec: int = 8,
    updates: int = 5000,
    demos: int = 400,
    noise_m: float = 0.005,
    out: str = "runs/chunking",
) -> dict[str, Any]:
    """Clones a policy for every seed and plays held-out episodes with every method and delay.

    Args:
        task: see `play_clones`, also for the settings that are not listed here.
        delays: control steps that planning takes.
        n_exec: control steps between two plans.
    """
    played: dict[tuple[str, int], list[tuple[EvalResult, Roughness]]] = {}

    def play_methods(env: VectorEnv, cloned: Cloned, held_out: NDArray[np.uint64]) -> None:
        for delay in delays:
            for method in METHODS:
                found = play(env, cloned.policy, method, delay, n_exec, held_out)
                played.setdefault((method, delay), []).append(found)

    common = play_clones(
        play_methods,
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
        "title": f"{task}: chunks of {horizon}, a plan every {n_exec} steps that takes `delay` steps",
        "rows": [_row(method, delay, results) for (method, delay), results in played.items()],
        **common,
        "notes": [
            SUCCESS_NOTE,
            TRIVIAL_NOTE,
            "jerk: mean |a(t) - 2 a(t-1) + a(t-2)| over steps and action elements, of actions in [-1, 1]",
            "jump: mean |a(t) - a(t-1)| at the first step of each new chunk",
        ],
    }


def play(
    env: VectorEnv, policy: Any, method: str, delay: int, n_exec: int, seeds: NDArray[np.uint64]
) -> tuple[EvalResult, Roughness]:
    """Returns the evaluation of one method at one delay, and the roughness of its actions."""
    acting: Policy = RealTimeChunks(policy) if method == "rtc" else policy
    roughness = Roughness(n_exec, delay)
    result = evaluate_in(
        env,
        acting,
        seeds=seeds,
        n_exec=n_exec,
        delay=delay,
        ensemble=_ENSEMBLE if method == "ensemble" else None,
        watch=roughness,
    )
    return result, roughness


class Roughness:
    """Measures jerk and jumps of the actions during an evaluation."""

    def __init__(self, n_exec: int, delay: int) -> None:
        self._n_exec, self._delay = n_exec, delay
        self._batch, self._step = slice(0, 0), 0
        self._last: list[NDArray[Any]] = []
        self._second, self._jumps = _Mean(), _Mean()

    @property
    def jerk(self) -> float:
        """Mean |a(t) - 2 a(t-1) + a(t-2)| over the steps of live rows and over action elements."""
        return self._second.value

    @property
    def jump(self) -> float:
        """Mean |a(t) - a(t-1)| over the first steps of new chunks."""
        return self._jumps.value

    def __call__(self, where: slice, moment: Moment) -> None:
        if where != self._batch:
            self._batch, self._step, self._last = where, 0, []
        rows = np.flatnonzero(moment.live[: where.stop - where.start])
        action = moment.action[rows]
        if len(self._last) == 2:
            before, last = self._last
            self._second.add(action - 2.0 * last[rows] + before[rows])
        # All rows begin their episodes and plan at the same steps.
        taken_over = self._step > self._delay and (self._step - self._delay) % self._n_exec == 0
        if taken_over:
            self._jumps.add(action - self._last[-1][rows])
        self._last = [*self._last[-1:], moment.action]
        self._step += 1


class _Mean:
    """A running mean of absolute values."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, values: NDArray[Any]) -> None:
        self._sum += float(np.abs(values).sum())
        self._count += values.size

    @property
    def value(self) -> float:
        return self._sum / max(self._count, 1)


def _row(method: str, delay: int, results: list[tuple[EvalResult, Roughness]]) -> dict[str, Any]:
    found = [result for result, _ in results]
    return {
        "delay": delay,
        "method": method,
        **successes_of([result.success for result in found]),
        "jerk": float(np.mean([roughness.jerk for _, roughness in results])),
        "jump": float(np.mean([roughness.jump for _, roughness in results])),
        "steps": float(np.mean([result.steps.mean() for result in found])),
        "episodes": sum(len(result.success) for result in found),
    }
