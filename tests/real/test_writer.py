"""The writer: what fails or hangs is counted, and holds nobody up."""

import logging
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from robot_rl.real.writer import Writer, process_log

logger = logging.getLogger("a.process")


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


@pytest.fixture
def file(tmp_path: Path) -> Generator[tuple[int, Path]]:
    number = os.open(tmp_path / "log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    yield number, tmp_path / "log"
    os.close(number)


def lines_of(path: Path) -> list[str]:
    return [line.partition(" INFO ")[2] or line for line in path.read_text().splitlines()]


def test_lines_are_written_in_order_until_the_end(file: tuple[int, Path]) -> None:
    number, path = file
    with process_log(number):
        for line in range(100):
            logger.info("line %d", line)
    logger.info("of nobody")
    assert lines_of(path) == [f"line {line}" for line in range(100)]


def test_lines_that_a_full_disk_refuses_are_counted_and_told_of(file: tuple[int, Path]) -> None:
    number, path = file
    full, free = os.open("/dev/full", os.O_WRONLY), os.dup(number)
    os.dup2(full, number)  # from here on the disk is full
    with process_log(number) as writer:
        logger.info("lost")
        logger.info("lost too")
        assert writer.flush()
        assert writer.flush()  # the writer's own line about it came after the first one
        assert writer.lost == 3
        lost = writer.lost
        os.dup2(free, number)
        logger.info("written")
        logger.info("written too")
    assert lines_of(path) == [f"({lost} writes before this one failed)", *lines_of(path)[1:]]
    assert lines_of(path)[1:] == ["written", "written too"]
    os.close(full)
    os.close(free)
