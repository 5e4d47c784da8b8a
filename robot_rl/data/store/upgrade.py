"""Makes a dataset into a store; one of an older format is written again, and the original is kept.

Format 1 is older than stores: a dataset with one file for all episodes, without sources, policy versions
and stamps. Sealing cannot append to it.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import exchange_folder, make_folder, sync_folder
from robot_rl.core.refusal import refusing
from robot_rl.data.store.layout import is_store

logger = logging.getLogger(__name__)

_OWN = "meta/robot_rl.json"


@refusing(DatasetError, kept="The original is whole.")
def upgrade(folder: Path) -> Path | None:
    """Brings a dataset to the present format; returns the path of the original, None if unchanged.

    The upgraded folder takes the place of the original in one step: a crash leaves one or the other.

    Raises:
        DatasetError: robot_rl did not write the dataset, or its format is no number.
    """
    if is_store(folder) or not (folder / "meta/info.json").is_file():
        return None
    from robot_rl.data.lerobot.edit import merge  # only where there is a dataset
    from robot_rl.data.lerobot.layout import FORMAT
    from robot_rl.data.lerobot.reader import Dataset

    folder = folder.resolve()
    found = _format(folder)
    if found is None:
        raise DatasetError(
            f"{folder}: robot_rl did not write this dataset, so it cannot be recorded into. Copy it first: "
            f"`robot-rl replay merge {folder} out=<new folder> images=video`, then record into that."
        )
    fresh = folder.with_name(f".upgrading-{folder.name}")
    original = _free(folder, found)
    left = _format(fresh)
    if left is not None and left < FORMAT <= found:  # a crash after the exchange: it is the original
        original = _free(folder, left)
        fresh.rename(original)
    shutil.rmtree(fresh, ignore_errors=True)
    if found >= FORMAT:
        sync_folder(folder.parent)  # an upgrade that failed at its end may have renamed
        return None
    merge([Dataset(folder)], fresh, images="png")  # as format 1 had them: without loss
    make_folder(fresh / "journal")
    lock = folder / "journal/writer.lock"
    if lock.exists():
        os.link(lock, fresh / "journal/writer.lock")  # the process that holds it holds it there as well
    exchange_folder(fresh, folder)
    fresh.rename(original)
    sync_folder(original.parent)
    shutil.rmtree(original / "journal", ignore_errors=True)
    logger.warning("%s: upgraded from format %d to %d; the original is %s", folder, found, FORMAT, original)
    return original


def _format(folder: Path) -> int | None:
    """Returns the format of a dataset that robot_rl wrote, None of another."""
    if not (folder / _OWN).is_file():
        return None
    from robot_rl.data.lerobot.checksums import Checksums  # only where there is a dataset

    found = Checksums(folder).json(_OWN).get("format", 1)
    if type(found) is not int:
        raise DatasetError(
            f"{folder / _OWN}: format is {found!r}, allowed: a whole number. Restore the file from a copy."
        )
    return found


def _free(folder: Path, number: int) -> Path:
    name = f"{folder.name}.format-{number}"
    names = [name, *(f"{name}-{copy}" for copy in range(2, 1000))]
    return next(path for path in map(folder.with_name, names) if not path.exists())
