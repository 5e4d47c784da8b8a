"""CrossQ, SAC and XQC on Gymnasium's Walker2d and Hopper: an external check of the actor-critic code.

All are recipes of `robot-rl train` on the same envs, with one update for each control step, XQC with two.
Published returns at 100,000 steps (SimbaV2's tables of CrossQ and SAC, XQC's own curves, on the -v4 envs,
means of several seeds): Walker2d CrossQ 3914, SAC 690, XQC 3612; Hopper CrossQ 2764, SAC 1103, XQC 2828.
CrossQ's critics are 2048 wide there; here the width is a setting, and the rows have its cost.

Every run is a process with its own folder. A repeated call resumes interrupted runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from robot_rl.bench.trials import Training, over_seeds, train_all
from robot_rl.core.errors import require
from robot_rl.core.files import write_json
from robot_rl.core.seeding import eval_seeds
from robot_rl.hal.vector import VectorEnv
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig
from robot_rl.telemetry.metrics import FILE_NAME, read_metrics

Array = NDArray[Any]
Name = Literal["crossq", "sac", "xqc"]
"""Recipes."""

PUBLISHED: dict[tuple[str, str], float] = {
    ("Walker2d-v5", "crossq"): 3914.0,
    ("Walker2d-v5", "sac"): 690.0,
    ("Walker2d-v5", "xqc"): 3612.0,
    ("Hopper-v5", "crossq"): 2764.0,
    ("Hopper-v5", "sac"): 1103.0,
    ("Hopper-v5", "xqc"): 2828.0,
}
"""Mean return at 100,000 steps."""

_LEARNING = ("collect", "replay", "sample", "update")
"""Stages of a run that belong to a control step and its update."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One learner in one env."""

    env: str
    learner: Name
    width: int
    seed: int
    steps: int
    evaluate_every: int
    episodes: int
    out: Path

    def training(self) -> Training:
        """Returns its run."""
        name = f"{self.env}-{self.learner}-{self.width}-seed{self.seed}"
        words = (
            *(f"recipe={self.learner}", f"env.id={self.env}", f"seed={self.seed}"),
            *(f"method.env_steps={self.steps}", f"method.capacity={max(1000, 2 * self.steps)}"),
            f"method.explore_steps={min(5000, self.steps // 20)}",
            f"method.algorithm.critic.width={self.width}",
            f"evaluate.every_env_steps={self.evaluate_every}",
            *(f"evaluate.{key}={self.episodes}" for key in ("episodes", "quick_episodes")),
            *(f"evaluate.num_envs={min(5, self.episodes)}", "lease_wait_s=1e6"),
        )
        return Training(f"bench crossq: {name}", self.out / name.replace("/", "-"), words)

    def row(self) -> dict[str, Any]:
        """Returns the return and the cost of a finished run."""
        _, summary = self.training().finished()
        spent_s = sum(summary["timing"].get(stage, 0.0) for stage in _LEARNING)
        return {
            "env": self.env,
            "learner": self.learner,
            "width": self.width,
            "seed": self.seed,
            "steps": self.steps,
            "return": summary["final_return"],
            "s_per_1000_steps": 1e3 * spent_s / self.steps,
        }

    def curve(self) -> list[dict[str, float]]:
        """Returns all evaluations of a finished run."""
        folder, _ = self.training().finished()
        rows = [row for row in read_metrics(folder / FILE_NAME) if "eval/return" in row]
        learned = [row for row in rows if row["phase"] != "base"]
        return [{"steps": row["step"], "return": row["eval/return"]} for row in learned]


def run(
    *,
    envs: tuple[str, ...] = ("Walker2d-v5", "Hopper-v5"),
    learners: tuple[Name, ...] = ("crossq", "sac", "xqc"),
    seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 100_000,
    width: int = 512,
    sac_width: int = 256,
    evaluate_every: int = 25_000,
    episodes: int = 10,
    jobs: int = 0,
    out: str = "runs/crossq",
) -> dict[str, Any]:
    """Trains every learner in every env for every seed; returns the tables.

    Args:
        envs: Gymnasium's names.
        learners: `crossq`, `sac`, `xqc`.
        seeds: of the runs.
        steps: env steps of each run, the first twentieth (5,000 at most) without learner updates.
        width: of CrossQ's critics (2048 in the paper) and of XQC's.
        sac_width: of SAC's critics.
        evaluate_every: steps between evaluations; the last one is at the end.
        episodes: episodes of an evaluation, with the mean action.
        jobs: runs at a time, one core each; 0: as many as there are cores.
        out: folder of the runs and of crossq.json with their curves; finished runs are not repeated.

    Raises:
        ConfigError: a run in `out` was begun with other settings.
        DeviceError: a run failed; the message names its log.
    """
    require(steps >= 1, "bench crossq: steps", steps, "1 or more")
    same: dict[str, Any] = {"steps": steps, "evaluate_every": evaluate_every, "episodes": episodes}
    trials = [
        Trial(
            env=env,
            learner=learner,
            width=sac_width if learner == "sac" else width,
            seed=seed,
            out=Path(out).resolve(),
            **same,
        )
        for env, seed, learner in itertools.product(envs, seeds, learners)
    ]
    for trial in trials:
        trial.training().check()
    waiting = [training for trial in trials if (training := trial.training()).done() is None]
    train_all("runs", [(training, ()) for training in waiting], jobs)
    rows = [trial.row() for trial in trials]
    curves = [{**row, "curve": trial.curve()} for row, trial in zip(rows, trials, strict=True)]
    table = summary(rows)
    write_json(Path(out) / "crossq.json", {"rows": table, "runs": curves})
    return {
        "title": "CrossQ, SAC and XQC, one update per step, XQC two: return of the mean action",
        "rows": table,
        "runs": rows,
        "trivial": [row for env in envs for row in trivial(env, seeds, episodes)],
        "notes": [
            "published: at 100,000 steps on the -v4 envs; CrossQ with critics 2048 wide.",
            "ci: Student's 95 % interval of the mean over seeds; low, high: the worst and the best seed.",
            "trivial: zero actions and uniform random actions, on the same episodes.",
        ],
    }


def returns_of(env: VectorEnv, act: Callable[[], Array], seeds: Sequence[int]) -> list[float]:
    """Returns the return of an episode for each seed; `act` returns actions (1, A)."""
    returns: list[float] = []
    for seed in seeds:
        env.reset(seed=[seed])
        total, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(act())
            total += float(reward[0])
            ended = bool(terminated[0] or truncated[0])
        returns.append(total)
    return returns


def trivial(name: str, seeds: Sequence[int], episodes: int) -> list[dict[str, Any]]:
    """Returns the returns of zero actions (the middle of their range) and of uniform random actions."""
    rows: list[dict[str, Any]] = []
    with opened(simulation(EnvConfig(kind="gym", id=name), 1), holder="bench crossq") as env:
        shape, rng = (1, len(env.action_names)), np.random.default_rng(0)
        acts: dict[str, Callable[[], Array]] = {
            "zero": lambda: np.zeros(shape, np.float32),
            "random": lambda: rng.uniform(-1.0, 1.0, shape).astype(np.float32),
        }
        for policy, act in acts.items():
            played = [returns_of(env, act, eval_seeds(seed, episodes).tolist()) for seed in seeds]
            means = [float(np.mean(returns)) for returns in played]
            row = {"env": name, "policy": policy, "return": float(np.mean(means))}
            rows.append({**row, "low": min(means), "high": max(means)})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row for each env, learner, width and number of steps, over its seeds."""
    found = over_seeds(rows, ("env", "learner", "width", "steps"), "return", means=("s_per_1000_steps",))
    return [{**row, "published": PUBLISHED.get((row["env"], row["learner"]))} for row in found]
