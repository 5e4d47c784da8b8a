"""Play of OGBench's oracle as a dataset, from which `robot-rl train` learns as from any other.

T control steps, E episodes.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.ogbench_env import Program, env_id
from robot_rl.bench.peers import cache_folder
from robot_rl.data.demos import save_episodes
from robot_rl.data.episodes import Episodes, EpisodesMeta
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.demos import episodes_meta


def play_of(task: str, steps: int, *, seed: int = 0) -> Path:
    """Returns the dataset of so many control steps, collected once and then kept in the user's cache."""
    name = f"{task}-{steps}-seed{seed}"
    folder, columns = (cache_folder("peers", "ogbench_play") / found for found in (name, f"{name}.npz"))
    if folder.exists():
        return folder
    if not columns.exists():
        columns.parent.mkdir(parents=True, exist_ok=True)
        unfinished = columns.with_name(f".writing-{os.getpid()}-{columns.name}")
        with closing(Program(task)) as program:
            program.ask(do="collect", steps=steps, seed=seed, path=str(unfinished))
        unfinished.rename(columns)
    with opened(simulation(EnvConfig(kind="gym", id=env_id(task)), 1), holder="bench ogbench") as env:
        meta = episodes_meta(env)
    return save_episodes(folder, episodes_of(meta, dict(np.load(columns))))


def episodes_of(meta: EpisodesMeta, play: dict[str, NDArray[Any]]) -> Episodes:
    """Returns play data as episodes that end wherever the task would, and where the clock ended them.

    Args:
        meta: what they are of.
        play: state (T, F), action (T, A), reward (T,), solved (T,) and ends (T,), and final (E, F), what
            each of the E recorded episodes led to. `solved` speaks of the state that a step begins in.
    """
    state, solved, ends = play["state"], play["solved"].astype(bool), play["ends"].astype(bool)
    over = solved | ends
    after = np.concatenate([state[1:], state[:1]])
    after[ends] = play["final"]
    return Episodes(
        meta=meta,
        obs={"state": state},
        action=play["action"],
        reward=play["reward"],
        terminated=solved,
        truncated=ends & ~solved,
        success=solved,
        episode_index=np.concatenate([[0], np.cumsum(over)[:-1]]),
        final_obs={"state": after[over]},
    )
