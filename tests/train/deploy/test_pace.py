"""Control ticks: absolute deadlines, what counts as late, and what follows a late step."""

import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.train.deploy.pace import Pace, RunningMedian


def test_small_delays_do_not_add_up_and_a_late_step_gets_a_whole_period() -> None:
    clock = ManualClock(50.0)
    pace = Pace(20.0, clock, clock.advance)
    pace.begin()
    ends: list[float] = []
    for thinks_s in (0.0, 0.02, 0.024, 0.06, 0.0):
        clock.advance(thinks_s)
        pace.step()
        pace.wait()
        ends.append(round(clock.now_s() - 50.0, 6))
    # 60 ms is more than half a period: that step begins at 0.15 + 0.06 and lasts 50 ms.
    assert ends == [0.05, 0.1, 0.15, 0.26, 0.31]
    assert pace.late == 1


def test_waiting_for_what_is_past_takes_no_time() -> None:
    clock = ManualClock(50.0)
    pace = Pace(20.0, clock, clock.advance)
    pace.begin()
    pace.wait()
    pace.wait(round(49e9))
    assert clock.now_s() == 50.0


def test_a_running_median_forgets() -> None:
    median = RunningMedian()
    assert median.value == 0.0
    for value in (1.0, 9.0, 2.0):
        median.add(value)
    assert median.value == 2.0
    for _ in range(51):
        median.add(7.0)
    assert median.value == pytest.approx(7.0)
