"""`-m`: runs a command for every combination of comma lists, after all combinations were checked.

If a command has `devices`, which returns the devices of a job, as many jobs run at once as fit on them.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from robot_rl.config import sweep
from robot_rl.core.errors import ConfigError, RobotRLError, StorageError, require
from robot_rl.core.refusal import is_refusal, refusal

if TYPE_CHECKING:
    from robot_rl.hal.device import DeviceSpec

    Devices = list[tuple[DeviceSpec, int]]

EXIT_FAILED = 1
"""Some jobs failed; the others have their run folders."""

AT_ONCE = "sweep.jobs"
"""Setting with the largest number of jobs at once; 1: one after another, in this terminal."""

_COLUMNS = (
    "task",
    "base_success",
    "final_success",
    "base_return",
    "final_return",
    "heldout_error",
    "success",
    "env_steps",
    "train_minutes",
    "run",
)
"""Columns of the table, if a result has them."""


def run_jobs(command: ModuleType, name: str, words: list[str]) -> int:
    """Runs every job, also after one that failed, and ends with one table and one report.

    Raises:
        ConfigError: the settings of a job are wrong; no job was begun.
    """
    as_json = "--json" in words
    at_once, rest = _at_once([word for word in words if word != "--json"])
    jobs = sweep(rest)
    configs = _check(command, jobs) if hasattr(command, "config") else []
    running = _begin(command, name, jobs, configs, at_once)
    found: dict[int, dict[str, Any]] = {}
    try:
        for number, result in running:
            found[number] = {"job": " ".join(_swept(jobs[number], jobs)), **result}
    finally:  # after Ctrl-C too, the finished jobs are shown
        results = [found[number] for number in sorted(found)]
        if len(results) < len(jobs):
            print(f"{len(results)} of {len(jobs)} jobs ended", file=sys.stderr)
        _show(results)
    page = _report(results)
    if as_json:
        print(json.dumps({"jobs": results, "report": page}))
    return EXIT_FAILED if any("error" in result for result in results) else 0


def _at_once(words: list[str]) -> tuple[int | None, list[str]]:
    """Returns the value of `sweep.jobs`, None without one, and the words for the jobs."""
    given = [word.partition("=")[2] for word in words if word.startswith(f"{AT_ONCE}=")]
    for value in given:
        require(value.isdecimal() and int(value) >= 1, AT_ONCE, value, "1 or more")
    rest = [word for word in words if not word.startswith(f"{AT_ONCE}=")]
    return (int(given[-1]) if given else None), rest


def _check(command: ModuleType, jobs: list[list[str]]) -> list[Any]:
    """Returns the settings of every job."""
    configs: list[Any] = []
    wrong: list[str] = []
    for number, job in enumerate(jobs, start=1):
        try:
            configs.append(command.config(job))
        except RobotRLError as error:
            wrong.append(f"job {number} of {len(jobs)} ({' '.join(_swept(job, jobs))}): {error}")
    if wrong:
        raise ConfigError("\n".join([*wrong, "No job was begun."]))
    return configs


def _begin(
    command: ModuleType, name: str, jobs: list[list[str]], configs: Sequence[Any], at_once: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Starts the jobs; returns an iterator over the number and the result of each."""
    asked: list[Devices | None] = [None]
    if hasattr(command, "devices"):
        asked = [command.devices(config) for config in configs]
    devices = [wanted for wanted in asked if wanted is not None]
    if is_alone := len(devices) < len(asked):
        alone = f"1: these jobs of robot-rl {name} run one after another"
        require(at_once in (None, 1), AT_ONCE, at_once, alone)
    if is_alone or at_once == 1 or len(jobs) < 2:
        return _one_after_another(command, name, jobs)
    from robot_rl.cli.side_by_side import Job, fit_together, held_slots, run_side_by_side

    if at_once is not None:  # the user says how many jobs the memory of a GPU can hold
        devices = [[(spec, slots) for spec, slots in wanted if spec.kind != "gpu"] for wanted in devices]
    prepared = [
        Job(words=job, label=" ".join(_swept(job, jobs)), devices=wanted)
        for job, wanted in zip(jobs, devices, strict=True)
    ]
    held = held_slots()
    if not any(fit_together(pair, held) for pair in itertools.pairwise(prepared)):
        if at_once is not None:
            print(f"{AT_ONCE}: no two jobs fit into the free slots (`robot-rl devices`)", file=sys.stderr)
        return _one_after_another(command, name, jobs)
    from robot_rl.train.record import new_folder

    folder = new_folder(configs[0].out, "sweep")
    print(f"logs of the jobs: {folder}", file=sys.stderr)
    return run_side_by_side(name, prepared, folder, at_once=at_once or len(jobs), held=held)


def _one_after_another(
    command: ModuleType, name: str, jobs: list[list[str]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, job in enumerate(jobs):
        print(f"job {number + 1}/{len(jobs)}: robot-rl {name} {' '.join(job)}", file=sys.stderr)
        try:
            yield number, _run(command, name, job)
        except KeyboardInterrupt as interrupt:
            for other in jobs[number + 1 :]:
                interrupt.add_note(f"\n  then: robot-rl {name} {shlex.join(other)}")
            raise


def _run(command: ModuleType, name: str, job: list[str]) -> dict[str, Any]:
    """Returns the result of a job, or its error."""
    try:
        if hasattr(command, "result"):
            return command.result(job)
        code = int(command.run(job))
        return {"error": f"ended with code {code}"} if code else {}
    except RobotRLError as error:
        message = str(error)
    except (OSError, MemoryError) as error:
        if not is_refusal(error):
            raise  # a bug of ours: show the traceback
        message = str(refusal(error, StorageError, f"robot-rl {name}"))
    print(f"error: {message}", file=sys.stderr)
    return {"error": message}


def _swept(job: list[str], jobs: list[list[str]]) -> list[str]:
    """Returns the words of a job that differ between jobs."""
    return [word for word, *others in zip(job, *jobs, strict=True) if len(set(others)) > 1]


def _show(results: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from robot_rl.cli.tables import table_of

    if not results:
        return
    counts_returns = all(result.get("says_success") is False for result in results if "error" not in result)
    of_others = ("base_success", "final_success") if counts_returns else ("base_return", "final_return")
    keys = [key for key in _COLUMNS if key not in of_others and any(key in result for result in results)]
    keys += ["error"] if any("error" in result for result in results) else []
    rows = [
        {"job": result["job"], **{key: _cell(key, result.get(key)) for key in keys}} for result in results
    ]
    Console(width=None if sys.stdout.isatty() else 180).print(table_of(rows, "sweep"))


def _cell(key: str, value: Any) -> Any:
    if value is None or not key.endswith(("success", "return")):
        return value
    return f"{value:.1%}" if key.endswith("success") else f"{value:.1f}"


def _report(results: list[dict[str, Any]]) -> str | None:
    """Writes one page of all finished training runs, if there are several; returns its path."""
    ended = [result for result in results if result.get("run") and "error" not in result]
    folders = [Path(result["run"]) for result in ended if "final_success" in result]
    if len(folders) < 2:
        return None
    from robot_rl.telemetry.report import write_report  # matplotlib

    try:
        report = write_report(folders)
    except (RobotRLError, OSError) as error:  # keep the results even without a page
        print(f"no report of the sweep: {error}", file=sys.stderr)
        return None
    print(f"report: {report.path} ({len(folders)} runs)")
    return str(report.path)
