"""The phases of a supervised arm, and who may change them, on a clock turned by hand at 100 Hz."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.clock import MonotonicClock
from robot_rl.real.messages import ArmState, Operation
from robot_rl.testing.devices import protective_stop
from tests.real.supervisor.conftest import MakeRig
from tests.real.supervisor.rig import two_joint_station


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_an_arm_waits_is_paused_runs_and_is_paused_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = rig.connect()
    rig.run(0.01)
    assert policy.status.phase == "paused"
    assert rig.arm.sent == []  # nothing is sent before somebody starts
    policy.control("start")
    rig.run(0.1)
    assert policy.answer.done
    assert policy.status.phase == "running"
    policy.link.send(rig.plan([0.1, -0.1]))
    rig.run(0.05)
    assert policy.status.plan == 1
    assert rig.arm.sent[-1].target_rad == pytest.approx([0.1, -0.1])
    policy.control("pause")
    rig.run(0.02)
    assert policy.status.phase == "paused"
    assert policy.status.plan == -1
    before = len(rig.arm.sent)
    policy.link.send(rig.plan([0.5, 0.5]))
    rig.run(3.0)
    assert policy.status.phase == "paused"  # nobody is missed while nothing is expected
    assert len(rig.arm.sent) == before + 300  # the target is held by repeating it
    assert rig.arm.position_rad == pytest.approx([0.1, -0.1])


def test_before_the_first_state_nothing_can_be_done(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = rig.connect()
    rig.supervisor.cycle()
    policy.control("start")
    rig.supervisor.cycle()
    policy.listen()
    assert policy.status.phase == "waiting"
    assert policy.status.state is None
    assert "no joint state has come yet" in policy.answer.message


def test_a_silent_policy_is_held_then_stopped(make_rig: MakeRig) -> None:
    # The plan covers 0.05 s; held 0.25 s later, stopped 2 s later. The arm goes no further than
    # to the target it was sent, at most the lead of 2 rad/s x 0.1 s.
    rig = make_rig()
    policy = rig.started()
    policy.link.send(rig.plan([0.2, 0.0]))
    rig.run(0.30)
    assert policy.status.phase == "running"
    rig.run(0.03)
    assert policy.status.phase == "holding"
    assert policy.status.reason == "no plan for 0.26 s"
    rig.run(1.70)
    assert policy.status.phase == "holding"
    rig.run(0.10)
    assert policy.status.phase == "stopped"
    assert policy.status.reason == "the policy is silent: no plan for 2.01 s (by the heartbeat watchdog)"
    assert rig.controls[-1].operation == "stop"
    assert rig.arm.position_rad == pytest.approx([0.2, 0.0], abs=1e-6)


def test_a_policy_that_comes_back_in_time_goes_on(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = rig.started()
    rig.run(0.5)
    assert policy.status.phase == "holding"
    policy.link.send(rig.plan([0.05, 0.0]))
    rig.run(0.02)
    assert policy.status.phase == "running"
    assert policy.status.reason == ""


def test_a_policy_that_is_gone_is_held_at_once(make_rig: MakeRig) -> None:
    # Twenty targets of 50 ms would cover a second; who is gone will not correct them.
    rig = make_rig()
    policy, watcher = rig.started(), rig.connect()
    policy.link.send(rig.plan(*[[0.01 * k, 0.0] for k in range(20)]))
    rig.run(0.1)
    policy.link.close()
    rig.peers.remove(policy)
    rig.run(0.02)
    assert watcher.status.phase == "holding"
    assert watcher.status.reason == "the policy is gone"
    rig.run(2.1)
    assert watcher.status.phase == "stopped"
    assert rig.arm.position_rad[0] <= 0.03  # target 0.02 was in force


def test_a_hanging_policy_with_a_long_plan_is_stopped_too(make_rig: MakeRig) -> None:
    # 1000 targets would cover 50 s; a plan counts for at most stop_after_s = 2 s, then 2 s of silence.
    rig = make_rig()
    policy = rig.started()
    policy.link.send(rig.plan(*[[0.0, 0.0]] * 1000))
    rig.run(3.9)
    assert policy.status.phase == "holding"
    rig.run(0.2)
    assert policy.status.phase == "stopped"


def test_a_stop_needs_a_person_with_a_name(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    policy = rig.started()
    policy.control("estop", by="Ada")
    rig.run(0.05)
    assert policy.answer.done
    assert policy.status.phase == "stopped"
    assert policy.status.reason == "estop by Ada"
    for operation in ("start", "home"):
        policy.control(operation)
        rig.run(0.02)
        assert "stopped: estop by Ada. Somebody looks at the arm" in policy.answer.message
    policy.control("clear", by=" ")
    rig.run(0.1)
    assert policy.answer.message == "clear: got by=' ', need the name of who looked at the arm."
    assert policy.status.phase == "stopped"
    policy.control("clear", by="Ada")
    rig.run(0.1)
    assert policy.answer.done
    assert policy.status.phase == "paused"  # never running: somebody starts it
    policy.control("start")
    rig.run(0.1)
    assert policy.status.phase == "running"
    names = [event["event"] for event in events(tmp_path)]
    assert names == ["begin", "start", "stop", "flight", "clear", "start"]


def test_the_first_stop_counts(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = rig.started()
    policy.control("stop", by="Ada")
    policy.control("estop", by="Bob")
    rig.run(0.05)
    assert policy.status.reason == "stop by Ada"


@pytest.mark.parametrize("operation", ["stop", "estop"])
def test_an_estop_takes_the_arm_away_at_once_a_stop_when_it_rests(
    make_rig: MakeRig, operation: Operation
) -> None:
    rig = make_rig()
    policy = rig.started()
    policy.link.send(rig.plan([0.15, 0.0]))
    rig.run(0.05)  # about 0.15 e^-0.5 / 0.1 = 0.9 rad/s
    policy.control(operation, by="Ada")
    rig.run(0.02)
    assert policy.status.phase == "stopped"
    assert (rig.controls[-1].operation == "stop") == (operation == "estop")
    rig.run(1.0)
    assert rig.controls[-1].operation == "stop"
    assert np.abs(rig.arm.position_rad).max() <= 0.15


def test_a_protective_stop_is_cleared_by_a_person_only(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = rig.started()
    rig.arm.script = [protective_stop()]
    rig.run(0.05)
    assert policy.status.phase == "stopped"
    assert policy.status.reason == "the arm stopped itself: collision (by the arm watchdog)"
    rig.run(5.0)
    assert "clear" not in [control.operation for control in rig.controls]
    policy.control("clear", by="Ada")
    rig.run(0.1)
    assert policy.status.phase == "paused"
    assert [c.by for c in rig.controls if c.operation == "clear"] == ["Ada"]


def test_clear_fails_while_the_cause_persists(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = rig.started()
    rig.arm.script = [protective_stop()] * 1000
    rig.run(0.05)
    policy.control("clear", by="Ada")
    rig.run(0.2)
    assert policy.answer.message == "still the arm stopped itself: collision"
    assert policy.status.phase == "stopped"


def test_an_estop_may_come_through_the_driver(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = rig.started()
    rig.driver.send(rig.order("estop", by="/estop"))
    rig.run(0.02)
    assert policy.status.phase == "stopped"
    assert policy.status.reason == "estop by /estop"


def test_homing_is_slow_and_answered_when_done(make_rig: MakeRig) -> None:
    # 1 rad at a quarter of 2 rad/s and 10 rad/s^2, jerk 1000: at least 1 / 0.5 + 0.5 / 2.5 = 2.2 s.
    rig = make_rig()
    rig.arm.push(np.array([1.0, -0.5]))
    policy = rig.connect()
    rig.run(0.02)
    policy.control("home")
    rig.run(0.1)
    assert policy.status.phase == "homing"
    rig.run(2.0)
    assert policy.answers == []
    rig.run(0.8)
    assert policy.answer.done
    assert policy.status.phase == "paused"
    assert rig.arm.position_rad == pytest.approx([0.0, 0.0], abs=5e-3)
    sent = np.array([command.target_rad for command in rig.arm.sent])
    assert np.abs(np.diff(sent, axis=0)).max() == pytest.approx(0.5 * 0.01)


def test_an_arm_is_parked_in_its_safe_pose(make_rig: MakeRig) -> None:
    # 0.4 rad at 0.5 rad/s and 2.5 rad/s^2: 0.4 / 0.5 + 0.5 / 2.5 = 1 s.
    rig = make_rig(two_joint_station(safe_rad=(0.4, -0.2)))
    policy = rig.connect()
    rig.run(0.02)
    policy.control("park")
    rig.run(0.9)
    assert policy.answers == []
    rig.run(0.5)
    assert (policy.answer.operation, policy.answer.done) == ("park", True)
    assert policy.status.phase == "paused"
    assert rig.arm.position_rad == pytest.approx([0.4, -0.2], abs=5e-3)


def test_homing_can_be_ended(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.arm.push(np.array([1.0, 0.0]))
    person, other = rig.connect(), rig.connect()
    rig.run(0.02)
    person.control("home")
    rig.run(1.0)
    other.control("pause", by="Bob")
    rig.run(0.02)
    assert person.answer.message == "pause by Bob"
    assert person.status.phase == "paused"
    at = rig.arm.position_rad[0]
    rig.run(2.0)
    # 0.5 rad/s: braking 0.5^2 / 20 + 0.0025, and a lead of 0.05.
    assert at - 0.08 < rig.arm.position_rad[0] < at


def test_one_commander_many_watchers(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy, other = rig.started(), rig.connect()
    rig.run(0.02)
    other.control("start")
    rig.run(0.05)
    who = f"process {os.getpid()}"
    assert other.answer.message == f"{who} commands this arm. One policy at a time; others may watch."
    other.link.send(rig.plan([0.5, 0.5]))
    rig.run(0.05)
    assert rig.arm.sent[-1].target_rad == pytest.approx([0.0, 0.0])
    assert other.status.phase == "running"
    other.control("stop", by="Bob")  # anybody may
    rig.run(0.05)
    assert policy.status.phase == "stopped"


def test_the_next_policy_takes_over_after_the_first(make_rig: MakeRig) -> None:
    rig = make_rig()
    first = rig.started()
    first.control("pause")
    rig.run(0.02)
    first.link.close()
    rig.peers.remove(first)
    rig.run(0.02)
    second = rig.connect()
    rig.run(0.02)
    second.control("start")
    rig.run(0.05)
    assert second.answer.done
    second.link.send(rig.plan([0.1, 0.0], number=0))  # its numbers begin anew
    rig.run(0.03)
    assert second.status.plan == 0


@pytest.mark.parametrize("real", [True, False])
def test_only_simulated_scenes_are_reset(make_rig: MakeRig, real: bool) -> None:
    rig = make_rig(two_joint_station(real=real))
    policy = rig.started()
    policy.control("reset", seed=7)
    rig.run(0.02)
    assert ("its scene is put back by a person" if real else "Pause first") in policy.answer.message
    policy.control("pause")
    policy.control("reset", seed=300)
    rig.run(0.2)
    if real:
        assert "reset 300" not in rig.arm.calls
        return
    assert policy.answer.done
    assert "reset 300" in rig.arm.calls
    # The arm jumped by 0.3 rad; the targets begin anew there, without a way back.
    assert rig.arm.sent[-1].target_rad == pytest.approx([0.3, 0.3])
    assert rig.arm.position_rad == pytest.approx([0.3, 0.3])
    assert policy.status.phase == "paused"


def test_what_the_driver_refuses_is_passed_on(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.refuse["start"] = "no such controller"
    policy = rig.connect()
    rig.run(0.02)
    policy.control("start")
    rig.run(0.05)
    assert not policy.answer.done
    assert policy.answer.message == "no such controller"
    assert policy.status.phase == "paused"


def test_a_driver_that_does_not_answer_stops_the_arm(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.deaf = True
    policy = rig.connect()
    rig.run(0.02)
    policy.control("start")
    rig.run(14.9)
    assert policy.answers == []
    rig.run(0.2)
    assert policy.answer.message == "the driver did not answer to 'start'"
    assert policy.status.phase == "stopped"


def test_an_arm_far_outside_of_its_limits_is_not_moved(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.arm.push(np.array([2.5, 0.0]))
    policy = rig.connect()
    rig.run(0.02)
    policy.control("home")
    rig.run(0.05)
    assert policy.answer.message == "a joint is 0.500 rad outside of its limits. Bring it back by hand."


def test_nonsense_from_a_client_costs_the_client_only(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy, other = rig.started(), rig.connect()
    rig.run(0.02)
    state = ArmState(stamp_ns=0, position_rad=np.ones(2), velocity_rad_s=np.ones(2))
    other.link.send(state)
    other.link._socket.send(b"\x02\x00\x00\x00no")
    rig.run(0.02)
    assert policy.status.phase == "running"
    assert len(rig.clients) == 1


def test_wall_clock_time_is_never_asked(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: object) -> float:
        raise AssertionError("wall-clock time")

    rig = make_rig()
    for name in ("time", "time_ns", "localtime", "gmtime"):
        monkeypatch.setattr(time, name, step)
    rig.clock.advance(0.0)
    assert MonotonicClock().now_s() > 0.0
    policy = rig.started()
    policy.link.send(rig.plan([0.1, 0.0]))
    rig.run(0.4)
    assert policy.status.phase == "holding"
    policy.control("pause")
    rig.run(0.02)
    assert policy.status.phase == "paused"


def test_a_status_reaches_everybody_every_cycle(make_rig: MakeRig) -> None:
    rig = make_rig()
    peers = [rig.connect() for _ in range(3)]
    rig.run(0.03)  # one is let in per cycle
    for peer in peers:
        peer.said.clear()
    rig.run(0.1)
    stamps = [[getattr(message, "stamp_ns", 0) for message in peer.said] for peer in peers]
    assert len(stamps[0]) == 10
    assert stamps[0] == stamps[1] == stamps[2]
