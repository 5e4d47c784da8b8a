"""The gate before the arm: what passes, and why all else does not."""

from dataclasses import replace

import numpy as np
import pytest

from robot_rl.real.drivers.gate import Gate
from robot_rl.real.messages import Beat, Command, Plan
from tests.real.supervisor.rig import two_joint_station

NOW_NS = 10_000_000_000
COMMAND = Command(number=3, stamp_ns=NOW_NS, target_rad=np.array([2.0, -2.0]), gripper=0.5)
"""At the limits of the station, which allow it."""
PLAN = Plan(
    number=3, start_ns=NOW_NS, period_ns=50_000_000, targets_rad=np.zeros((4, 2)), gripper=np.zeros(4)
)


@pytest.fixture
def gate():
    return Gate(two_joint_station())


def test_what_is_fresh_finite_and_within_limits_passes(gate):
    assert gate.refuses(COMMAND, NOW_NS) == ""
    assert gate.refuses(PLAN, NOW_NS) == ""
    assert gate.refused == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_rad": np.array([np.nan, 0.0])}, "a: target nan rad, allowed -2 to 2"),
        ({"target_rad": np.array([0.0, np.inf])}, "b: target inf rad, allowed -2 to 2"),
        ({"target_rad": np.array([0.0, 2.001])}, "b: target 2.001 rad, allowed -2 to 2"),
        ({"target_rad": np.zeros(3)}, "targets of shape (3,), gripper (); allowed (2,), ()"),
        ({"gripper": np.nan}, "gripper target nan is not finite"),
        ({"stamp_ns": NOW_NS - 101_000_000}, "command 3 is 101 ms old, allowed 100 ms"),
    ],
)
def test_a_command_is_refused_by_name(gate, changes, reason):
    assert gate.refuses(replace(COMMAND, **changes), NOW_NS) == reason
    assert gate.refused == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"targets_rad": np.array([[0, 0], [0, -2.5], [0, 0], [0, 0]])},
            "b: target -2.5 rad, allowed -2 to 2",
        ),
        ({"targets_rad": np.zeros((3, 2))}, "targets of shape (3, 2), gripper (4,); allowed (4, 2), (4,)"),
        (
            {"targets_rad": np.zeros((0, 2)), "gripper": np.zeros(0), "start_ns": NOW_NS + 1},
            "targets of shape (0, 2), gripper (0,); allowed (0, 2), (0,)",
        ),
        ({"period_ns": 0}, "plan 3 has a period of 0 ns, allowed: above 0"),
        ({"start_ns": NOW_NS - 300_000_000}, "plan 3 comes 250 ms late, allowed 100 ms"),
        # 1 s may be the longest piece, and 0.25 s of slack: 4 x 0.3 s pass, 4 x 0.32 s do not.
        (
            {"period_ns": 320_000_000},
            "plan 3 ends in 1.28 s, allowed 1.25 s (supervisor.max_plan_s and 0.25 s)",
        ),
        (
            {"start_ns": NOW_NS + 1_100_000_000},
            "plan 3 ends in 1.30 s, allowed 1.25 s (supervisor.max_plan_s and 0.25 s)",
        ),
    ],
)
def test_a_plan_is_refused_whole(gate, changes, reason):
    assert gate.refuses(replace(PLAN, **changes), NOW_NS) == reason


def test_an_older_plan_does_not_overtake(gate):
    assert gate.refuses(PLAN, NOW_NS) == ""
    assert gate.refuses(replace(PLAN, number=2), NOW_NS) == "plan 2 comes after plan 3"
    gate.restart()  # another supervisor
    assert gate.refuses(replace(PLAN, number=2), NOW_NS) == ""


def test_a_refused_plan_does_not_count_as_the_last(gate):
    assert gate.refuses(replace(PLAN, number=9, targets_rad=np.full((4, 2), 3.0)), NOW_NS) != ""
    assert gate.refuses(replace(PLAN, number=4), NOW_NS) == ""


def test_a_plan_may_end_a_little_later_than_its_longest_piece(gate):
    assert gate.refuses(replace(PLAN, period_ns=300_000_000), NOW_NS) == ""


@pytest.mark.parametrize(
    ("message", "is_fresh"),
    [
        (Beat(stamp_ns=NOW_NS - 100_000_000), True),
        (Beat(stamp_ns=NOW_NS - 101_000_000), False),
        (Beat(stamp_ns=NOW_NS + 101_000_000), False),  # of no clock of this machine
        (replace(COMMAND, stamp_ns=NOW_NS - 101_000_000), False),
        (COMMAND, True),
        # The first target is due after 50 ms, and may be late by 100 ms.
        (replace(PLAN, start_ns=NOW_NS - 150_000_000), True),
        (replace(PLAN, start_ns=NOW_NS - 151_000_000), False),
    ],
)
def test_what_waited_for_long_is_no_sign_of_life(gate, message, is_fresh):
    assert gate.is_fresh(message, NOW_NS) is is_fresh
