"""The list of finished segments in store.json: their lengths, those that are missing, and known losses.

The list is behind the journal, never ahead of it: a segment is listed after the disk has all of it, and
taken off the list before it is removed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DatasetError
from robot_rl.data.store.journal import Problem, segment_numbers, segment_path
from robot_rl.data.store.layout import STORE_JSON, change_store_json, read_store_json

_KEY = "segments"


def note_finished(folder: Path, num_bytes: Mapping[int, int]) -> None:
    """Adds number -> bytes of segments that still exist to the list, or replaces their length."""

    def added(content: dict[str, Any]) -> dict[str, Any]:
        there = {n: size for n, size in num_bytes.items() if segment_path(folder / "journal", n).is_file()}
        return _with(content, _finished(content) | there)

    if num_bytes:
        change_store_json(folder, added)


def note_all(folder: Path) -> None:
    """Adds the segments that a crash or an earlier version left off the list; no process writes to them."""
    journal, listed = folder / "journal", _finished(read_store_json(folder))
    left: dict[int, int] = {}
    for number in segment_numbers(journal):
        if number not in listed:
            with segment_path(journal, number).open("rb") as file:
                os.fsync(file.fileno())  # the list may not be ahead of the disk
                left[number] = os.fstat(file.fileno()).st_size
    note_finished(folder, left)


def forget_finished(folder: Path, numbers: Iterable[int]) -> None:
    """Takes segments off the list, before they are removed or written again."""
    gone = set(numbers)
    if gone & _finished(read_store_json(folder)).keys():
        change_store_json(
            folder,
            lambda content: _with(content, {n: s for n, s in _finished(content).items() if n not in gone}),
        )


def last_finished(folder: Path) -> int:
    """Returns the highest number on the list, 0 without any."""
    return max(_finished(read_store_json(folder)), default=0)


def missing_segments(folder: Path, torn: Collection[int] = ()) -> list[Problem]:
    """Returns the finished segments that are gone or shorter than they were, but those in `torn`.

    `torn` are segments whose end is known to be unfinished.
    """
    # A writer may have trimmed them just after the first look.
    return _missing(folder, torn) and _missing(folder, torn)


def _missing(folder: Path, torn: Collection[int]) -> list[Problem]:
    found: list[Problem] = []
    listed = _finished(read_store_json(folder))
    for number, was in sorted((number, was) for number, was in listed.items() if number not in torn):
        path = segment_path(folder / "journal", number)
        name = f"journal/{path.name}"
        if not path.is_file():
            detail = "The segment was finished, and is not there."
            found.append(Problem(kind="missing", where=name, num_bytes=was, steps=None, detail=detail))
        elif (now := path.stat().st_size) < was:
            where, detail = f"{name}, byte {now}", "The end of a finished segment is gone."
            found.append(Problem(kind="missing", where=where, num_bytes=was - now, steps=None, detail=detail))
    return found


def _finished(content: Mapping[str, Any]) -> dict[int, int]:
    """Returns number -> bytes; stores of earlier versions have no list."""
    return {int(number): int(num_bytes) for number, num_bytes in content.get(_KEY, {}).items()}


def _with(content: Mapping[str, Any], finished: Mapping[int, int]) -> dict[str, Any]:
    return {**content, _KEY: {f"{number:06d}": finished[number] for number in sorted(finished)}}


def known_losses(folder: Path) -> list[Problem]:
    """Returns the losses that store.json lists; raises `DatasetError` if it is damaged."""
    try:
        return [Problem(**entry) for entry in read_store_json(folder).get("lost", [])]
    except TypeError as error:  # written before there was a checksum
        raise DatasetError(
            f"{folder / STORE_JSON}: damaged: {error}. Take the entry out of its list 'lost'."
        ) from error
