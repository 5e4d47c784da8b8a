"""The safety envelope: every limit with its arithmetic, every stop with its words."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from robot_rl.core.arrays import namespace_of
from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import ConfigError, SafetyStopError, StaleObservationError
from robot_rl.hal.safety import Array, SafetyEnvelope, SafetyLimits

DT_S = 0.05
TWO_JOINTS: dict[str, Any] = {
    "position_low_rad": (-1.0, -1.0),
    "position_high_rad": (1.0, 1.0),
    "velocity_rad_s": (2.0, 3.0),
    "acceleration_rad_s2": (10.0, 20.0),
    "effort_n_m": (5.0, 6.0),
}
LIMITS = SafetyLimits(**TWO_JOINTS)
STILL = np.zeros((1, 2))


def envelope(num_envs: int = 1, **changes: Any) -> SafetyEnvelope:
    limits = SafetyLimits(**{**TWO_JOINTS, **changes})
    return SafetyEnvelope(limits, control_dt_s=DT_S, num_envs=num_envs, clock=ManualClock())


def rows(*values: tuple[float, float]) -> Array:
    return np.array(values, float)


# Limits


def test_what_is_allowed_passes_unchanged() -> None:
    target = rows((0.1, -0.1))
    safe, limited = envelope().filter(target, STILL, STILL)
    assert np.array_equal(safe, target)
    assert limited.tolist() == [False]


def test_the_velocity_limit_bounds_the_lead() -> None:
    # Lookahead 0.1 s: joint 0 may lead by 2 * 0.1 = 0.2, joint 1 by 3 * 0.1 = 0.3.
    safe, limited = envelope().filter(rows((0.5, -0.5)), STILL, STILL)
    assert safe == pytest.approx(rows((0.2, -0.3)))
    assert limited.tolist() == [True]


def test_a_longer_lookahead_allows_a_longer_lead() -> None:
    # 2 * 0.2 = 0.4 and 3 * 0.2 = 0.6.
    safe, _ = envelope(lookahead_s=0.2).filter(rows((0.5, 0.5)), STILL, STILL)
    assert safe == pytest.approx(rows((0.4, 0.5)))


def test_targets_stay_within_the_position_limits() -> None:
    # From 0.95 the lead would allow 1.15, the limit is 1.0; from -0.9, -1.2 and -1.0.
    safe, limited = envelope().filter(rows((1.1, -1.1)), rows((0.95, -0.9)), STILL)
    assert safe == pytest.approx(rows((1.0, -1.0)))
    assert limited.tolist() == [True]


def test_an_arm_outside_of_its_limits_is_sent_back_to_them() -> None:
    # At 1.5 the lead allows 1.3 at the lowest; the position limit wins, and 1.0 is a valid target.
    safe, _ = envelope().filter(rows((1.4, 0.0)), rows((1.5, 0.0)), STILL)
    assert safe[0, 0] == pytest.approx(1.0)


def test_the_action_rate_bounds_a_reversal() -> None:
    # Rate 2 + 10 * 0.1 = 3 rad/s, so 0.15 per step, and 3 + 20 * 0.1 = 5, so 0.25.
    # From the target (0.2, 0.3), a full reversal to (-0.2, -0.3) gets to (0.05, 0.05) at first,
    # then to (-0.1, -0.2), then all the way.
    safety = envelope()
    safety.filter(rows((0.2, 0.3)), STILL, STILL)
    for expected in ((0.05, 0.05), (-0.1, -0.2), (-0.2, -0.3)):
        safe, _ = safety.filter(rows((-0.2, -0.3)), STILL, STILL)
        assert safe == pytest.approx(rows(expected))


def test_the_action_rate_can_be_given() -> None:
    # 1 rad/s * 0.05 s = 0.05 from the first target on; the first has no predecessor.
    safety = envelope(action_rate_rad_s=(1.0, 1.0))
    assert safety.filter(rows((0.1, 0.0)), STILL, STILL)[0][0, 0] == pytest.approx(0.1)
    assert safety.filter(rows((0.2, 0.0)), STILL, STILL)[0][0, 0] == pytest.approx(0.15)


def test_a_pushed_arm_takes_its_target_along() -> None:
    # The target was 0.0; the arm was pushed to 0.8. The lead (0.6 to 1.0) wins over the rate (0.15).
    safety = envelope()
    safety.filter(STILL, STILL, STILL)
    safe, _ = safety.filter(STILL, rows((0.8, 0.0)), STILL)
    assert safe == pytest.approx(rows((0.6, 0.0)))


def test_a_reset_forgets_the_previous_target_of_its_rows_only() -> None:
    safety = envelope(num_envs=2)
    still = np.zeros((2, 2))
    safety.filter(rows((0.2, 0.0), (0.2, 0.0)), still, still)
    safety.reset(np.array([True, False]))
    safe, limited = safety.filter(rows((-0.2, 0.0), (-0.2, 0.0)), still, still)
    assert safe == pytest.approx(rows((-0.2, 0.0), (0.05, 0.0)))
    assert limited.tolist() == [False, True]


def test_rows_that_are_not_active_keep_their_previous_target() -> None:
    safety = envelope(num_envs=2)
    still = np.zeros((2, 2))
    safety.filter(rows((0.2, 0.0), (0.2, 0.0)), still, still)
    _, limited = safety.filter(rows((-0.2, 0.0), (-0.2, 0.0)), still, still, np.array([True, False]))
    assert limited.tolist() == [True, False]
    safe, _ = safety.filter(rows((-0.2, 0.0), (-0.2, 0.0)), still, still)
    # Row 0 has come from 0.2 by 0.15 twice, row 1 once.
    assert safe == pytest.approx(rows((-0.1, 0.0), (0.05, 0.0)))


def test_the_filtered_target_belongs_to_the_caller() -> None:
    safety = envelope()
    target = rows((0.1, 0.1))
    safe, _ = safety.filter(target, STILL, STILL)
    safe[:] = 7.0
    again, _ = safety.filter(target, STILL, STILL)
    assert np.array_equal(again, target)


def test_each_row_is_alone() -> None:
    rng = np.random.default_rng(0)
    target, position = rng.uniform(-1.5, 1.5, (16, 2)), rng.uniform(-1.0, 1.0, (16, 2))
    together = envelope(num_envs=16)
    single = [envelope() for _ in range(16)]
    for _ in range(3):
        target = target[::-1].copy()
        safe, limited = together.filter(target, position, np.zeros((16, 2)))
        for row, safety in enumerate(single):
            alone, is_limited = safety.filter(target[row : row + 1], position[row : row + 1], STILL)
            assert np.array_equal(alone[0], safe[row])
            assert is_limited[0] == limited[row]


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(ConfigError, match=r"got targets of shape \(1, 3\), need \(1, 2\)"):
        envelope().filter(np.zeros((1, 3)), np.zeros((1, 3)), np.zeros((1, 3)))


# What is not finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_simulated_row_is_held_where_it_is_until_its_reset(bad: float) -> None:
    safety = envelope(num_envs=2)
    position, still = rows((0.1, 0.2), (0.3, 0.4)), np.zeros((2, 2))
    safe, limited = safety.filter(rows((bad, 0.2), (0.3, 0.4)), position, still)
    assert np.array_equal(safe, position)
    assert limited.tolist() == [True, False]
    assert safety.row_stopped.tolist() == [True, False]
    # The next command is finite, but the row stays stopped, and where it was.
    safe, limited = safety.filter(rows((0.15, 0.2), (0.3, 0.4)), position + 0.01, still)
    assert np.array_equal(safe[0], [0.1, 0.2])
    assert limited.tolist() == [True, False]
    safety.reset(np.array([True, False]))
    safe, limited = safety.filter(rows((0.15, 0.2), (0.3, 0.4)), position, still)
    assert safe[0] == pytest.approx([0.15, 0.2])
    assert not limited.any()


def test_opposite_infinities_do_not_hide_each_other() -> None:
    safety = envelope()
    safe, limited = safety.filter(rows((np.inf, -np.inf)), STILL, STILL)
    assert np.array_equal(safe, STILL)
    assert limited.tolist() == [True]


def test_a_row_without_a_known_position_is_held_at_its_last_target() -> None:
    safety = envelope()
    safety.filter(rows((0.1, 0.1)), STILL, STILL)
    safe, _ = safety.filter(rows((0.2, 0.2)), rows((np.nan, 0.05)), STILL)
    assert safe == pytest.approx(rows((0.1, 0.05)))


def test_a_nan_of_a_waiting_row_stops_nobody() -> None:
    safety = envelope(num_envs=2)
    target = rows((np.nan, 0.0), (0.1, 0.1))
    safe, _ = safety.filter(target, np.zeros((2, 2)), np.zeros((2, 2)), np.array([False, True]))
    assert safe[1] == pytest.approx([0.1, 0.1])
    assert not safety.row_stopped.any()


def test_a_real_robot_stops_at_nan_and_a_reset_does_not_lift_it() -> None:
    safety = SafetyEnvelope(LIMITS, control_dt_s=DT_S, real=True, clock=ManualClock())
    message = r"stopped by safety envelope .* target \[nan, 0.0\] at position \[0.0, 0.0\] is not finite"
    with pytest.raises(SafetyStopError, match=message):
        safety.filter(rows((np.nan, 0.0)), STILL, STILL)
    safety.reset()
    with pytest.raises(SafetyStopError, match="is not finite"):
        safety.filter(STILL, STILL, STILL)


# Stops


def test_a_stop_latches_and_says_who_when_why_and_what_clears_it() -> None:
    clock = ManualClock(50.0)
    safety = SafetyEnvelope(LIMITS, control_dt_s=DT_S, clock=clock)
    safety.trip("hand in the cell", by="light curtain")
    safety.trip("later", by="somebody else")
    clock.advance(3.2)
    with pytest.raises(SafetyStopError) as caught:
        safety.filter(STILL, STILL, STILL)
    assert str(caught.value) == (
        "safety: stopped by light curtain 3.2 s ago: hand in the cell. "
        "Nothing moves until somebody has looked at the robot and calls clear(by=<name>)."
    )
    assert safety.stopped is not None
    assert safety.stopped.at_s == 50.0


def test_a_person_clears_a_stop_and_the_first_target_then_has_no_predecessor() -> None:
    safety = envelope()
    safety.filter(rows((0.2, 0.0)), STILL, STILL)
    safety.trip("test")
    with pytest.raises(ConfigError, match=r"safety.clear: got by=''"):
        safety.clear("")
    assert safety.stopped is not None
    safety.clear("ada")
    safety.require_clear()
    assert safety.filter(rows((-0.2, 0.0)), STILL, STILL)[0][0, 0] == pytest.approx(-0.2)


def test_the_workspace_is_a_box() -> None:
    safety = envelope(workspace_low_m=(0.2, -0.5, 0.0), workspace_high_m=(0.8, 0.5, 1.0))
    tool = np.array([[0.5, 0.0, 0.5], [0.9, -0.6, 0.5], [0.5, 0.0, -0.01]])
    clamped, limited = safety.check_workspace(tool)
    assert clamped == pytest.approx(np.array([[0.5, 0.0, 0.5], [0.8, -0.5, 0.5], [0.5, 0.0, 0.0]]))
    assert limited.tolist() == [False, True, True]


def test_without_a_box_every_finite_tool_position_passes() -> None:
    safety = envelope()
    clamped, limited = safety.check_workspace(np.array([[9.0, 9.0, 9.0]]))
    assert clamped.tolist() == [[9.0, 9.0, 9.0]]
    assert not limited.any()
    with pytest.raises(SafetyStopError, match=r"tool position is not finite: \[nan, 0.0, 0.0\]"):
        safety.check_workspace(np.array([[np.nan, 0.0, 0.0]]))


def test_measured_motion_may_exceed_its_limits_by_the_tolerance() -> None:
    # Limits 2 and 3 rad/s with 20 %: up to 2.4 and 3.6. Torques 5 and 6 N m: up to 6 and 7.2.
    safety = envelope()
    safety.check_motion(rows((2.4, -3.59)), rows((-6.0, 7.19)))
    with pytest.raises(SafetyStopError, match=r"joint 1: speed -3.7 rad/s is over the limit 3 rad/s"):
        safety.check_motion(rows((0.0, -3.7)))
    safety.clear("test")
    with pytest.raises(SafetyStopError, match=r"joint 0: torque 6.1 N m is over the limit 5 N m"):
        safety.check_motion(STILL[0], np.array([6.1, 0.0]))
    safety.clear("test")
    with pytest.raises(SafetyStopError, match="joint 1: speed nan"):
        safety.check_motion(rows((0.0, np.nan)))


# Watchdogs


def test_an_old_observation_is_refused_with_both_numbers() -> None:
    safety = envelope(max_observation_age_s=0.03)
    safety.observe(0.03)
    with pytest.raises(StaleObservationError, match="40 ms old, allowed is 30 ms"):
        safety.observe(0.04)
    with pytest.raises(StaleObservationError):
        safety.observe(float("nan"))
    safety.require_clear()  # one late frame is no stop


# Resume


def test_a_restored_envelope_goes_on_where_it_was() -> None:
    first, second = envelope(num_envs=2), envelope(num_envs=2)
    still = np.zeros((2, 2))
    first.filter(rows((0.2, 0.3), (np.nan, 0.0)), still, still)
    state = first.state_dict()
    expected = first.filter(rows((-0.2, -0.3), (0.1, 0.1)), still, still)
    second.load_state_dict(state)
    got = second.filter(rows((-0.2, -0.3), (0.1, 0.1)), still, still)
    assert np.array_equal(got[0], expected[0])
    assert got[1].tolist() == expected[1].tolist() == [True, True]


def test_a_stop_survives_a_restart() -> None:
    first, second = envelope(), envelope()
    first.trip("collision", by="arm")
    second.load_state_dict(first.state_dict())
    with pytest.raises(SafetyStopError, match=r"stopped by arm .*collision"):
        second.require_clear()


def test_the_state_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got a state of shape \(2, 2\), need \(1, 2\)"):
        envelope().load_state_dict(envelope(num_envs=2).state_dict())


# Settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"effort_n_m": (1.0,)}, "one entry per arm joint is needed in every list, got .*'effort_n_m': 1"),
        ({"action_rate_rad_s": (1.0,)}, "'action_rate_rad_s': 1"),
        (
            {"position_low_rad": (-1.0, 1.0)},
            "joint 1: position_low_rad 1.0 must be below position_high_rad 1.0",
        ),
        ({"velocity_rad_s": (0.0, 1.0)}, r"safety.velocity_rad_s: got \(0.0, 1.0\), allowed: above 0"),
        ({"action_rate_rad_s": (-1.0, 1.0)}, "safety.action_rate_rad_s"),
        ({"lookahead_s": 0.0}, "safety.lookahead_s: got 0.0, allowed: above 0"),
        ({"max_observation_age_s": -1.0}, "safety.max_observation_age_s"),
        ({"motion_tolerance": -0.1}, "safety.motion_tolerance: got -0.1, allowed: 0 or more"),
        ({"workspace_low_m": (0.0, 0.0, 0.0)}, "give both workspace_low_m and workspace_high_m"),
        (
            {"workspace_low_m": (0.0, 0.0, 1.0), "workspace_high_m": (1.0, 1.0, 1.0)},
            r"workspace_low_m \(0.0, 0.0, 1.0\) must be below",
        ),
    ],
)
def test_bad_limits_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SafetyLimits(**{**TWO_JOINTS, **change})


def test_a_control_period_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"control_dt_s: got 0.0, allowed: above 0"):
        SafetyEnvelope(LIMITS, control_dt_s=0.0)


# Tensors


def test_tensors_are_limited_to_the_same_bits() -> None:
    box: dict[str, Any] = {"workspace_low_m": (-0.5, -0.5, 0.0), "workspace_high_m": (0.5, 0.5, 1.0)}
    limits = SafetyLimits(**TWO_JOINTS, **box)
    ours = SafetyEnvelope(limits, control_dt_s=DT_S, num_envs=5)
    theirs = SafetyEnvelope(limits, control_dt_s=DT_S, num_envs=5, xp=namespace_of("torch"))
    rng, tensor = np.random.default_rng(0), cast("Any", torch.tensor)
    for step in range(8):
        target, position, velocity = rng.uniform(-1.5, 1.5, (3, 5, 2))
        target[2, 0] = np.nan if step == 2 else target[2, 0]  # held from then on, until its reset
        active = np.arange(5) != 1 if step > 3 else None
        expected = ours.filter(target, position, velocity, active)
        mask = None if active is None else tensor(active)
        got: Any = theirs.filter(tensor(target), tensor(position), tensor(velocity), mask)
        for limited, array in zip(got, expected, strict=True):
            np.testing.assert_array_equal(limited.numpy(), array)
        np.testing.assert_array_equal(theirs.row_stopped, ours.row_stopped)
        if step == 5:
            ended = np.arange(5) == 2
            ours.reset(ended, position)
            theirs.reset(tensor(ended), tensor(position))
    tool = rng.uniform(-2.0, 2.0, (5, 3))
    for kept, array in zip(theirs.check_workspace(tensor(tool)), ours.check_workspace(tool), strict=True):
        np.testing.assert_array_equal(kept, array)
    fast = tensor([[0.0, 0.0], [0.0, 3.7]])
    with pytest.raises(SafetyStopError, match=r"joint 1: speed 3.7 rad/s is over the limit 3 rad/s"):
        theirs.check_motion(fast)
