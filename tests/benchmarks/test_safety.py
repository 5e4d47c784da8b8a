"""The safety filter costs little of a control step, of which the physics are nearly all."""

import time
from typing import Any

import numpy as np
import pytest

from robot_rl.sim.vector import EnvConfig, SimVectorEnv

STEPS = 100


@pytest.mark.benchmark
@pytest.mark.parametrize("num_envs", [64, 512])
def test_the_filter_is_at_most_2_percent_of_a_step(num_envs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    env = SimVectorEnv(EnvConfig(task="reach"), num_envs)
    spent_s, inner = [0.0], env.safety.filter

    def timed(*args: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return inner(*args)
        finally:
            spent_s[0] += time.perf_counter() - began_s

    monkeypatch.setattr(env.safety, "filter", timed)
    env.reset(seed=0)
    shape = (STEPS, num_envs, len(env.action_names))
    actions = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    began_s = time.perf_counter()
    for action in actions:
        env.step(action)
    share = spent_s[0] / (time.perf_counter() - began_s)
    assert spent_s[0] > 0
    assert share <= 0.02, share
