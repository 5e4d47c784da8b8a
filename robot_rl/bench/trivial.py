"""What needs no learning: success of noise, of standing still, and of the scripted experts themselves.

The rows that a learned policy's success is to be read beside. The episodes are the held-out ones of a run
with the same seed, those that `robot-rl train` and `bench improve` report.
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
"""Keeps these draws apart from what an env draws from the same episode seed."""


def run(
    *,
    tasks: tuple[str, ...] = ("pick_cube", "open_drawer"),
    policies: tuple[str, ...] = POLICIES,
    seeds: tuple[int, ...] = (0, 1, 2),
    episodes: int = 200,
) -> dict[str, Any]:
    """Plays held-out episodes with policies that have learned nothing, and returns a row for each.

    Args:
        tasks: of the table.
        policies: `random`: another action at every step; `hold`: every motion zero, the gripper half open;
            `repeat`: one random action for the whole episode; `demonstrator`: the expert with the bias and
            noise of `base=<task>`, where there is one; `expert`: the same without either.
        seeds: of runs, whose held-out episodes are played.
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
        "title": "What needs no learning (held-out episodes)",
        "rows": rows,
        "notes": [SUCCESS_NOTE, "policy: `robot-rl bench trivial --help` says what each does"],
    }


def solved(env: VectorEnv, name: str, seed: int, episodes: int) -> NDArray[np.bool_]:
    """Returns which of the held-out episodes of a run's seed a policy solves."""
    return collect_episodes(env, actor_of(env, name, seed), eval_seeds(seed, episodes)).episode_success()


def has_base(task: str) -> bool:
    """Returns whether the table of `bench improve` has a base of the task, and so a demonstrator."""
    return task in options("base")


def actor_of(env: VectorEnv, name: str, seed: int) -> Expert:
    """Returns what acts in all envs at once; `seed` is the run's whose demonstrator it is."""
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
    """A policy that looks at nothing."""

    draw: Callable[[], NDArray[Any]]

    def act(self) -> NDArray[Any]:
        """Returns actions (B, A)."""
        return self.draw().astype(np.float32)
