"""Success without learning: random actions, no motion, and the scripted experts.

These rows are the reference for the success of a learned policy. The episodes are the held-out episodes of a
run with the same seed, as in `robot-rl train` and `bench improve`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.trials import SUCCESS_NOTE, successes_of
from robot_rl.config import load, options
from robot_rl.core.errors import require
from robot_rl.core.seeding import EpisodeRng, eval_seeds
from robot_rl.hal.vector import VectorEnv
from robot_rl.rollout.envs import Expert, simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import collect_episodes, expert_of

POLICIES = ("random", "hold", "repeat", "demonstrator", "expert")
_NUM_ENVS = 50
_STREAM = 0x7472697669616C
"""Separates these draws from those of the env with the same episode seed."""


def run(
    *,
    tasks: tuple[str, ...] = ("pick_cube", "open_drawer"),
    policies: tuple[str, ...] = POLICIES,
    seeds: tuple[int, ...] = (0, 1, 2),
    episodes: int = 200,
) -> dict[str, Any]:
    """Plays held-out episodes with policies without learning, and returns a row for each.

    Args:
        tasks: names of tasks.
        policies: `random`: a random action at every step; `hold`: no motion, the gripper half open;
            `repeat`: one random action for the whole episode; `demonstrator`: the expert with the bias and
            noise of `base=<task>`, if there is one; `expert`: the expert without bias and noise.
        seeds: seeds of runs, whose held-out episodes are played.
        episodes: for every seed.
    """
    for name in policies:
        require(name in POLICIES, "bench trivial: policies", name, ", ".join(POLICIES))
    require(1 <= episodes <= 10_000, "bench trivial: episodes", episodes, "1 to 10000")
    pairs = [(task, name) for task in tasks for name in policies if name != "demonstrator" or has_base(task)]
    rows: list[dict[str, Any]] = []
    with ProgressDisplay() as display:
        for task, name in pairs:
            with (
                display.phase(f"{task} {name}", len(seeds), unit="seeds") as progress,
                opened(
                    simulation(EnvConfig(task=task), min(_NUM_ENVS, episodes)), holder="bench trivial"
                ) as env,
            ):
                played: list[NDArray[np.bool_]] = []
                for number, seed in enumerate(seeds, start=1):
                    played.append(solved(env, name, seed, episodes))
                    progress.update(number)
            total = episodes * len(seeds)
            rows.append({"task": task, "policy": name, **successes_of(played), "episodes": total})
    return {
        "title": "Success without learning (held-out episodes)",
        "rows": rows,
        "notes": [SUCCESS_NOTE, "policy: `robot-rl bench trivial --help` explains them"],
    }


def solved(env: VectorEnv, name: str, seed: int, episodes: int) -> NDArray[np.bool_]:
    """Returns for each held-out episode of a run's seed whether the policy solves it."""
    return collect_episodes(env, actor_of(env, name, seed), eval_seeds(seed, episodes)).episode_success()


def has_base(task: str) -> bool:
    """Returns whether `configs/base` has the task, and so a demonstrator."""
    return task in options("base")


def actor_of(env: VectorEnv, name: str, seed: int) -> Expert:
    """Returns the actor of all envs; `seed` is that of the demonstrator's run."""
    if name in ("demonstrator", "expert"):
        bias_m = noise_m = 0.0
        if name == "demonstrator":
            demos = load(RunConfig, ["recipe=residual", f"base={env.task}"], config_name="train").demos
            bias_m, noise_m = demos.bias_m, demos.noise_m
        return expert_of(env, bias_m=bias_m, noise_m=noise_m, run_seed=seed)[0]
    num_envs, size = env.num_envs, len(env.action_names)
    rng, any_env = np.random.default_rng(seed), cast("Any", env)
    acts: dict[str, Callable[[], NDArray[Any]]] = {
        "random": lambda: rng.uniform(-1.0, 1.0, (num_envs, size)),
        "hold": lambda: np.zeros((num_envs, size)),
        "repeat": lambda: EpisodeRng(any_env.episode_seeds(), np.full(num_envs, _STREAM)).uniform(
            -1.0, 1.0, size
        ),
    }
    return Actor(acts[name])


@dataclass(frozen=True)
class Actor:
    """A policy that ignores the observation."""

    draw: Callable[[], NDArray[Any]]

    def act(self) -> NDArray[Any]:
        """Returns actions (B, A)."""
        return self.draw().astype(np.float32)
