"""Going on exactly where a checkpoint stood: what was recorded after it is cut off.

A run that resumes from a checkpoint makes the steps after it once more. They must be in the store
once. So a checkpoint finishes a segment of the journal, and resuming removes the later ones and
goes on inside of the episodes that were open.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import sync_folder
from robot_rl.data.store.finished import forget_finished, last_finished
from robot_rl.data.store.journal import segment_numbers, segment_path
from robot_rl.data.store.sealed import sealed_episodes

logger = logging.getLogger(__name__)


def lengths_below(folder: Path, segment: int) -> list[tuple[int, int]]:
    """Returns the number and the bytes of every segment before one."""
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
    """Removes what a store's journal holds from a segment on.

    Args:
        folder: of the store, which nobody writes to meanwhile.
        segment: the first to go.
        lengths: what `lengths_below` said when the checkpoint was made; None if it did not say.
        next_episode: the first that began in it, or later.
        unfinished: episodes before that one which went on in it.

    Raises:
        DatasetError: some of it was sealed meanwhile, or what stays is not as it was; nothing was removed.
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
