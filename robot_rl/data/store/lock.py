"""The lock of a store: one writer, many readers; it ends with the process that holds it."""

from __future__ import annotations

from pathlib import Path

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import make_folder
from robot_rl.core.lock import HeldError, ProcessLock, is_held

_FILE = "journal/writer.lock"


class WriterLock:
    """The right to append to a store, until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Raises `DatasetError` if another writer has it; the message names its process and host."""
        make_folder((folder / _FILE).parent)
        try:
            self._lock = ProcessLock(folder / _FILE)
        except HeldError as holder:
            raise DatasetError(
                f"{folder}: {holder} is writing to this store, and a store has one writer. "
                "Wait until it is done, stop it, or record into another folder; reading is free."
            ) from holder

    def release(self) -> None:
        self._lock.release()


def is_being_written(folder: Path) -> bool:
    """Returns whether a process holds the lock now."""
    return is_held(folder / _FILE)
