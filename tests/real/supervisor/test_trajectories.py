"""An arm that follows plans by itself: watched in every cycle, never far ahead, held until it rests."""

from typing import Any

import numpy as np
import pytest

from robot_rl.real.messages import Plan
from robot_rl.real.station import Ros2Config, StationConfig
from robot_rl.real.supervisor.pieces import Pieces
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
    for _ in range(400):
        rig.run(0.01)
        for piece in rig.arm.plans[seen:]:
            assert ahead_s(rig, piece) <= 1.0
        seen = len(rig.arm.plans)
        speeds.append(rig.arm._velocity[0])
    # The first at once, then each when half a second is left, or a little less: 4 / 0.5 - 1 = 7.
    assert 7 <= seen <= 8
    assert np.diff([piece.number for piece in rig.arm.plans]).min() >= 1
    assert rig.arm.position_rad[0] == pytest.approx(2.0, abs=0.01)
    assert min(speeds[10:390]) >= 0.49  # it never comes to rest in between
    assert max(speeds[10:]) <= 0.51


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
            assert ahead_s(rig, piece) <= 1.0
        seen = len(rig.arm.plans)
        speeds.append(abs(rig.arm._velocity[0]))
        assert len(speeds) < 500
    assert policy.answer.done
    assert seen >= 4
    assert rig.arm.position_rad == pytest.approx([0.0, 0.0], abs=1e-6)
    assert max(speeds) <= 0.51
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
        targets_rad=np.array([[target] for target in targets]),
        gripper=np.arange(len(targets), dtype=float),
        token=7,
    )


def test_a_short_plan_is_one_piece() -> None:
    pieces = Pieces(1.0)
    pieces.follow(one_plan(50, 0.1, 0.2))
    piece = pieces.due(10 * MS)
    assert piece is not None
    assert (piece.start_ns, piece.period_ns, piece.number, piece.token) == (0, 50 * MS, 3, 7)
    assert piece.targets_rad[:, 0].tolist() == [0.1, 0.2]
    assert pieces.due(20 * MS) is None
    assert not pieces.is_done(99 * MS)
    assert pieces.is_done(100 * MS)


def test_long_periods_are_divided() -> None:
    # 2 s a target: eighths of a quarter of 1 s. The first target is held from the start, as nobody knows
    # where the arm is; the gripper stays with its target.
    pieces = Pieces(1.0)
    pieces.follow(one_plan(2000, 0.0, 0.8))
    found = dict[int, tuple[float, float]]()
    for now_ms in range(0, 4000, 10):
        piece = pieces.due(now_ms * MS)
        if piece is not None:
            assert piece.start_ns + len(piece.gripper) * piece.period_ns <= (now_ms + 1000) * MS
            for row in range(len(piece.gripper)):
                end_ms = (piece.start_ns + (row + 1) * piece.period_ns) // MS
                found[end_ms] = float(piece.targets_rad[row, 0]), float(piece.gripper[row])
    assert sorted(found) == list(range(250, 4001, 250))
    assert found[2000] == (pytest.approx(0.0), 0.0)
    assert found[2250] == (pytest.approx(0.1), 1.0)
    assert found[4000] == (pytest.approx(0.8), 1.0)


def test_what_starts_later_waits_and_what_is_past_is_left_out() -> None:
    pieces = Pieces(1.0)
    pieces.follow(one_plan(50, *[0.1] * 4, start_ms=1500))
    assert pieces.due(540 * MS) is None
    early = pieces.due(550 * MS)
    assert early is not None
    assert len(early.gripper) == 1
    pieces.follow(one_plan(50, 0.1, 0.2, 0.3))
    late = pieces.due(70 * MS)
    assert late is not None
    assert (late.start_ns, late.targets_rad[:, 0].tolist()) == (50 * MS, [0.2, 0.3])
    pieces.follow(one_plan(50, 0.1))
    assert pieces.due(50 * MS) is None
    assert pieces.due(51 * MS) is None


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
    assert opened == ([[1.0, 0.0]] if command == "trajectory" else [])
    assert {sent.gripper for sent in rig.arm.sent} <= {0.0, 1.0}
    assert policy.status.sent_gripper == 0.0
    assert any(getattr(message, "limited", False) for message in policy.said)
    assert policy.status.phase == "running"
