"""A thread for what may fail or wait: lines of a log, files. Whoever moves an arm does not wait for it."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Callable, Generator
from io import FileIO

logger = logging.getLogger(__name__)

_CAPACITY = 2000
_PATIENCE_S = 2.0


class Writer:
    """Does jobs one after another on a thread of its own; what fails is counted and does no harm."""

    def __init__(self, *, capacity: int = _CAPACITY, patience_s: float = _PATIENCE_S) -> None:
        """Starts the thread.

        Args:
            capacity: more jobs do not wait, they are lost.
            patience_s: how long `flush` and `close` wait for a disk that may hang for good.
        """
        self._capacity, self._patience_s = capacity, patience_s
        # Not Queue: its lock could be held by the thread while a busy machine lets that wait.
        self._jobs = queue.SimpleQueue[Callable[[], object] | None]()
        self._refused = self._failed = 0  # one counter a thread: no lock
        self._is_shown = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Jobs that failed, or were too many."""
        return self._refused + self._failed

    def put(self, job: Callable[[], object]) -> None:
        """Has a job done soon; never waits and never raises."""
        try:
            if self._jobs.qsize() < self._capacity:
                self._jobs.put(job)
                return
        except MemoryError:
            pass
        self.lose()

    def lose(self) -> None:
        """Counts what could not even be handed over; for the thread that calls `put`."""
        self._refused += 1

    def flush(self) -> bool:
        """Waits until all jobs of before are done; returns whether they are."""
        done = threading.Event()
        self.put(done.set)
        return done.wait(self._patience_s)

    def close(self) -> None:
        """Waits for the jobs in hand, and ends the thread."""
        self._jobs.put(None)
        self._thread.join(self._patience_s)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get()
                if job is None:
                    return
                job()
            except Exception as error:
                self._failed += 1
                if not self._is_shown:
                    self._is_shown = True
                    logger.error("cannot write: %s. What is lost from here on is counted.", error)


@contextlib.contextmanager
def process_log(file: int | None = None) -> Generator[Writer]:
    """Has the root logger's records written by a thread; for a process that must not wait for its disk.

    Args:
        file: descriptor that lines are written to; that of stderr if None.
    """
    root, writer = logging.getLogger(), Writer()
    # Unbuffered: what fails is lost, and does not come out later.
    with FileIO(sys.stderr.fileno() if file is None else file, "wb", closefd=False) as lines:
        handler = _Handler(writer, lines)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        try:
            yield writer
        finally:
            root.removeHandler(handler)
            writer.close()


class _Handler(logging.Handler):
    """Log records to a file by a writer: a full or hanging disk holds nobody up."""

    def __init__(self, writer: Writer, file: FileIO) -> None:
        super().__init__()
        self._writer, self._file = writer, file
        self._told = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(lambda: self._write(record))

    def _write(self, record: logging.LogRecord) -> None:
        lost = self._writer.lost
        gap = f"({lost - self._told} writes before this one failed)\n" if lost > self._told else ""
        self._file.write(f"{gap}{self.format(record)}\n".encode(errors="replace"))
        self._told = lost
