"""Reads run folders for reports, and names what is missing in them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from robot_rl.config.used import used
from robot_rl.core.errors import ConfigError, nearest
from robot_rl.core.files import read_checked_text, without_checksum
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.telemetry.metrics import FILE_NAME, Row, read_run

Floats = NDArray[np.float64]
Moment = Literal["base", "final"]

FILES = ("config.yaml", FILE_NAME, "summary.json")
"""A run folder has at least one of them."""


@dataclass(frozen=True)
class Outcome:
    """Solved episodes among all started ones."""

    successes: int
    episodes: int

    @property
    def share(self) -> float:
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of `share`."""
        return wilson_interval(self.successes, self.episodes)


@dataclass(frozen=True)
class Failure:
    """A picture of an episode that failed."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Curve:
    """One metric over a run."""

    x: Floats
    y: Floats
    unit: str
    """What x counts: control steps, updates, or rows if neither changes."""


@dataclass(frozen=True)
class RunRecord:
    """One run folder in memory."""

    folder: Path
    summary: Mapping[str, Any]
    rows: Sequence[Row]
    config: Mapping[str, Any]
    """Resolved configuration with dotted keys."""
    failures: Sequence[Failure]
    missing: Sequence[str]
    """What could not be read, in words."""
    setting: str = ""
    """Label of its settings among several; empty for one setting."""

    @property
    def label(self) -> str:
        own = f"seed {self.seed}" if self.seed is not None else self.folder.name
        return f"{self.setting}, {own}" if self.setting else own

    @property
    def seed(self) -> Any:
        return self.summary.get("seed", self.config.get("seed"))

    @property
    def task(self) -> str | None:
        return self.summary.get("task", self.config.get("env.task"))

    @property
    def recipe(self) -> str | None:
        return self.summary.get("recipe", self.config.get("recipe"))

    @property
    def sources(self) -> list[str]:
        """Names of the robots that learned together in this run; empty for one, of however many sources."""
        names = dict.fromkeys(key.split(".")[1] for key in self.config if key.startswith("sources."))
        judged = {key.split("/")[0] for row in self.rows for key in row if key.startswith("eval.")}
        known = _mapping(self.summary.get("sources"))
        return [name for name in names if f"eval.{name}" in judged or "final" in _mapping(known.get(name))]

    def of_source(self, name: str) -> RunRecord:
        """Returns a record with the evaluations of one of several robots only."""
        found = _mapping(_mapping(self.summary.get("sources")).get(name))
        base, final = _mapping(found.get("base")), _mapping(found.get("final"))
        summary = {
            "base_success": base.get("success"),
            "final_success": final.get("success"),
            "episodes": final.get("episodes", base.get("episodes")),
        }
        own = f"eval.{name}/"
        rows = [
            {key.replace(own, "eval/"): value for key, value in row.items() if "/" not in key or own in key}
            for row in self.rows
        ]
        return replace(self, summary={**self.summary, **summary}, rows=rows)

    def outcome(self, moment: Moment) -> Outcome | None:
        """Returns the evaluation before (`base`) or after (`final`) reinforcement learning."""
        episodes_list = self.summary.get(f"{moment}_successes")
        if isinstance(episodes_list, list) and episodes_list:
            return Outcome(sum(map(bool, episodes_list)), len(episodes_list))
        return _outcome(self.number(f"{moment}_success"), self.number("episodes"))

    @property
    def counts_returns(self) -> bool:
        """Whether the env reports no success, so that returns are the result."""
        return self.summary.get("says_success") is False

    def drawn(self, name: str) -> bool:
        """Whether a metric has a number to draw in any row."""
        return any(np.isfinite(_column(self.rows, name)))

    def number(self, key: str) -> float | None:
        """Returns a number of summary.json; None if it is missing."""
        value = self.summary.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)

    def names(self) -> list[str]:
        """Returns the names of all metrics, in the order of their first rows."""
        return list(dict.fromkeys(name for row in self.rows for name in row if "/" in name))

    def curve(self, name: str) -> Curve:
        """Returns a metric over control steps; over updates in a phase without steps."""
        rows = [row for row in self.rows if name in row]
        for key, unit in (("step", "control steps"), ("updates", "updates")):
            x = np.array([row.get(key, 0) for row in rows], float)
            if len(x) > 1 and x.max() > x.min():
                return Curve(x, _column(rows, name), unit)
        return Curve(np.arange(1, len(rows) + 1, dtype=float), _column(rows, name), "rows")

    def evaluations(self) -> tuple[Floats, list[Outcome]]:
        """Returns control steps and outcomes of the evaluations during training, the last of each step."""
        at: dict[int, Outcome] = {}
        for row in self.rows:
            if outcome := _outcome(row.get("eval/success"), row.get("eval/episodes")):
                at[row["step"]] = outcome
        steps = sorted(at)
        return np.array(steps, float), [at[step] for step in steps]

    def counted(self, name: str, *, cumulative: bool) -> int | None:
        """Returns a count of summary.json, or else of the rows.

        Args:
            name: key of summary.json, and the metric `<group>/<name>`.
            cumulative: the metric counts from the start of the run, not since the last row.
        """
        if (count := self.number(name)) is not None:
            return int(count)
        columns = [_column(self.rows, metric) for metric in self.names() if metric.endswith(f"/{name}")]
        finite = [known for column in columns if len(known := column[np.isfinite(column)])]
        return int(sum(known.max() if cumulative else known.sum() for known in finite)) if finite else None


def load_run(folder: Path) -> RunRecord:
    """Reads a run folder; the record names what is missing or damaged.

    Raises:
        ConfigError: the folder is not a run folder.
    """
    if not any((folder / name).is_file() for name in FILES):
        raise ConfigError(_no_run_message(folder))
    missing: list[str] = []
    summary = _read_object(folder / "summary.json", missing, "the run did not finish, or is still running")
    config = _read_yaml(folder / "config.yaml", missing)
    rows, damaged = read_run(folder / FILE_NAME) if (folder / FILE_NAME).is_file() else ([], [])
    missing += [f"{FILE_NAME}: {problem}" for problem in damaged]
    written = summary.get("rows")
    if not damaged and isinstance(written, int) and len(rows) < written:
        missing.append(f"{FILE_NAME}: {written - len(rows)} of {written} rows are not there")
    if not rows:
        missing.append(f"{FILE_NAME}: not there or empty, so there are no curves")
    return RunRecord(folder, summary, rows, config, _read_failures(folder, missing), missing)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _mapping(found: Any) -> Mapping[str, Any]:
    """Returns a part of summary.json, or an empty mapping if it is damaged."""
    return found if isinstance(found, Mapping) else {}


def _outcome(share: float | None, episodes: float | None) -> Outcome | None:
    """Returns the outcome for a share; None unless both numbers are valid."""
    if share is None or episodes is None or not 0 <= share <= 1 or not 1 <= episodes < math.inf:
        return None
    return Outcome(round(share * episodes), int(episodes))


def _column(rows: Sequence[Row], name: str) -> Floats:
    return np.array([row.get(name, math.nan) for row in rows], float)


def _no_run_message(folder: Path) -> str:
    if not folder.is_dir():
        siblings = [path.name for path in folder.parent.glob("*") if path.is_dir()]
        hint = nearest(folder.name, siblings) if siblings else ""
        return f"report.run: there is no folder {str(folder)!r}.{hint} `robot-rl train` makes them, in runs/."
    return (
        f"report.run: {str(folder)!r} is no run folder, it has none of {', '.join(FILES)}. "
        "Pass one that `robot-rl train` made, such as runs/<date-time>-<recipe>-seed<k>."
    )


def _read_object(path: Path, missing: list[str], why: str) -> dict[str, Any]:
    if not path.is_file():
        missing.append(f"{path.name}: not there ({why})")
        return {}
    try:
        return without_checksum(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        missing.append(f"{path.name}: not readable ({error})")
        return {}


def _read_yaml(path: Path, missing: list[str]) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        missing.append(f"{path.name}: not there, so there is no table of settings")
        return {}
    try:
        found = yaml.safe_load(read_checked_text(path, ConfigError, ""))
    except (yaml.YAMLError, ValueError) as error:
        missing.append(f"{path.name}: not readable ({' '.join(str(error).split())})")
        return {}
    if not isinstance(found, dict):
        missing.append(f"{path.name}: it holds no settings")
        return {}
    return flatten(used(found))


def _read_failures(folder: Path, missing: list[str]) -> list[Failure]:
    """Reads failures/index.json; a run without failures, or without a renderer, has none."""
    index = folder / "failures" / "index.json"
    if not index.is_file():
        return []
    try:
        content = json.loads(index.read_bytes())
        found = content if isinstance(content, list) else without_checksum(content)["pictures"]
        entries = [_failure(index.parent, entry) for entry in found]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        missing.append(f"failures/index.json: not readable ({error!r})")
        return []
    gone = [failure.path.name for failure in entries if not failure.path.is_file()]
    if gone:
        missing.append(f"failures/: {', '.join(gone)} not there")
    return [failure for failure in entries if failure.path.is_file()]


def _failure(folder: Path, entry: Mapping[str, Any]) -> Failure:
    parts = [str(entry["phase"])] if entry.get("phase") else []
    parts += [f"episode seed {entry['seed']}"] if "seed" in entry else []
    parts += [str(entry["caption"])] if entry.get("caption") else []
    return Failure(folder / Path(str(entry["file"])).name, ", ".join(parts))
