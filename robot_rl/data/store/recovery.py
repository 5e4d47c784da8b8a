"""What a writer does before it appends: it makes a store, cleans one up after a crash, or cuts it back.

A run that resumes from a checkpoint makes the steps after it a second time, and the store must hold them
once. So a checkpoint finishes a segment of the journal; resuming removes the later segments and goes on
inside the episodes that were open.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import make_folder, sync_folder
from robot_rl.data.episode import Starts
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
"""Holds the originals of segments that were written again without their damage."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """What was lost, and the numbers with which the writer goes on."""

    lost: tuple[Problem, ...]
    next_segment: int
    next_episode: int
    next_picture: int
    starts: Starts | None
    """What the store says of the starts of its episodes."""


def recover(folder: Path, layout: Layout) -> Recovered:
    """Makes the store if there is none, and takes out what a crash left unfinished.

    Raises:
        DatasetError: the store is of another robot, task or layout.
    """
    if is_store(folder):
        sync_folder(folder / "meta")  # the process that made it may have failed to
        sync_folder(folder)
        found = read_layout(folder)
        check_layout(folder, found, layout)
        starts = found.starts  # None of a version that kept none: of which bank its rows are is unknown
    else:
        starts = layout.starts
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
            starts = None  # a dataset does not name the bank of its rows
        make_folder(folder / "meta")
        write_store_json(folder, dataclasses.replace(layout, starts=starts).to_json() | {"lost": []})
    lost = clean_last_write(folder)
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
        starts=starts,
    )


def check_layout(folder: Path, found: Layout, layout: Layout) -> None:
    """Refuses a store of another robot, task, layout or bank; `DatasetError` names the first difference."""
    keys = sorted({*found.features, *layout.features})
    problem = misfit(found.meta, layout.meta, also=("task", "robot"))
    problem = problem or feature_misfit(found.features, layout.features, keys)
    if problem is None and None not in (found.starts, layout.starts) and found.starts != layout.starts:
        problem = f"its episodes begin in starts of {found.starts}, not of {layout.starts}"
    if problem is not None:
        raise DatasetError(f"{folder}: the store does not fit: {problem}. Record into another folder.")


def clean_last_write(folder: Path) -> tuple[Problem, ...]:
    """Takes out what a crash left of the last write, lists the losses in store.json and returns them.

    An unfinished end is cut off. Where records before the end are damaged, the segment is written again
    without them, and their episodes can be read. Older damage is left to `repair`.
    """
    index = JournalIndex(folder)
    lost = [*index.damaged_last, *(index.torn[number] for number in sorted(index.torn))]
    if not lost:
        return ()
    note_lost(folder, lost)
    cut_torn(folder, index)
    if index.damaged_last:
        number = max(index.segments)
        take_out(folder, number, {problem.where for problem in index.damaged_last})
        cleaned = JournalIndex(folder)
        for gap in cleaned.gaps(known_losses(folder)):
            episode = cleaned.episodes[gap.episode if gap.episode is not None else -1]
            after = next((r for r in episode.steps if gap.first is not None and r.b > gap.first), episode.end)
            if after is not None and (after.segment, after.flush) == (number, index.last_flush):
                lost.append(gap)
        note_lost(folder, lost)
    return tuple(lost)


def cut_torn(folder: Path, index: JournalIndex) -> None:
    """Cuts unfinished writes off the ends of segments; the caller has listed the losses."""
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
    """Writes a segment again with its good records, but those at `places`; the original is kept."""
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
    names = [path.name, *(f"{path.stem}-{copy}.log" for copy in range(1, 1000))]
    os.link(path, next(kept / name for name in names if not (kept / name).exists()))
    fresh.replace(path)
    sync_folder(kept)
    sync_folder(journal)


def note_lost(folder: Path, problems: Iterable[Problem]) -> None:
    """Adds to the losses that store.json lists, each once."""
    entries = [dataclasses.asdict(problem) for problem in problems]

    def add(content: dict[str, Any]) -> dict[str, Any]:
        lost: list[dict[str, Any]] = content.get("lost", [])
        return content | {"lost": lost + [entry for entry in entries if entry not in lost]}

    change_store_json(folder, add)


def lengths_below(folder: Path, segment: int) -> list[tuple[int, int]]:
    """Returns the number and the bytes of every segment before this one."""
    journal = folder / "journal"
    return [(n, segment_path(journal, n).stat().st_size) for n in segment_numbers(journal) if n < segment]


def cut_off(
    folder: Path,
    *,
    segment: int,
    lengths: Sequence[Sequence[int]] | None,
    next_episode: int,
    unfinished: Collection[int],
) -> None:
    """Removes the journal from a segment on; the caller holds the store's lock.

    Args:
        segment: the first that is removed.
        lengths: of `lengths_below` when the checkpoint was made; None: unknown.
        next_episode: the first episode that began in the removed segments.
        unfinished: earlier episodes that went on in them.

    Raises:
        DatasetError: some of it was sealed meanwhile, or what stays has changed; nothing was removed.
    """
    there = dict(lengths_below(folder, segment))
    for number, length in there.items() if lengths is None else lengths:
        if there.get(number) != length:
            path = segment_path(folder / "journal", number)
            raise DatasetError(
                f"{path}: {there.get(number, 0)} bytes, there were {length} when the checkpoint was made "
                "that is resumed: the store was sealed, repaired or cut since. "
                "Bring the folder back as it was, or begin a new run; this one can be reused by its path."
            )
    sealed = [number for number in sealed_episodes(folder) if number >= next_episode or number in unfinished]
    if sealed:
        raise DatasetError(
            f"{folder}: episode {sealed[0]} was sealed after the checkpoint that is resumed, and would be "
            "recorded once more. Begin a new run; this one can be reused by its path."
        )
    journal = folder / "journal"
    later = [number for number in segment_numbers(journal) if number >= segment]
    forget_finished(folder, range(segment, max(last_finished(folder), segment) + 1))
    for number in reversed(later):
        segment_path(journal, number).unlink()
    sync_folder(journal)
    if later:
        logger.info("store %s: %d segments after the checkpoint were cut off", folder, len(later))
