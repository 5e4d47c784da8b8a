"""One writer per store, many readers: a lock that ends with the process that holds it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DatasetError

_FILE = "journal/writer.lock"
_TRIES, _WAIT_S = 5, 0.005


class WriterLock:
    """The right to append to a store, until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            DatasetError: another writer has it; the message names its process and host.
        """
        path = folder / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _take(self._fd):
            os.close(self._fd)
            raise DatasetError(
                f"{folder}: {_describe(path)} is writing to this store, and a store has one writer. "
                "Wait until it is done, stop it, or record into another folder; reading is free."
            )
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, holder, 0)

    def release(self) -> None:
        """Lets another writer in."""
        if self._fd >= 0:
            os.close(self._fd)  # the lock goes with the last descriptor of it
            self._fd = -1


def is_being_written(folder: Path) -> bool:
    """Returns whether some process holds the lock now."""
    try:
        handle = os.open(folder / _FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _take(handle: int) -> bool:
    """Takes the lock, unless it is held for longer than a reader needs to ask whether it is."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_WAIT_S)
        else:
            return True
    return False


def _describe(path: Path) -> str:
    """Returns who holds the lock, as far as the file says."""
    try:
        holder: dict[str, Any] = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
