"""Every watchdog, with numbers: at 100 Hz, 2 rad/s, 10 rad/s^2, servos of 0.1 s."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.hal.safety import SafetyEnvelope
from robot_rl.real.messages import ArmState, Array, Plan
from robot_rl.real.station import Ros2Config
from robot_rl.real.supervisor.log import PHASES
from robot_rl.real.supervisor.watchdog import Watchdog
from robot_rl.testing.devices import Behaviour, drop, faulty, freeze, late, ok, protective_stop
from tests.real.supervisor.conftest import MakeRig
from tests.real.supervisor.rig import Peer, Rig, two_joint_station

LEAD_RAD = 0.2
"""Velocity limit times lookahead."""


def race(rig: Rig, policy: Peer) -> float:
    """Drives joint a as fast as it is allowed, for half a second; returns where it is then."""
    for _ in range(10):
        policy.link.send(rig.plan([rig.arm.position_rad[0] + 1.0, 0.0]))
        rig.run(0.05)
    assert policy.status.phase == "running"
    assert policy.status.limited
    assert 2.0 * np.exp(-0.1) <= rig.speed <= 2.0 + 1e-9  # the lead of 2 rad/s, after a cycle of 0.01 s
    return float(rig.arm.position_rad[0])


FAULTS: list[tuple[Sequence[Behaviour], str, float]] = [
    # States may be 0.1 s old; one of 150 ms is too old at once.
    (
        [late(150)] * 100,
        "the newest joint state is 150 ms old, allowed 100 ms",
        0.01,
    ),
    # Frozen states age: the one from before is 110 ms old in the eleventh cycle.
    (
        [freeze()] * 100,
        "the newest joint state is 110 ms old, allowed 100 ms",
        0.11,
    ),
    ([ok, faulty()], "a: measured position is not finite", 0.02),
    ([protective_stop()], "the arm stopped itself: collision", 0.01),
    ([ok, drop()], "the driver is gone", 0.02),
]


@pytest.mark.parametrize(("script", "reason", "after_s"), FAULTS, ids=lambda value: str(value)[:24])
def test_an_arm_that_lies_is_stopped(
    make_rig: MakeRig, tmp_path: Path, script: Sequence[Behaviour], reason: str, after_s: float
) -> None:
    rig = make_rig()
    policy = rig.started()
    race(rig, policy)
    rig.arm.script = list(script)
    rig.run(after_s - 0.01)
    assert policy.status.phase == "running"
    rig.run(0.01)
    assert policy.status.phase == "stopped"
    assert policy.status.reason.startswith(reason)
    sent = len(rig.arm.sent)
    rig.run(1.0)
    assert len(rig.arm.sent) <= sent + 1  # the one under way
    if not rig.driver.closed:
        assert rig.controls[-1].operation == "stop"
    with np.load(next((tmp_path / "flight").iterdir())) as flight:
        assert str(flight["reason"]).startswith(reason)
        assert PHASES[int(flight["phase"][-1])] == "running"
        assert flight["position_rad"].shape[1:] == (2,)


STOPS: dict[str, Callable[[Rig, Peer], None]] = {
    "NaN": lambda rig, policy: send(policy, rig.plan([np.nan, 0.0])),
    "NaN gripper": lambda rig, policy: send(policy, rig.plan([0.0, 0.0], gripper=np.array([np.nan]))),
    "infinite": lambda rig, policy: send(policy, rig.plan([np.inf, 0.0])),
    "another arm's": lambda rig, policy: send(policy, rig.plan([0.0, 0.0, 0.0])),
    "empty": lambda rig, policy: send(policy, rig.plan(gripper=np.ones(0))),
    "no period": lambda rig, policy: send(policy, rig.plan([0.0, 0.0], period_ns=0)),
    "next year": lambda rig, policy: send(policy, rig.plan([0.0, 0.0], start_s=3.2e7)),
    "gone": lambda rig, policy: policy.link.close(),
    "silent": lambda rig, policy: None,
    "stop": lambda rig, policy: policy.control("stop"),
}


def send(policy: Peer, plan: Plan) -> None:
    policy.link.send(plan)


@pytest.mark.parametrize("interpolate", ["hold", "linear", "jerk_limited"])
@pytest.mark.parametrize("fault", STOPS)
def test_the_way_to_rest_is_bounded(make_rig: MakeRig, fault: str, interpolate: str) -> None:
    # A target leads by at most 0.2 rad. From the target on, the ramp takes v^2 / 2a + v a / 2j =
    # 2^2 / 20 + 2 x 10 / 2000 = 0.21 rad, where targets move; held ones stay. A plan lasts 0.05 s
    # more, a silent policy 0.3 s more: then the target in force is the last asked, 1 rad away,
    # and lead and plan bound it.
    rig = make_rig(two_joint_station(supervisor={"interpolate": interpolate}))
    policy, watcher = rig.started(), rig.connect()
    start = race(rig, policy)
    asked = start + 1.0 if fault == "silent" else start + 0.3 * 2.0
    STOPS[fault](rig, policy)
    if fault == "gone":
        rig.peers.remove(policy)
    rig.run(0.05)
    assert watcher.status.phase == {"gone": "holding", "silent": "running"}.get(fault, "stopped")
    rig.run(2.5 if fault in ("gone", "silent") else 1.0)
    assert watcher.status.phase == "stopped"
    end = rig.arm.position_rad[0]
    bound = asked if fault == "silent" else start + 0.02 * 2.0 + LEAD_RAD + 0.21
    assert start < end <= bound + 1e-6
    assert np.abs([command.target_rad for command in rig.arm.sent]).max() <= 2.0
    assert all(np.isfinite(command.target_rad).all() for command in rig.arm.sent)
    assert rig.speed <= 2.0 + 1e-6


def test_nothing_beyond_the_limits_reaches_the_arm(make_rig: MakeRig) -> None:
    # Position limit 2, lead 0.2 over the measured position, 0.15 in any 50 ms.
    rig, rng = make_rig(), np.random.default_rng(0)
    policy = rig.started()
    seen: list[Array] = []
    for _ in range(60):
        policy.link.send(rig.plan(rng.uniform(-5.0, 5.0, 2)))
        for _ in range(5):
            before = rig.arm.position_rad
            rig.run(0.01)
            seen.append(policy.status.sent_rad)
            assert np.abs(seen[-1] - before).max() <= LEAD_RAD + 0.02 + 1e-9  # the arm moves 0.02 meanwhile
    targets = np.array(seen)
    assert np.abs(targets).max() <= 2.0
    for later in range(1, 6):
        # The lead wins over the rate: the arm itself moves by up to 0.1 in 50 ms.
        assert np.abs(targets[later:] - targets[:-later]).max() <= 0.15 + 0.1 + 1e-9
    assert rig.speed <= 2.0 + 1e-6


def test_an_arm_that_does_not_follow_is_stopped(make_rig: MakeRig) -> None:
    # Asked for 1 rad, blocked at 0: over 1.5 x 2 x 0.1 = 0.3 rad for more than 0.5 s.
    rig = make_rig()
    policy = rig.started()
    rig.arm.is_blocked = True
    for _ in range(10):
        policy.link.send(rig.plan([1.0, 0.0]))
        rig.run(0.05)
    assert policy.status.phase == "running"
    policy.link.send(rig.plan([1.0, 0.0]))
    rig.run(0.05)
    assert policy.status.phase == "stopped"
    assert policy.status.reason.startswith("a: 1.000 rad away from its target for 0.51 s, allowed 0.300 rad")


def test_an_arm_that_follows_at_full_speed_is_not_stopped(make_rig: MakeRig) -> None:
    # 1.9 rad at 2 rad/s is not within 0.3 rad of its target for 0.8 s, but on its way.
    rig = make_rig()
    policy = rig.started()
    for _ in range(40):
        policy.link.send(rig.plan([1.9, 0.0]))
        rig.run(0.05)
    assert policy.status.phase == "running"
    assert rig.arm.position_rad[0] == pytest.approx(1.9, abs=0.01)


def watch(**state: Any) -> str:
    station = two_joint_station()
    watchdog = Watchdog(station, SafetyEnvelope(station.limits, control_dt_s=0.05, clock=ManualClock()))
    still: dict[str, Any] = {"position_rad": np.zeros(2), "velocity_rad_s": np.zeros(2)}
    return watchdog.motion_reason(ArmState(stamp_ns=0, **{**still, **state}))


def test_speed_and_torque_have_limits() -> None:
    # 20 % over 2 rad/s is 2.4, over 5 N m is 6.
    assert watch(velocity_rad_s=np.array([2.3, -2.39]), effort_n_m=np.array([5.9, -5.9])) == ""
    assert (
        watch(velocity_rad_s=np.array([0.0, -2.41])) == "joint 1: speed -2.41 rad/s is over the limit 2 rad/s"
    )
    reason = watch(effort_n_m=np.array([6.1, 0.0]))
    assert reason == "joint 0: torque 6.1 N m is over the limit 5 N m"


def test_a_state_of_another_arm_is_refused() -> None:
    station = two_joint_station()
    watchdog = Watchdog(station, SafetyEnvelope(station.limits, control_dt_s=0.05, clock=ManualClock()))
    state = ArmState(stamp_ns=0, position_rad=np.zeros(3), velocity_rad_s=np.zeros(3))
    assert watchdog.arm_reason(state, 0) == "the arm measures 3 joints, the station has 2"


def test_an_arm_without_clock_of_its_own_is_watched_by_arrival() -> None:
    station = two_joint_station()
    watchdog = Watchdog(station, SafetyEnvelope(station.limits, control_dt_s=0.05, clock=ManualClock()))
    for stamp_ns in (0, 10_000_000, 20_000_000):
        watchdog.note(ArmState(stamp_ns=stamp_ns, position_rad=np.zeros(2), velocity_rad_s=np.zeros(2)))
    assert watchdog.age_s(20_000_000) == 0.0


def test_a_trajectory_goes_out_within_the_limits(make_rig: MakeRig) -> None:
    rig = make_rig(two_joint_station(driver="ros2", ros2=Ros2Config(command="trajectory")))
    policy = rig.started()
    policy.link.send(rig.plan([0.05, 0.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]))
    rig.run(0.05)
    (plan,) = rig.arm.plans
    assert np.abs(plan.targets_rad).max() <= 2.0
    # 2 rad/s is 0.1 rad per 50 ms, 10 rad/s^2 0.025 more in each than in the one before.
    steps = np.diff(plan.targets_rad[:, 0], prepend=0.0)
    assert 0.099 <= steps.max() <= 0.1 + 1e-9
    assert np.abs(np.diff(steps[:-4])).max() <= 0.025 + 1e-9
    assert rig.arm.sent == []
    assert policy.status.limited or any(getattr(message, "limited", False) for message in policy.said)
    rig.run(0.6)
    assert policy.status.phase == "holding"
    assert "hold" in rig.arm.calls
    policy.control("pause")
    policy.control("home")
    rig.run(3.0)
    assert policy.answer.operation == "home"
    assert policy.answer.done
    assert rig.arm.plans[-1].targets_rad[-1] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_a_trajectory_with_nan_never_leaves(make_rig: MakeRig) -> None:
    rig = make_rig(two_joint_station(driver="ros2", ros2=Ros2Config(command="trajectory")))
    policy = rig.started()
    policy.link.send(rig.plan([0.0, 0.0], [np.nan, 0.0]))
    rig.run(0.05)
    assert rig.arm.plans == []
    assert policy.status.phase == "stopped"
    assert policy.status.reason.startswith("plan 1: not finite: [[0.0, 0.0], [nan, 0.0]]")
