"""The thread that writes steps and pictures to the disk while the robot moves.

The control thread fills a block and hands over pictures; it never waits for the disk. Every
`flush_s` the thread takes the block and writes it behind the pictures that it refers to: one write and
one fdatasync.

A block or picture stays in the queue until its records are packed, and these stay in memory until the
disk has them. So no failure loses anything: the segment is cut back to the last good flush, the thread
stops, every call of the writer raises, and the next `flush` begins again where it stopped. A picture
that cannot be compressed holds up the steps behind it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import sync_folder
from robot_rl.data.episode import Array
from robot_rl.data.store.finished import note_finished
from robot_rl.data.store.journal import FORMAT, HEADER, Kind, pack, segment_path
from robot_rl.data.store.layout import Layout, PictureFormat, encode_picture

logger = logging.getLogger(__name__)

_WRITE_BYTES = 32 << 20
"""So much is written at once, before `flush_s` is over."""
_SPARE = 8
"""Buffers for pictures that are made at the start, for each size of picture."""
_LOOK_S = 1.0
"""A thread that waits looks this often whether the writing thread still runs."""


class WritingError(Exception):
    """The thread cannot write; `__cause__` holds the reason."""


@dataclass
class Block:
    """Steps of all lanes in the order of appending, by columns."""

    columns: dict[str, Array]
    episode: Array
    step: Array
    size: int = 0
    begun: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    """Episode, lane, JSON."""
    ended: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    """Episode, steps, final observation (empty: unknown)."""

    @classmethod
    def of(cls, layout: Layout, capacity: int) -> Block:
        columns = {
            name: np.zeros((capacity, *feature.shape), feature.dtype)
            for name, feature in layout.columns.items()
        }
        return cls(columns, np.zeros(capacity, np.int64), np.zeros(capacity, np.int64))

    @property
    def is_empty(self) -> bool:
        return not (self.size or self.begun or self.ended)

    def clear(self) -> None:
        self.size = 0
        self.begun.clear()
        self.ended.clear()


@dataclass
class Picture:
    """A copy of a picture that waits to be compressed."""

    pixels: bytearray
    episode: int
    picture: int
    stamp_ns: int
    camera: int


@dataclass(eq=False)
class _Mark:
    """Asks that everything before it is written to the disk now."""

    rotates: bool = False
    """Whether the next record begins another segment."""
    next_segment: int = 0
    is_done: bool = False


class JournalFile:
    """The segment that is appended to."""

    def __init__(self, folder: Path, layout: Layout, *, first: int, segment_bytes: int) -> None:
        self._journal = folder / "journal"
        self._layout = layout
        self._segment_bytes = segment_bytes
        self.number = first - 1
        """The segment being written; segments below it are finished."""
        self._fd = -1
        self._size = 0
        self._is_cut = True
        """Whether the file ends where the last good flush did."""
        self._open: dict[int, tuple[int, bytes]] = {}
        self._finished: dict[int, int] = {}
        """Segment -> bytes of those that store.json does not list yet."""
        self.flushes = 0
        self.written_bytes = 0

    def pack(self, kind: Kind, payload: bytes, *keys: int) -> bytes:
        """Returns a record of the next flush."""
        a, b, c, d = (*keys, 0, 0, 0, 0)[:4]
        return pack(kind, payload, (a, b, c, d), self.flushes + 1)

    def pack_begin(self, episode: int, lane: int, content: bytes) -> bytes:
        """Returns the record that begins an episode; every segment in which it continues repeats it."""
        self._open[episode] = (lane, content)
        return self.pack(Kind.EPISODE, content, episode, lane)

    def pack_end(self, episode: int, steps: int, final: bytes) -> bytes:
        self._open.pop(episode, None)
        return self.pack(Kind.END, final, episode, steps, int(bool(final)))

    def write(self, records: list[bytes]) -> None:
        """Appends records and waits until the disk has them; all of them, or an error and none."""
        if self._fd < 0:
            path = segment_path(self._journal, self.number + 1)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.number += 1
        is_new = self._size == 0
        content = b"".join([*(self._head() if is_new else ()), *records])
        flushes, written = self.flushes + 1, self.written_bytes + len(content)
        if not self._is_cut:
            self._cut()
        self._is_cut = False
        try:
            view, at = memoryview(content), self._size
            while view:
                done = os.pwrite(self._fd, view, at)
                view, at = view[done:], at + done
            os.fdatasync(self._fd)
            if is_new:
                sync_folder(self._journal)
        except BaseException:
            with contextlib.suppress(OSError):  # the next write tries again
                self._cut()
            raise
        self._size, self._is_cut = at, True
        self.flushes, self.written_bytes = flushes, written
        if self._size >= self._segment_bytes:
            self.rotate()

    def _cut(self) -> None:
        """Cuts off what a failed write has left at the end."""
        os.ftruncate(self._fd, self._size)
        self._is_cut = True

    def rotate(self) -> None:
        """Finishes the segment; the next write begins another."""
        if self._fd >= 0 and self._size:
            self._finished[self.number] = self._size
            handle, self._fd, self._size = self._fd, -1, 0
            with contextlib.suppress(OSError):  # the disk has all of it
                os.close(handle)
        self._note()

    def mark(self) -> list[tuple[int, int, str]]:
        """Returns the episodes that go on in the next segment, for `rewind`: number, lane, JSON."""
        return [(episode, lane, content.decode()) for episode, (lane, content) in self._open.items()]

    def rewind(self, segment: int, unfinished: Iterable[tuple[int, int, str]]) -> None:
        """Lets the next write begin this segment again, in which these episodes go on."""
        assert self._fd < 0, "a segment is being written"
        self.number = segment - 1
        self._finished = {number: size for number, size in self._finished.items() if number < segment}
        self._open = {episode: (lane, content.encode()) for episode, lane, content in unfinished}

    def close(self) -> None:
        """Closes the segment; one in which nothing was written is removed."""
        if self._fd >= 0 and not self._size:
            handle, self._fd = self._fd, -1
            os.close(handle)
            segment_path(self._journal, self.number).unlink(missing_ok=True)
        self.rotate()

    def _note(self) -> None:
        """Lists finished segments in store.json; if the disk refuses, the next call does it."""
        try:
            note_finished(self._journal.parent, self._finished)
            self._finished.clear()
        except (OSError, DatasetError) as error:
            logger.warning("store: %s: the list of segments is behind: %s", self._journal.parent, error)

    def _head(self) -> list[bytes]:
        layout = json.dumps(self._layout.to_json()).encode()
        begun = [
            self.pack(Kind.EPISODE, content, episode, lane) for episode, (lane, content) in self._open.items()
        ]
        return [self.pack(Kind.SEGMENT, layout, FORMAT, self.number), *begun]


class Flusher:
    """The thread, its queue, and the block that the control thread fills while it holds `changed`."""

    def __init__(
        self,
        file: JournalFile,
        layout: Layout,
        *,
        flush_s: float,
        capacity: int,
        hurry_steps: int,
        picture: PictureFormat,
        quality: int,
    ) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.block = Block.of(layout, capacity)
        self.error: BaseException | None = None
        """The reason why the thread has stopped, until `flush` lets it try again."""
        self.appended_steps = 0
        self.waiting_bytes = 0
        """Pixels that wait to be compressed."""
        self.flushed_steps = 0
        self.busy_s = 0.0
        """CPU time of the thread."""
        self._file = file
        self._layout = layout
        self._flush_s = flush_s
        self._capacity = capacity
        self._hurry_steps = hurry_steps
        self._picture: PictureFormat = picture
        self._quality = quality
        self._queue: deque[Block | Picture | _Mark] = deque()
        self._free_blocks: list[Block] = []
        # Filled, not only reserved: the first write to fresh memory takes half a millisecond.
        sizes = [int(np.prod(layout.features[camera].shape)) for camera in layout.cameras]
        self._free_pixels = {size: [bytearray(b"\1") * size for _ in range(_SPARE)] for size in sizes}
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._pending_steps = 0
        self._is_closing = False
        self._deadline = time.monotonic() + flush_s
        self._thread = threading.Thread(target=self._run, name="store-flusher", daemon=True)
        self._thread.start()

    @property
    def waiting_steps(self) -> int:
        """Steps that were appended and are not yet on the disk."""
        return self.appended_steps - self.flushed_steps

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; only `close` should end it."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Raises `WritingError` while the thread has stopped."""
        if self.error is None and not self.is_alive:
            self.error = RuntimeError("the thread that writes is gone")
        if self.error is not None:
            raise WritingError from self.error

    # --- called by the control thread, which holds `changed` -------------------------------------

    def cut(self) -> None:
        """Hands the block over and begins an empty one."""
        if not self.block.is_empty:
            fresh = self._free_blocks.pop() if self._free_blocks else Block.of(self._layout, self._capacity)
            self._queue.append(self.block)
            self.block = fresh
            self.changed.notify_all()

    def take_pixels(self, num_bytes: int) -> bytearray:
        free = self._free_pixels.get(num_bytes)
        return free.pop() if free else bytearray(num_bytes)

    def put(self, picture: Picture) -> None:
        self._queue.append(picture)
        self.waiting_bytes += len(picture.pixels)
        self.changed.notify_all()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits for the thread; raises `WritingError` if it has stopped."""
        while not holds():
            self.check()
            self.changed.wait(_LOOK_S)

    # --- called by the control thread, which does not hold it ------------------------------------

    def flush(self) -> int:
        """Waits until everything appended so far is on the disk; returns the steps on the disk.

        Raises:
            WritingError: the thread cannot write; it tries again at the next call.
        """
        self._send(_Mark())
        return self.flushed_steps

    def rotate(self) -> int:
        """Flushes and finishes the segment; returns the number of the next one."""
        mark = _Mark(rotates=True)
        self._send(mark)
        return mark.next_segment

    def _send(self, mark: _Mark) -> None:
        with self.changed:
            self.cut()
            if self.error is not None and self._queue and not isinstance(self._queue[0], _Mark):
                self._queue.appendleft(_Mark())  # what was packed before the thread stopped is written first
            self._queue.append(mark)
            self.error = None
            self.changed.notify_all()
            try:
                self.wait_until(lambda: mark.is_done)
            except WritingError:
                self._queue.remove(mark)
                raise

    def close(self) -> None:
        """Ends the thread; what it could not write is lost."""
        with self.changed:
            self._is_closing = True
            self.changed.notify_all()
        self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn()
            except BaseException as error:  # every later call of the writer raises it
                self.error = error
                with (
                    contextlib.suppress(MemoryError),
                    self.changed,
                ):  # waiting threads look by themselves
                    self.changed.notify_all()
                    logger.error("store: writing stopped: %s: %s", type(error).__name__, error)

    def _turn(self) -> bool:
        """Waits for an item and handles it; returns False when the thread must end."""
        with self.changed:
            if self._is_closing and (self.error is not None or not self._queue):
                return False
            if self.error is not None:  # until `flush` lifts it
                self.changed.wait()
                return True
            now = time.monotonic()
            if now >= self._deadline:
                self._deadline = now + self._flush_s
                self.cut()
                self._queue.append(_Mark())
            if not self._queue:
                self.changed.wait(self._deadline - now)
                return True
            item = self._queue[0]
        self._handle(item)
        self.busy_s = time.thread_time()
        return True

    def _handle(self, item: Block | Picture | _Mark) -> None:
        """Handles an item, and only then takes it off the queue."""
        match item:
            case Picture():
                self._take([self._encoded(item)], item)
            case Block():
                self._take(self._records(item), item)
            case _Mark():
                self._write()
                if item.rotates:
                    self._file.rotate()
                    item.next_segment = self._file.number + 1
                with self.changed:
                    self._queue.popleft()
                    item.is_done = True
                    self.changed.notify_all()
        if self._pending_bytes > _WRITE_BYTES or self._pending_steps > self._hurry_steps:
            self._write()

    def _take(self, records: list[bytes], item: Block | Picture) -> None:
        """Replaces an item by its packed records, and reuses its memory."""
        with self.changed:
            self._pending += records
            self._queue.popleft()
            self._pending_bytes += sum(map(len, records))
            if isinstance(item, Block):
                self._pending_steps += item.size
                item.clear()
                self._free_blocks.append(item)
            else:
                self.waiting_bytes -= len(item.pixels)
                self._free_pixels.setdefault(len(item.pixels), []).append(item.pixels)
            self.changed.notify_all()

    def _write(self) -> None:
        if not self._pending:
            return
        after: list[bytes] = []  # made before the write: afterwards nothing may fail
        flushed = self.flushed_steps + self._pending_steps
        self._file.write(self._pending)
        with self.changed:
            self._pending, self._pending_bytes, self._pending_steps = after, 0, 0
            self.flushed_steps = flushed
            self.changed.notify_all()

    def _encoded(self, item: Picture) -> bytes:
        shape = self._layout.features[self._layout.cameras[item.camera]].shape
        encoded = encode_picture(item.pixels, shape, self._picture, self._quality)
        return self._file.pack(Kind.PICTURE, encoded, item.episode, item.picture, item.stamp_ns, item.camera)

    def _records(self, block: Block) -> list[bytes]:
        """Returns a block as records: beginnings, the steps of each episode, ends."""
        records = [self._file.pack_begin(*begun) for begun in block.begun]
        if block.size:
            records += self._steps(block)
        return records + [self._file.pack_end(*ended) for ended in block.ended]

    def _steps(self, block: Block) -> list[bytes]:
        episode, size = block.episode[: block.size], block.size
        columns: dict[str, Any] = {name: values[:size] for name, values in block.columns.items()}
        step = block.step[:size]
        if (episode[1:] < episode[:-1]).any():  # steps of several lanes: those of one episode come together
            order = np.argsort(episode, kind="stable")
            episode, step = episode[order], step[order]
            columns = {name: values[order] for name, values in columns.items()}
        starts = np.flatnonzero(np.r_[True, episode[1:] != episode[:-1]])
        ends = np.r_[starts[1:], size]
        return [
            self._file.pack(
                Kind.STEPS,
                b"".join([values[start:end].tobytes() for values in columns.values()]),
                int(episode[start]),
                int(step[start]),
                int(end - start),
                int(columns["terminated"][end - 1] or columns["truncated"][end - 1]),
            )
            for start, end in zip(starts, ends, strict=True)
        ]


def block_capacity(layout: Layout) -> int:
    """Returns the steps of a block: about 8 MiB of them, so that a store needs little memory."""
    return int(np.clip((8 << 20) // (layout.step_bytes + HEADER.size), 16, 1 << 16))
