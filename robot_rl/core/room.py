"""Whether something can be written, asked before hours of work are to go there."""

from __future__ import annotations

import shutil
from pathlib import Path

from robot_rl.core.errors import StorageError
from robot_rl.core.refusal import refusals

MIN_FREE_BYTES = 16 * 2**20
"""Less than that is a full disk: the smallest dataset or report would not fit."""


def check_room(path: Path, *, at: str) -> None:
    """Tries to make the folder that `path` goes into, and to write there; leaves nothing behind.

    Args:
        path: a file or a folder that is to be made.
        at: the setting that named it, which begins the message.

    Raises:
        StorageError: the folder cannot be made or written, or its disk is full.
    """
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    made: list[Path] = []
    with refusals(StorageError, f"{at}: {str(path)!r} cannot be written"):
        try:
            for folder in reversed(missing):
                folder.mkdir()
                made.append(folder)
            probe = path.absolute().with_name(f".probe-{path.name}")
            try:
                probe.write_bytes(bytes(4096))
            finally:
                probe.unlink(missing_ok=True)
            free = shutil.disk_usage(path.absolute().parent).free
        finally:
            for folder in reversed(made):
                folder.rmdir()
    if free < MIN_FREE_BYTES:
        raise StorageError(
            f"{at}: {free / 2**20:.1f} MB are free for {str(path)!r}, allowed: "
            f"{MIN_FREE_BYTES / 2**20:.0f} or more. Make room, or write elsewhere."
        )
