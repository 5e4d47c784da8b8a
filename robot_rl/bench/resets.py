"""What diverse starts are worth: one PPO, one reward and one budget from several distributions of starts.

    diverse          all classes of the bank, alike
    nominal          the task's own starts, without a bank
    near_goal        the class next to the goal alone
    without_<class>  all classes but one

OmniReset (arXiv 2603.15789) compares the first three; the ablation by class is ours. A bank costs control
steps, and an arm that uses it trains that much less. Policies are evaluated from the task's own starts on
held-out seeds, and from rows of each class that training never draws. Each run is a process of
`robot-rl train`; finished runs in `out` are not repeated, and interrupted runs are resumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from robot_rl.bench.trials import Training, over_seeds, train_all
from robot_rl.core.errors import ConfigError, StorageError, nearest, require
from robot_rl.core.files import at_home, make_folder, read_json, write_json
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.bank_files import OWN, Bank, load_bank
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.train.phases import evaluate_folder
from robot_rl.train.record import load_config_here

Row = dict[str, Any]
DIVERSE, NOMINAL, NEAR_GOAL, WITHOUT = "diverse", "nominal", "near_goal", "without_"
_FIXED = (
    *("recipe=plain_ppo", "stages=[look,online,evaluate]", "torch_threads=1", "env.num_threads=1"),
    *("lease_wait_s=1e6", "video.episodes=0", "video.failures=0"),
)
"""Of all runs: one core each; the noise that they begin with is not evaluated."""
_SUCCESSES = "starts.json"
"""In a run folder: successes by class of start."""


@dataclass(frozen=True)
class Trial:
    """What is learned from one distribution of starts with one seed."""

    bank: Bank
    folder: str
    arm: str
    seed: int
    env_steps: int
    settings: tuple[str, ...]
    out: Path

    @property
    def mix(self) -> tuple[str, ...]:
        """The classes that training begins in, alike."""
        if self.arm == NOMINAL:
            return (OWN,)
        if self.arm == NEAR_GOAL:
            return (NEAR_GOAL,)
        return tuple(name for name in self.bank.sets if self.arm != f"{WITHOUT}{name}")

    @property
    def bank_steps(self) -> int:
        """Control steps that making those classes cost."""
        return sum(self.bank.bills[name].control_steps for name in self.mix if name != OWN)

    def training(self) -> Training:
        """Returns the run, which has what the bank left of the budget."""
        mix = ",".join(f"{name}:1.0" for name in self.mix)
        words = (
            *_FIXED,
            f"env.task={self.bank.key.task}",
            f"env.robot={self.bank.key.robot}",
            f"env.resets.bank={self.folder}",
            f"env.resets.mix={{{mix}}}",
            f"method.env_steps={self.env_steps - self.bank_steps}",
            f"seed={self.seed}",
            *self.settings,
        )
        at = f"bench resets: {self.arm}, seed {self.seed}"
        return Training(at, self.out / f"{self.arm}-seed{self.seed}", words)

    def rows(self) -> list[Row]:
        """Returns success from every class of start, of the finished run."""
        folder, summary = self.training().finished()
        found: list[Row] = []
        for name, solved in self._successes(folder, summary).items():
            low, high = wilson_interval(solved, summary["episodes"])
            found.append(
                {
                    "arm": self.arm,
                    "seed": self.seed,
                    "class": name,
                    "success": solved / summary["episodes"],
                    "ci_low": low,
                    "ci_high": high,
                    "episodes": summary["episodes"],
                    "env_steps": summary["env_steps"],
                    "bank_steps": self.bank_steps,
                    "minutes": summary["spent"]["final"]["minutes"],
                    "commit": summary["versions"].get("robot_rl_commit"),
                }
            )
        return found

    def _successes(self, folder: Path, summary: Mapping[str, Any]) -> dict[str, int]:
        """Returns solved held-out episodes by class; classes of the bank are played once, on this machine."""
        path, episodes = folder / _SUCCESSES, summary["episodes"]
        if path.exists():
            return read_json(path, StorageError, "Remove it; the policy is evaluated again.")
        found = {OWN: round(summary["final_success"] * episodes)}
        config = replace(load_config_here(folder, at="bench resets")[0], device="cpu")
        for name in self.bank.sets:
            env = replace(config.env, resets=replace(config.env.resets, evaluate=name)).evaluated()
            device = simulation(env, config.evaluate.num_envs)
            with opened(device, holder="bench resets", wait_s=1e6) as envs:
                found[name] = int(evaluate_folder(folder, "final", config, envs).success.sum())
        write_json(path, found)
        return found


def run(
    *,
    bank: str = "banks/gantry_peg-gantry",
    arms: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
    env_steps: int = 2_000_000,
    settings: tuple[str, ...] = (),
    jobs: int = 0,
    out: str = "runs/resets",
    figure: str = "resets.png",
) -> dict[str, Any]:
    """Trains from every distribution of starts and every seed; returns rows.

    Args:
        bank: folder of `robot-rl resets generate`; its task and robot are those of all runs.
        arms: `diverse`, `nominal`, `near_goal`, `without_<class>`; all if empty.
        seeds: of the runs.
        env_steps: control steps of an arm: those of training, and those that its part of the bank cost.
        settings: key=value for all runs, with quotes: "settings=['num_envs=512']".
        jobs: runs at a time, one core each; 0: as many as there are cores.
        out: folder of the runs and of resets.json; finished runs are not repeated.
        figure: file of the bars; none if empty.

    Raises:
        ConfigError: an unknown arm, a bank without that class, a bank that costs more than the budget, or a
            run in `out` was begun with other settings.
        DatasetError: `bank` is none.
        DeviceError: a run failed; the message names its log.
    """
    found = load_bank(bank, at="bank")
    chosen = arms or arms_of(found)
    for arm in chosen:
        if arm not in arms_of(found):
            raise ConfigError(f"bench resets: no arm {arm!r} of {bank}.{nearest(arm, arms_of(found))}")
    how = (env_steps, settings, Path(out).resolve())
    folder = str(Path(at_home(bank)).resolve())
    # Seed by seed, so that a table that was cut short has whole seeds.
    trials = [Trial(found, folder, arm, seed, *how) for seed, arm in itertools.product(seeds, chosen)]
    most = max(trial.bank_steps for trial in trials)
    require(env_steps > most, "env_steps", env_steps, f"more than {most}, which making the bank cost")
    for trial in trials:
        trial.training().check()
    waiting = [(trial.training(), ()) for trial in trials if trial.training().done() is None]
    train_all("runs", waiting, jobs)
    rows = [row for trial in trials for row in trial.rows()]
    rows.sort(key=lambda row: (chosen.index(row["arm"]), row["seed"]))  # stable: classes in order
    costs = ("env_steps", "bank_steps", "minutes")
    means = over_seeds(rows, ("arm", "class"), "success", means=costs)
    make_folder(Path(out))
    write_json(Path(out) / "resets.json", {"rows": rows, "means": means})
    if figure:
        _draw(
            Path(figure), f"{found.key.task} on {found.key.robot}, {env_steps:,} control steps", means, rows
        )
    return {
        "title": f"Starts of training, {found.key.task} on {found.key.robot} (held-out episodes)",
        "means": means,
        "rows": rows,
        "figure": figure or None,
        "notes": [
            "means: success over seeds, with Student's 95 % interval; low and high: worst and best seed",
            f"class: of the starts of evaluation; {OWN}: as the task draws them, on held-out seeds; others: "
            "rows of the bank that training never draws",
            "env_steps + bank_steps: control steps, the same for all arms up to a rollout",
        ],
    }


def arms_of(bank: Bank) -> tuple[str, ...]:
    """Returns the names of all distributions of starts that a bank can make."""
    return (DIVERSE, NOMINAL, NEAR_GOAL, *(f"{WITHOUT}{name}" for name in bank.sets))


def _draw(path: Path, title: str, means: Sequence[Row], rows: Sequence[Row]) -> None:
    """Draws success from the task's own starts by arm, and from every class by arm."""
    from matplotlib.figure import Figure

    arms = list(dict.fromkeys(row["arm"] for row in means))
    classes = list(dict.fromkeys(row["class"] for row in means))
    drawing = Figure(figsize=(6.0 + 0.9 * len(classes), 1.4 + 0.42 * len(arms)), layout="constrained")
    left, right = drawing.subplots(1, 2, width_ratios=(4, 1 + len(classes)), sharey=True)
    drawing.suptitle(title)
    for place, arm in enumerate(arms):
        (mean,) = (row for row in means if (row["arm"], row["class"]) == (arm, OWN))
        seeds = [row["success"] for row in rows if (row["arm"], row["class"]) == (arm, OWN)]
        left.barh(place, mean["success"], 0.7, color=f"C{min(place, 3)}")
        left.plot(seeds, [place] * len(seeds), "k.", markersize=4)
    left.set_xlim(-0.02, 1.02)
    left.set_xlabel("success from the task's own starts; a dot for each seed")
    left.set_yticks(range(len(arms)), arms)
    left.invert_yaxis()
    left.grid(axis="x", alpha=0.3)
    share = {(row["arm"], row["class"]): row["success"] for row in means}
    table = [[share[arm, name] for name in classes] for arm in arms]
    right.imshow(table, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
    for (place, arm), (column, name) in itertools.product(enumerate(arms), enumerate(classes)):
        value = share[arm, name]
        shown = {"ha": "center", "va": "center", "color": "black" if value > 0.6 else "white"}
        right.text(column, place, f"{100 * value:.0f}", **shown)
    right.set_xticks(range(len(classes)), classes)
    right.set_xlabel("success in %, by class of start")
    drawing.savefig(path, dpi=120)
