"""The clocks only move forward, and the manual one only when told."""

import pytest

from robot_rl.core.clock import ManualClock, MonotonicClock


def test_manual_clock_moves_when_told() -> None:
    clock = ManualClock(start_s=2.0)
    assert clock.now_s() == 2.0
    clock.advance(0.5)
    clock.advance(0.25)
    assert clock.now_s() == pytest.approx(2.75)  # 2 + 0.5 + 0.25


def test_monotonic_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    first = clock.now_s()
    assert clock.now_s() >= first
