"""What benchmarks share: counts over seeds, and how those that learn for long are cut short and go on."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.telemetry.intervals import mean_interval, wilson_interval

SUCCESS_NOTE = "success: of all episodes of all seeds, 95 % Wilson interval; low and high: of single seeds"


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
