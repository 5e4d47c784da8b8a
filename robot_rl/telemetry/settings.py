"""Groups runs by their settings: runs that differ only in their seed are counted together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from robot_rl.telemetry.runs import Moment, Outcome, RunRecord

_BESIDE = ("seed", "out", "run", "lease_wait_s")
"""The seed, and settings without influence on what is learned."""
_MAX_NAMED = 3


@dataclass(frozen=True)
class Setting:
    """Runs of the same settings, one for each seed."""

    label: str
    """The settings that the others do not share; empty if there is one setting."""
    runs: tuple[RunRecord, ...]

    def outcome(self, moment: Moment) -> Outcome | None:
        """Returns the outcome over the episodes of all seeds."""
        return outcome_of(self.runs, moment)


def outcome_of(runs: Sequence[RunRecord], moment: Moment) -> Outcome | None:
    """Returns the outcome over the episodes of several runs; None if none was evaluated."""
    outcomes = [outcome for run in runs if (outcome := run.outcome(moment)) is not None]
    if not outcomes:
        return None
    return Outcome(sum(o.successes for o in outcomes), sum(o.episodes for o in outcomes))


def grouped(runs: Sequence[RunRecord]) -> tuple[list[Setting], list[str]]:
    """Returns the settings in the order of the runs, and a note for each run that does not count.

    A seed counts once, because its held-out episodes are always the same.
    """
    groups: dict[tuple[Any, ...], list[RunRecord]] = {}
    notes: list[str] = []
    for run in runs:
        group = groups.setdefault(_key(run), [])
        twin = next((other for other in group if other.seed == run.seed), None)
        if twin is None:
            group.append(run)
        elif twin.folder.resolve() == run.folder.resolve():
            notes.append(f"{run.folder.name} was given twice; it counts once")
        else:
            notes.append(
                f"{run.folder.name} has the settings and the seed of {twin.folder.name}; its episodes are "
                "the same and do not count again"
            )
    members = [sorted(group, key=lambda run: _by_seed(run.seed)) for group in groups.values()]
    labels = _labels([group[0] for group in members])
    return [
        Setting(label, tuple(replace(run, setting=label) for run in group))
        for label, group in zip(labels, members, strict=True)
    ], notes


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the names of settings in which runs differ, except seeds and folders."""
    keys = dict.fromkeys(key for run in runs for key in _settings(run))
    return [key for key in keys if len({_text(_settings(run).get(key)) for run in runs}) > 1]


def _settings(run: RunRecord) -> dict[str, Any]:
    """Returns the settings of a run; without config.yaml those in its summary."""
    known = {key: value for key, value in run.config.items() if key.split(".")[0] not in _BESIDE}
    return {"env.task": run.task, "recipe": run.recipe, **known}


def _key(run: RunRecord) -> tuple[Any, ...]:
    return tuple(sorted((key, _text(value)) for key, value in _settings(run).items()))


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Returns a short name for each setting: task and recipe if they differ, and settings that differ."""
    if len(runs) == 1:
        return [""]
    parts = {key: getattr(run, key) for key in ("task", "recipe") for run in runs[:1]}
    named = [key for key in parts if len({getattr(run, key) for run in runs}) > 1]
    heads = [", ".join(str(getattr(run, key)) for key in named) for run in runs]
    labels: list[str] = []
    for run, head in zip(runs, heads, strict=True):
        alike = [other for other, its in zip(runs, heads, strict=True) if its == head]
        keys = differing(alike)
        words = [f"{key}={_text(_settings(run).get(key))}" for key in keys[:_MAX_NAMED]]
        words += [f"and {len(keys) - _MAX_NAMED} more"] if len(keys) > _MAX_NAMED else []
        labels.append(", ".join([*([head] if head else []), *words]))
    is_unique = len(set(labels)) == len(labels)
    if not is_unique:  # more settings differ than the label names
        labels = [f"{label} ({run.folder.name})" for label, run in zip(labels, runs, strict=True)]
    return labels


def _by_seed(seed: Any) -> tuple[bool, float, str]:
    """Returns a sort key: numbers first, in their order, then other seeds."""
    is_number = isinstance(seed, int | float)
    return (not is_number, float(seed) if is_number else 0.0, str(seed))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
