"""metrics.jsonl, the record of a run, and TensorBoard's event files, a copy made from it.

A row is `{"step": control steps, "updates": learner updates of the phase, "phase": name,
"wall_s": training time, "<group>/<name>": number, ..., "checksum": of all before it}`. A number that is
not finite is written as null, because JSON has none, and read back as NaN. Rows without a checksum are of
an earlier version, and are read as they are.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from robot_rl.core.clock import Clock, MonotonicClock
from robot_rl.core.files import sync_folder, with_checksum, without_checksum, write_synced

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

logger = logging.getLogger(__name__)

Row = dict[str, Any]

FILE_NAME = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"


class MetricsWriter:
    """Appends rows to `<folder>/metrics.jsonl`.

    A written row survives the end of the process, even a kill. A power cut may lose the rows since the last
    `state_dict` (for a checkpoint) or `close`, which both wait for the disk.

    A resumed run opens the same folder: a torn last line is dropped, `wall_s` continues, and
    `load_state_dict` drops the rows after the checkpoint, so that no curve has a point twice. Damaged lines
    stay, for a person to look at.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = True, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        for problem in _problems(_read_lines(self._path, with_torn=True)):
            logger.warning("%s: %s", self._path, problem)
        lines = _read_lines(self._path)
        self._events = _EventCopy(folder / EVENTS_FOLDER) if tensorboard else None
        self._start(lines)

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def write(self, step: int, phase: str, metrics: Mapping[str, Any], *, updates: int = 0) -> None:
        """Appends one row; every value is one number (Python, numpy or a tensor)."""
        row: Row = {"step": int(step), "updates": int(updates), "phase": phase, "wall_s": self._wall_s()}
        for name, value in metrics.items():
            if "/" not in name:
                raise ValueError(f"metrics: got {name!r}, allowed is '<group>/<name>', such as 'eval/{name}'")
            row[name] = as_float(name, value)
        self._append(_line(row))
        self._num_rows += 1
        if self._events is not None:
            self._events.add(row)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the file, after all rows before it are on the disk.

        Phases without control steps need it to resume exactly.

        Raises:
            OSError: the disk refuses; the next call tries again.
        """
        self._sync()
        return {"rows": self._num_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Drops the rows that were written after `state_dict`."""
        lines, rows = _read_lines(self._path), int(state["rows"])
        ends = itertools.accumulate(line.num_rows for line in lines)
        kept = [line for line, end in zip(lines, ends, strict=True) if end <= rows]
        if len(kept) < len(lines):
            self._start(kept)
        if self._num_rows < rows:
            logger.warning("%s: %d rows at its end are gone", self._path, rows - self._num_rows)

    def close(self) -> None:
        if not self._file.closed:
            self._sync()
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, lines: list[_Line]) -> None:
        """Makes the file hold exactly `lines` and opens it to append."""
        self._rewrite(lines)
        rows = [line.row for line in lines if line.row is not None]
        self._before_s = float(rows[-1]["wall_s"]) if rows else 0.0
        self._opened_s = self._clock.now_s()
        if self._events is not None:
            self._events.rewrite(rows)

    def _rewrite(self, lines: list[_Line]) -> None:
        """Replaces the file; if that fails the old file stays as it is."""
        content, temporary = b"".join(line.content for line in lines), self._path.with_suffix(".tmp")
        write_synced(temporary, content)
        file = temporary.open("ab", buffering=0)
        try:
            os.replace(temporary, self._path)
        except BaseException:
            file.close()
            raise
        self._file.close()
        self._file, self._size, self._is_in_doubt = file, len(content), True
        self._num_rows = sum(line.num_rows for line in lines)
        sync_folder(self._path.parent)
        self._is_in_doubt = False

    def _append(self, line: str) -> None:
        """Adds a whole line or nothing, since half a line would damage the next one."""
        if os.fstat(self._file.fileno()).st_size != self._size:
            self._file.truncate(self._size)
        content = line.encode("ascii")
        written = self._file.write(content)
        if written != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._size += written

    def _sync(self) -> None:
        """Waits for the disk. After a failure all rows are written again: the system drops refused pages."""
        if self._is_in_doubt:
            self._rewrite(_read_lines(self._path))
        self._is_in_doubt = True
        os.fsync(self._file.fileno())
        self._is_in_doubt = False

    def _wall_s(self) -> float:
        return round(self._before_s + self._clock.now_s() - self._opened_s, 3)


class _EventCopy:
    """TensorBoard's copy of the rows; rewritten when rows were dropped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventFileWriter | None = None
        self._epoch_s = 0.0

    def rewrite(self, rows: list[Row]) -> None:
        """Replaces the content of the folder by these rows."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._epoch_s = time.time() - (rows[-1]["wall_s"] if rows else 0.0)  # the date TensorBoard shows
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        # Protobuf makes these classes at import, where no type checker sees them.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [
            Summary.Value(tag=name, simple_value=math.nan if value is None else value)
            for name, value in row.items()
            if "/" in name
        ]
        # Before the first control step only the updates increase.
        step = row["step"] or row.get("updates", 0)
        event = Event(wall_time=self._epoch_s + row["wall_s"], step=step, summary=Summary(value=values))
        self._open().add_event(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> EventFileWriter:
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._folder), flush_secs=10)
        return self._writer


def read_metrics(path: Path) -> list[Row]:
    """Reads the rows of a metrics.jsonl; torn and altered lines are left out with a warning."""
    lines = _read_lines(path, with_torn=True)
    for problem in _problems(lines):
        logger.warning("%s: %s", path, problem)
    return [line.row for line in lines if line.row is not None]


def read_run(path: Path) -> tuple[list[Row], list[str]]:
    """Returns the rows of a metrics.jsonl, and a message for each line that is left out."""
    lines = _read_lines(path, with_torn=True)
    return [line.row for line in lines if line.row is not None], _problems(lines)


def as_float(name: str, value: Any) -> float | None:
    """Returns one number as JSON can hold it: None for NaN and infinities.

    Raises:
        ValueError: `value` is not one number; the message says its shape.
    """
    if hasattr(value, "detach"):  # a torch tensor: this module does not import torch
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise ValueError(f"metrics: {name!r} must be one number, got shape {array.shape} of {array.dtype}")
    number = float(array.reshape(()))
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class _Line:
    """A line of the file."""

    content: bytes
    row: Row | None
    """None if the line is torn or was altered."""

    @property
    def num_rows(self) -> int:
        """Returns how many rows were written here: two if the end of a line was altered."""
        return 1 if self.row is not None else max(1, self.content.count(b'"phase"'))


def _read_lines(path: Path, *, with_torn: bool = False) -> list[_Line]:
    """Reads the lines of a file; a torn last line only if `with_torn`."""
    *whole, last = path.read_bytes().split(b"\n")
    lines = [_Line(content + b"\n", _parse(content)) for content in whole]
    row = _parse(last)
    if row is not None or (last and with_torn):
        lines.append(_Line(last + b"\n", row))
    return lines


def _problems(lines: list[_Line]) -> list[str]:
    last = len(lines)
    return [
        f"line {number} is {'torn' if number == last else 'damaged'}, left out"
        for number, line in enumerate(lines, start=1)
        if line.row is None
    ]


def _line(row: Row) -> str:
    plain = {name: None if value != value else value for name, value in row.items()}  # NaN alone differs
    return json.dumps(with_checksum(plain), allow_nan=False) + "\n"


def _parse(line: bytes) -> Row | None:
    """Returns the row of one line with null read as NaN; None if the line is not a whole row."""
    try:
        row = without_checksum(json.loads(line))
    except ValueError:
        return None
    if not {"step", "phase", "wall_s"} <= row.keys():
        return None
    whole = {name: math.nan if value is None else value for name, value in row.items()}
    numbers = (value for name, value in whole.items() if name != "phase")
    return whole if all(isinstance(value, int | float) for value in numbers) else None
