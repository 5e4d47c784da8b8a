"""What benchmarks share: runs of `robot-rl train`, rates, and statistics over seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.config import load, plain
from robot_rl.core.errors import ConfigError, DeviceError, StorageError
from robot_rl.core.files import read_json
from robot_rl.telemetry.intervals import mean_interval, wilson_interval
from robot_rl.telemetry.progress import ProgressDisplay
from robot_rl.telemetry.runs import flatten
from robot_rl.train.config import RunConfig
from robot_rl.train.record import load_config

SUCCESS_NOTE = (
    "success: share of all episodes of all seeds, with its 95 % Wilson interval; "
    "low and high: the worst and the best seed"
)


@dataclass(frozen=True)
class Training:
    """A run of `robot-rl train` in its own process: a finished run is kept, an interrupted one is resumed."""

    at: str
    """Name of the run in error messages."""
    folder: Path
    """Holds the run folder."""
    words: tuple[str, ...]
    """Arguments of `robot-rl train`, without `out`."""

    def done(self) -> Path | None:
        """Returns the run folder, if it has a summary."""
        return next((path.parent for path in self.folder.glob("*/summary.json")), None)

    def begun(self) -> Path | None:
        """Returns the run folder, finished or not."""
        return self.done() or max((path.parent for path in self.folder.glob("*/config.yaml")), default=None)

    def check(self, *, but: Sequence[str] = ()) -> None:
        """Refuses a run folder that another recipe or other settings made; settings in `but` may differ.

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
        """Starts or resumes the run; returns whether it has finished.

        Args:
            more: arguments for a new run alone.
            limit_s: seconds of wall-clock, after which the run is stopped; the next call resumes it.

        Raises:
            DeviceError: the run failed; the message names its log.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        log, begun = self.folder / "train.log", self.begun()
        words = [f"resume={begun}"] if begun else [*self.words, f"out={self.folder}", *more]
        with log.open("ab") as output:
            how: dict[str, Any] = {"stdout": output, "stderr": output, "check": False, "timeout": limit_s}
            try:
                done = subprocess.run(command_line("train", *words), **how)
            except subprocess.TimeoutExpired:
                return False
        if done.returncode != 0:
            raise DeviceError(f"{self.at}: see {log}.")
        return True

    def finished(self) -> tuple[Path, dict[str, Any]]:
        """Returns the folder and the summary of a finished run."""
        folder = self.done()
        assert folder is not None, self.at
        return folder, read_json(folder / "summary.json", StorageError, "Remove the folder; it is run again.")


def train_all(phase: str, waiting: Sequence[tuple[Training, Sequence[str]]], jobs: int) -> None:
    """Trains runs side by side, `jobs` at a time, or one for each core if 0; shows the progress.

    Args:
        phase: name in the display.
        waiting: runs, and the arguments that each gets if it is new.
        jobs: how many run at a time.
    """
    with (
        ProgressDisplay() as display,
        display.phase(phase, len(waiting), unit="runs") as progress,
        ThreadPoolExecutor(jobs or os.cpu_count()) as pool,
    ):
        trained = pool.map(lambda one: one[0].train(*one[1]), waiting)
        for number, _ in enumerate(trained, start=1):
            progress.update(number)


def call(at: str, log: Path, *words: str) -> dict[str, Any]:
    """Runs a command of `robot-rl`; returns what it prints with --json.

    Args:
        at: begins the message of an error.
        log: gets what it prints.
        words: of the command.

    Raises:
        DeviceError: it failed.
    """
    with log.open("ab") as output:
        how: dict[str, Any] = {"stderr": output, "check": False, "text": True}
        done = subprocess.run(command_line(*words, "--json"), stdout=subprocess.PIPE, **how)
        output.write(done.stdout.encode())
    if done.returncode:
        raise DeviceError(f"{at}: `robot-rl {' '.join(words)}` failed: see {log}.")
    return json.loads(done.stdout.splitlines()[-1])


def command_line(*words: str) -> list[str]:
    """Returns a `robot-rl` command as the words of a process."""
    code = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
    return [sys.executable, "-c", code, *words]


def check_plan(at: str, folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to resume a trial with other settings.

    Raises:
        ConfigError: a value differs; `at` begins the message.
    """
    for name, value in now.items():
        if begun[name] != value:
            raise ConfigError(
                f"{at}: {folder} was begun with {name}={begun[name]!r}, got {value!r}. "
                "Use the first value, or choose another folder: out=..."
            )


def over_seeds(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str], value: str, *, means: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Returns one row for each group of runs that differ only in their seeds.

    Args:
        rows: one for each run.
        keys: columns that are equal within a group.
        value: column to average, with its lowest and highest value and Student's 95 % interval.
        means: columns to average without an interval.
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
    """Returns the columns that `SUCCESS_NOTE` explains; `played` has the solved episodes of each seed."""
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


@dataclass(frozen=True)
class Rate:
    """Events per second of wall-clock and of processor time."""

    wall: float
    cpu: float


class Stopwatch:
    """Measures the rate of events since it was made."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._wall_s

    def rate(self, count: float) -> Rate:
        return Rate(count / self.wall_s, count / max(time.process_time() - self._cpu_s, 1e-9))


def median_ratio(ours: Sequence[Rate], theirs: Sequence[Rate], clock: str) -> float:
    """Returns the median ratio of rounds that ran one after the other; `clock` is `wall` or `cpu`."""
    pairs = zip(ours, theirs, strict=True)
    return median(getattr(a, clock) / getattr(b, clock) for a, b in pairs)


@contextmanager
def one_torch_thread() -> Generator[None]:
    """Limits torch to one thread within a block."""
    import torch  # not every benchmark needs it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
