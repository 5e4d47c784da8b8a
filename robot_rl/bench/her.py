"""Time to 95 % on push_cube with demonstrations, against Stable-Baselines3's SAC with hindsight replay.

All learners start from nothing and run one after the other on the same core. The time includes the start of
the program, demonstrations of the same expert, cloning, learning and evaluations. It ends with the first
quick evaluation (the same episodes for all) at the target. A peer that has not reached it after `times` our
processor time is stopped: on a shared machine that is fairer than the wall clock.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from robot_rl.bench.trials import check_plan, command_line, over_seeds, processor_s
from robot_rl.core.errors import DeviceError, require
from robot_rl.core.files import write_json
from robot_rl.telemetry.progress import PhaseProgress, ProgressDisplay

Name = Literal["robot_rl", "her", "her_demos"]
LEARNERS: tuple[Name, ...] = ("robot_rl", "her", "her_demos")

OURS = (
    "recipe=residual",
    "base=pick_cube",
    "env.task=push_cube",
    "demos.bias_m=0",
    "bc.updates=4000",
    "n_exec=1",
    "method.env_steps=150000",
    "method.explore_steps=2000",
    "method.scale=0.2",
    "method.algorithm.critic_warmup=2000",
    "evaluate.every_env_steps=2000",
)
"""Settings of our run, chosen on seed 10: a base from an expert without bias, and small corrections of it."""

_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A learner is stopped at the first of these."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One learner from one seed."""

    learner: Name
    seed: int
    folder: Path
    demos: int
    noise_m: float
    episodes: int
    batch: int
    width: int
    settings: tuple[str, ...]

    @property
    def command(self) -> list[str]:
        """The words of the program, which learns until it is stopped."""
        if self.learner == "robot_rl":
            return command_line("train", *OURS, *self._words(), *self.settings)
        peer = {
            "seed": self.seed,
            "curve": str(self.folder / "curve.jsonl"),
            "episodes": self.episodes,
            "batch": self.batch,
            "width": self.width,
            "demos": self.demos if self.learner == "her_demos" else 0,
            "noise_m": self.noise_m,
        }
        return [sys.executable, "-m", "robot_rl.bench.her_peer", json.dumps(peer)]

    def curve(self) -> list[dict[str, Any]]:
        """Returns the evaluations so far: rows with `eval/success`."""
        path = next(iter(self.folder.glob("*/metrics.jsonl")), self.folder / "curve.jsonl")
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
        return [row for row in rows if "eval/success" in row]

    def _words(self) -> list[str]:
        evaluation = ("episodes", "num_envs", "quick_episodes")
        return [
            f"seed={self.seed}",
            f"out={self.folder}",
            f"demos.episodes={self.demos}",
            f"demos.noise_m={self.noise_m}",
            *(f"evaluate.{name}={self.episodes}" for name in evaluation),
            "torch_threads=1",
            "env.num_threads=1",
            "replay.record=false",
            "video.episodes=0",
            "video.failures=0",
        ]


def run(
    *,
    learners: tuple[Name, ...] = LEARNERS,
    seeds: tuple[int, ...] = (0,),
    target: float = 0.95,
    demos: int = 1000,
    noise_m: float = 0.005,
    episodes: int = 100,
    batch: int = 256,
    width: int = 256,
    settings: tuple[str, ...] = (),
    times: float = 10.0,
    minutes: float = 60.0,
    out: str = "runs/her",
) -> dict[str, Any]:
    """Measures every learner for every seed, in turn, and returns rows and ratios.

    Args:
        learners: `robot_rl`; `her`: without demonstrations; `her_demos`: with our demonstrations in its
            replay.
        seeds: of the runs.
        target: success rate of a quick evaluation that ends the time.
        demos: number of demonstrations.
        noise_m: noise of their expert; see `DemosConfig`.
        episodes: of each evaluation.
        batch: batch size of the peer (RL Zoo: 2048).
        width: of the peer's three layers (RL Zoo: 512).
        settings: key=value of `robot-rl train` for our run.
        times: the peer is stopped after this multiple of our processor time.
        minutes: limit in wall-clock minutes for every learner.
        out: folder of logs, curves and her.json; rows in that file are not measured again.

    """
    for name in learners:
        require(name in LEARNERS, "bench her: learners", name, ", ".join(LEARNERS))
    require(0 < target <= 1, "bench her: target", target, "above 0, at most 1")
    same: dict[str, Any] = {
        "demos": demos,
        "noise_m": noise_m,
        "episodes": episodes,
        "batch": batch,
        "width": width,
        "settings": settings,
    }
    asked = {**same, "target": target}
    path = Path(out) / "her.json"
    rows = _kept(path, asked)
    with ProgressDisplay() as display:
        for seed in seeds:
            for learner in learners:
                if any((row["learner"], row["seed"]) == (learner, seed) for row in rows):
                    continue
                limits = Limits(
                    wall_s=60.0 * minutes,
                    cpu_s=60.0 * min([minutes, *(times * row["cpu_minutes"] for row in _ours(rows, seed))]),
                )
                trial = Trial(learner=learner, seed=seed, folder=_fresh(Path(out), learner, seed), **same)
                with display.phase(f"{learner} {seed}", round(limits.cpu_s), unit="s") as progress:
                    rows.append({**measure(trial, target, limits, progress), "asked": asked})
                write_json(path, rows)
    return {
        "title": f"push_cube: minutes until {target:.0%} of {episodes} episodes succeed, on one core",
        "rows": [{key: row[key] for key in row if key not in ("curve", "asked")} for row in rows],
        "ratios": ratios(rows),
        "means": means(rows),
        "mean_ratios": mean_ratios(rows),
        "notes": [
            "minutes: until the target, or until the stop if reached is no; ratio: theirs divided by ours, "
            "at_least if theirs was stopped. best: the best evaluation.",
            "means, mean_ratios: over seeds; ci: Student's 95 % interval of the mean, if no run was stopped; "
            "no mean_ratios if ours was stopped on a seed.",
        ],
    }


def measure(trial: Trial, target: float, limits: Limits, progress: PhaseProgress) -> dict[str, Any]:
    """Runs the program of a trial until it reaches the target or a limit, and returns its row.

    Raises:
        DeviceError: it failed; the message names its log.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.perf_counter()
    log = trial.folder / "log"
    with log.open("wb") as output:
        core = str(min(os.sched_getaffinity(0)))
        process = subprocess.Popen(
            ["taskset", "-c", core, *trial.command],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            while True:
                time.sleep(_LOOK_EVERY_S)
                spent_s, took_s = processor_s(process.pid), time.perf_counter() - began_s
                is_over = process.poll() is not None
                progress.update(min(round(spent_s), round(limits.cpu_s)))
                curve = trial.curve()
                reached = any(row["eval/success"] >= target for row in curve)
                if reached or is_over or took_s >= limits.wall_s or spent_s >= limits.cpu_s:
                    break
        finally:
            process.terminate()
            process.wait()
    if is_over and not reached and process.returncode != 0:
        raise DeviceError(f"bench her: {trial.learner}, seed {trial.seed}, failed: see {log}.")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "learner": trial.learner,
        "seed": trial.seed,
        "reached": reached,
        "minutes": took_s / 60,
        "cpu_minutes": cpu_s / 60,
        "env_steps": curve[-1]["step"] if curve else 0,
        "best": max((row["eval/success"] for row in curve), default=None),
        "curve": [{"env_steps": row["step"], "success": row["eval/success"]} for row in curve],
    }


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the time of each peer as a multiple of ours, for each seed; a lower bound if it was stopped."""
    return [
        {
            "learner": row["learner"],
            "seed": row["seed"],
            "ratio": row["minutes"] / ours["minutes"],
            "cpu_ratio": row["cpu_minutes"] / ours["cpu_minutes"],
            "at_least": not row["reached"],
        }
        for row in rows
        for ours in _ours(rows, row["seed"])
        if row["learner"] != "robot_rl"
    ]


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the mean minutes of each learner over seeds; a lower bound if one was stopped."""
    return _over_seeds([{**row, "at_least": not row["reached"]} for row in rows], "minutes", "cpu_minutes")


def mean_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the mean ratio of each peer over seeds; a lower bound if one was stopped.

    Returns nothing if our run was stopped on a seed: a mean over the other seeds would favour us.
    """
    if any(row["learner"] == "robot_rl" and not row["reached"] for row in rows):
        return []
    return _over_seeds(ratios(rows), "ratio", "cpu_ratio")


def _over_seeds(rows: Sequence[dict[str, Any]], value: str, cpu: str) -> list[dict[str, Any]]:
    """Returns a row for each learner; a lower bound has no interval."""
    stopped = {row["learner"] for row in rows if row["at_least"]}
    found = over_seeds(rows, ("learner",), value, means=(cpu,))
    no_interval = {"ci_low": None, "ci_high": None}
    return [
        {**row, **(no_interval if row["learner"] in stopped else {}), "at_least": row["learner"] in stopped}
        for row in found
    ]


def _ours(rows: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Returns our row of that seed, if it reached the target."""
    return [row for row in rows if (row["learner"], row["seed"]) == ("robot_rl", seed) and row["reached"]]


def _kept(path: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of earlier calls, which must have the same settings."""
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for row in rows:
        begun = {"settings": [], **row["asked"]}  # old rows have no settings
        check_plan("bench her", path, begun, json.loads(json.dumps(asked)))
    return rows


def _fresh(out: Path, learner: str, seed: int) -> Path:
    """Returns a new folder; unfinished ones of earlier calls stay."""
    number = 0
    while (folder := out / f"{learner}-seed{seed}-{number}").exists():
        number += 1
    folder.mkdir(parents=True)
    return folder
