"""What benchmarks share: counts over seeds, and how those that learn for long are cut short and go on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.config import load, plain
from robot_rl.core.errors import ConfigError, DeviceError, StorageError
from robot_rl.core.files import read_json
from robot_rl.telemetry.intervals import mean_interval, wilson_interval
from robot_rl.telemetry.runs import flatten
from robot_rl.train.config import RunConfig
from robot_rl.train.record import load_config

SUCCESS_NOTE = "success: of all episodes of all seeds, 95 % Wilson interval; low and high: of single seeds"


@dataclass(frozen=True)
class Training:
    """A run of `robot-rl train` in a process of its own: done once, gone on with where it was cut short."""

    at: str
    """What the benchmark calls it in its messages."""
    folder: Path
    """In which its run folder is made."""
    words: tuple[str, ...]
    """Arguments of `robot-rl train`, but for `out`."""

    def done(self) -> Path | None:
        """Returns the run folder, if it has a summary."""
        return next((path.parent for path in self.folder.glob("*/summary.json")), None)

    def begun(self) -> Path | None:
        """Returns the run folder, finished or not."""
        return self.done() or max((path.parent for path in self.folder.glob("*/config.yaml")), default=None)

    def check(self, *, but: Sequence[str] = ()) -> None:
        """Refuses a run folder that another recipe or other settings made; `but` lists those that may differ.

        Raises:
            ConfigError: a setting differs.
        """
        asked = flatten(plain(load(RunConfig, [*self.words, f"out={self.folder}"], config_name="train")))
        begun = self.begun()
        if begun is None:
            return
        for name in but:
            del asked[name]
        check_plan(self.at.split(":")[0], begun, flatten(plain(load_config(begun))), asked)

    def train(self, *more: str, limit_s: float | None = None) -> bool:
        """Trains it, or goes on; returns whether it came to its end.

        Args:
            more: arguments that only a new run gets.
            limit_s: of wall-clock, after which it is cut short; the next call goes on with it.

        Raises:
            DeviceError: it failed; its log is named.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        log, begun = self.folder / "train.log", self.begun()
        words = [f"resume={begun}"] if begun else [*self.words, f"out={self.folder}", *more]
        with log.open("ab") as output:
            how: dict[str, Any] = {"stdout": output, "stderr": output, "check": False, "timeout": limit_s}
            try:
                done = subprocess.run(train_command(*words), **how)
            except subprocess.TimeoutExpired:
                return False
        if done.returncode != 0:
            raise DeviceError(f"{self.at}: see {log}.")
        return True

    def finished(self) -> tuple[Path, dict[str, Any]]:
        """Returns the folder of a run that is done, and what it came to."""
        folder = self.done()
        assert folder is not None, self.at
        return folder, read_json(folder / "summary.json", StorageError, "Remove the folder; it is run again.")


def train_command(*words: str) -> list[str]:
    """Returns the program `robot-rl train` with these arguments."""
    code = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
    return [sys.executable, "-c", code, "train", *words]


def check_plan(at: str, folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with a trial under another plan.

    Raises:
        ConfigError: a value differs; `at` begins the message.
    """
    for name, value in now.items():
        if begun[name] != value:
            raise ConfigError(
                f"{at}: {folder} was begun with {name}={begun[name]!r}, got {value!r}. "
                "Go on with that, or give another folder: out=..."
            )


def over_seeds(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], value: str, *, means: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Returns one row for each group of runs that differ in their seeds alone.

    Args:
        rows: of single runs.
        keys: what the rows of a group have in common.
        value: what is averaged, with the lowest and highest of single seeds and Student's 95 % interval.
        means: what is averaged without either.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    found: list[dict[str, Any]] = []
    for group, members in groups.items():
        values = [row[value] for row in members]
        ci_low, ci_high = mean_interval(values)
        found.append(
            {
                **dict(zip(keys, group, strict=True)),
                "seeds": len(values),
                value: fmean(values),
                "low": min(values),
                "high": max(values),
                "ci_low": ci_low,
                "ci_high": ci_high,
                **{name: fmean(row[name] for row in members) for name in means},
            }
        )
    return found


def successes_of(played: Sequence[NDArray[np.bool_]]) -> dict[str, float]:
    """Returns the columns that `SUCCESS_NOTE` explains, of which episodes were solved for each seed."""
    success = np.concatenate(played)
    rates = [float(solved.mean()) for solved in played]
    low, high = wilson_interval(int(success.sum()), len(success))
    return {
        "success": float(success.mean()),
        "ci_low": low,
        "ci_high": high,
        "low": min(rates),
        "high": max(rates),
    }


def processor_s(pid: int) -> float:
    """Returns processor seconds of a process and its threads so far; proc(5), fields 14 and 15."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
