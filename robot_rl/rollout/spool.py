"""Numbered files in a folder: what one process leaves there, another takes in order and removes.

A file has its name once it is whole. What was put outlives both processes; a power cut may take the newest,
which are not flushed: no arm waits for a disk.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from robot_rl.core.errors import StorageError

_TAKEN = "taken"
"""Holds the number up to which all was taken, so that numbers go on after all files are gone."""


class Spool:
    """One end of the folder; numbers count from 1."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, or goes on with what lies there.

        Raises:
            OSError: it cannot be made or read.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        numbers = self._numbers()
        self.taken = min(numbers, default=1) - 1
        """Up to which number all was taken, as far as this end knows."""
        with contextlib.suppress(OSError, ValueError):  # it is missing, or a power cut took it
            self.taken = max(self.taken, int((folder / _TAKEN).read_text()))
        self.newest = max([self.taken, *numbers])
        """The largest number that was put, as far as this end knows."""

    def put(self, octets: bytes) -> int:
        """Adds a file; returns its number.

        Raises:
            StorageError: the disk is full, or the folder is gone.
        """
        number = self.newest + 1
        try:
            self._write(f"{number:012d}", octets)
        except OSError as error:
            raise StorageError(f"{self._folder}: {error.strerror}. Free the disk; the arm rests.") from error
        self.newest = number
        return number

    def read(self, number: int) -> bytes | None:
        """Returns a file; None if it is not there, or a power cut left nothing of it."""
        try:
            return (self._folder / f"{number:012d}").read_bytes() or None
        except FileNotFoundError:
            return None

    def take(self, upto: int) -> None:
        """Removes the files up to a number, which the other end has for good."""
        if upto <= self.taken:
            return
        for number in self._numbers():
            if number <= upto:
                (self._folder / f"{number:012d}").unlink(missing_ok=True)
        self.taken, self.newest = upto, max(self.newest, upto)
        self._write(_TAKEN, str(upto).encode())  # last: on a full disk there is room now

    def _numbers(self) -> list[int]:
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]

    def _write(self, name: str, octets: bytes) -> None:
        early = self._folder / f"{name}~"
        early.write_bytes(octets)
        os.replace(early, self._folder / name)
