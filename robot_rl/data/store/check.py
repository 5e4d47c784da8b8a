"""Verifies and repairs a store: every checksum and every gap of its journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import make_folder, sync_tree
from robot_rl.core.refusal import refusing
from robot_rl.data.store.finished import forget_finished, known_losses, missing_segments, note_all
from robot_rl.data.store.index import JournalIndex
from robot_rl.data.store.journal import Kind, Problem, Segment, segment_numbers
from robot_rl.data.store.layout import STORE_JSON, Layout, read_layout, read_store_json, write_store_json
from robot_rl.data.store.lock import WriterLock, is_being_written
from robot_rl.data.store.recovery import cut_torn, note_lost, take_out


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """What `verify` found."""

    episodes: int
    """In the journal; each part of an episode with gaps counts."""
    steps: int
    pictures: int
    records: int
    num_bytes: int
    """Of the journal."""
    problems: tuple[Problem, ...]
    """Damage that is not repaired."""
    lost: tuple[Problem, ...]
    """Known losses of earlier crashes and repairs; nothing is wrong now."""
    is_being_written: bool


@refusing(DatasetError)
def verify(folder: str | Path) -> StoreReport:
    """Reads every record of the journal and compares it with its checksum; changes nothing.

    While a process writes to the store, an unfinished write at its end is no problem.

    Raises:
        DatasetError: no store, or one of a later format.
    """
    folder = Path(folder)
    problems: list[Problem] = []
    lost: list[Problem] = []
    if not (folder / STORE_JSON).is_file() and not segment_numbers(folder / "journal"):
        read_store_json(folder)  # raises: it is missing
    live = is_being_written(folder)
    try:
        layout = read_layout(folder)
        lost = known_losses(folder)
    except DatasetError as error:
        if "has format" in str(error):
            raise
        layout = None
        problems.append(Problem(kind="damaged", where=STORE_JSON, detail=str(error)))
    index = JournalIndex(folder, check_all=True)
    problems += missing_segments(folder, index.torn) if layout is not None else []
    problems += index.damage
    newest = max(index.segments, default=-1)
    problems += [torn for number, torn in sorted(index.torn.items()) if not (live and number == newest)]
    problems += _gaps(index, layout, lost)
    return StoreReport(
        episodes=sum(len(episode.parts()) for episode in index.episodes.values()),
        steps=sum(record.c for episode in index.episodes.values() for record in episode.steps),
        pictures=sum(len(episode.pictures) for episode in index.episodes.values()),
        records=index.num_records,
        num_bytes=sum(segment.size() for segment in index.segments.values()),
        problems=tuple(problems),
        lost=tuple(lost),
        is_being_written=live,
    )


@refusing(DatasetError, kept="What was whole is whole.")
def repair(folder: str | Path) -> tuple[Problem, ...]:
    """Takes damage out of the journal, lists in store.json what was lost with it, and returns that.

    Unfinished writes are cut off. A segment that is damaged inside is written again without the
    damaged records; the original is kept in `journal/damaged`.

    Raises:
        DatasetError: a writer has the store, or neither store.json nor a segment holds its layout.
    """
    folder = Path(folder)
    if not (folder / STORE_JSON).is_file() and not segment_numbers(folder / "journal"):
        read_store_json(folder)
    lock = WriterLock(folder)
    try:
        _restore_store_json(folder)
        index = JournalIndex(folder, check_all=True)
        missing = missing_segments(folder, index.torn)
        repaired = [*index.damage, *index.torn.values(), *missing]
        note_lost(folder, repaired)
        forget_finished(folder, _segments(missing))
        cut_torn(folder, index)
        places = {problem.where for problem in index.damage}
        for number in _segments(index.damage):
            take_out(folder, number, places)
        layout = read_layout(folder)
        gaps = _gaps(JournalIndex(folder), layout, known_losses(folder))
        note_lost(folder, gaps)
        note_all(folder)
        sync_tree(folder / "journal")  # an earlier repair may have failed to
        return (*repaired, *gaps)
    finally:
        lock.release()


def _segments(problems: Iterable[Problem]) -> set[int]:
    return {int(problem.where[len("journal/") :][:6]) for problem in problems}


def _gaps(index: JournalIndex, layout: Layout | None, noted: Sequence[Problem]) -> list[Problem]:
    """Returns gaps that are not noted: missing steps, and episodes without any picture of a camera."""
    gaps = index.gaps(noted)
    known = {problem.where for problem in noted}
    cameras = () if layout is None else layout.cameras
    for episode in index.episodes.values():
        seen = {record.d for record in episode.pictures}
        for number, camera in enumerate(cameras):
            if number not in seen and episode.steps:
                where, detail = f"episode {episode.episode}, {camera}", "No picture is left."
                gaps.append(Problem(kind="gap", where=where, episode=episode.episode, detail=detail))
    return [gap for gap in gaps if gap.first is not None or gap.where not in known]


def _restore_store_json(folder: Path) -> None:
    """Writes meta/store.json again from the head of a segment if it cannot be read."""
    try:
        read_layout(folder)
        known_losses(folder)
    except DatasetError as error:
        if "has format" in str(error):
            raise
        for number in segment_numbers(folder / "journal"):
            segment = Segment(folder / "journal", number)
            head = segment.header(0)
            content = segment.payload(head) if head is not None and head.kind == Kind.SEGMENT else None
            if content is not None:
                make_folder(folder / "meta")
                write_store_json(folder, {**json.loads(content), "lost": []})
                detail = "Written again from the journal."
                note_lost(folder, [Problem(kind="damaged", where=STORE_JSON, detail=detail)])
                return
        raise
