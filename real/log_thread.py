"""Log lines of a process that must not wait for its disk: written by a thread, lost if they cannot be."""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import threading

_MAX_LINES = 10_000
"""Waiting lines; more are dropped, and counted."""
_END_S = 1.0
"""Longest wait for the disk at the end."""
_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_STDERR = 2


class LogThread:
    """Takes the root logger's records; a context manager around a process."""

    def __init__(self, *, max_lines: int = _MAX_LINES, file: int = _STDERR) -> None:
        """Writes from now on.

        Args:
            max_lines: how many may wait for the disk.
            file: descriptor that lines are written to.
        """
        self._file, self._formatter = file, logging.Formatter(_FORMAT)
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(max_lines)
        self._handler = _Handler(self._lines)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self.lost = 0
        """Lines that the disk refused."""

    @property
    def dropped(self) -> int:
        """Lines that came while too many waited."""
        return self._handler.dropped

    def __enter__(self) -> LogThread:
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(logging.INFO)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        try:
            self._lines.put(None, timeout=_END_S)
        except queue.Full:
            return  # the disk hangs, and the thread with it: it ends with the process
        self._thread.join(_END_S)

    def _run(self) -> None:
        missing = 0
        while (record := self._lines.get()) is not None:
            gap = self.lost + self.dropped - missing
            line = self._formatter.format(record)
            if gap:
                line = f"({gap} lines before this one could not be written)\n{line}"
            try:
                os.write(self._file, f"{line}\n".encode(errors="replace"))
                missing += gap
            except OSError:
                self.lost += 1


class _Handler(logging.handlers.QueueHandler):
    """Never waits."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None]) -> None:
        super().__init__(lines)
        self.dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
