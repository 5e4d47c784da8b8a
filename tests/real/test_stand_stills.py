"""A failure is repeated if the machine stood still, and only then."""

import os
import signal
import time

import pytest

runs: list[str] = []


def stand_still(pulse: int) -> None:
    os.kill(pulse, signal.SIGSTOP)
    time.sleep(0.15)
    os.kill(pulse, signal.SIGCONT)


@pytest.fixture
def at_first(pulse: int) -> None:
    if not pulse:
        pytest.skip("no process may have real-time priority here")
    runs.append("setup")
    if len(runs) == 1:
        stand_still(pulse)
        raise OSError("not now")


def test_it_is_repeated_where_it_failed_while_the_machine_stood_still(at_first: None, pulse: int) -> None:
    runs.append("call")
    if len(runs) < 5:
        stand_still(pulse)
        pytest.fail("nor now")
    assert runs == ["setup", "setup", "call", "setup", "call"]


@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
def test_any_other_failure_counts() -> None:
    _ = 1 // 0
