"""Going on exactly where a checkpoint stood: what was recorded after it is cut off.

A run that resumes from a checkpoint makes the steps after it once more. They must be in the store
once. So a checkpoint finishes a segment of the journal, and resuming removes the later ones and
goes on inside of the episodes that were open.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import sync_folder
from robot_rl.data.store.journal import segment_numbers, segment_path
from robot_rl.data.store.sealed import sealed_episodes
from robot_rl.data.store.writer import StoreWriter

logger = logging.getLogger(__name__)

_LANES = ("episode", "step", "picture", "stamp")


def mark(writer: StoreWriter) -> dict[str, Any]:
    """Brings everything to the disk and returns where the writer stands, for `rewind`.

    Raises:
        DatasetError: the disk does not take it.
    """
    segment = writer._flushed(writer._flusher.rotate)
    open_episodes = writer._file._open.items()
    return {
        "segment": segment,
        "next_episode": writer._next_episode,
        "next_picture": writer._next_picture,
        "lanes": {name: getattr(writer, f"_lane_{name}").copy() for name in _LANES},
        "open": [(episode, lane, content.decode()) for episode, (lane, content) in open_episodes],
    }


def rewind(writer: StoreWriter, state: Mapping[str, Any]) -> None:
    """Takes a writer that was just opened back to where another one of the same store made its `mark`.

    Raises:
        DatasetError: what was recorded after the mark was sealed meanwhile.
    """
    folder = writer.folder
    begun = {int(episode): (int(lane), str(content).encode()) for episode, lane, content in state["open"]}
    next_episode = int(state["next_episode"])
    sealed = [number for number in sealed_episodes(folder) if number >= next_episode or number in begun]
    if sealed:
        raise DatasetError(
            f"{folder}: episode {sealed[0]} was sealed after the checkpoint that is resumed, and would be "
            "recorded once more. Begin a new run; this one can be reused by its path."
        )
    journal = folder / "journal"
    later = [number for number in segment_numbers(journal) if number >= int(state["segment"])]
    for number in reversed(later):
        segment_path(journal, number).unlink()
    sync_folder(journal)
    if later:
        logger.info("store %s: %d segments after the checkpoint were cut off", folder, len(later))
    writer._file._number = int(state["segment"]) - 1
    writer._file._open = begun
    writer._next_episode, writer._next_picture = next_episode, int(state["next_picture"])
    for name in _LANES:
        setattr(writer, f"_lane_{name}", np.array(state["lanes"][name], np.int64))
