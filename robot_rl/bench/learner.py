"""Learner updates per second: SAC here, in Stable-Baselines3 and, if asked, in sbx (JAX).

All do the same work: actor and twin critics of 2 x 256, batch 256, 17 observations, 6 actions, one thread,
gradient steps only, each from its own full replay. Ours and Stable-Baselines3 take turns in one process, so
that other load on the machine affects both; ratios are those of neighbouring rounds. sbx runs in its own
virtual environment, on one core.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.algos.actor_critic import ActorCritic
from robot_rl.algos.config.off_policy import ActorCriticConfig
from robot_rl.bench.peers import environment
from robot_rl.bench.trials import Rate, Stopwatch, median_ratio, one_torch_thread
from robot_rl.core.errors import RobotRLError
from robot_rl.data.replay import ReplayBuffer, StepBatch

Array = NDArray[Any]

OBS, ACTIONS, BATCH, STEPS = 17, 6, 256, 10_000

# The same torch as here, which the package cache then has already.
_SBX = ("sbx-rl==0.28.0", f"torch=={torch.__version__.split('+')[0]}")

_SBX_PROGRAM = """
import json, time
import gymnasium, numpy as np
from stable_baselines3.common.logger import configure
from sbx import SAC
class Blank(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, ({obs},), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, ({actions},), np.float32)
    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {{}}
    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {{}}
model = SAC("MlpPolicy", Blank(), learning_starts={steps}, buffer_size={steps})
model.learn({steps})
model.set_logger(configure(None, []))
rates = []
model.train(64, {batch})
for _ in range({rounds}):
    updates, wall, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < {seconds}:
        model.train(64, {batch})
        updates += 64
    rates.append([updates / (time.perf_counter() - wall), updates / (time.process_time() - cpu)])
print(json.dumps(rates))
"""


def run(*, seconds_per_round: float = 3.0, rounds: int = 4, sbx: bool = False) -> dict[str, Any]:
    """Measures and returns rows and ratios.

    Args:
        seconds_per_round: length of each turn.
        rounds: turns of each learner.
        sbx: also measures sbx, in a virtual environment that is made in the user's cache on first use.
    """
    if seconds_per_round <= 0 or rounds < 1:
        raise ValueError(
            f"bench learner: got {rounds} rounds of {seconds_per_round} s, "
            "allowed: at least 1 round, above 0 s"
        )
    with one_torch_thread():
        updates = {"robot_rl": ours(), "stable_baselines3": theirs()}
        rates = alternate(updates, seconds_per_round, rounds)
    if sbx:
        rates["sbx"] = measure_sbx(seconds_per_round, rounds)
    return {
        "title": "SAC, 2 x 256, batch 256, one thread: learner updates per second",
        "rows": [_row(name, values) for name, values in rates.items()],
        **{
            f"ratio_to_{name}": ratios(rates["robot_rl"], values)
            for name, values in rates.items()
            if name != "robot_rl"
        },
        "bf16": bool(torch.cpu.get_capabilities().get("avx512_bf16", False)),
        "notes": ["Rates are medians over rounds, ratios medians over neighbouring rounds."],
    }


def ratios(mine: list[Rate], peer: list[Rate]) -> dict[str, float]:
    """Returns the median ratio of neighbouring rounds, per wall-clock and per CPU second."""
    return {clock: median_ratio(mine, peer, clock) for clock in ("wall", "cpu")}


def alternate(updates: dict[str, Callable[[], int]], seconds: float, rounds: int) -> dict[str, list[Rate]]:
    """Runs each function in turn, `rounds` times; a call makes some updates and returns how many."""
    for update in updates.values():
        update()
    rates: dict[str, list[Rate]] = {name: [] for name in updates}
    for _ in range(rounds):
        for name, update in updates.items():
            count, watch = 0, Stopwatch()
            while watch.wall_s < seconds:
                count += update()
            rates[name].append(watch.rate(count))
    return rates


def ours(cfg: ActorCriticConfig | None = None) -> Callable[[], int]:
    """Returns a function that makes 20 updates of this project's SAC and returns 20."""
    cfg = cfg or ActorCriticConfig()
    rng = np.random.default_rng(0)
    replay = ReplayBuffer(STEPS, 1, {"state": ((OBS,), np.float32)}, ACTIONS)
    obs = rng.standard_normal((STEPS, 1, OBS), dtype=np.float32)
    actions = rng.uniform(-1, 1, (STEPS, 1, ACTIONS)).astype(np.float32)
    ended = np.zeros(1, bool)
    for t in range(STEPS - 1):
        replay.add(
            StepBatch(
                obs={"state": obs[t]},
                base_action=actions[t],
                action=actions[t],
                reward=actions[t, :, 0],
                terminated=ended,
                truncated=ended,
                next_obs={"state": obs[t + 1]},
                next_base_action=actions[t],
            )
        )
    learner = ActorCritic(OBS, ACTIONS, cfg, seed=0)

    def update() -> int:
        for _ in range(20):
            learner.update(replay.sample(BATCH, n_step=cfg.n_step, gamma_step=cfg.gamma_step, rng=rng))
        return 20

    return update


def theirs() -> Callable[[], int]:
    """Returns a function that makes 20 updates of Stable-Baselines3's SAC and returns 20.

    Raises:
        RobotRLError: it is not installed.
    """
    try:
        peer: Any = importlib.import_module("stable_baselines3")
        logger: Any = importlib.import_module("stable_baselines3.common.logger")
    except ImportError as error:
        raise RobotRLError(
            "bench learner: stable-baselines3 is not installed. `uv pip install -e '.[dev]'` brings it."
        ) from error
    model = peer.SAC("MlpPolicy", _Blank(), device="cpu", learning_starts=STEPS, buffer_size=STEPS)
    model.learn(STEPS)
    model.set_logger(logger.configure(None, []))

    def update() -> int:
        model.train(20, BATCH)
        return 20

    return update


def measure_sbx(seconds: float, rounds: int) -> list[Rate]:
    """Measures sbx on one core, in its own virtual environment.

    Raises:
        RobotRLError: it cannot be installed, or fails.
    """
    program = _SBX_PROGRAM.format(
        obs=OBS, actions=ACTIONS, steps=STEPS, batch=BATCH, seconds=seconds, rounds=rounds
    )
    remedy = " Use sbx=false to leave it out."
    python = environment("sbx", _SBX, at="bench learner", remedy=remedy)
    command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), str(python), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    if done.returncode != 0:
        raise RobotRLError(f"bench learner: sbx failed: {done.stderr.strip()[-400:]}{remedy}")
    return [Rate(wall, cpu) for wall, cpu in json.loads(done.stdout.strip().splitlines()[-1])]


def _row(name: str, rates: list[Rate]) -> dict[str, Any]:
    return {
        "learner": name,
        "updates_per_s": statistics.median(rate.wall for rate in rates),
        "updates_per_cpu_s": statistics.median(rate.cpu for rate in rates),
        "rounds": len(rates),
    }


class _Blank(gymnasium.Env[Array, Array]):
    """An env of the same sizes, to fill the peer's replay."""

    observation_space = gymnasium.spaces.Box(-1, 1, (OBS,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Array) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {}
