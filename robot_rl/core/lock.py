"""One process at a time: a lock that ends with the process that holds it, however it ends.

A process that is stopped (SIGSTOP) or hangs keeps its locks, as it still uses what they guard.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

NOTE_BYTES = 512
"""The file begins with who holds it, filled up with blanks; the rest belongs to the caller."""
_NOTE_LETTERS = 200
_TRIES, _WAIT_S = 5, 0.005
_PLAIN = os.O_RDWR | os.O_CLOEXEC
_CAREFUL = _PLAIN | os.O_NOFOLLOW | os.O_NONBLOCK


class HeldError(Exception):
    """Another process has the lock; the text says which. Callers say what to do about it."""


class ProcessLock:
    """A file that one process holds, until `release` or its end."""

    def __init__(self, path: Path, *, note: str = "", public: bool = False) -> None:
        """Takes the lock.

        Args:
            path: the file; it is made if it is not there.
            note: shown to others with the process and host of the holder.
            public: the folder belongs to all users of the machine. All of them may take the lock then,
                and only a plain file with one name is opened, never what a link leads to.

        Raises:
            HeldError: names the process and host that have it.
            OSError: the file cannot be made or opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _taken(path, public)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "note": note[:_NOTE_LETTERS]}
        os.pwrite(self._fd, json.dumps(holder).encode()[:NOTE_BYTES].ljust(NOTE_BYTES), 0)

    def fileno(self) -> int:
        return self._fd

    def release(self) -> None:
        """Lets another process in."""
        if self._fd >= 0:
            os.close(self._fd)  # the lock goes with the last descriptor of it
            self._fd = -1


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float) -> Generator[None]:
    """Holds a lock while a file that others change, too, is read and written; waits its turn.

    Raises:
        HeldError: another process still has it after `wait_s`.
        OSError: the file cannot be made or opened.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            lock = ProcessLock(path)
            break
        except HeldError:
            if time.monotonic() >= until_s:
                raise
    try:
        yield
    finally:
        lock.release()


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


def _taken(path: Path, public: bool) -> int:
    """Returns the locked file that is at the path: a deleted file would lock nothing."""
    while True:
        handle = _open_public(path) if public else os.open(path, _PLAIN | os.O_CREAT, 0o644)
        if not _take(handle):
            os.close(handle)
            raise HeldError(_describe(path))
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return handle
        os.close(handle)


def _open_public(path: Path) -> int:
    """Opens a file in a folder that others write to, or makes one that they may open."""
    for last in (*[False] * _TRIES, True):
        try:
            # Without O_CREAT first: with it, Linux refuses another user's file (fs.protected_regular).
            handle = os.open(path, _CAREFUL)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                return _make_public(path)
        except PermissionError:  # made a moment ago, and not yet open to all
            if last:
                raise
            time.sleep(_WAIT_S)
        else:
            found = os.fstat(handle)
            if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
                return handle
            os.close(handle)
            raise OSError(f"{path} is no plain file, or has a second name")
    raise OSError(f"{path} comes and goes")


def _make_public(path: Path) -> int:
    handle = os.open(path, _CAREFUL | os.O_CREAT | os.O_EXCL, 0o666)
    os.fchmod(handle, 0o666)  # whatever the umask
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return handle


def _take(handle: int) -> bool:
    """Takes the lock; waits for as long as `is_held` of another process holds it."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_WAIT_S)
        else:
            return True
    return False


def _describe(path: Path) -> str:
    """Returns who holds the lock, if the file names it."""
    try:
        with path.open("rb") as file:
            holder: dict[str, Any] = json.loads(file.read(NOTE_BYTES))
        note = holder.get("note", "")
        return f"process {holder['pid']} on {holder['host']}" + (f" ({note})" if note else "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "another process"
