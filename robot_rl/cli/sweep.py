"""`-m`: a command for every combination of comma lists. All are checked before the first begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from robot_rl.config import sweep
from robot_rl.core.errors import ConfigError, RobotRLError, StorageError
from robot_rl.core.refusal import is_refusal, refusal

EXIT_FAILED = 1
"""Some jobs failed; those that did not have left their runs."""

_COLUMNS = (
    "task",
    "base_success",
    "final_success",
    "heldout_error",
    "success",
    "env_steps",
    "train_minutes",
    "run",
)
"""What the table shows of a job's result, where there is such a thing."""


def run_jobs(command: ModuleType, name: str, words: list[str]) -> int:
    """Runs every job, goes on after one that fails, and ends on one table and one report.

    Raises:
        ConfigError: settings of some job are wrong; none was begun.
    """
    as_json = "--json" in words
    jobs = sweep([word for word in words if word != "--json"])
    if hasattr(command, "config"):
        _check(command, jobs)
    results: list[dict[str, Any]] = []
    try:
        for number, job in enumerate(jobs, start=1):
            print(f"job {number}/{len(jobs)}: robot-rl {name} {' '.join(job)}", file=sys.stderr)
            results.append({"job": " ".join(_swept(job, jobs)), **_run(command, name, job)})
    finally:  # Ctrl-C ends a sweep; what its jobs came to is worth a line each
        if len(results) < len(jobs):
            print(f"{len(results)} of {len(jobs)} jobs ended", file=sys.stderr)
        _show(results)
    page = _report(results)
    if as_json:
        print(json.dumps({"jobs": results, "report": page}))
    return EXIT_FAILED if any("error" in result for result in results) else 0


def _check(command: ModuleType, jobs: list[list[str]]) -> None:
    wrong: list[str] = []
    for number, job in enumerate(jobs, start=1):
        try:
            command.config(job)
        except RobotRLError as error:
            wrong.append(f"job {number} of {len(jobs)} ({' '.join(_swept(job, jobs))}): {error}")
    if wrong:
        raise ConfigError("\n".join([*wrong, "No job was begun."]))


def _run(command: ModuleType, name: str, job: list[str]) -> dict[str, Any]:
    """Returns what a job came to, or the error that ended it."""
    try:
        if hasattr(command, "result"):
            return command.result(job)
        code = int(command.run(job))
        return {"error": f"ended with code {code}"} if code else {}
    except RobotRLError as error:
        told = str(error)
    except (OSError, MemoryError) as error:
        if not is_refusal(error):
            raise  # a fault of ours: its traceback is wanted
        told = str(refusal(error, StorageError, f"robot-rl {name}"))
    print(f"error: {told}", file=sys.stderr)
    return {"error": told}


def _swept(job: list[str], jobs: list[list[str]]) -> list[str]:
    """Returns the words by which a job differs from others."""
    return [word for word, *others in zip(job, *jobs, strict=True) if len(set(others)) > 1]


def _show(results: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from robot_rl.cli.tables import table_of

    if not results:
        return
    keys = [key for key in _COLUMNS if any(key in result for result in results)]
    keys += ["error"] if any("error" in result for result in results) else []
    rows = [
        {"job": result["job"], **{key: _cell(key, result.get(key)) for key in keys}} for result in results
    ]
    Console(width=None if sys.stdout.isatty() else 180).print(table_of(rows, "sweep"))


def _cell(key: str, value: Any) -> Any:
    return f"{value:.1%}" if key.endswith("success") and value is not None else value


def _report(results: list[dict[str, Any]]) -> str | None:
    """Writes one page of all runs that ended, where there are several; returns where."""
    folders = [Path(result["run"]) for result in results if result.get("run") and "error" not in result]
    if len(folders) < 2:
        return None
    from robot_rl.telemetry.report import write_report  # matplotlib

    try:
        report = write_report(folders)
    except (RobotRLError, OSError) as error:  # the runs are worth more than their page
        print(f"no report of the sweep: {error}", file=sys.stderr)
        return None
    print(f"report: {report.path} ({len(folders)} runs)")
    return str(report.path)
