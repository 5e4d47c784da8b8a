"""The writer: what fails or hangs is counted, and holds nobody up."""

import logging
import threading
import time
from io import FileIO
from pathlib import Path

import pytest

from robot_rl.real.writer import QueuedHandler, Writer


def test_jobs_are_done_in_order_and_failures_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    writer, done = Writer(), list[int]()

    def fail() -> None:
        raise OSError("No space left on device")

    for job in (lambda: done.append(1), fail, lambda: done.append(2), fail, lambda: done.append(3)):
        writer.put(job)
    assert writer.flush()
    assert done == [1, 2, 3]
    assert writer.lost == 2
    assert caplog.messages == [  # once
        "cannot write: No space left on device. What is lost from here on is counted."
    ]
    writer.close()


def test_a_disk_that_hangs_holds_nobody_up() -> None:
    # The job in hand and 10 that wait; the other 90, and those of `flush`, are lost.
    writer, disk, began = Writer(capacity=10, patience_s=0.05), threading.Event(), threading.Event()
    writer.put(lambda: (began.set(), disk.wait()))
    assert began.wait(5.0)
    begun_s = time.monotonic()
    for _ in range(100):
        writer.put(lambda: None)
    assert not writer.flush()
    assert writer.lost == 91
    writer.close()
    assert time.monotonic() - begun_s < 1.0
    disk.set()


def test_a_log_on_a_full_disk_is_counted_too(tmp_path: Path) -> None:
    record = logging.LogRecord("a", logging.INFO, "b", 1, "%s moves", ("arm",), None)
    writer = Writer()
    with FileIO("/dev/full", "wb") as full, FileIO(tmp_path / "log", "wb") as free:
        QueuedHandler(writer, full).handle(record)
        QueuedHandler(writer, free).handle(record)
        assert writer.flush()
    assert writer.lost == 1
    assert (tmp_path / "log").read_text() == "arm moves\n"
    writer.close()
