"""Summary of a store or a dataset: its episodes, sources and losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.core.files import listed
from robot_rl.data.episode import RESET_ROW, SOURCES, Array, EpisodeSource
from robot_rl.data.store.journal import Problem
from robot_rl.data.store.lock import is_being_written
from robot_rl.data.store.reader import StoreReader, open_source


@dataclass(kw_only=True)
class Group:
    """Steps that one source made on one device."""

    source: str
    device: str
    episodes: int = 0
    """Episodes with such steps."""
    steps: int = 0
    minutes: float = 0.0
    successes: int = 0
    """Episodes that reached success at some step."""
    first_version: int = 0
    last_version: int = 0
    """Versions of the policies that acted."""


@dataclass(kw_only=True)
class StartGroup:
    """Episodes that began in starts of one class."""

    name: str
    episodes: int = 0
    successes: int = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A store or dataset in numbers."""

    path: str
    kind: str
    """store or dataset"""
    task: str
    robot: str
    control_hz: float
    episodes: int
    unfinished: int
    steps: int
    minutes: float
    success: float | None
    """Share of the episodes that reached success; None where success was not recorded."""
    sealed_episodes: int
    journal_episodes: int
    num_bytes: int
    journal_bytes: int
    groups: tuple[Group, ...]
    lost: tuple[Problem, ...]
    features: dict[str, tuple[int, ...]]
    """Observation -> shape; cameras are those that end in .rgb or .depth."""
    action: int
    """Elements of an action."""
    instructions: tuple[str, ...]
    """In the order in which they first appear."""
    starts: tuple[StartGroup, ...]
    """Empty where no start was recorded, and of stores that do not name the classes."""

    @property
    def lost_steps(self) -> int:
        """Steps that are known to be lost."""
        return sum(problem.steps or 0 for problem in self.lost)


def summarize(path: str | Path, opened: EpisodeSource | None = None) -> Summary:
    """Reads the numbers of all episodes, no pictures; `opened` is the source if it is open already."""
    folder, source = Path(path), open_source(path) if opened is None else opened
    starts = source.layout.starts if isinstance(source, StoreReader) else None
    groups: dict[tuple[str, str], Group] = {}
    unfinished = successes = 0
    instructions: dict[str, None] = {}
    started = {} if starts is None else {name: StartGroup(name=name) for name in starts.classes}
    for device, instruction, columns in _episodes(source):
        instructions[instruction] = None
        reached = bool(columns["success"].any())
        if starts is not None:
            begun = started[starts.of(columns[f"obs.{RESET_ROW}"])[0]]
            begun.episodes += 1
            begun.successes += reached
        successes += reached
        unfinished += not (columns["terminated"][-1] or columns["truncated"][-1])
        for number in np.unique(columns["source"]):
            of_source = columns["source"] == number
            versions = columns["policy_version"][of_source]
            name = SOURCES[number]
            fresh = Group(source=name, device=device, first_version=int(versions.min()))
            group = groups.setdefault((name, device), fresh)
            group.episodes += 1
            group.steps += int(of_source.sum())
            group.minutes = group.steps / source.meta.control_hz / 60
            group.successes += reached
            group.first_version = min(group.first_version, int(versions.min()))
            group.last_version = max(group.last_version, int(versions.max()))
    steps = int(source.lengths().sum())
    is_store = isinstance(source, StoreReader)
    in_journal = sum(source.sealed(i) is None for i in range(len(source))) if is_store else 0
    return Summary(
        path=str(folder),
        kind="store" if is_store else "dataset",
        task=source.meta.task,
        robot=source.meta.robot,
        control_hz=source.meta.control_hz,
        episodes=len(source),
        unfinished=unfinished,
        steps=steps,
        minutes=steps / source.meta.control_hz / 60,
        success=successes / max(1, len(source)) if _is_judged(source) else None,
        sealed_episodes=len(source) - in_journal,
        journal_episodes=in_journal,
        num_bytes=_num_bytes(folder),
        journal_bytes=_num_bytes(folder / "journal"),
        groups=tuple(groups.values()),
        lost=_lost(source) if is_store else (),
        features={key: tuple(feature.shape) for key, feature in source.features.items()},
        action=len(source.meta.action_names),
        instructions=tuple(instructions),
        starts=tuple(group for group in started.values() if group.episodes),
    )


def _episodes(source: EpisodeSource) -> Iterator[tuple[str, str, dict[str, Array]]]:
    """Yields device, instruction and the columns that a summary needs, of every episode."""
    names = ("success", "terminated", "truncated", "source", "policy_version")
    seen = [RESET_ROW] if RESET_ROW in source.features else []
    for i in range(len(source)):
        if isinstance(source, StoreReader) and source.sealed(i) is None:
            words = source.words(i)
            columns = source.columns([*names, *(f"obs.{key}" for key in seen)], [i])
            yield words["device"], words["instruction"], columns
        else:
            episode = source.read(i)
            columns = {name: getattr(episode, name) for name in names}
            columns |= {f"obs.{key}": episode.obs[key] for key in seen}
            yield episode.device, episode.meta.instruction, columns


def _is_judged(source: EpisodeSource) -> bool:
    """Returns whether success was recorded; most datasets of others lack its column."""
    info: dict[str, Any] | None = getattr(source, "info", None)
    return info is None or "next.success" in info["features"]


def _lost(store: StoreReader) -> tuple[Problem, ...]:
    """Returns all losses; an unfinished write is none while a process writes."""
    live = is_being_written(store.folder)
    now = [problem for problem in store.problems() if not (live and problem.kind == "torn")]
    return (*store.lost(), *now)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in listed(folder) if path.is_file())
