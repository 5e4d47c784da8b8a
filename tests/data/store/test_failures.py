"""Whatever fails in the writer, once or for ever: nothing is lost in silence, and nobody waits for ever."""

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import DatasetError
from robot_rl.data.store import flusher
from robot_rl.data.store.check import verify
from robot_rl.data.store.reader import StoreReader

STEPS = 10
FRONT, WRIST = "front.rgb", "wrist.rgb"


class FailsOnce:
    """Fails at one of its calls; all others do what they did."""

    def __init__(self, wrapped: Callable[..., Any], at: int, error: BaseException) -> None:
        self._wrapped, self._at, self._error = wrapped, at, error
        self.calls = 0

    def __call__(self, *words: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self._at:
            raise self._error
        return self._wrapped(*words, **named)


def append(bench: Any, writer: Any, step: int) -> None:
    bench.append(writer, 0, step, pictures={key: bench.picture(key, 10 * step) for key in (FRONT, WRIST)})


def record(bench: Any, writer: Any) -> int:
    """Appends ten steps and flushes at every third, and again after each failure; returns the failures."""
    failures = 0

    def insist(work: Callable[[], Any], is_done: Callable[[], bool] = lambda: False) -> None:
        nonlocal failures
        for _ in range(5):
            try:
                if not is_done():
                    work()
                return
            except (DatasetError, MemoryError):
                failures += 1
                insist(writer.flush)
        raise AssertionError("it fails for ever")

    for step in range(STEPS):

        def is_done(step: int = step) -> bool:
            return writer.stats.steps > step

        insist(lambda step=step: append(bench, writer, step), is_done)
        if step % 3 == 2:
            insist(writer.flush)
    insist(writer.flush)
    return failures


def assert_whole(bench: Any) -> None:
    """Each step shows its own numbers and its own pictures."""
    episode = StoreReader(bench.folder, check_all=True).read(0)
    assert episode.obs["state"][:, 1].tolist() == list(range(STEPS))
    for camera in (FRONT, WRIST):
        grey = episode.obs[camera][np.arange(STEPS)][:, 0, 0, 0]
        assert grey.tolist() == [10 * step for step in range(STEPS)]
    assert verify(bench.folder).problems == ()


CALLS = [
    (flusher, "encode_picture", MemoryError(), 20),
    (flusher, "encode_picture", SystemExit(3), 20),
    (flusher, "encode_picture", KeyError("jpeg"), 20),
    (flusher, "sync_folder", OSError(errno.EIO, "Input/output error"), 1),
    (flusher.JournalFile, "pack", MemoryError(), 27),
    (flusher.Block, "of", MemoryError(), 1),
    (flusher, "segment_path", MemoryError(), 1),
    (os, "pwrite", OSError(errno.ENOSPC, "No space left on device"), 4),
    (os, "pwrite", MemoryError(), 4),
    (os, "fdatasync", OSError(errno.EIO, "Input/output error"), 4),
    (os, "ftruncate", OSError(errno.EIO, "Input/output error"), 0),
]


@pytest.mark.parametrize(("owner", "name", "error", "least"), CALLS)
def test_any_call_may_fail_once(
    bench: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, least: int
) -> None:
    """Each call in turn: `flush` says 10 only when 10 are on the disk, each with its own pictures."""
    bench.with_cameras()
    root, at = bench.folder, 0
    while True:
        at += 1
        bench.folder = root / str(at)
        writer = bench.writer(queue_steps=4)  # blocks of four steps
        fails = FailsOnce(getattr(owner, name), at, error)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails if owner is not flusher.JournalFile else _bound(fails))
            failures = record(bench, writer)
        assert writer.flush() == STEPS
        assert (writer.stats.steps, writer._flusher.waiting_bytes) == (STEPS, 0)
        assert failures <= (at <= fails.calls)  # none where `flush` tried again before anybody was told
        writer.close()
        assert_whole(bench)
        if at > fails.calls:
            break
    assert at > least


def _bound(fails: FailsOnce) -> Any:
    return lambda self, *words: fails(self, *words)


def test_a_picture_that_cannot_be_kept_holds_its_step_up(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step's: the first is safe, the others are said to be lost, none shows another's picture."""
    bench.with_cameras()
    writer = bench.writer()
    encode, appended = flusher.encode_picture, threading.Event()

    def broken(pixels: Any, *words: Any) -> bytes:
        if pixels[0] == 10:
            appended.wait(5)
            raise MemoryError
        return encode(pixels, *words)

    monkeypatch.setattr(flusher, "encode_picture", broken)
    append(bench, writer, 0)
    writer.flush()
    append(bench, writer, 1)
    append(bench, writer, 2)
    appended.set()
    message = r"writing failed \(MemoryError: \)\. 1 steps are safe, 2 wait in memory: repair it, then flush"
    for _ in range(3):
        with pytest.raises(DatasetError, match=message):
            writer.flush()
    with pytest.raises(DatasetError, match=message):
        append(bench, writer, 3)
    with pytest.raises(DatasetError, match=message):
        writer.begin_episode(1)
    with pytest.raises(DatasetError, match=r"closed instead: 2 steps are lost\."):
        writer.close()
    episode = StoreReader(bench.folder).read(0)
    assert len(episode) == 1
    assert episode.obs[FRONT][0][0, 0, 0] == 0


def test_what_was_packed_before_a_failure_is_written_by_the_next_flush(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps in a block of their own, then a picture that cannot be kept: the four are safe."""
    bench.with_cameras()
    writer = bench.writer(queue_steps=40)
    monkeypatch.setattr(writer, "_capacity", 4)
    encode = flusher.encode_picture

    def broken(pixels: Any, *words: Any) -> bytes:
        if pixels[0] == 40:
            raise MemoryError
        return encode(pixels, *words)

    monkeypatch.setattr(flusher, "encode_picture", broken)
    for step in range(4):
        append(bench, writer, step)
    with writer._flusher.changed:
        writer._flusher.cut()
    append(bench, writer, 4)
    while writer._flusher.error is None:
        time.sleep(0.001)
    with pytest.raises(DatasetError, match="4 steps are safe, 1 wait in memory"):
        writer.flush()
    monkeypatch.undo()
    assert writer.flush() == 5


def test_an_error_between_two_items_does_not_end_the_thread(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for the next block, in the thread that takes one every 10 ms: whoever appends hears of it."""
    writer = bench.writer(flush_s=0.01)

    def none(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(flusher.Block, "of", none)
        began, said = time.monotonic(), ""
        while not said and time.monotonic() < began + 5:
            try:
                bench.append(writer, 0, writer.stats.steps)
            except DatasetError as error:
                said = str(error)
    steps = writer.stats.steps
    assert "writing failed (MemoryError" in said
    assert f"{writer.stats.flushed_steps} steps are safe" in said
    assert writer.flush() == steps
    writer.close()
    assert StoreReader(bench.folder).lengths().tolist() == [steps]


def test_nobody_waits_for_a_thread_that_is_gone(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "_LOOK_S", 0.01)
    writer = bench.writer(queue_steps=2)
    bench.append(writer, 0, 0)
    writer.flush()
    bench.append(writer, 0, 1)
    monkeypatch.setattr(writer._flusher, "_turn", lambda: False)
    with writer._flusher.changed:
        writer._flusher.changed.notify_all()
    writer._flusher._thread.join(5)
    message = r"the thread that writes is gone\)\. 1 steps are safe, 1 wait in memory: they are lost\. Close"
    for work in (writer.flush, writer.mark, writer.seal, lambda: bench.append(writer, 0, 2)):
        with pytest.raises(DatasetError, match=message):
            work()
    with pytest.raises(DatasetError, match="1 steps are lost"):
        writer.close()
    bench.writer()  # and the store is free


def test_one_who_waits_for_room_hears_of_a_failure(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.with_cameras()
    go = threading.Event()

    def broken(*_: Any) -> bytes:
        go.wait(5)
        raise MemoryError

    monkeypatch.setattr(flusher, "encode_picture", broken)
    writer = bench.writer(queue_bytes=1, when_behind="wait")
    threading.Timer(0.05, go.set).start()
    with pytest.raises(DatasetError, match="writing failed"):
        append(bench, writer, 0)
    with pytest.raises(DatasetError, match="0 steps are lost"):
        writer.close()
