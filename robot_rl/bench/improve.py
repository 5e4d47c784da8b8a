"""Compares methods that improve one frozen base: success over control steps and over minutes.

Every method is a recipe of `robot-rl train`. For every task and seed a base is cloned once, and all methods
start from its demonstrations and weights (except `dppo`, which clones a diffusion policy from the same
demonstrations, and `rlpd` and `wsrl`, which have no base). Each run is a process of `robot-rl train`;
finished runs in `out` are not repeated, and interrupted runs are resumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.trials import Training, train_all
from robot_rl.config import load, options
from robot_rl.core.errors import ConfigError, nearest
from robot_rl.core.files import write_json
from robot_rl.telemetry.metrics import FILE_NAME, read_metrics
from robot_rl.train.config import RunConfig

METHODS = (
    "residual",
    "latent",
    "flow_sde",
    "dppo",
    "reinflow",
    "fpo",
    "grpo",
    "srpo",
    "rl100",
    "rlpd",
    "wsrl",
    "qc",
    "qc_fql",
)
"""Recipes."""
TASKS = ("pick_cube", "open_drawer")
"""Bases of `configs/base`."""
Array = NDArray[Any]
_BASE = "base"
"""Stands for the run that clones the base, instead of a method."""
_FIXED = ("torch_threads=1", "env.num_threads=1", "lease_wait_s=1e6", "video.episodes=0")


@dataclass(frozen=True)
class Trial:
    """One run of the table; with `_BASE` as method, the run that it starts from."""

    task: str
    method: str
    seed: int
    out: Path

    @property
    def folder(self) -> Path:
        """Holds the run folder."""
        return self.out / self.task / self.method / f"seed{self.seed}"

    @property
    def base(self) -> Trial:
        return Trial(self.task, _BASE, self.seed, self.out)

    def plan(self) -> list[str]:
        """Returns the arguments of `robot-rl train`, without `out` and the base."""
        recipe = (
            ["recipe=residual", "method.env_steps=0"] if self.method == _BASE else [f"recipe={self.method}"]
        )
        return [*recipe, f"base={self.task}", f"seed={self.seed}"]

    def training(self, *fixed: str) -> Training:
        """Returns the run, with the `fixed` settings of all runs."""
        at = f"bench improve: {self.method} on {self.task}, seed {self.seed}"
        return Training(at, self.folder, (*fixed, *self.plan()))

    def start(self) -> list[str]:
        """Returns the arguments for the demonstrations of the base, and for its policy if it is used."""
        if self.method == _BASE:
            return []
        given = self.base.training().done()
        assert given is not None, "bases come before methods"
        demos = f"demos.path={given / 'demos'}"
        if _cloning(*self.plan()) != _cloning(*self.base.plan()):
            return [demos]
        return [demos, f"bc.policy={given / 'policy/base'}"]


def run(
    *,
    tasks: tuple[str, ...] = TASKS,
    methods: tuple[str, ...] = METHODS,
    seeds: tuple[int, ...] = (0, 1, 2),
    settings: tuple[str, ...] = (),
    equal_steps: int = 60_000,
    equal_minutes: float = 2.0,
    jobs: int = 0,
    out: str = "runs/improve",
    figure: str = "improve.png",
) -> dict[str, Any]:
    """Trains every method on every task from every seed; returns rows.

    Args:
        tasks: bases of `configs/base`.
        methods: recipes.
        seeds: of the runs.
        settings: key=value for all runs, with quotes: "settings=['video.episodes=0']".
        equal_steps: control steps at which all methods are also compared.
        equal_minutes: minutes at which all methods are also compared.
        jobs: runs at a time, one core each; 0: as many as there are cores.
        out: folder of the runs and of improve.json with their curves; finished runs are not repeated.
        figure: file of the curves; none if empty.

    Raises:
        ConfigError: an unknown task or method, or a run in `out` was begun with other settings.
        DeviceError: a run failed; the message names its log.
    """
    for name, kind in (*((method, "recipe") for method in methods), *((task, "base") for task in tasks)):
        if name not in options(kind):
            raise ConfigError(f"bench improve: no {kind} {name!r}.{nearest(name, options(kind))}")
    trials = [
        Trial(task, method, seed, Path(out).resolve())
        for seed in seeds
        for task in tasks
        for method in methods
    ]
    fixed = (*_FIXED, *settings)
    bases = list(dict.fromkeys(trial.base for trial in trials))
    for trial in (*bases, *trials):
        trial.training(*fixed).check(but=("demos.path", "bc.policy"))  # the base is a trial too
    waiting = [trial for trial in trials if trial.training().done() is None]
    for phase, part in (("bases", list(dict.fromkeys(one.base for one in waiting))), ("runs", waiting)):
        begin = [trial for trial in part if trial.training().done() is None]
        train_all(phase, [(trial.training(*fixed), trial.start()) for trial in begin], jobs)
    runs = [_result(trial) for trial in trials]
    rows = list(_rows(runs, equal_steps, equal_minutes))
    if figure:
        _draw(Path(figure), runs)
    write_json(Path(out) / "improve.json", {"rows": rows, "runs": runs})
    for one in runs:
        del one["curve"]  # no table has room for it
    return {
        "title": "One frozen base, and each method that improves it (held-out episodes)",
        "rows": rows,
        "runs": runs,
        "figure": figure or None,
        "notes": [
            "base, success, env_steps, minutes: means over seeds; spread: smallest and largest success.",
            "env_steps: control steps of RL. minutes: from the cloned base to the end of training, with "
            "quick evaluations, on one core for each job.",
            f"at_steps, at_minutes: quick evaluations after {equal_steps:,} control steps and after "
            f"{equal_minutes:g} minutes, means over seeds; a shorter run counts with its last value.",
        ],
    }


def _cloning(*words: str) -> tuple[Any, ...]:
    """Returns all settings of a base, except task and seed."""
    config = load(RunConfig, words, config_name="train")
    return config.demos, config.policy, config.bc


def _result(trial: Trial) -> dict[str, Any]:
    """Returns the result and the curve of a finished run."""
    folder, summary = trial.training().finished()
    minutes, curve = _curve(folder)
    return {
        "method": trial.method,
        "task": trial.task,
        "seed": trial.seed,
        "base": summary["base_success"],
        "success": summary["final_success"],
        "env_steps": summary["env_steps"],
        "minutes": minutes,
        "curve": curve,
    }


def _curve(folder: Path) -> tuple[float, list[dict[str, float]]]:
    """Returns the minutes from the base to the end of training, and the quick evaluations."""
    rows = read_metrics(folder / FILE_NAME)
    began = next(row["wall_s"] for row in rows if row["phase"] == "base")
    learned = [row for row in rows if row["phase"] not in ("demos", "bc", "base", "final")]
    for row in learned:
        row["minutes"] = (row["wall_s"] - began) / 60
    curve = [
        {"env_steps": row["step"], "minutes": row["minutes"], "success": row["eval/success"]}
        for row in learned
        if "eval/success" in row
    ]
    return max((row["minutes"] for row in learned), default=0.0), curve


def _at(one: dict[str, Any], against: str, limit: float) -> float:
    """Returns the last success of a run within a limit of control steps or minutes."""
    if one[against] <= limit:
        return one["success"]
    seen = (at["success"] for at in reversed(one["curve"]) if at[against] <= limit)
    return next(seen, one["base"])


def _rows(runs: Sequence[dict[str, Any]], equal_steps: int, equal_minutes: float) -> Iterator[dict[str, Any]]:
    """Yields one row for each method on each task, in the order of the runs."""

    def key(one: dict[str, Any]) -> tuple[str, str]:
        return one["task"], one["method"]

    order = list(dict.fromkeys(map(key, runs)))
    for (task, method), group in groupby(sorted(runs, key=lambda one: order.index(key(one))), key):
        seeds = list(group)
        success = [one["success"] for one in seeds]
        yield {
            "method": method,
            "task": task,
            "base": statistics.mean(one["base"] for one in seeds),
            "success": statistics.mean(success),
            "spread": f"{min(success):.1%} to {max(success):.1%}",
            "env_steps": round(statistics.mean(one["env_steps"] for one in seeds)),
            "minutes": statistics.mean(one["minutes"] for one in seeds),
            "at_steps": statistics.mean(_at(one, "env_steps", equal_steps) for one in seeds),
            "at_minutes": statistics.mean(_at(one, "minutes", equal_minutes) for one in seeds),
            "seed": " ".join(str(one["seed"]) for one in seeds),
        }


def _draw(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Draws a row of panels for each task: the mean over seeds, and a band from the worst to the best."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(one["task"] for one in runs))
    methods = list(dict.fromkeys(one["method"] for one in runs))
    drawing = Figure(figsize=(13, 4.6 * len(tasks)), layout="constrained")
    panels = drawing.subplots(len(tasks), 2, squeeze=False, sharey=True)
    for task, pair in zip(tasks, panels, strict=True):
        for axes, against in zip(pair, ("env_steps", "minutes"), strict=True):
            for number, method in enumerate(methods):
                seeds = [one for one in runs if (one["task"], one["method"]) == (task, method)]
                x, success = _aligned(seeds, against)
                colour = colormaps["tab10"](number % 10)
                style = {"color": colour, "linestyle": ("-", "--")[number // 10 % 2]}
                axes.plot(x, success.mean(axis=0), linewidth=1.6, label=method, **style)
                axes.fill_between(x, success.min(axis=0), success.max(axis=0), color=colour, alpha=0.1, lw=0)
            axes.set_title(task)
            axes.set_xlabel({"env_steps": "control steps", "minutes": "minutes"}[against])
            axes.set_ylim(0, 1.02)
            axes.grid(alpha=0.3)
        pair[0].set_ylabel("success, quick evaluation")
        pair[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawing.savefig(path, dpi=120)


def _aligned(seeds: Sequence[dict[str, Any]], against: str) -> tuple[Array, Array]:
    """Returns points (N,) up to the last evaluation of the shortest run, and success there (seeds, N)."""
    curves = [
        (
            [0.0, *(at[against] for at in one["curve"])],
            [one["base"], *(at["success"] for at in one["curve"])],
        )
        for one in seeds
    ]
    x = np.linspace(0.0, min(at[-1] for at, _ in curves), 100)
    return x, np.stack([np.interp(x, *curve) for curve in curves])
