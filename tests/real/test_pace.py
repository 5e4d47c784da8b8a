"""Deadlines are absolute, and what was missed is counted."""

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.real.pace import Pacer

MS = 1_000_000


class Time:
    """A clock that sleeping and working move, too far by `oversleep_ns` at every sleep."""

    def __init__(self, oversleep_ns: int = 0) -> None:
        self.now_ns, self._oversleep_ns = 5 * MS, oversleep_ns

    def read(self) -> int:
        return self.now_ns

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_ns += round(1e9 * duration_s) + self._oversleep_ns


def test_oversleeping_does_not_add_up() -> None:
    time = Time(oversleep_ns=MS // 2)
    pacer = Pacer(100, clock_ns=time.read, sleep_s=time.sleep)
    for cycle in range(1, 301):
        assert pacer.wait() == 1
        assert time.now_ns == 5 * MS + cycle * 10 * MS + MS // 2
    summary = pacer.summary()
    assert summary["cycles"] == 300
    assert summary["missed"] == 0
    assert summary["late_worst_ms"] == 0.5


def test_a_period_that_is_no_whole_number_of_nanoseconds() -> None:
    time = Time()
    pacer = Pacer(300, clock_ns=time.read, sleep_s=time.sleep)
    for _ in range(300):
        pacer.wait()
    assert time.now_ns == 5 * MS + 1000 * MS


def test_a_slow_cycle_costs_the_periods_it_covers() -> None:
    time = Time()
    pacer = Pacer(100, clock_ns=time.read, sleep_s=time.sleep)
    pacer.wait()
    time.now_ns += 34 * MS  # cycle 1, due at 10, ends at 44: 20 and 30 are missed, 40 begins 4 late
    assert pacer.wait() == 3
    assert time.now_ns == 5 * MS + 44 * MS
    assert pacer.wait() == 1  # at 50, on time
    assert time.now_ns == 5 * MS + 50 * MS
    assert pacer.missed == 2
    late = np.array([0, 24, 0])
    assert pacer.summary()["late_worst_ms"] == late.max()  # it was due at 20


def test_rates_are_checked() -> None:
    with pytest.raises(ConfigError, match="rate_hz: got 0, allowed: above 0, at most 2000"):
        Pacer(0)
