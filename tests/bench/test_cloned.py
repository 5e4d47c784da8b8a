"""Benchmarks of acting: what needs no learning stands beside the clones, on the same episodes."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.bench import cloned
from robot_rl.hal.vector import VectorEnv


def test_noise_standing_still_and_the_expert_play_the_same_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def solved(env: VectorEnv, name: str, seed: int, episodes: int) -> NDArray[np.bool_]:
        seen.append((env.task, name, seed, episodes))
        return np.arange(episodes) < {"random": 0, "hold": seed, "expert": episodes}[name]

    monkeypatch.setattr(cloned, "solved", solved)
    clones: list[int] = []
    result = cloned.play_clones(
        lambda env, clone, held_out: clones.append(clone.seed),
        task="reach",
        seeds=(0, 1),
        episodes=2,
        horizon=4,
        updates=1,
        demos=2,
        noise_m=0.0,
    )
    assert clones == result["seeds"] == [0, 1]
    noise, still, expert = result["trivial"]
    assert (noise["policy"], noise["success"]) == ("random", 0.0)
    # None of 2 with seed 0, one of 2 with seed 1; Wilson, 1 of 4.
    assert (still["policy"], still["success"], still["low"], still["high"]) == ("hold", 0.25, 0.0, 0.5)
    assert (still["ci_low"], still["ci_high"]) == pytest.approx((0.0456, 0.6994), abs=1e-4)
    assert (expert["policy"], expert["success"]) == ("expert", 1.0)
    assert seen == [("reach", name, seed, 2) for name in ("random", "hold", "expert") for seed in (0, 1)]
