"""What a step costs in another process: the same environments here and there, by turns."""

import time
from typing import Any

import numpy as np
import pytest

from robot_rl.envs.gym import GymVectorEnv
from robot_rl.envs.process import ProcessVectorEnv

pytestmark = pytest.mark.benchmark

NUM_ENVS, STEPS, ROUNDS = 8, 500, 9
LIMIT_US = 50.0


def _step_us(env: GymVectorEnv, actions: Any) -> float:
    """Returns the time of a step of one environment."""
    env.reset(seed=0)
    began = time.perf_counter()
    for _ in range(STEPS):
        env.step(actions)
    return (time.perf_counter() - began) / (STEPS * NUM_ENVS) * 1e6


def test_another_process_costs_fifty_microseconds_a_step_at_most(record_property: Any) -> None:
    here = GymVectorEnv("Pendulum-v1", NUM_ENVS)
    there = ProcessVectorEnv("Pendulum-v1", NUM_ENVS, workers=1)
    actions = np.zeros((NUM_ENVS, 1), np.float32)
    rounds = [(_step_us(here, actions), _step_us(there, actions)) for _ in range(ROUNDS)]
    there.close()
    costs = [after - before for before, after in rounds]
    record_property("microseconds a step, here and there", rounds)
    assert np.median(costs) <= LIMIT_US, rounds
