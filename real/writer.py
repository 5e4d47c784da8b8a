"""A thread for jobs that may fail or wait, log lines and files, so that the caller never waits for a disk."""

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
    """Does jobs one after another on its own thread; failures are counted and do no harm."""

    def __init__(self, *, capacity: int = _CAPACITY, patience_s: float = _PATIENCE_S) -> None:
        """Starts the thread.

        Args:
            capacity: of the queue; more jobs are lost.
            patience_s: how long `flush` and `close` wait for a disk that may hang for ever.
        """
        self._capacity, self._patience_s = capacity, patience_s
        # Not Queue: on a busy machine its thread may hold the lock while it waits for the processor.
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
        """Queues a job; never waits and never raises."""
        try:
            if self._jobs.qsize() < self._capacity:
                self._jobs.put(job)
                return
        except MemoryError:
            pass
        self.lose()

    def lose(self) -> None:
        """Counts a job that was not queued; for the thread that calls `put`."""
        self._refused += 1

    def flush(self) -> bool:
        """Waits until all earlier jobs are done; returns whether they are."""
        done = threading.Event()
        self.put(done.set)
        return done.wait(self._patience_s)

    def close(self) -> None:
        """Waits for the queued jobs, and ends the thread."""
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
    """Writes the root logger's records on a thread, to a file descriptor, or to stderr if None."""
    root, writer = logging.getLogger(), Writer()
    # Unbuffered: a failed line is lost, and does not appear later.
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
    """Writes log records to a file on a writer's thread: the caller never waits for a disk."""

    def __init__(self, writer: Writer, file: FileIO) -> None:
        super().__init__()
        self._writer, self._file = writer, file
        self._reported = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(lambda: self._write(record))

    def _write(self, record: logging.LogRecord) -> None:
        lost = self._writer.lost
        gap = f"({lost - self._reported} writes before this one failed)\n" if lost > self._reported else ""
        self._file.write(f"{gap}{self.format(record)}\n".encode(errors="replace"))
        self._reported = lost
