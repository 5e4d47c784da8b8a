"""Policies that see: success by task and arm, from cameras and what the arm measures of itself.

    clone       the base of a run: cloned from demonstrations alone, before DAgger
    dagger      the same run at its end: the policy acted, the expert labelled, the policy cloned that
    clone_long  cloning alone, with about as many labels and as many updates as `dagger` ends with
    rl          residual RL on the clone, on sparse reward: no labels but the demonstrations
    expert      the scripted expert, which reads the true state: the ceiling

One run gives the first two rows, so `clone` has fewer labels and updates than `dagger`; `clone_long` tells
what that makes. Each run is a process of `robot-rl train`; finished runs in `out` are not repeated, and
interrupted runs are resumed. All policies of a seed play the same held-out episodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from robot_rl.bench.trials import SUCCESS_NOTE, Training, successes_of, train_all
from robot_rl.bench.trivial import solved
from robot_rl.config import load
from robot_rl.core.files import make_folder, write_json
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.config import check_names
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import DaggerSettings
from robot_rl.train.improve.method import settings_of

Name = Literal["clone", "dagger", "clone_long", "rl", "expert"]
Row = dict[str, Any]
_FIXED = ("torch_threads=1", "env.num_threads=1", "evaluate.every_env_steps=0", "lease_wait_s=1e6")
"""Of all runs: one core each, and no evaluations on the way."""
_NO_FILMS = ("video.episodes=0", "video.failures=0")
_RL = (
    *("method=residual", "num_envs=16", "method.env_steps=40000", "method.utd=0.5", "method.batch=128"),
    *("method.explore_steps=4000", "method.scale=0.5", "method.head.explore_std=0.1"),
    *(f"method.algorithm.{each}" for each in ("num_critics=2", "gamma_step=0.98", "residual_l2=1.0")),
    "method.algorithm.privileged=true",
)
"""As `recipe=residual`, with critics that read the true state, and fewer steps."""


@dataclass(frozen=True)
class Trial:
    """What is learned on one task with one seed."""

    task: str
    seed: int
    out: Path
    settings: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Returns the arguments of `robot-rl train`, without `out`."""
        own = ("recipe=pick_cube_pixels", f"env.task={self.task}", f"seed={self.seed}")
        return (*own, *_FIXED, *_NO_FILMS, *self.settings)

    @property
    def config(self) -> RunConfig:
        return load(RunConfig, self.words, config_name="train")

    def training(self) -> Training:
        """Returns the run that clones, and improves the clone by DAgger."""
        at = f"bench pixels: {self.task}, seed {self.seed}"
        return Training(at, self.out / f"{self.task}-seed{self.seed}", self.words)

    def long(self) -> Training:
        """Returns the run that clones alone, with as much as the finished other run had in the end."""
        config, summary = self.config, self.training().finished()[1]
        method, demo_steps = settings_of(config, DaggerSettings), summary["demo_env_steps"]
        episodes = round(config.demos.episodes * (1 + summary["env_steps"] / demo_steps))
        updates = config.bc.updates + round(method.utd * method.env_steps)
        more = ("stages=[demos,clone,evaluate]", f"demos.episodes={episodes}", f"bc.updates={updates}")
        at = f"bench pixels: {self.task}, clone_long, seed {self.seed}"
        return Training(at, self.out / f"{self.task}-clone_long-seed{self.seed}", (*self.words, *more))

    def improved(self) -> Training:
        """Returns the run that clones, and improves the clone by residual RL."""
        at = f"bench pixels: {self.task}, rl, seed {self.seed}"
        return Training(at, self.out / f"{self.task}-rl-seed{self.seed}", (*self.words, *_RL))

    def row(self, arm: Name) -> Row:
        """Returns success and cost of one arm, from finished runs."""
        if arm == "expert":
            episodes = self.config.evaluate.episodes
            success, cost = _of_expert(self.task, self.seed, episodes), {}
        else:
            made = {"clone_long": self.long, "rl": self.improved}.get(arm, self.training)
            _, summary = made().finished()
            which, episodes = "base" if arm == "clone" else "final", summary["episodes"]
            success = round(summary[f"{which}_success"] * episodes)
            labels = summary["demo_env_steps"] + (summary["env_steps"] if arm == "dagger" else 0)
            made_by = {
                "commit": summary["versions"].get("robot_rl_commit"),
                "machine": f"{summary['machine']['cores']} cores, {summary['machine']['processor']}",
            }
            cost = {**summary["spent"][which], "labels": labels, **made_by}
        low, high = wilson_interval(success, episodes)
        return {
            "task": self.task,
            "arm": arm,
            "seed": self.seed,
            "success": success / episodes,
            "ci_low": low,
            "ci_high": high,
            "episodes": episodes,
            **{name: cost.get(name) for name in ("minutes", "cpu_minutes", "labels", "commit", "machine")},
        }


def run(
    *,
    tasks: tuple[str, ...] = ("reach", "push_cube", "pick_cube", "open_drawer", "stack_cube"),
    arms: tuple[Name, ...] = ("clone", "dagger", "expert"),
    seeds: tuple[int, ...] = (0, 1, 2),
    settings: tuple[str, ...] = (),
    jobs: int = 0,
    out: str = "runs/pixels",
    figure: str = "pixels.png",
) -> dict[str, Any]:
    """Trains a policy that sees on every task from every seed; returns rows.

    Args:
        tasks: names of tasks.
        arms: `clone`, `dagger`, `clone_long`, `rl`, `expert`.
        seeds: of the runs.
        settings: key=value for all runs, with quotes: "settings=['evaluate.episodes=50']".
        jobs: runs at a time, one core each; 0: as many as there are cores.
        out: folder of the runs and of pixels.json; finished runs are not repeated.
        figure: file of the bars; none if empty.

    Raises:
        ConfigError: an unknown task, or a run in `out` was begun with other settings.
        DeviceError: a run failed; the message names its log.
    """
    for task in tasks:
        check_names(task, None, at="bench pixels: ")
    # Task by task, so that a table that was cut short has whole tasks.
    trials = [
        Trial(task, seed, Path(out).resolve(), settings) for task, seed in itertools.product(tasks, seeds)
    ]
    if set(arms) - {"rl", "expert"}:
        _train("runs", [trial.training() for trial in trials], jobs)
    if "rl" in arms:
        _train("rl", [trial.improved() for trial in trials], jobs)
    if "clone_long" in arms:
        _train("clone_long", [trial.long() for trial in trials], jobs)
    rows = [trial.row(arm) for arm, trial in itertools.product(arms, trials)]
    rows.sort(key=lambda row: (tasks.index(row["task"]), arms.index(row["arm"])))  # stable: seeds in order
    means = list(_means(rows))
    make_folder(Path(out))
    write_json(Path(out) / "pixels.json", {"rows": rows, "means": means})
    if figure:
        _draw(Path(figure), means, rows)
    return {
        "title": "Policies that see (held-out episodes)",
        "rows": rows,
        "means": means,
        "figure": figure or None,
        "notes": [
            f"means: {SUCCESS_NOTE}",
            "minutes, cpu_minutes: from the first demonstration on, evaluations left out; labels: control "
            "steps for which the expert gave an action",
            "clone and dagger are one run, before and after DAgger; rl begins with the same clone; "
            "expert: reads the true state",
        ],
    }


def _train(phase: str, runs: Sequence[Training], jobs: int) -> None:
    for one in runs:
        one.check()
    train_all(phase, [(one, ()) for one in runs if one.done() is None], jobs)


def _of_expert(task: str, seed: int, episodes: int) -> int:
    """Returns how many of a seed's held-out episodes the expert solves; nothing is drawn for it."""
    device = simulation(EnvConfig(task=task), min(50, episodes))
    with opened(device, holder="bench pixels", wait_s=1e6) as env:
        return int(solved(env, "expert", seed, episodes).sum())


def _means(rows: Sequence[Row]) -> list[Row]:
    """Returns one row for each task and arm, over its seeds, which stand side by side in `rows`."""
    found: list[Row] = []
    for (task, arm), group in itertools.groupby(rows, lambda row: (row["task"], row["arm"])):
        seeds = list(group)
        played = [np.arange(row["episodes"]) < round(row["success"] * row["episodes"]) for row in seeds]
        costs = {
            name: None if arm == "expert" else float(np.mean([row[name] for row in seeds]))
            for name in ("minutes", "cpu_minutes")
        }
        found.append({"task": task, "arm": arm, "seeds": len(seeds), **successes_of(played), **costs})
    return found


def _draw(path: Path, means: Sequence[Row], rows: Sequence[Row]) -> None:
    """Draws a bar for each task and arm with its interval, and a dot for each seed."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in means))
    arms = list(dict.fromkeys(row["arm"] for row in means))
    drawing = Figure(figsize=(2.0 + 1.6 * len(tasks), 3.8), layout="constrained")
    axes, width = drawing.subplots(), 0.8 / len(arms)
    for number, arm in enumerate(arms):
        bars = [row for row in means if row["arm"] == arm]
        at = [tasks.index(row["task"]) + width * (number - (len(arms) - 1) / 2) for row in bars]
        height = [row["success"] for row in bars]
        reach = [
            [row["success"] - row["ci_low"] for row in bars],
            [row["ci_high"] - row["success"] for row in bars],
        ]
        axes.bar(at, height, 0.9 * width, color=f"C{number}", label=arm, yerr=reach, capsize=2)
        for x, bar in zip(at, bars, strict=True):
            seeds = [row["success"] for row in rows if (row["task"], row["arm"]) == (bar["task"], arm)]
            axes.plot([x] * len(seeds), seeds, "k.", markersize=3)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("success")
    axes.grid(axis="y", alpha=0.3)
    drawing.legend(frameon=False, loc="outside upper center", ncols=len(arms))
    drawing.savefig(path, dpi=120)
