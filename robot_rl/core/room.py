"""Checks that a place can be written to, before hours of work."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from robot_rl.core.errors import StorageError
from robot_rl.core.refusal import refusals

MIN_FREE_BYTES = 16 * 2**20
"""Less than that is a full disk: the smallest dataset or report would not fit."""


def check_room(path: Path, *, at: str) -> None:
    """Tries to write at `path`, or in the nearest folder above it that exists; leaves no file behind.

    Args:
        path: a file or a folder that is to be made.
        at: the setting that named it, which begins the message.

    Raises:
        StorageError: nothing can be written there, or the disk is full.
    """
    if any(above.name == ".." and not above.exists() for above in (path, *path.parents)):
        raise StorageError(f"{at}: {str(path)!r} goes up from a folder that is not there. Leave '..' out.")
    with refusals(StorageError, f"{at}: {str(path)!r} cannot be written"):
        path.exists()  # refuses a name that is too long
        there = next(folder for folder in path.absolute().parents if folder.exists())
        with tempfile.NamedTemporaryFile(dir=there, prefix=".probe-") as probe:
            probe.write(bytes(4096))
            probe.flush()
        free = shutil.disk_usage(there).free
    if free < MIN_FREE_BYTES:
        raise StorageError(
            f"{at}: {free / 2**20:.1f} MB are free for {str(path)!r}, allowed: "
            f"{MIN_FREE_BYTES / 2**20:.0f} or more. Make room, or write elsewhere."
        )
