"""Sealing moves finished episodes from the journal into the LeRobotDataset of the same folder.

A crash at any point leaves every episode exactly once: the dataset lists the store episode of each of its
episodes, so none is sealed twice, and the journal loses only segments whose episodes the dataset has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import sync_folder
from robot_rl.core.refusal import refusing
from robot_rl.data.store.finished import forget_finished
from robot_rl.data.store.journal import Kind, Record, Segment, segment_numbers, segment_path
from robot_rl.data.store.lock import WriterLock
from robot_rl.data.store.reader import StoreReader
from robot_rl.data.store.recovery import clean_last_write
from robot_rl.data.store.sealed import read_info, sealed_episodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SealOptions:
    """How pictures are kept in the dataset."""

    images: Literal["video", "png"] | None = None
    """As video, or without further loss; None: as the dataset keeps them, video for a new one."""
    codec: Literal["h264", "av1"] = "h264"


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """The result of sealing."""

    episodes: int
    steps: int
    trimmed_segments: int
    refused: tuple[str, ...]
    """Reasons why episodes stayed in the journal."""


@refusing(DatasetError, kept="Every episode is in the journal or in the dataset.")
def seal(folder: str | Path, options: SealOptions | None = None) -> Sealed:
    """Seals every episode of a store, unfinished ones too; raises `DatasetError` if a writer has it."""
    folder = Path(folder)
    StoreReader(folder)  # before a lock file is made: raises if it is no store
    lock = WriterLock(folder)
    try:
        clean_last_write(folder)
        return seal_episodes(folder, options or SealOptions())
    finally:
        lock.release()


@refusing(DatasetError, kept="Every episode is in the journal or in the dataset.")
def seal_episodes(
    folder: Path,
    options: SealOptions,
    *,
    goes_on: Callable[[int], bool] = lambda episode: False,
    below: int | None = None,
) -> Sealed:
    """Seals the episodes of a store whose lock the caller holds.

    Args:
        options: how pictures are kept.
        goes_on: whether an episode is still being written, so that it stays.
        below: segments from this one on are still being written, and stay; None: none is.
    """
    from robot_rl.data.lerobot.writer import DatasetWriter  # a recorder that never seals does not load it

    source = StoreReader(folder)
    waiting = [
        i for i in range(len(source)) if source.sealed(i) is None and not goes_on(source.store_episode(i))
    ]
    refused: list[str] = []
    sealed = steps = 0
    if waiting:
        meta, features = source.layout.meta, source.features
        images = options.images or _images(folder)
        with DatasetWriter(folder, meta, features, images=images, codec=options.codec) as out:
            refused_numbers: set[int] = set()  # parts of one episode go in order, or not at all
            for i in waiting:
                number = source.store_episode(i)
                if number in refused_numbers:
                    continue
                try:
                    episode = source.read(i)
                    out.write(episode, store_episode=number)
                except DatasetError as error:
                    if isinstance(error.__cause__, OSError | MemoryError):  # the episode is not at fault
                        raise
                    refused_numbers.add(number)
                    refused.append(str(error))
                    continue
                sealed += 1
                steps += len(episode)
    trimmed = _trim(folder, goes_on, below)
    return Sealed(episodes=sealed, steps=steps, trimmed_segments=trimmed, refused=tuple(refused))


def _images(folder: Path) -> Literal["video", "png"]:
    features = {} if (info := read_info(folder)) is None else info["features"]
    return "png" if any(feature["dtype"] == "image" for feature in features.values()) else "video"


def _trim(folder: Path, goes_on: Callable[[int], bool], below: int | None) -> int:
    """Removes the segments that hold nothing but sealed episodes; returns how many."""
    journal = folder / "journal"
    done, source = sealed_episodes(folder), StoreReader(folder)
    kept = {source.store_episode(i) for i in range(len(source)) if source.sealed(i) is None}
    surplus: list[int] = []
    for number in segment_numbers(journal):
        if below is not None and number >= below:
            continue
        needed = False
        for found in Segment(journal, number).scan(0):
            if not isinstance(found, Record):
                needed = True  # damaged: `repair` lists the loss before it is removed
            elif found.kind != Kind.SEGMENT:
                needed |= (
                    found.a in kept or goes_on(found.a) or (found.a not in done and found.kind == Kind.STEPS)
                )
        if not needed:
            surplus.append(number)
    forget_finished(folder, surplus)
    for number in surplus:
        segment_path(journal, number).unlink()
    forget_finished(folder, surplus)  # a writer whose list was behind may have added some just now
    if surplus:
        sync_folder(journal)
    return len(surplus)
