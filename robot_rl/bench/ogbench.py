"""Chunked critics on OGBench's cube tasks: h = 5 and h = 1, offline and then online.

The published comparison (Li et al. 2025, Q-chunking; 1M offline updates, 4 x 512, 1M steps of play data):
cube-double QC-FQL .42 offline and .99 after .5M control steps, FQL (h = 1) .32 and .72; best of 32 chunks
.66, of 32 actions .67 offline. Deviations: data from the same oracle but fewer steps of it, networks and
budgets as set, the default task of the environment.

Every (h, seed) is a run of `robot-rl train recipe=offline` in its own folder: the play data are its
demonstrations, the task is its environment. A repeated call resumes a run that was interrupted or ran out of
`minutes`, from its last checkpoint, which is at most a minute old.

T control steps, E episodes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.ogbench_env import TASKS, Program, env_id
from robot_rl.bench.peers import cache_folder
from robot_rl.bench.trials import Training, check_plan, over_seeds
from robot_rl.bench.trivial import solved
from robot_rl.core.errors import StorageError, require
from robot_rl.core.files import make_folder, read_json, write_json
from robot_rl.data.demos import load_episodes, save_episodes
from robot_rl.data.episodes import Episodes, EpisodesMeta, episodes_meta
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.metrics import FILE_NAME, read_metrics
from robot_rl.telemetry.progress import ProgressDisplay

_METHOD = "chunked"
"""Phase of the metrics."""
_GAMMA = 0.99
_ANEW = "Remove the folder to run it again."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of one row."""

    task: str
    actor: str
    horizon: int
    seed: int
    offline_updates: int
    online_steps: int
    evaluate_every: int
    episodes: int
    data_steps: int
    width: int
    depth: int
    batch: int
    flow_steps: int
    candidates: int
    alpha: float

    @property
    def name(self) -> str:
        return f"{self.task}-{self.actor}-h{self.horizon}-seed{self.seed}"

    def words(self, play: Path) -> tuple[str, ...]:
        """Returns the arguments of `robot-rl train` for this row, with a dataset of play."""
        method: dict[str, Any] = {
            "offline_updates": self.offline_updates,
            "env_steps": self.online_steps,
            "utd": 1.0,
            "batch": self.batch,
            # Every step, offline or online, is as likely as any other.
            "demo_ratio": "null" if self.online_steps else 0.0,
            "capacity": max(1000, 2 * self.online_steps + 2),
            "algorithm.actor": self.actor,
            "algorithm.candidates": self.candidates,
            "algorithm.alpha": self.alpha,
            "algorithm.gamma_step": _GAMMA,
        }
        size = {"width": self.width, "depth": self.depth}
        return (
            *("recipe=offline", f"seed={self.seed}", "env.kind=gym", f"env.id={env_id(self.task)}"),
            *(f"demos.path={play}", f"n_exec={self.horizon}", f"policy.horizon={self.horizon}"),
            f"policy.steps={self.flow_steps}",
            *(f"policy.{key}={value}" for key, value in size.items()),
            *(f"method.{key}={value}" for key, value in method.items()),
            *(f"method.algorithm.critics.{key}={value}" for key, value in size.items()),
            *(f"evaluate.{key}={self.episodes}" for key in ("episodes", "quick_episodes")),
            *(f"evaluate.every_{what}={self.evaluate_every}" for what in ("updates", "env_steps")),
            *("evaluate.num_envs=1", "lease_wait_s=1e6"),  # a process of OGBench takes 0.7 GB
        )


def run(
    *,
    task: str = "cube-double",
    actor: str = "fql",
    horizons: tuple[int, ...] = (5, 1),
    seeds: tuple[int, ...] = (0,),
    offline_updates: int = 100_000,
    online_steps: int = 0,
    evaluate_every: int = 25_000,
    episodes: int = 50,
    data_steps: int = 200_000,
    width: int = 256,
    depth: int = 3,
    batch: int = 256,
    flow_steps: int = 5,
    candidates: int = 8,
    alpha: float = 100.0,
    minutes: float = 60.0,
    out: str = "runs/ogbench",
) -> dict[str, Any]:
    """Learns with every h and seed, and returns the rows so far.

    Args:
        task: `cube-single` or `cube-double`; its data are those of the play oracle.
        actor: `fql` or `best_of_n`, see `ChunkQConfig`.
        horizons: h; 1 is FQL, or best-of-n, with an ordinary Q.
        seeds: of the learners; the data are the same for all.
        offline_updates: updates before the first control step.
        online_steps: control steps, with one update each.
        evaluate_every: updates between evaluations.
        episodes: of each evaluation.
        data_steps: control steps of play data.
        width: of all networks (the paper: width 512, depth 4, batch 256, flow_steps 10).
        candidates: of `best_of_n` (the paper: 32).
        alpha: of `fql`; choose it for the task (FQL: 300 for cubes).
        minutes: wall-clock minutes of learning in this call; the next call continues. The episodes without
            learning, once for each seed, take additional time.
        out: folder of the runs and their rows.

    Raises:
        ConfigError: a run in `out` was begun with other settings.
        DeviceError: a run failed; the message names its log.
    """
    require(task in TASKS, "bench ogbench: task", task, ", ".join(TASKS))
    require(actor in ("fql", "best_of_n"), "bench ogbench: actor", actor, "fql, best_of_n")
    same: dict[str, Any] = {
        "task": task,
        "actor": actor,
        "offline_updates": offline_updates,
        "online_steps": online_steps,
        "evaluate_every": evaluate_every,
        "episodes": episodes,
        "data_steps": data_steps,
        "width": width,
        "depth": depth,
        "batch": batch,
        "flow_steps": flow_steps,
        "candidates": candidates,
        "alpha": alpha,
    }
    play = play_of(task, data_steps)
    plans = [Plan(**same, horizon=h, seed=seed) for seed in seeds for h in horizons]
    trials = [Trial(plan, play, Path(out).resolve() / plan.name) for plan in plans]
    rows = learned(trials, minutes)
    baselines = [row for seed in seeds for row in trivial(task, seed, episodes, Path(out))]
    data = load_episodes(play)
    return {
        "title": f"{task}, {actor}: chunks of h actions, success of {episodes} episodes",
        "rows": rows,
        "means": means([row for row in rows if row["done"]]),
        "trivial": over_seeds(baselines, ("policy",), "success"),
        "notes": [
            "means: of finished runs; ci: Student's 95 % interval of the mean over seeds",
            "trivial: zero actions, random actions, and the oracle of the play data, on the same episodes",
            f"play data: {data_steps:,} steps in {data.num_episodes:,} episodes, of which "
            f"{data.episode_success().sum():,.0f} end in the task's goal",
            "repeat the command to continue the rows that are not done",
        ],
    }


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each h, over its seeds."""
    return over_seeds(rows, ("h",), "success")


def trivial(task: str, seed: int, episodes: int, out: Path) -> list[dict[str, Any]]:
    """Returns success without learning on the episodes of a seed, from its file if there is one."""
    path = out / f"{task}-trivial-{episodes}-seed{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    rows: list[dict[str, Any]] = []
    for policy, name in {"zero": "hold", "random": "random", "oracle": "hold"}.items():
        settings = {"oracle": True} if policy == "oracle" else {}
        config = EnvConfig(kind="gym", id=env_id(task), settings=settings)
        with opened(simulation(config, 1), holder="bench ogbench") as env:
            success = float(solved(env, name, seed, episodes).mean())
        rows.append({"policy": policy, "seed": seed, "success": success})
    make_folder(out)
    write_json(path, rows)
    return rows


def learned(trials: Sequence[Trial], minutes: float) -> list[dict[str, Any]]:
    """Continues unfinished runs, one after another, until the time is over; returns all rows."""
    waiting = [trial for trial in trials if not trial.is_done]
    for trial in waiting:
        trial.training.check()
    deadline_s = time.perf_counter() + 60.0 * minutes
    with ProgressDisplay() as display, display.phase("runs", len(waiting), unit="runs") as progress:
        for number, trial in enumerate(waiting, start=1):
            left_s = deadline_s - time.perf_counter()
            if trial.training.done() is None and (left_s <= 0 or not trial.training.train(limit_s=left_s)):
                break
            trial.keep()
            progress.update(number)
    return [trial.row() for trial in trials]


def play_of(task: str, steps: int, *, seed: int = 0) -> Path:
    """Returns a dataset of play, which is collected once and kept in the user's cache."""
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
    """Returns play data as episodes that end where the task ends them, and at the time limit.

    Args:
        meta: of the episodes.
        play: state (T, F), action (T, A), reward (T,), solved (T,), ends (T,), and final (E, F), the last
            observation of each of the E recorded episodes. `solved` is about the state before a step.
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


class Trial:
    """One learner: its run, and its row, which `row.json` holds after the end of the run."""

    def __init__(self, plan: Plan, play: Path, folder: Path) -> None:
        self._plan, self._path = plan, folder / "row.json"
        self.training = Training(f"bench ogbench: {plan.name}", folder, plan.words(play))

    @property
    def is_done(self) -> bool:
        """Returns whether the file has the final row.

        Raises:
            ConfigError: the file is of another plan.
        """
        if not self._path.exists():
            return False
        kept = read_json(self._path, StorageError, _ANEW)
        check_plan("bench ogbench", self._path.parent, kept["plan"], vars(self._plan))
        return bool(kept["row"]["done"])

    def keep(self) -> None:
        """Writes the row of a finished run."""
        write_json(self._path, {"plan": vars(self._plan), "row": self.measured(), "curve": self.curve()})

    def row(self) -> dict[str, Any]:
        """Returns progress, success and cost."""
        return read_json(self._path, StorageError, _ANEW)["row"] if self.is_done else self.measured()

    def curve(self) -> list[dict[str, Any]]:
        """Returns all evaluations; the last one has other episodes than those before."""
        points: dict[tuple[int, int], float] = {}
        for row in self._metrics():
            if row.get("eval/success") is not None:
                points[self._place(row)] = row["eval/success"]
        return [{"updates": at[0], "env_steps": at[1], "success": rate} for at, rate in points.items()]

    def measured(self) -> dict[str, Any]:
        """Returns the row from the files of the run; the cost is known after its end."""
        plan, curve, rows = self._plan, self.curve(), self._metrics()
        updates, env_steps = self._place(rows[-1]) if rows else (0, 0)
        offline = [point["success"] for point in curve if point["updates"] == plan.offline_updates]
        row: dict[str, Any] = {
            "h": plan.horizon,
            "seed": plan.seed,
            "updates": updates,
            "env_steps": env_steps,
            "offline": offline[0] if offline else None,
            "success": curve[-1]["success"] if curve else None,
        }
        is_done = self.training.done() is not None
        return {**row, **self._took(is_done, updates, env_steps, len(curve)), "done": is_done}

    def _took(self, is_done: bool, updates: int, env_steps: int, looks: int) -> dict[str, Any]:
        timing = self.training.finished()[1]["timing"] if is_done else {}

        def each(stages: Sequence[str], count: int) -> float | None:
            return sum(timing.get(stage, 0.0) for stage in stages) / count if is_done and count else None

        update_s, step_s = each(("sample", "update"), updates), each(("collect", "replay"), env_steps)
        return {
            "s_per_1000_updates": None if update_s is None else 1e3 * update_s,
            "s_per_1000_env_steps": None if step_s is None else 1e3 * step_s,
            "evaluate_s": each(("evaluate",), looks),
        }

    def _metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics since the first update."""
        begun = self.training.begun()
        if begun is None or not (begun / FILE_NAME).exists():
            return []
        phases = (f"{_METHOD} offline", _METHOD, "final")
        return [row for row in read_metrics(begun / FILE_NAME) if row["phase"] in phases]

    def _place(self, row: dict[str, Any]) -> tuple[int, int]:
        """Returns all updates and control steps so far; a run counts updates for each phase."""
        plan = self._plan
        if row["phase"] == "final":
            return plan.offline_updates + plan.online_steps, plan.online_steps
        is_online = row["phase"] == _METHOD and row["step"] > 0
        return row["updates"] + plan.offline_updates * is_online, row["step"]
