"""Imagined control steps come at a multiple of the simulator's pace, of the same task on the same core."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from robot_rl.bench.world import LIFTED
from robot_rl.cli.main import main
from robot_rl.hal.vector import VectorEnv
from robot_rl.sim.config import EnvConfig
from robot_rl.sim.vector import SimVectorEnv
from robot_rl.worlds.env import ImaginedConfig, WorldEnv
from robot_rl.worlds.saved import load_world

NUM_ENVS, CHUNK, ROUNDS = 256, 8, 4
CHUNKS = {"imagined": 25, "simulated": 2}


@pytest.mark.benchmark
@pytest.mark.parametrize(("stride", "times"), [(4, 12), (8, 20)])
def test_imagination_is_so_many_times_as_fast_as_the_simulator(
    stride: int, times: int, tmp_path: Path
) -> None:
    """The model has its usual size; a few updates make it as fast as many do. The aim was 20 times."""
    demos, model = tmp_path / "demos", tmp_path / "model"
    assert main(["collect", "task=push_cube", "episodes=150", f"out={demos}"]) == 0
    assert (
        main(
            [
                "worlds",
                "fit",
                f"data={demos}",
                f"out={model}",
                "fit.updates=20",
                f"model.stride={stride}",
                *LIFTED,
            ]
        )
        == 0
    )
    torch.set_num_threads(1)
    settings = ImaginedConfig(strides=0, gate=False)
    envs: dict[str, VectorEnv] = {
        "imagined": WorldEnv(load_world(model), NUM_ENVS, autoreset="same_step", settings=settings),
        "simulated": SimVectorEnv(EnvConfig(task="push_cube", num_threads=1), NUM_ENVS),
    }
    rng, spent = np.random.default_rng(0), dict.fromkeys(envs, 0.0)
    for env in envs.values():
        env.reset(seed=0)
    for _ in range(ROUNDS):
        for name, env in envs.items():
            size = (CHUNKS[name], NUM_ENVS, CHUNK, len(env.action_names))
            actions = rng.uniform(-0.3, 0.3, size).astype(np.float32)
            began = time.perf_counter()
            for chunk in actions:
                env.step_chunk(chunk, n_exec=CHUNK)
            spent[name] += time.perf_counter() - began
    pace = {name: ROUNDS * CHUNKS[name] * NUM_ENVS * CHUNK / spent[name] for name in envs}
    assert pace["imagined"] >= times * pace["simulated"], pace
