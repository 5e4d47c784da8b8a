"""One process at a time: a lock that ends with the process that holds it, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

_TRIES, _WAIT_S = 5, 0.005


class HeldError(Exception):
    """Another process has the lock; the text says which. Callers say what to do about it."""


class ProcessLock:
    """A file that one process holds, until `release` or its end."""

    def __init__(self, path: Path) -> None:
        """Takes the lock.

        Raises:
            HeldError: names the process and host that have it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _take(self._fd):
            os.close(self._fd)
            raise HeldError(_describe(path))
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, holder, 0)

    def release(self) -> None:
        """Lets another process in."""
        if self._fd >= 0:
            os.close(self._fd)  # the lock goes with the last descriptor of it
            self._fd = -1


def is_held(path: Path) -> bool:
    """Returns whether some process holds the lock now."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
    """Takes the lock, unless it is held for longer than somebody needs to ask whether it is."""
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
