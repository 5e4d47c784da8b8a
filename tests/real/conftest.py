"""A test of several processes is repeated where it failed while the machine stood still.

A virtual machine whose processors are taken away for half a second breaks every deadline of a deployment
at once. That says nothing about the deployment. A failure of a test through which the machine ran counts, and
so does every one where no process may have real-time priority, which load cannot keep from its turn.
"""

import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_STILL_S = 0.1
_BEAT_S = 0.01
_FILE = pytest.StashKey[Path]()
_BEGAN_NS = pytest.StashKey[int]()
_PULSE = f"""
import os, time
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(80))  # nothing of a test keeps it from its turn
except (AttributeError, OSError):
    raise SystemExit
last_ns = time.monotonic_ns()
print(0, 0, flush=True)  # it watches
while os.getppid() == {{parent}}:
    time.sleep({_BEAT_S})
    now_ns = time.monotonic_ns()
    if now_ns - last_ns > {_STILL_S} * 1e9:
        print(last_ns, now_ns, flush=True)
    last_ns = now_ns
"""


class StoodStillError(AssertionError):
    """A test failed, and while it ran no process of this machine did."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.flaky(reruns=3, only_rerun=[StoodStillError.__name__]))


@pytest.fixture(scope="session", autouse=True)
def pulse(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Notes in a file when the machine stood still; returns the process that does, 0 if none may."""
    path = tmp_path_factory.mktemp("pulse") / "stood-still"
    with path.open("wb") as out:
        words = [sys.executable, "-S", "-c", _PULSE.format(parent=os.getpid())]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out)
    while not path.stat().st_size and process.poll() is None:
        time.sleep(_BEAT_S)
    pytestconfig.stash[_FILE] = path
    yield process.pid if path.stat().st_size else 0
    process.kill()
    process.wait()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    item.stash[_BEGAN_NS] = time.monotonic_ns()
    with _told_apart(item):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with _told_apart(item):
        yield


@contextmanager
def _told_apart(item: pytest.Item) -> Generator[None]:
    """Names a failure for what it is if the machine stood still since the test began."""
    try:
        yield
    except pytest.skip.Exception:
        raise
    except (Exception, pytest.fail.Exception) as error:
        still_s = _longest_s(item)
        if still_s > 0:
            raise StoodStillError(f"{item.name}: the machine stood still for {still_s:.2f} s.") from error
        raise


def _longest_s(item: pytest.Item) -> float:
    """Returns for how long, at most, the machine stood still since the test began."""
    time.sleep(2 * _BEAT_S)  # the pulse says so only once it goes on
    lines = item.config.stash[_FILE].read_text().splitlines()
    gaps = [[int(stamp_ns) for stamp_ns in line.split()] for line in lines]
    since_ns = item.stash[_BEGAN_NS]
    return max((end_ns - begun_ns for begun_ns, end_ns in gaps if end_ns > since_ns), default=0) / 1e9
