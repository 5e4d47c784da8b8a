"""Ways to improve one frozen base, side by side: success against control steps and against minutes.

Every method is a recipe of `robot-rl train` with the demonstrations, the policy and the cloning of
its task, so that a seed has one base, whatever improves it (but for `dppo`, which needs a
diffusion base). Runs are `robot-rl train` in processes of their own; what is finished in `out` is
not done again, and a run that was cut short goes on.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from robot_rl.config import options
from robot_rl.core.errors import ConfigError, DeviceError, nearest
from robot_rl.core.files import write_synced
from robot_rl.telemetry.progress import ProgressDisplay

METHODS = ("residual", "latent", "flow_sde", "dppo", "reinflow", "fpo", "rlpd", "wsrl", "qc", "qc_fql")
"""Recipes."""
TASKS = ("pick_cube",)
"""Bases of `configs/base`."""


@dataclass(frozen=True)
class Trial:
    """One run of the table."""

    task: str
    method: str
    seed: int
    folder: Path
    """In which its run folder is made."""

    def done(self) -> Path | None:
        """Returns the run folder, if it has a summary."""
        return next((path.parent for path in self.folder.glob("*/summary.json")), None)

    def words(self, more: Sequence[str]) -> list[str]:
        """Returns the arguments of `robot-rl train` that begin it, or go on with it."""
        begun = sorted(self.folder.glob("*/config.yaml"))
        if begun:
            return [f"resume={begun[-1].parent}"]
        chosen = [f"recipe={self.method}", f"base={self.task}", f"seed={self.seed}", f"out={self.folder}"]
        return [*chosen, *more]


def run(
    *,
    tasks: tuple[str, ...] = TASKS,
    methods: tuple[str, ...] = METHODS,
    seeds: tuple[int, ...] = (0, 1, 2),
    settings: tuple[str, ...] = (),
    jobs: int = 0,
    out: str = "runs/improve",
    figure: str = "improve.png",
) -> dict[str, Any]:
    """Trains every method on every task from every seed; returns rows.

    Args:
        tasks: of the table: bases of `configs/base`.
        methods: recipes.
        seeds: of the runs.
        settings: key=value for all runs, such as video.episodes=0.
        jobs: runs at a time, one core each; 0 takes all cores.
        out: folder of the runs; what is finished there is not done again.
        figure: file of the curves; none if empty.

    Raises:
        ConfigError: an unknown task or method.
        DeviceError: a run failed; its log is named.
    """
    for name, kind in (*((method, "recipe") for method in methods), *((task, "base") for task in tasks)):
        if name not in options(kind):
            raise ConfigError(f"bench improve: no {kind} {name!r}.{nearest(name, options(kind))}")
    trials = [
        Trial(task, method, seed, Path(out) / task / method / f"seed{seed}")
        for seed in seeds
        for task in tasks
        for method in methods
    ]
    fixed = ("torch_threads=1", "env.num_threads=1", "lease_wait_s=1e6", *settings)
    waiting = [trial for trial in trials if trial.done() is None]
    with (
        ProgressDisplay() as display,
        display.phase("runs", len(waiting), unit="runs") as progress,
        ThreadPoolExecutor(jobs or os.cpu_count()) as pool,
    ):
        for number, _ in enumerate(pool.map(lambda trial: _train(trial, fixed), waiting), start=1):
            progress.update(number)
    runs = [_result(trial) for trial in trials]
    rows = list(_rows(runs))
    if figure:
        _draw(Path(figure), runs)
    write_synced(Path(out) / "improve.json", json.dumps({"rows": rows, "runs": runs}, indent=1).encode())
    return {
        "title": "One frozen base, and what each method made of it (held-out episodes)",
        "rows": rows,
        "runs": runs,
        "figure": figure or None,
        "notes": [
            "success, env_steps, minutes: means over the seeds; spread: smallest and largest success. "
            "env_steps: control steps of RL; minutes: of the whole run on one core, with cloning and "
            "evaluations.",
        ],
    }


def _train(trial: Trial, fixed: Sequence[str]) -> None:
    trial.folder.mkdir(parents=True, exist_ok=True)
    code = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
    log = trial.folder / "train.log"
    with log.open("ab") as output:
        command = [sys.executable, "-c", code, "train", *trial.words(fixed)]
        done = subprocess.run(command, stdout=output, stderr=output, check=False)
    if done.returncode != 0:
        raise DeviceError(f"bench improve: {trial.method} on {trial.task}, seed {trial.seed}: see {log}.")


def _result(trial: Trial) -> dict[str, Any]:
    """Returns what a finished run came to, and its curve."""
    folder = trial.done()
    assert folder is not None, trial
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "method": trial.method,
        "task": trial.task,
        "seed": trial.seed,
        "base": summary["base_success"],
        "success": summary["final_success"],
        "env_steps": summary["env_steps"],
        "minutes": summary["train_minutes"],
        "curve": list(_curve(folder)),
    }


def _curve(folder: Path) -> Iterator[dict[str, float]]:
    """Yields the quick evaluations of a run: control steps, minutes since it began, success."""
    phases = ("demos", "bc", "base", "final")
    with (folder / "metrics.jsonl").open() as lines:
        for row in map(json.loads, lines):
            if "eval/success" in row and row["phase"] not in phases:
                yield {
                    "env_steps": row["step"],
                    "minutes": row["wall_s"] / 60,
                    "success": row["eval/success"],
                }


def _rows(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields one row for each method on each task, in the order of the runs."""

    def key(one: dict[str, Any]) -> tuple[str, str]:
        return one["task"], one["method"]

    order = list(dict.fromkeys(map(key, runs)))
    for (task, method), group in groupby(sorted(runs, key=lambda one: order.index(key(one))), key):
        seeds = list(group)
        success = [one["success"] for one in seeds]
        means = {
            name: statistics.mean(one[name] for one in seeds) for name in ("base", "env_steps", "minutes")
        }
        yield {
            "method": method,
            "task": task,
            "base": means["base"],
            "success": statistics.mean(success),
            "spread": f"{min(success):.1%} to {max(success):.1%}",
            "env_steps": round(means["env_steps"]),
            "minutes": means["minutes"],
            "seed": " ".join(str(one["seed"]) for one in seeds),
        }


def _draw(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Draws the curves: a row of panels for each task, against control steps and against minutes."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(one["task"] for one in runs))
    methods = list(dict.fromkeys(one["method"] for one in runs))
    drawing = Figure(figsize=(11, 4.2 * len(tasks)), layout="constrained")
    panels = drawing.subplots(len(tasks), 2, squeeze=False)
    for task, pair in zip(tasks, panels, strict=True):
        for axes, against in zip(pair, ("env_steps", "minutes"), strict=True):
            for number, method in enumerate(methods):
                curves = [one for one in runs if (one["task"], one["method"]) == (task, method)]
                for one in curves:
                    x = [0.0, *(at[against] for at in one["curve"])]
                    y = [one["base"], *(at["success"] for at in one["curve"])]
                    axes.plot(
                        x, y, color=f"C{number}", linewidth=1.2, label=method if one is curves[0] else None
                    )
            axes.set_title(task)
            axes.set_xlabel({"env_steps": "control steps", "minutes": "minutes"}[against])
            axes.set_ylabel("success, quick evaluation")
            axes.set_ylim(0, 1.02)
            axes.grid(alpha=0.3)
        pair[1].legend(frameon=False, fontsize=8)
    drawing.savefig(path, dpi=120)
