"""A draw from a start bank costs little of a step, less than the task's own starts."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.resets.generate import GenerateSettings, generate
from robot_rl.resets.workbench import Workbench
from robot_rl.sim.config import EnvConfig, ResetsConfig
from robot_rl.sim.own_starts import OwnStarts
from robot_rl.sim.start_bank import StartBank
from robot_rl.sim.vector import SimVectorEnv

NUM_ENVS, STEPS, ROUNDS = 512, 20, 4


@pytest.mark.benchmark
def test_a_draw_is_at_most_5_percent_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of 1 s end at different times: some 26 of 512 envs begin again in each step."""
    bench = Workbench(SimVectorEnv(EnvConfig(task="gantry_peg"), 128, autoreset="disabled"))
    generate(bench, GenerateSettings(rows=100, seed=0, classes=())).save(tmp_path / "bank")
    spent = {"own": 0.0, "bank": 0.0}

    def timed(name: str, owner: type[Any], method: str) -> None:
        inner = getattr(owner, method)

        def outer(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args)
            finally:
                spent[name] += time.perf_counter() - started

        monkeypatch.setattr(owner, method, outer)

    timed("own", OwnStarts, "begin")
    timed("bank", StartBank, "begin")
    starts = {"own": ResetsConfig(), "bank": ResetsConfig(bank=str(tmp_path / "bank"))}
    envs = {
        name: SimVectorEnv(EnvConfig(task="gantry_peg", horizon_s=1.0, resets=resets), NUM_ENVS)
        for name, resets in starts.items()
    }
    for env in envs.values():
        env.reset(seed=0)
        env._elapsed[:] = np.arange(NUM_ENVS) % env.horizon
    spent.update(own=0.0, bank=0.0)
    stepped = dict.fromkeys(spent, 0.0)
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, NUM_ENVS, 3)).astype(np.float32)
    for _ in range(ROUNDS):
        for name, env in envs.items():
            started = time.perf_counter()
            for action in actions:
                env.step(action)
            stepped[name] += time.perf_counter() - started
    share = {name: spent[name] / stepped[name] for name in spent}
    assert min(share.values()) > 0, f"not timed: {share}"
    assert share["bank"] <= 0.05, share
    assert share["bank"] < share["own"], share
