"""Hooks that every loop has: show progress, write metrics, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from robot_rl.rollout.sources import Source
from robot_rl.train.config import CheckpointConfig
from robot_rl.train.loop import Hook, Run
from robot_rl.train.schedule import Counters, Every
from robot_rl.train.session import RunSession


def checkpoint_hooks(
    session: RunSession, run: Run, phase: str, config: CheckpointConfig, read: Callable[[Counters], float]
) -> list[Hook]:
    """Returns the hooks that save: by time, and by steps if asked for."""

    def save(_: Counters) -> None:
        session.save(phase, run)

    # The clock of the first is the run's own, which stands still while the run is dead.
    by_time = Every(config.every_s, start=session.elapsed_s)
    return [
        Hook("checkpoint time", by_time, lambda _: session.elapsed_s, save),
        Hook("checkpoint steps", Every(config.every_steps), read, save),
    ]


def write_metrics(
    session: RunSession,
    run: Run,
    phase: str,
    sources: Mapping[str, Source] | None = None,
    more: Mapping[str, float] | None = None,
) -> None:
    """Writes what the learner and the sources, by name, reported since the last row, and `more`."""
    row: dict[str, float] = {}
    for learner in run.learners:
        group = learner.name or phase
        means = learner.meter.take().items()
        row |= {name if "/" in name and not learner.name else f"{group}/{name}": mean for name, mean in means}
    for number, (name, source) in enumerate((sources or {}).items()):
        group = group_of("collect", name)
        row |= {f"{group}/{metric}": value for metric, value in source.episodes.take().items()}
        row[f"{group}/nan_resets"] = source.episodes.nan_resets
        if source.episodes.overflows is not None:
            row[f"{group}/overflows"] = source.episodes.overflows
        if name:
            row[f"{group}/env_steps"] = run.counters.of_source(number)
    session.write(phase, row | dict(more or {}))


def group_of(group: str, source: str) -> str:
    """Returns the group of a source's metrics: `collect`, or `collect.panda` where there are several."""
    return f"{group}.{source}" if source else group


def show_progress(
    session: RunSession, done: int, updates: int | None = None, note: str | None = None
) -> None:
    """Updates the progress display of the present phase."""
    if session.progress is not None:
        session.progress.update(done, updates=updates, note=note)


def updates(counters: Counters) -> float:
    """Reads the clock that counts learner updates."""
    return counters.updates


def env_steps(counters: Counters) -> float:
    """Reads the clock that counts control steps."""
    return counters.env_steps
