"""Processes that decode pictures ahead of the learner.

A worker is a new interpreter that imports neither torch (unless pictures are resized) nor the script of
the caller. Pictures come back through shared memory; when one side dies, the other ends.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.decode import Backend
from robot_rl.data.lerobot.pictures import PictureCache, PictureReader, Size
from robot_rl.data.lerobot.reader import Dataset

Array = NDArray[Any]

_SLOTS = 2
"""Batches that a worker may be ahead."""


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """What a worker needs to open the dataset as its parent did."""

    folder: Path
    backend: Backend
    kept: Array
    """Episodes that the parent did not skip, by the dataset's numbers."""
    resize: Size | None
    cache: PictureCache
    slot_bytes: int
    rename: Mapping[str, str]
    """As of `Dataset`."""


class PictureWorkers:
    """Decodes batches: process k modulo the number of processes decodes batch k."""

    def __init__(
        self, task: WorkerTask, num_workers: int, shapes: Mapping[str, tuple[int, int, int]]
    ) -> None:
        self._shapes = dict(shapes)
        self.counts: dict[str, int] = {}
        """Pictures read so far, by their source; see `PictureReader.counts`."""
        self._workers = [_Worker(task) for _ in range(num_workers)]
        self._slot_bytes = task.slot_bytes

    @property
    def ahead(self) -> int:
        """The most batches that may be requested at a time."""
        return _SLOTS * len(self._workers)

    def submit(self, number: int, wanted: Mapping[str, Array]) -> None:
        """Requests batch `number`: camera -> rows."""
        self._worker(number).send((number, self._slot(number), dict(wanted)))

    def collect(self, number: int, wanted: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the pictures of a batch that was submitted, (n, h, w, 3) by camera.

        Raises:
            DatasetError: what went wrong in the worker, or that it died.
        """
        worker = self._worker(number)
        done, counts, error = worker.receive()
        if error is not None:
            raise DatasetError(error)
        assert done == number, f"workers: got batch {done}, waited for {number}"
        for place, count in counts.items():
            self.counts[place] = self.counts.get(place, 0) + count
        begin = self._slot(number) * self._slot_bytes
        places = slots(worker.memory, begin, wanted, self._shapes)
        return {key: pictures.copy() for key, pictures in places.items()}  # the slot is used again

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def _worker(self, number: int) -> _Worker:
        return self._workers[number % len(self._workers)]

    def _slot(self, number: int) -> int:
        return number // len(self._workers) % _SLOTS


class _Worker:
    """The parent's side of one process."""

    def __init__(self, task: WorkerTask) -> None:
        near = Path("/dev/shm")
        with tempfile.TemporaryFile(dir=near if near.is_dir() else None) as file:
            file.truncate(max(1, _SLOTS * task.slot_bytes))
            self.memory = mmap.mmap(file.fileno(), 0)
            mine, theirs = socket.socketpair()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(file.fileno())],
                pass_fds=(theirs.fileno(), file.fileno()),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            theirs.close()
        self._connection = Connection(mine.detach())
        self.send(task)

    def send(self, message: Any) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError as error:
            raise DatasetError(self._died()) from error

    def receive(self) -> Any:
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise DatasetError(self._died()) from error

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _died(self) -> str:
        status = self._process.wait(5.0)
        hint = " (killed: out of memory?)" if status == -signal.SIGKILL else ""
        return (
            f"loader: a worker process ended with status {status}{hint}. Use fewer workers, a smaller "
            "batch or num_workers=0, which shows the error itself."
        )


def slots(
    memory: mmap.mmap, begin: int, wanted: Mapping[str, Array], shapes: Mapping[str, tuple[int, int, int]]
) -> dict[str, Array]:
    """Returns camera -> (n, h, w, 3), one after the other in shared memory."""
    places: dict[str, Array] = {}
    for key, rows in wanted.items():
        shape = (len(rows), *shapes[key])
        size = int(np.prod(shape))
        places[key] = np.frombuffer(memory, np.uint8, size, begin).reshape(shape)
        begin += size
    return places


def work(connection: Connection, memory: mmap.mmap) -> None:
    """Decodes what the parent requests, until the parent ends."""
    task: WorkerTask = pickle.loads(connection.recv_bytes())
    reader: PictureReader | None = None
    while True:
        number, slot, wanted = pickle.loads(connection.recv_bytes())
        counts: dict[str, int] = {}
        error: str | None = None
        try:
            if reader is None:
                dataset = Dataset(task.folder, backend=task.backend, rename=task.rename)
                dataset.keep(task.kept)
                reader = PictureReader(dataset, resize=task.resize, cache=task.cache, threads=1)
            before = dict(reader.counts)
            reader.read_into(wanted, slots(memory, slot * task.slot_bytes, wanted, reader.shapes))
            counts = {place: count - before[place] for place, count in reader.counts.items()}
        except DatasetError as problem:
            error = str(problem)
        except Exception as problem:  # of any kind: the parent must not wait forever
            error = f"loader: a worker failed with {type(problem).__name__}: {problem}"
        connection.send_bytes(pickle.dumps((number, counts, error)))


def main() -> None:
    """Runs a worker; arguments are the file descriptors of connection and memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    connection = Connection(int(sys.argv[1]))
    memory = mmap.mmap(int(sys.argv[2]), 0)
    try:
        work(connection, memory)
    except (EOFError, OSError):
        os._exit(0)  # the parent has ended, or has closed the loader


if __name__ == "__main__":
    main()
