"""What a writer does before it appends: makes the store, or mends what a crash left of it."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import make_folder, sync_folder
from robot_rl.data.fit import feature_misfit, misfit
from robot_rl.data.store.finished import (
    forget_finished,
    known_losses,
    last_finished,
    missing_segments,
    note_all,
)
from robot_rl.data.store.index import JournalIndex
from robot_rl.data.store.journal import HEADER, Problem, Record, Segment, segment_numbers, segment_path
from robot_rl.data.store.layout import (
    STORE_JSON,
    Layout,
    change_store_json,
    is_store,
    read_layout,
    write_store_json,
)
from robot_rl.data.store.sealed import sealed_episodes
from robot_rl.data.store.upgrade import upgrade

logger = logging.getLogger(__name__)

DAMAGED = "journal/damaged"
"""Where the segments are kept that were written again without their damage."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Where to go on."""

    lost: tuple[Problem, ...]
    next_segment: int
    next_episode: int
    next_picture: int


def recover(folder: Path, layout: Layout) -> Recovered:
    """Makes the store if there is none, takes out what a crash left unfinished, and says where to go on.

    Raises:
        DatasetError: the store is of another robot, task or layout.
    """
    if is_store(folder):
        sync_folder(folder / "meta")  # whoever made it may have failed to
        sync_folder(folder)
        check_layout(folder, read_layout(folder), layout)
    else:
        if segment_numbers(folder / "journal"):
            raise DatasetError(
                f"{folder}: the journal is there, {STORE_JSON} is not. "
                "`robot-rl replay repair` writes it again from the journal."
            )
        upgrade(folder)
        if (folder / "meta/info.json").is_file():
            from robot_rl.data.lerobot.reader import Dataset  # only where there is a dataset

            dataset = Dataset(folder)
            check_layout(folder, Layout(meta=dataset.meta, features=dataset.features), layout)
        make_folder(folder / "meta")
        write_store_json(folder, layout.to_json() | {"lost": []})
    lost = mend(folder)
    for problem in (*lost, *missing_segments(folder)):  # `repair` notes the latter
        logger.warning("store %s: %s", folder, problem)
    note_all(folder)
    index = JournalIndex(folder)
    known = [*index.episodes, *sealed_episodes(folder)]
    pictures = (record.b for episode in index.episodes.values() for record in episode.pictures)
    return Recovered(
        lost=lost,
        next_segment=max(last_finished(folder), *segment_numbers(folder / "journal"), 0) + 1,
        next_episode=max(known, default=-1) + 1,
        next_picture=max(pictures, default=-1) + 1,
    )


def check_layout(folder: Path, found: Layout, layout: Layout) -> None:
    """Verifies that what is there is of this robot, task and layout.

    Raises:
        DatasetError: the first thing that differs.
    """
    keys = sorted({*found.features, *layout.features})
    problem = misfit(found.meta, layout.meta, also=("task", "robot"))
    problem = problem or feature_misfit(found.features, layout.features, keys)
    if problem is not None:
        raise DatasetError(f"{folder}: the store does not fit: {problem}. Record into another folder.")


def mend(folder: Path) -> tuple[Problem, ...]:
    """Takes out what a crash left of the last write; what was lost with it is noted in store.json.

    An unfinished end is cut off. Where records are damaged before the end, the segment is written again
    without them, and the episodes that they were of can be read. Older damage is left to `repair`.

    Returns: what was lost now.
    """
    index = JournalIndex(folder)
    lost = [*index.hurt, *(index.torn[number] for number in sorted(index.torn))]
    if not lost:
        return ()
    note_lost(folder, lost)
    cut_torn(folder, index)
    if index.hurt:
        number = max(index.segments)
        take_out(folder, number, {problem.where for problem in index.hurt})
        mended = JournalIndex(folder)
        for gap in mended.gaps(known_losses(folder)):
            episode = mended.episodes[gap.episode if gap.episode is not None else -1]
            after = next((r for r in episode.steps if gap.first is not None and r.b > gap.first), episode.end)
            if after is not None and (after.segment, after.flush) == (number, index.last_flush):
                lost.append(gap)
        note_lost(folder, lost)
    return tuple(lost)


def cut_torn(folder: Path, index: JournalIndex) -> None:
    """Cuts unfinished writes off the ends of segments; the caller has noted what is lost."""
    forget_finished(folder, index.torn)
    for number in index.torn:
        path = segment_path(index.journal, number)
        handle = os.open(path, os.O_RDWR)
        try:
            os.ftruncate(handle, index.segments[number].scanned)
            os.fsync(handle)
        finally:
            os.close(handle)
    index.torn.clear()


def take_out(folder: Path, number: int, places: Collection[str]) -> None:
    """Replaces a segment by its good records, but for those at `places`; the original is kept aside."""
    forget_finished(folder, [number])
    journal, kept = folder / "journal", folder / DAMAGED
    path, fresh = segment_path(journal, number), journal / f".{number:06d}.new"
    segment = Segment(journal, number)
    with fresh.open("wb") as file:
        for found in segment.scan(0):
            if not isinstance(found, Record) or f"{segment.name}, byte {found.offset}" in places:
                continue
            if segment.payload(found) is not None:
                file.write(os.pread(segment.fd, HEADER.size + found.length, found.offset))
        file.flush()
        os.fsync(file.fileno())
    kept.mkdir(exist_ok=True)
    original = kept / path.name
    for copy in range(1, 1000):
        if not original.exists():
            break
        original = kept / f"{path.stem}-{copy}.log"
    os.link(path, original)
    fresh.replace(path)
    sync_folder(kept)
    sync_folder(journal)


def note_lost(folder: Path, problems: Iterable[Problem]) -> None:
    """Adds to the losses that store.json lists; one that it has already is not listed twice."""
    entries = [dataclasses.asdict(problem) for problem in problems]

    def add(content: dict[str, Any]) -> dict[str, Any]:
        lost: list[dict[str, Any]] = content.get("lost", [])
        return content | {"lost": lost + [entry for entry in entries if entry not in lost]}

    change_store_json(folder, add)
