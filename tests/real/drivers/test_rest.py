"""Where an arm is held, and how often: every number worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from robot_rl.hal.arm import ArmState
from robot_rl.real.drivers.rest import Holding, HoldTarget
from tests.real.supervisor.rig import two_joint_station

LIMITS = two_joint_station().limits
"""Lead 2 rad/s x 0.1 s = 0.2 rad; at rest below 0.02 x 2 = 0.04 rad/s."""
MS = 1_000_000


def test_an_arm_is_held_at_its_last_target_where_that_is_near_and_where_it_is_where_not():
    held = HoldTarget(LIMITS)
    assert held.choose(np.array([0.5, 0.5])).tolist() == [0.5, 0.5]  # nobody has moved it
    held.note(np.array([0.7, 0.8]))
    assert held.choose(np.array([0.5, 0.5])).tolist() == [0.7, 0.5]  # 0.2 and 0.3 rad away


def test_an_arm_that_hangs_below_its_target_does_not_sink_with_a_hundred_holds():
    held, sag = HoldTarget(LIMITS), np.array([0.05, 0.0])
    held.note(np.array([1.0, 0.0]))
    position = np.array([1.0, 0.0]) - sag
    for _ in range(100):
        position = held.choose(position) - sag
    assert position.tolist() == [0.95, 0.0]  # 5 rad lower if each hold were at the measured position


def test_an_arm_that_somebody_else_moved_is_held_where_it_is():
    held = HoldTarget(LIMITS)
    held.note(np.array([0.1, 0.0]))
    held.forget()
    assert held.choose(np.array([0.0, 0.0])).tolist() == [0.0, 0.0]


def test_a_joint_that_measures_nothing_stays_at_its_target():
    held = HoldTarget(LIMITS)
    held.note(np.array([0.3, 0.1]))
    assert held.choose(np.array([np.nan, 0.1])).tolist() == [0.3, 0.1]


class Bench:
    """An arm that is held when the test says, on the test's clock."""

    def __init__(self) -> None:
        self.held_at: list[int] = []
        self.works = True
        self.now_ms = 0
        self.holding = Holding(LIMITS, self.hold)
        self.state = ArmState(stamp_ns=0, position_rad=np.zeros(2), velocity_rad_s=np.zeros(2))

    def hold(self) -> bool:
        self.held_at.append(self.now_ms)
        return self.works

    def run(self, until_ms: int, speed: float | None) -> None:
        """Measures every 10 ms; None for an arm that measures no more."""
        while self.now_ms < until_ms:
            self.now_ms += 10
            if speed is not None:
                velocity = np.array([0.0, speed])
                self.state = replace(self.state, stamp_ns=self.now_ms * MS, velocity_rad_s=velocity)
            self.holding.update(self.state, self.now_ms * MS)


@pytest.fixture
def bench():
    return Bench()


def test_an_arm_at_rest_is_held_once(bench):
    bench.holding.begin(0)
    bench.run(150, speed=0.039)
    assert not bench.holding.is_done  # seen still from 60 ms on
    bench.run(160, speed=0.039)
    assert bench.holding.is_done
    bench.run(1000, speed=1.0)
    assert bench.held_at == [0]


@pytest.mark.parametrize("speed", [0.041, -2.0, np.nan, None])
def test_an_arm_that_moves_or_is_not_seen_is_held_every_tenth_of_a_second(bench, speed):
    bench.holding.begin(0)
    bench.run(500, speed)
    assert bench.held_at == [0, 100, 200, 300, 400, 500]
    bench.run(1000, speed=0.0)
    assert bench.held_at[-1] == 500
    assert bench.holding.is_done


def test_an_arm_that_only_turns_round_is_not_at_rest(bench):
    bench.holding.begin(0)
    bench.run(90, speed=1.0)
    bench.run(180, speed=0.0)  # still for 90 ms
    bench.run(300, speed=-1.0)
    assert not bench.holding.is_done
    assert bench.held_at[1] == 190


def test_a_hold_that_fails_is_tried_until_it_does_not(bench):
    bench.works = False
    assert not bench.holding.begin(0)
    bench.run(300, speed=0.0)
    assert bench.held_at == [0, 100, 200, 300]
    assert not bench.holding.is_done
    bench.works = True
    bench.run(600, speed=0.0)
    assert bench.held_at == [0, 100, 200, 300, 400]
    assert bench.holding.is_done


def test_a_command_ends_it(bench):
    bench.holding.begin(0)
    bench.run(50, speed=1.0)
    bench.holding.end()
    bench.run(500, speed=1.0)
    assert bench.held_at == [0]
