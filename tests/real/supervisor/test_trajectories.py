"""An arm that follows plans by itself: watched in every cycle, never far ahead, held until it rests."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.real.messages import Plan
from robot_rl.real.station import Ros2Config, StationConfig
from robot_rl.real.supervisor.pieces import Pieces
from robot_rl.testing.devices import freeze
from tests.real.supervisor.conftest import MakeRig
from tests.real.supervisor.rig import Peer, Rig, two_joint_station

MS = 1_000_000


def station(**supervisor: Any) -> StationConfig:
    return two_joint_station(driver="ros2", ros2=Ros2Config(command="trajectory"), supervisor=supervisor)


def ahead_s(rig: Rig, plan: Plan) -> float:
    """Returns how far ahead of now a plan ends."""
    return 1e-9 * (plan.start_ns + len(plan.gripper) * plan.period_ns - rig.now_ns())


# Beats


def test_a_beat_goes_out_in_every_cycle_without_a_target(make_rig: MakeRig) -> None:
    rig = make_rig(station())
    policy = rig.started()
    before = rig.beats
    policy.link.send(rig.plan([0.01, 0.0]))
    rig.run(1.0)  # running, then holding
    assert rig.beats == before + 100
    policy.control("estop", by="Ada")
    rig.run(0.1)
    stopped = rig.beats
    rig.run(0.5)
    assert rig.beats == stopped  # the driver was told to take the arm


def test_a_stream_beats_while_its_scene_is_put_back(make_rig: MakeRig) -> None:
    rig = make_rig(two_joint_station(real=False))
    policy = rig.started()
    assert rig.beats == 0
    policy.control("pause")
    rig.run(0.02)
    rig.deaf = True
    policy.control("reset", seed=1)
    sent = len(rig.arm.sent)
    rig.run(1.0)
    assert len(rig.arm.sent) <= sent + 1
    assert rig.beats >= 98


# Pieces


def test_a_long_plan_goes_out_in_pieces_that_end_within_a_second(make_rig: MakeRig) -> None:
    # 0.5 rad/s for 4 s in targets of 50 ms.
    rig = make_rig(station(stop_after_s=10.0))
    policy = rig.started()
    policy.link.send(rig.plan(*[[0.025 * k, 0.0] for k in range(1, 81)]))
    seen, speeds = 0, []
    for _ in range(600):
        rig.run(0.01)
        for piece in rig.arm.plans[seen:]:
            assert 0.0 < ahead_s(rig, piece) <= 1.0
        seen = len(rig.arm.plans)
        speeds.append(rig.arm._velocity[0])
    # One each half second until the last target is reached, 5 x 0.1 s after its period: (4.5 - 1) / 0.5.
    assert 8 <= seen <= 9
    assert np.diff([piece.number for piece in rig.arm.plans]).min() >= 1
    assert rig.arm.position_rad[0] == pytest.approx(2.0, abs=0.01)
    assert np.min(speeds[50:390]) >= 0.49  # it never comes to rest in between
    assert np.max(speeds) <= 0.51


def test_an_arm_that_is_not_seen_gets_no_new_piece(make_rig: MakeRig) -> None:
    """It goes on with the one that it has: nobody knows from where the next one would begin."""
    rig = make_rig(station(max_state_age_s=0.3))
    policy = rig.started()
    policy.link.send(rig.plan(*[[0.025 * k, 0.0] for k in range(1, 41)]))
    rig.run(0.1)
    rig.arm.script = [freeze()] * 20  # 0.2 s
    seen = []
    for _ in range(8):
        policy.link.send(rig.plan(*[[0.025 * k, 0.0] for k in range(1, 41)]))
        rig.run(0.05)
        seen.append(len(rig.arm.plans))
    assert [later > before for before, later in pairwise(seen[1:])] == [False, False, True, True, True, True]
    assert rig.supervisor.phase == "running"


def test_home_goes_out_in_pieces_too(make_rig: MakeRig) -> None:
    # 1.5 rad at a quarter of 2 rad/s: 3 s and more.
    rig = make_rig(station())
    rig.arm.push(np.array([1.5, 0.0]))
    policy = rig.connect()
    rig.run(0.02)
    policy.control("home")
    seen, speeds = 0, []
    while not policy.answers:
        rig.run(0.01)
        for piece in rig.arm.plans[seen:]:
            assert 0.0 < ahead_s(rig, piece) <= 1.0
        seen = len(rig.arm.plans)
        speeds.append(abs(rig.arm._velocity[0]))
        assert len(speeds) < 500
    assert policy.answer.done
    assert seen >= 4
    assert rig.arm.position_rad == pytest.approx([0.0, 0.0], abs=1e-6)
    assert max(speeds) <= 0.52
    moving = np.flatnonzero(np.array(speeds) > 0.4)
    assert np.diff(moving).max() == 1  # one stretch at full speed


def test_after_a_hold_no_piece_follows(make_rig: MakeRig) -> None:
    rig = make_rig(station())
    policy = rig.started()
    policy.link.send(rig.plan(*[[0.01 * k, 0.0] for k in range(1, 101)]))
    rig.run(0.3)
    policy.control("pause")
    rig.run(0.05)
    sent = len(rig.arm.plans)
    rig.run(2.0)
    assert len(rig.arm.plans) == sent
    assert rig.arm.position_rad[0] < 0.1


def one_plan(period_ms: int, *targets: float, start_ms: int = 0) -> Plan:
    return Plan(
        number=3,
        start_ns=start_ms * MS,
        period_ns=period_ms * MS,
        targets_rad=np.array([[target, 0.0] for target in targets]),
        gripper=np.arange(1.0, len(targets) + 1.0),
        token=7,
    )


def due(pieces: Pieces, now_ms: int, at: float = 0.0, speed: float = 0.0) -> Plan | None:
    return pieces.due(now_ms * MS, np.array([at, 0.0]), np.array([speed, 0.0]))


def test_a_piece_is_the_way_of_soft_servos() -> None:
    # A lead of 0.05 rad held for good: 0.05 (1 - e^(-t / 0.1 s)), after the start at 10 rad/s^2.
    pieces = Pieces(station())
    pieces.follow(one_plan(50, 0.05))
    piece = due(pieces, 10)
    assert piece is not None
    assert (piece.start_ns, piece.period_ns, piece.number, piece.token) == (10 * MS, 50 * MS, 3, 7)
    assert len(piece.gripper) == 11  # 40 ms, and 5 time constants, in steps of 50 ms
    times_s = 0.05 * np.arange(1, 12)
    # Up to 0.5 rad/s it takes 0.05 s: it is up to 0.025 s late, e^0.25 of what is left.
    left = 0.05 - piece.targets_rad[:, 0]
    assert (left >= 0.05 * np.exp(-times_s / 0.1) - 1e-9).all()
    assert (left <= 0.05 * np.exp(-(times_s - 0.025) / 0.1) + 1e-9).all()
    assert set(piece.gripper) == {1.0}
    assert due(pieces, 20) is None
    assert not pieces.is_done(559 * MS)
    assert pieces.is_done(560 * MS)


def test_a_piece_goes_on_at_the_speed_there_is() -> None:
    # At 1 rad/s with a lead of 0.1 rad soft servos are in balance: 0.1 (1 - e^-0.5) rad in 50 ms.
    pieces = Pieces(station())
    pieces.follow(one_plan(50, 0.1))
    piece = due(pieces, 0, speed=1.0)
    assert piece is not None
    assert piece.targets_rad[0, 0] == pytest.approx(0.1 * (1.0 - np.exp(-0.5)), abs=1e-3)


def test_a_piece_can_stop_at_its_target_within_the_acceleration_limit() -> None:
    # 1 rad away: 2 rad/s, and 10 rad/s^2 on both sides; servos alone would end at 2 / 0.1 = 20 rad/s^2.
    pieces = Pieces(station(max_plan_s=3.0))
    pieces.follow(one_plan(50, 1.0))
    piece = due(pieces, 0)
    assert piece is not None
    speeds = np.diff(piece.targets_rad[:, 0], prepend=0.0) / 0.05
    assert 1.5 <= speeds.max() <= 2.0 + 1e-9
    assert np.abs(np.diff(speeds)).max() / 0.05 <= 10.0 + 1e-9
    assert piece.targets_rad.max() <= 1.0 + 1e-3


@pytest.mark.parametrize(
    ("aimed", "lag", "left"),
    [
        # 10 rad/s^2 for 50 ms are 0.5 rad/s, 0.025 rad in 50 ms.
        ([0.0, 0.0, 0.0, 0.0, 0.0], 0.06, [0.035, 0.01, 0.0, 0.0, 0.0]),
        ([0.0, 0.0, 0.0, 0.0, 0.0], -0.06, [-0.035, -0.01, 0.0, 0.0, 0.0]),
        # At 1.8 rad/s 0.2 rad/s are left over; at 2 rad/s nothing is, and nothing is soon.
        # From 1.8 to 2 rad/s takes 1 / 150 s, which costs half of that times 0.2 rad/s.
        ([0.09, 0.18, 0.27, 0.36, 0.45], 0.03, [0.02 + 1 / 1500, 0.01 + 1 / 1500, 1 / 1500, 0.0, 0.0]),
        ([0.1, 0.2, 0.3, 0.4, 0.4], 0.06, [0.06] * 5),
        ([0.0, 0.0, 0.0, 0.1, 0.1], 0.06, [0.06] * 5),
        # An arm that is ahead waits: the aim comes towards it.
        ([0.1, 0.2, 0.3, 0.4, 0.4], -0.06, [-0.035, -0.01, 0.0, 0.0, 0.0]),
    ],
)
def test_a_lag_is_made_up_with_the_speed_that_is_left_over(
    aimed: list[float], lag: float, left: list[float]
) -> None:
    plan = replace(one_plan(50, *aimed), start_ns=0)
    speed = np.array([aimed[0] / 0.05, 0.0])  # the arm is as fast as its aim
    sent = Pieces(station()).caught_up(plan, np.zeros(2), np.array([-lag, 0.0]), speed)
    np.testing.assert_allclose(sent.targets_rad[:, 0], np.array(aimed) - left, atol=1e-12)
    assert not sent.targets_rad[:, 1].any()


def test_an_arm_that_stands_is_not_told_to_jump_to_full_speed() -> None:
    """Its aim is at 2 rad/s. At 3 x 10 rad/s^2 it gets there in 1/15 s: 0.0375 rad after 50 ms."""
    plan = replace(one_plan(50, 0.1, 0.2, 0.3), start_ns=0)
    sent = Pieces(station()).caught_up(plan, np.zeros(2), np.zeros(2), np.zeros(2))
    np.testing.assert_allclose(sent.targets_rad[:, 0], [0.0375, 0.2 - 1 / 15, 0.3 - 1 / 15])
    sent = Pieces(station()).caught_up(plan, np.zeros(2), np.zeros(2), np.array([-2.0, 0.0]))
    np.testing.assert_allclose(sent.targets_rad[:, 0], [-0.1 + 0.0375, -0.2 + 0.15, 2 / 60])


def test_each_target_counts_for_its_period_and_so_does_the_gripper() -> None:
    pieces = Pieces(station())
    pieces.follow(one_plan(2000, 0.0, 0.8))
    where, openings = 0.0, dict[int, float]()
    for now_ms in range(0, 4500, 10):
        piece = due(pieces, now_ms, where)
        if piece is not None:
            assert now_ms % 500 == 0
            for row in range(len(piece.gripper)):
                openings[now_ms + 50 * row] = float(piece.gripper[row])
            where = float(piece.targets_rad[min(9, len(piece.gripper) - 1), 0])
    assert where == pytest.approx(0.8, abs=0.01)
    assert [at_ms for at_ms, opening in openings.items() if opening == 1.0][-1] == 1950


def test_what_starts_later_waits_and_of_a_late_plan_the_rest_counts() -> None:
    pieces = Pieces(station())
    pieces.follow(one_plan(50, 0.1, start_ms=200))
    pieces.follow(one_plan(50, 0.1, start_ms=100))
    assert due(pieces, 90) is None
    assert not pieces.is_done(90 * MS)
    assert due(pieces, 100) is not None
    pieces.follow(one_plan(50, 9.0, 9.0, 0.0, 0.0))
    late = due(pieces, 120)
    assert late is not None
    assert np.abs(late.targets_rad).max() == 0.0
    assert late.start_ns == 120 * MS


def test_too_short_pieces_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"supervisor.max_plan_s: got 0.05, allowed: 0.1 or more"):
        Pieces(station(max_plan_s=0.05))


@pytest.mark.parametrize(
    ("command", "least"), [("hold", 0.95), ("trajectory", 0.95), ("linear", 0.8), ("jerk_limited", 0.8)]
)
def test_in_every_mode_a_lead_is_the_same_speed(make_rig: MakeRig, command: str, least: float) -> None:
    """A policy that asks for 0.1 rad more than it measures, 20 times a second, as in training.

    Soft servos of 0.1 s close 1 - e^-0.5 of it in each step, 7.9 per second, and of what was measured 20 ms
    before: 0.79 / (1 + 0.02 x 7.9) = 0.68 rad/s. An arm that is at each target by the end of its step moves
    at 2 rad/s. Interpolated targets are full leads at the end of their step only.
    """
    by_itself = command == "trajectory"
    rig = make_rig(station() if by_itself else two_joint_station(supervisor={"interpolate": command}))
    policy = rig.started()
    for _ in range(10):
        policy.link.send(rig.plan([rig.arm.position_rad[0] + 0.1, 0.0]))
        rig.run(0.05)
    began = rig.arm.position_rad[0]
    for _ in range(20):
        policy.link.send(rig.plan([rig.arm.position_rad[0] + 0.1, 0.0]))
        rig.run(0.05)
    assert least * 0.68 <= rig.arm.position_rad[0] - began <= 1.05 * 0.68
    assert policy.status.phase == "running"


# Holds and stops that are refused


def holds(rig: Rig) -> int:
    return sum(control.operation == "hold" for control in rig.controls)


def test_a_hold_is_tried_again_until_the_arm_rests(make_rig: MakeRig) -> None:
    rig = make_rig(station())
    policy = rig.started()
    policy.link.send(rig.plan(*[[0.04 * k, 0.0] for k in range(1, 41)]))
    rig.run(0.3)
    rig.refuse["hold"] = "busy"
    policy.control("pause")
    rig.run(0.5)
    assert holds(rig) == 5  # every 0.1 s
    assert policy.status.phase == "paused"
    rig.refuse.clear()
    rig.run(0.2)
    held = holds(rig)
    assert rig.arm.calls[-1] == "hold"
    rig.run(3.0)
    assert holds(rig) == held  # it rests: once was enough
    assert policy.status.phase == "paused"


def test_a_hold_that_the_driver_does_not_hear_is_sent_again(make_rig: MakeRig) -> None:
    rig = make_rig(station())
    policy = rig.started()
    policy.link.send(rig.plan(*[[0.04 * k, 0.0] for k in range(1, 41)]))
    rig.run(0.3)
    rig.deaf = True
    policy.link.close()
    rig.peers.remove(policy)
    rig.run(0.25)
    assert holds(rig) >= 2
    rig.deaf = False
    rig.run(0.2)
    assert rig.arm.calls[-1] == "hold"


def test_an_arm_that_does_not_come_to_rest_is_stopped(make_rig: MakeRig) -> None:
    rig = make_rig(station())
    policy = rig.started()
    rig.refuse["hold"] = "busy"
    policy.control("pause")
    rig.run(1.9)
    assert policy.status.phase == "paused"
    rig.run(0.2)
    assert policy.status.phase == "stopped"
    assert policy.status.reason.startswith(
        "the arm did not come to rest within 2 s of a hold: it moves at 0.00 rad/s, the driver refused: busy"
    )
    assert rig.arm.calls[-2:] == ["stop", "hold"]


def moving(rig: Rig) -> Peer:
    """Returns a policy on whose plan the arm moves for a second more."""
    policy = rig.started()
    policy.link.send(rig.plan(*[[0.04 * k, 0.0] for k in range(1, 41)]))
    rig.run(0.2)
    return policy


def test_a_stop_that_is_refused_is_tried_again(make_rig: MakeRig) -> None:
    rig = make_rig(station())
    policy = moving(rig)
    rig.refuse["stop"] = "no such controller"
    policy.control("estop", by="Ada")
    rig.run(0.35)
    assert [control.operation for control in rig.controls][-3:] == ["stop"] * 3
    assert policy.status.reason == "estop by Ada; the driver does not stop it: no such controller"
    assert not rig.supervisor.is_released
    rig.refuse.clear()
    rig.run(0.2)
    assert rig.arm.calls[-2:] == ["stop", "hold"]
    assert rig.supervisor.is_released
    assert policy.status.reason == "estop by Ada"


def test_a_stop_is_given_up_when_the_arm_rests_and_that_is_told(make_rig: MakeRig) -> None:
    rig = make_rig(station())
    policy = moving(rig)
    rig.refuse["stop"] = "no such controller"
    policy.control("estop", by="Ada")
    rig.run(2.0)  # the piece in hand ends within a second
    assert rig.supervisor.is_released
    tries = len(rig.controls)
    rig.run(1.0)
    assert len(rig.controls) == tries
    assert policy.status.reason == "estop by Ada; the driver does not stop it: no such controller"


# The gripper


@pytest.mark.parametrize("command", ["position", "trajectory"])
def test_the_gripper_stays_within_its_range(make_rig: MakeRig, command: Any) -> None:
    # From closed 0.0 to open 1.0.
    rig = make_rig(two_joint_station(driver="ros2", ros2=Ros2Config(command=command)))
    policy = rig.started()
    policy.said.clear()
    policy.link.send(rig.plan([0.0, 0.0], [0.0, 0.0], gripper=np.array([1e9, -3.0])))
    rig.run(0.08)
    opened = [plan.gripper.tolist() for plan in rig.arm.plans]
    if command == "trajectory":
        ((first, *others),) = opened
        assert (first, set(others)) == (1.0, {0.0})
    assert {sent.gripper for sent in rig.arm.sent} <= {0.0, 1.0}
    assert policy.status.sent_gripper == 0.0
    assert any(getattr(message, "limited", False) for message in policy.said)
    assert policy.status.phase == "running"
