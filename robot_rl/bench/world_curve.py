"""Success against real control steps, with a world model and without one.

    on_policy   PPO through the flow of the base, in the real env
    grpo        the same by groups of episodes
    residual    residual off-policy RL
    filtered    what succeeded of the demonstrations and of recorded episodes of the base, cloned
    search      the base looks ahead in a model of these episodes; nothing is trained
    searched    as many episodes of that search, too; what succeeded of all is cloned
    imagined    `recipe=imagined` with as many real steps, probes among them
    unguarded   the same without gate, short branches, key frames and anchor
    perfect     on_policy with as many simulated steps as `imagined` imagined: a model without error

Every arm begins with the same base, cloned from 100 demonstrations of a biased expert, and is billed for
these, too. Quick evaluations are measurements and not billed; probes that choose a policy are. Each case (a
task and a run seed) is a chain of commands of `robot-rl`, kept in `out`: finished ones are not repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from robot_rl.bench.trials import Training, call, over_seeds
from robot_rl.bench.world import LIFTED
from robot_rl.core.errors import ConfigError, StorageError, nearest
from robot_rl.core.files import make_folder, read_json, write_json
from robot_rl.telemetry.metrics import FILE_NAME, read_metrics
from robot_rl.telemetry.progress import ProgressDisplay

Row = dict[str, Any]

# Thresholds, set before the first run of this benchmark.
TARGET = 0.80
"""Success that is to be reached."""
TIMES_FEWER = 4.0
"""How many times fewer real steps `imagined` must need than `on_policy` and `grpo`."""
POINTS_ABOVE = 0.10
"""How far `imagined` must be above `filtered` at equal data."""

ARMS = (
    *("on_policy", "grpo", "residual", "filtered", "search", "searched"),
    *("imagined", "unguarded", "perfect"),
)
_BASES = {
    "push_cube": ("demos.bias_m=0.03", "demos.noise_m=0.02"),
    "gantry_peg": ("demos.bias_m=0.01", "demos.noise_m=0.01"),
    "reach": ("demos.bias_m=0.03", "demos.noise_m=0.02"),
}
"""Demonstrations by task: run seed 10 clones 22, 20 and 42 %."""
_FIXED = ("lease_wait_s=1e6", "torch_threads=1", "env.num_threads=1", "video.episodes=0", "video.failures=0")
_LOOKED_AT = ("evaluate.every_env_steps=10000", "evaluate.quick_episodes=100")
_PPO = ("method.algorithm.actor_lr=5e-5", "method.algorithm.clip=0.05", "method.algorithm.target_kl=0.002")
_ONLINE = {
    "on_policy": ("recipe=reinflow", "num_envs=32", "method.env_steps=160000"),
    "grpo": ("recipe=grpo", "num_envs=64", "method.env_steps=160000"),
    "residual": ("recipe=residual", "method.env_steps=80000"),
}
"""What learns in the real env."""
_TUNED = {("on_policy", "gantry_peg"): _PPO}
"""Of what was tried on run seed 10: PPO at rates of 2e-5 (the recipe's), 5e-5 and 1e-4, in 32 and 64 envs;
GRPO at rates of 2e-5 (the recipe's) and 5e-5."""
_PERFECT_STEPS = 460_000
"""At most so many in the simulator; more does not help PPO there."""
_UNGUARDED = (
    *("method.strides=0", "method.gate=false", "method.algorithm.regulariser=none"),
    "method.starts={initial: 1.0, keyframe: 0.0, replay: 0.0, drop: 0.0}",
)


@dataclass(frozen=True)
class Case:
    """A task and a run seed."""

    task: str
    seed: int
    episodes: tuple[int, ...]
    """Of the base, recorded; each is a budget of real steps."""
    updates: int
    """Of a world model."""
    settings: tuple[str, ...]
    """Of all runs."""
    out: Path
    lock: Lock = field(default_factory=Lock, compare=False)

    @property
    def home(self) -> Path:
        return self.out / f"{self.task}-seed{self.seed}"

    # What the arms share

    def base(self) -> tuple[Path, Row]:
        """Returns folder and summary of the run that cloned the base."""
        return self._trained("base", ("recipe=imagined", "stages=[demos,clone,evaluate]", *_BASES[self.task]))

    @property
    def demos(self) -> Path:
        return self.base()[0] / "demos"

    @property
    def policy(self) -> Path:
        return self.base()[0] / "policy/base"

    def recorded(self, episodes: int) -> Path:
        """Returns episodes of the base."""
        return self._collected(f"of-base-{episodes}", episodes)

    def model(self, episodes: int) -> Path:
        """Returns a world model of demonstrations and episodes of the base; believed or not."""
        folder = self.home / f"model-{episodes}"
        if not (folder / "world.json").is_file():
            data = f"data={self.demos},{self.recorded(episodes)}"
            self._call(
                "worlds", "fit", data, f"out={folder}", f"fit.updates={self.updates}", *_FIXED[:2], *LIFTED
            )
        return folder

    def look_ahead(self, episodes: int) -> tuple[str, ...]:
        """Returns the settings of a search in that model."""
        return (f"search.world={self.model(episodes)}", "search.candidates=16")

    # Arms

    def online(self, arm: str) -> Iterator[Row]:
        """Yields the quick evaluations of what learns in the real env, and its end."""
        folder, summary = self._trained(
            arm, (*_ONLINE[arm], *_TUNED.get((arm, self.task), ()), *_LOOKED_AT, *self._from_base())
        )
        demos = summary["demo_env_steps"]
        yield self._row(arm, demos, summary["base_success"], summary["episodes"], is_quick=True)
        looks = (row for row in read_metrics(folder / FILE_NAME) if "eval/success" in row)
        within = [row for row in looks if row["phase"] not in ("base", "final")]
        for point, row in enumerate(within, start=1):
            how: dict[str, Any] = {"point": point, "is_quick": True}
            steps = int(demos + row["step"])
            yield self._row(arm, steps, row["eval/success"], int(row["eval/episodes"]), **how)
        yield {**self._of(arm, summary), "point": len(within) + 1}

    def filtered(self, episodes: int) -> Row:
        """Returns the clone of what succeeded."""
        return self._cloned("filtered", episodes, [self.demos, self.recorded(episodes)])

    def searched(self, episodes: int) -> Row:
        """Returns the clone of what succeeded, episodes of a search among it."""
        found = self._collected(f"of-search-{episodes}", episodes, *self.look_ahead(episodes))
        return self._cloned("searched", episodes, [self.demos, self.recorded(episodes), found])

    def search(self, episodes: int) -> Row:
        """Returns the success of the base that looks ahead."""
        path = self.home / f"search-{episodes}.json"
        if not path.is_file():
            policy = f"policy={self.policy}"
            count = f"episodes={self.base()[1]['episodes']}"
            words = (policy, count, f"seed={self.seed}", *self.look_ahead(episodes), *_FIXED[:2])
            write_json(path, self._call("evaluate", *words))
        found = read_json(path, StorageError, "Remove it; it is measured again.")
        steps = self._demo_steps() + _steps_of(self.recorded(episodes))
        return self._row("search", steps, found["success"], found["episodes"], budget=episodes)

    def imagined(self, arm: str, episodes: int) -> Iterator[Row]:
        """Yields the best probe so far of the loop with a model, and its end."""
        steps = self._demo_steps() + _steps_of(self.recorded(episodes))
        words = ("recipe=imagined", f"method.real_steps={steps}", f"method.world.fit.updates={self.updates}")
        words += (f"method.first_episodes={min(self.episodes) * 2 // 3}",)
        words += _UNGUARDED if arm == "unguarded" else ()
        folder, summary = self._trained(f"{arm}-{episodes}", (*words, *self._from_base()))
        best = 0.0
        for row in read_metrics(folder / FILE_NAME):
            if "probe/real" in row:
                best = max(best, row["probe/real"])
                yield self._row(arm, int(row["probe/real_steps"]), best, 20, budget=episodes, is_quick=True)
        yield self._of(arm, summary, episodes)

    def perfect(self, episodes: int) -> Row:
        """Returns PPO in the simulator with as many steps as were imagined, billed as those of `imagined`."""
        (like,) = (row for row in self.imagined("imagined", episodes) if not row["quick"])
        steps = min(max(like["imagined_steps"], 1000), _PERFECT_STEPS)  # 0 if the model was never believed
        words = ("recipe=reinflow", *_PPO, f"method.env_steps={steps}", "evaluate.every_env_steps=0")
        _, summary = self._trained(f"perfect-{episodes}", (*words, *self._from_base()))
        row = self._of("perfect", summary, episodes)
        return {**row, "real_steps": like["real_steps"], "imagined_steps": summary["env_steps"]}

    # Commands

    def _from_base(self) -> tuple[str, ...]:
        return (f"demos.path={self.demos}", f"bc.policy={self.policy}")

    def _demo_steps(self) -> int:
        return int(self.base()[1]["demo_env_steps"])

    def _cloned(self, arm: str, episodes: int, data: Sequence[Path]) -> Row:
        together, good = self.home / f"{arm}-{episodes}-all", self.home / f"{arm}-{episodes}-good"
        if not together.is_dir():
            self._call("replay", "merge", *map(str, data), f"out={together}")
        if not good.is_dir():
            self._call("replay", "filter", str(together), f"out={good}", "success=true")
        words = ("recipe=imagined", "stages=[demos,clone,evaluate]", f"demos.path={good}")
        _, summary = self._trained(f"{arm}-{episodes}", words)
        steps = self._demo_steps() + sum(_steps_of(one) for one in data[1:])
        return self._row(arm, steps, summary["final_success"], summary["episodes"], budget=episodes)

    def _collected(self, name: str, episodes: int, *words: str) -> Path:
        folder = self.home / name
        if not folder.is_dir():
            policy = f"policy={self.policy}"
            # a search begins other episodes than the recorded ones
            seed = f"seed={2 * self.seed + bool(words)}"
            how = (policy, f"episodes={episodes}", "keep.success=false", seed, *words, *_FIXED[:2])
            self._call("collect", *how, f"out={folder}")
        return folder

    def _trained(self, name: str, words: Sequence[str]) -> tuple[Path, Row]:
        """Returns folder and summary of a run, which is trained if it is not there."""
        about = (f"env.task={self.task}", f"seed={self.seed}")
        at = f"bench world_curve: {name} of {self.home.name}"
        run = Training(at, self.home / name, (*words, *about, *_FIXED, *self.settings))
        run.check()
        if run.done() is None:
            run.train()
        return run.finished()

    def _call(self, *words: str) -> Row:
        return call("bench world_curve", self.home / f"{words[0]}.log", *words)

    def _of(self, arm: str, summary: Mapping[str, Any], budget: int = 0) -> Row:
        steps = summary["control_steps"]
        real, imagined = steps["demo"] + steps.get("sim", 0), steps.get("world", 0)
        row = self._row(arm, real, summary["final_success"], summary["episodes"], budget=budget)
        return {**row, "imagined_steps": imagined}

    def _row(
        self,
        arm: str,
        steps: int,
        success: float,
        episodes: int,
        *,
        budget: int = 0,
        point: int = 0,
        is_quick: bool = False,
    ) -> Row:
        return {
            **{
                "task": self.task,
                "seed": self.seed,
                "arm": arm,
                "budget": budget,
                "quick": is_quick,
                "point": point,
            },
            **{"real_steps": steps, "imagined_steps": 0, "success": success, "episodes": episodes},
        }

    def rows(self, arm: str) -> list[Row]:
        """Returns the rows of an arm, measured if they are not there; one arm of a case at a time."""
        with self.lock:
            if arm in _ONLINE:
                return list(self.online(arm))
            if arm == "imagined":
                return [row for count in self.episodes for row in self.imagined(arm, count)]
            if arm == "unguarded":
                return list(self.imagined(arm, max(self.episodes)))
            if arm == "perfect":
                return [self.perfect(max(self.episodes))]
            measure = {"filtered": self.filtered, "search": self.search, "searched": self.searched}[arm]
            return [measure(count) for count in self.episodes]


def run(
    *,
    tasks: tuple[str, ...] = tuple(_BASES),
    arms: tuple[str, ...] = ARMS,
    seeds: tuple[int, ...] = (0, 1, 2),
    episodes: tuple[int, ...] = (150, 450),
    updates: int = 4000,
    settings: tuple[str, ...] = (),
    jobs: int = 0,
    out: str = "runs/world_curve",
    figure: str = "world_curve.png",
) -> dict[str, Any]:
    """Measures every arm on every task and seed.

    Args:
        tasks: push_cube (contacts that slide), gantry_peg (narrow ones), reach (none).
        arms: see `robot_rl.bench.world_curve`.
        seeds: of the runs; chosen on 10.
        episodes: of the base, recorded: budgets of real steps. The loops with a model get the largest.
        updates: of a world model.
        settings: key=value for all runs, with quotes: "settings=['video.episodes=0']".
        jobs: commands at a time, one core each; 0: as many as there are cores.
        out: folder of all runs and of world_curve.json.
        figure: file of the curves; none if empty.

    Raises:
        ConfigError: an unknown task or arm.
        DeviceError: a command failed; the message names its log.
    """
    for name, known in (*((task, tuple(_BASES)) for task in tasks), *((arm, ARMS) for arm in arms)):
        if name not in known:
            raise ConfigError(f"bench world_curve: no {name!r}.{nearest(name, known)}")
    home = Path(out).resolve()
    make_folder(home)
    cases = [Case(task, seed, episodes, updates, settings, home) for seed in seeds for task in tasks]
    for case in cases:
        make_folder(case.home)
    # Seed by seed, so that a table that was cut short has whole seeds; tasks in turn, so that two go on.
    parts = [(case, arm) for seed in seeds for arm in arms for case in cases if case.seed == seed]
    rows = list[Row]()
    with (
        ProgressDisplay() as display,
        display.phase("arms", len(parts), unit="arms") as progress,
        ThreadPoolExecutor(jobs or os.cpu_count()) as pool,
    ):
        for number, found in enumerate(pool.map(lambda part: part[0].rows(part[1]), parts), start=1):
            rows += found
            write_json(home / "world_curve.json", {"rows": rows})
            progress.update(number)
    keys = ("task", "arm", "budget")
    means = over_seeds(
        [row for row in rows if not row["quick"]], keys, "success", means=("real_steps", "imagined_steps")
    )
    claims = [claim for task in tasks for claim in _claims(task, rows, means)]
    if figure:
        _draw(Path(figure), rows)
    return {
        "title": "Success against real control steps (held-out episodes)",
        "means": means,
        "claims": claims,
        "rows": rows,
        "figure": figure or None,
        "notes": [
            "budget: recorded episodes of the base, or as many real steps; 0: the budget of the recipe",
            "real_steps: demonstrations, what was learned from, and probes that chose a policy",
            f"reached: real steps to {TARGET:.0%}, mean over seeds, for what learns in the real env by quick "
            "evaluations, else held-out; none where a seed did not get there",
        ],
    }


def _steps_of(dataset: Path) -> int:
    """Returns the control steps of a dataset."""
    info = read_json(dataset / "meta/info.json", StorageError, "Remove the folder; it is collected again.")
    return int(info["total_frames"])


def _reached(rows: Sequence[Row], task: str, arm: str) -> float | None:
    """Returns the real steps to the target, in the mean over seeds; None where one did not get there."""
    some = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
    counted = some if arm in _ONLINE else [row for row in some if not row["quick"]]
    first = [
        min(
            (row["real_steps"] for row in counted if row["seed"] == seed and row["success"] >= TARGET),
            default=None,
        )
        for seed in {row["seed"] for row in some}
    ]
    found = [steps for steps in first if steps is not None]
    return fmean(found) if found and len(found) == len(first) else None


def _claims(task: str, rows: Sequence[Row], means: Sequence[Row]) -> Iterator[Row]:
    """Yields each threshold, what was found, and whether it holds."""
    ours = _reached(rows, task, "imagined")
    for arm in ("on_policy", "grpo", "residual"):
        theirs = _reached(rows, task, arm)
        looked = [row["real_steps"] for row in rows if (row["task"], row["arm"]) == (task, arm)]
        if not looked:
            continue
        least = max(looked) if theirs is None else theirs  # it was not followed further
        yield {
            "claim": f"{task}: times fewer real steps to {TARGET:.0%} than {arm}",
            "reached": ours,
            "reached_by_it": theirs,
            "found": None if ours is None or theirs is None else round(theirs / ours, 2),
            "threshold": TIMES_FEWER,
            "holds": ours is not None and least >= TIMES_FEWER * ours,
        }
    share = {(row["arm"], row["budget"]): row["success"] for row in means if row["task"] == task}
    for budget in sorted({budget for arm, budget in share if arm == "filtered"}):
        if ("imagined", budget) in share:
            points = share["imagined", budget] - share["filtered", budget]
            yield {
                "claim": f"{task}: above filtered clones of {budget} episodes",
                "found": round(points, 3),
                "threshold": POINTS_ABOVE,
                "holds": points >= POINTS_ABOVE,
            }


def _draw(path: Path, rows: Sequence[Row]) -> None:
    """Draws a panel for each task: a thin line or mark for each seed, the mean of the seeds in bold."""
    from matplotlib.figure import Figure

    tasks, arms = (list(dict.fromkeys(row[name] for row in rows)) for name in ("task", "arm"))
    drawing = Figure(figsize=(6.5 * len(tasks) + 1.5, 4.8), layout="constrained")
    panels = drawing.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for task, axes in zip(tasks, panels, strict=True):
        for number, arm in enumerate(arms):
            some = [row for row in rows if (row["task"], row["arm"]) == (task, arm)]
            if arm not in _ONLINE:
                some = [row for row in some if not row["quick"]]
            if not some:
                continue  # not measured on this task
            colour = f"C{number}"
            for seed in {row["seed"] for row in some}:
                line = sorted((row["real_steps"], row["success"]) for row in some if row["seed"] == seed)
                axes.plot(*zip(*line, strict=True), color=colour, alpha=0.3, lw=0.8)
            means = over_seeds(some, ("budget", "point"), "success", means=("real_steps",))
            line = sorted((row["real_steps"], row["success"]) for row in means)
            mark = "-" if arm in _ONLINE else "o-"
            axes.plot(*zip(*line, strict=True), mark, color=colour, lw=2, label=arm)
        axes.axhline(TARGET, color="0.6", linestyle=":")
        axes.set(
            title=task, xscale="log", ylim=(0, 1.02), xlabel="real control steps, demonstrations among them"
        )
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("success")
    panels[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawing.savefig(path, dpi=120)
