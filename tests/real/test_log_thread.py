"""Log lines whose disk refuses or hangs: nobody waits for them."""

import contextlib
import errno
import logging
import os
import time

import pytest

from robot_rl.real import log_thread
from robot_rl.real.log_thread import LogThread

logger = logging.getLogger("a.process")


def read(path: str) -> list[str]:
    with open(path) as file:
        return [line.partition(" INFO ")[2] or line for line in file.read().splitlines()]


def wait_for(condition) -> None:
    until_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < until_s, "timed out"
        time.sleep(0.002)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "log"
    number = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    yield number, path
    os.close(number)


def test_lines_are_written_in_order(file):
    number, path = file
    with LogThread(file=number):
        for line in range(100):
            logger.info("line %d", line)
    assert read(path) == [f"line {line}" for line in range(100)]
    logger.info("of nobody")
    assert len(read(path)) == 100


def test_lines_that_a_full_disk_refuses_are_counted_and_told_of(file, monkeypatch):
    number, path = file
    write, is_full = os.write, [True]

    def refuse(to, octets):
        if to == number and is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(to, octets)

    monkeypatch.setattr(log_thread.os, "write", refuse)
    with LogThread(file=number) as log:
        logger.info("lost")
        logger.info("lost too")
        wait_for(lambda: log.lost == 2)
        is_full[0] = False
        logger.info("written")
        logger.info("written too")
    lines = read(path)
    assert lines[0].endswith("(2 lines before this one could not be written)")
    assert lines[1:] == ["written", "written too"]


def test_nobody_waits_for_a_disk_that_hangs(monkeypatch):
    monkeypatch.setattr(log_thread, "_END_S", 0.1)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    begun_s = time.monotonic()
    with LogThread(file=writes, max_lines=10) as log:
        for line in range(100):
            logger.info("line %d", line)
        assert log.dropped >= 89  # ten wait, and the thread has one
    assert time.monotonic() - begun_s < 1.0
    os.close(reads)  # whoever waited for it gets an error
    os.close(writes)
