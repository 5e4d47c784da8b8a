"""Where the arm should be now, what passes of it, and the pace: 2 rad/s, 10 rad/s^2, 1000 rad/s^3."""

import gc
import sys
import time

import numpy as np
import pytest
import ruckig

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import DeviceError, SafetyStopError
from robot_rl.hal.safety import SafetyEnvelope
from robot_rl.real.messages import ArmState, Array, Plan
from robot_rl.real.station import load_station
from robot_rl.real.supervisor.limiter import Limiter
from robot_rl.real.supervisor.pace import Pace, raise_priority
from robot_rl.real.supervisor.plan import Aim, JerkLimited
from tests.real.supervisor.rig import two_joint_station

MS = 1_000_000


def aim(interpolate: str) -> Aim:
    aim = Aim(two_joint_station(supervisor={"interpolate": interpolate}))
    aim.rest(np.zeros(2))
    return aim


def plan(*targets: float, start_ns: int = 0, number: int = 1) -> Plan:
    """Targets of joint a, 50 ms each; joint b stays."""
    return Plan(
        number=number,
        start_ns=start_ns,
        period_ns=50 * MS,
        targets_rad=np.array([[target, 0.0] for target in targets]),
        gripper=np.arange(1.0, len(targets) + 1.0),
    )


def sampled(aim: Aim, end_ms: int, step_ms: int = 1) -> Array:
    """Returns targets of joint a at 0, 1, ... ms."""
    return np.array([aim.at(ms * MS)[0] for ms in range(0, end_ms + 1, step_ms)])


def test_hold_is_at_each_target_for_its_period() -> None:
    held = aim("hold")
    held.follow(plan(0.1, 0.3))
    a = sampled(held, 120)
    assert np.unique(a[:50]).tolist() == [0.1]
    assert np.unique(a[50:]).tolist() == [0.3]  # the last one until something else comes
    assert held.gripper == 2.0
    assert held.plan == 1


def test_linear_gets_there_at_the_end_of_the_period() -> None:
    line = aim("linear")
    line.follow(plan(0.1, 0.3))
    a = sampled(line, 120)
    assert a[[0, 25, 50, 75, 100, 120]] == pytest.approx([0.0, 0.05, 0.1, 0.2, 0.3, 0.3])


def test_a_jerk_limited_motion_keeps_all_limits_and_is_on_time() -> None:
    # Steps of 0.05 rad in 50 ms: 1 rad/s. Targets lead soft servos of 0.1 s by their speed times that, so
    # those of an arm within its limits move at up to 2 + 0.1 x 10 rad/s, 10 + 0.1 x 1000 rad/s^2.
    smooth = aim("jerk_limited")
    targets = [0.05 * k for k in range(1, 11)]
    smooth.follow(plan(*targets, *[0.5] * 10))
    a = sampled(smooth, 900)
    speed = np.diff(a) / 1e-3
    assert np.abs(speed).max() <= 3.0 + 1e-9
    assert np.abs(np.diff(speed)).max() / 1e-3 <= 110.0 + 1e-6
    assert np.abs(np.diff(speed, n=2)).max() / 1e-6 <= 11_000.0 + 1e-2
    assert a.max() <= 0.5 + 1e-9  # nothing is overshot
    assert a[-1] == pytest.approx(0.5)
    assert a[450] == pytest.approx(0.45, abs=0.002)


def test_a_jerk_limited_step_is_there_within_its_period() -> None:
    # 0.1 rad ahead of an arm at rest asks for 1 rad/s. With the limits of the arm itself, 10 rad/s^2, the
    # target would take 2 sqrt(0.1 / 10) = 0.2 s, four periods of a policy; with 110 it takes 0.06 s.
    smooth = aim("jerk_limited")
    smooth.follow(plan(0.1, 0.1))
    a = sampled(smooth, 100)
    assert a[75] == pytest.approx(0.1)


def test_targets_are_passed_without_overshooting() -> None:
    # 0.1 and then 0.11: evenly that would be 1.1 rad/s; at most twice the slower side, 2 x 0.2, is passed.
    smooth = aim("jerk_limited")
    smooth.follow(plan(0.1, 0.11, 0.11))
    a = sampled(smooth, 200)
    assert a.max() <= 0.11 + 1e-9
    turned = aim("jerk_limited")
    turned.follow(plan(0.05, 0.0, 0.0))
    assert sampled(turned, 200).max() <= 0.05 + 1e-9


RUCKIG_KNOWS_NONE = np.array(
    [
        # Where a Panda was that was stopped by it: one joint each, with its acceleration, and where to be.
        (0.01878684423062579, -0.3371803430165977, 0.0, 0.1275368442306258, 1.996331846188659),
        (-2.088936978148233, 0.03506438340832899, 7.252349627107257, -1.7628, 2.175),
        (-3.121659902835809, -0.6783020049730673, 10.0, -2.8973, 2.175),
        (-3.214473074348191, 0.2335869273417139, 0.0, -3.0718, 1.42673074348191),
        (-0.07968435019119413, -0.0997550660178964, 0.0, 0.05081564980880587, 1.790731780000161),
        (2.752541742654478, -0.2682794400348589, 0.0, 2.883041742654478, 2.61),
        (0.6338389886442363, -0.2682794400348591, 0.0, 0.7643389886442362, 2.61),
    ]
).T


def test_a_state_without_a_way_to_the_target_is_no_fault() -> None:
    position, speed, acceleration, goal, passing = RUCKIG_KNOWS_NONE
    station = load_station("panda_ros2")
    path = JerkLimited(station)
    path.begin(position, speed)
    path._acceleration = acceleration.tolist()
    path.aim(goal, passing, 0, 45 * MS)
    assert path.at(3000 * MS)[0] == pytest.approx(goal, abs=1e-6)  # there, and at rest instead
    assert path.at(3000 * MS)[1] == pytest.approx(np.zeros(7), abs=1e-6)


class Clueless:
    """A ruckig that knows no way to any position, and in the end none at all."""

    def __init__(self, solver: ruckig.Ruckig) -> None:
        self._solver, self.is_hopeless = solver, False

    def calculate(self, asked: ruckig.InputParameter, path: ruckig.Trajectory) -> ruckig.Result:
        if self.is_hopeless or asked.control_interface == ruckig.ControlInterface.Position:
            raise ruckig.RuckigError("\n[ruckig] error in step 1, dof: 1 input: \ninp.current_position = [")
        return self._solver.calculate(asked, path)


def test_without_any_way_it_brakes_and_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    path = JerkLimited(two_joint_station())
    clueless = Clueless(path._solver)
    monkeypatch.setattr(path, "_solver", clueless)
    path.begin(np.zeros(2), np.array([1.0, 0.0]))
    path.aim(np.ones(2), np.zeros(2), 0, 0)
    # 1 rad/s at 10 rad/s^2 and 1000 rad/s^3, as in braking above.
    assert path.at(200 * MS)[0] == pytest.approx([0.055, 0.0])
    clueless.is_hopeless = True
    with pytest.raises(
        DeviceError, match=r"^supervisor: no way to rest within the limits from \[0.055, 0.0\] rad at "
    ) as caught:
        path.aim(np.ones(2), np.zeros(2), 300 * MS, 0)
    assert "ruckig" not in str(caught.value)
    assert path.at(400 * MS)[0] == pytest.approx([0.055, 0.0])  # the way before stays


@pytest.mark.parametrize("interpolate", ["hold", "linear", "jerk_limited"])
def test_a_plan_holds_until_the_next_one_starts(interpolate: str) -> None:
    both = aim(interpolate)
    both.follow(plan(0.02))
    both.at(0)
    both.follow(plan(0.04, start_ns=200 * MS, number=2))
    assert both.at(199 * MS)[0] == pytest.approx(0.02)
    assert both.plan == 1
    both.at(200 * MS)
    assert both.plan == 2
    assert both.at(400 * MS)[0] == pytest.approx(0.04)


def test_a_plan_that_comes_late_begins_where_it_should_be_by_now() -> None:
    late = aim("hold")
    late.follow(plan(0.1, 0.2, 0.3))
    assert late.at(70 * MS)[0] == 0.2


def test_braking_takes_its_time_and_no_jump() -> None:
    # From 1 rad/s at 10 rad/s^2 and 1000 rad/s^3: 0.1 s + 0.01 s, and 1 x 0.11 / 2 = 0.055 rad.
    line = aim("linear")
    line.follow(plan(*[0.05 * k for k in range(1, 5)]))
    sampled(line, 100)
    line.brake(np.array([0.1, 0.0]), 100 * MS)
    a = np.array([line.at(ms * MS)[0] for ms in range(100, 301)])
    assert a[0] == pytest.approx(0.1)
    assert a[-1] == pytest.approx(0.155)
    assert np.abs(np.diff(a)).max() <= 1.0 * 1e-3 + 1e-9
    assert not line.is_done(205 * MS)
    assert line.is_done(211 * MS)
    assert line.plan == -1


def test_braking_from_held_targets_stays_at_the_last() -> None:
    held = aim("hold")
    held.follow(plan(0.1))
    held.at(0)
    held.brake(np.array([0.1, 0.0]), 10 * MS)
    assert held.is_done(10 * MS)
    assert held.at(500 * MS)[0] == pytest.approx(0.1)


# The limiter


def state(position_rad: float) -> ArmState:
    position = np.array([position_rad, 0.0])
    return ArmState(stamp_ns=0, position_rad=position, velocity_rad_s=np.zeros(2))


def test_a_step_target_passes_as_in_training() -> None:
    # Training: one filter per 50 ms, 0.15 rad at once. Here five per 50 ms: the same 0.15 at once.
    limiter = Limiter(two_joint_station(), ManualClock())
    limiter.rebase(np.zeros(2))
    sent = [limiter.filter(np.array([0.15, 0.0]), state(0.0)) for _ in range(5)]
    assert [target[0] for target, _ in sent] == pytest.approx([0.15] * 5)
    assert not any(limited for _, limited in sent)
    # Back by 0.35 rad: 0.15 of it at once, and again 50 ms later.
    back = [limiter.filter(np.array([-0.2, 0.0]), state(0.0))[0][0] for _ in range(11)]
    assert back == pytest.approx([0.0] * 5 + [-0.15] * 5 + [-0.2])


@pytest.mark.parametrize("command_hz", [20.0, 100.0, 500.0])
def test_at_any_rate_the_targets_of_training_come_through(command_hz: float) -> None:
    """A policy of 20 Hz gets from the supervisor, in the middle of each step, what it got in training."""
    station = two_joint_station(supervisor={"command_hz": command_hz})
    limiter = Limiter(station, ManualClock())
    training = SafetyEnvelope(station.limits, control_dt_s=0.05)
    limiter.rebase(np.zeros(2))
    training.reset(target_rad=np.zeros((1, 2)))
    rng, position = np.random.default_rng(0), 0.0
    cycles, wrong = round(command_hz * 0.05), 0
    for _ in range(200):
        asked = np.array([position + rng.uniform(-0.3, 0.3), 0.0])
        now = state(position)
        expected, _ = training.filter(asked[None], now.position_rad[None], now.velocity_rad_s[None])
        sent = [limiter.filter(asked, now)[0] for _ in range(cycles)]
        wrong += not np.allclose(sent, expected)
        position += 0.39 * (expected[0, 0] - position)  # 1 - exp(-0.5): servos of 0.1 s
    assert wrong == 0


def test_any_window_of_50_ms_keeps_the_rate() -> None:
    limiter, rng = (
        Limiter(two_joint_station(limits={"lookahead_s": 10.0}), ManualClock()),
        np.random.default_rng(0),
    )
    limiter.rebase(np.zeros(2))
    # The lead of 20 rad never binds; the rate is 2 + 10 x 10 = 102 rad/s, given instead: 3.
    limits = {"lookahead_s": 10.0, "action_rate_rad_s": (3.0, 3.0)}
    limiter = Limiter(two_joint_station(limits=limits), ManualClock())
    limiter.rebase(np.zeros(2))
    sent = np.array([limiter.filter(rng.uniform(-2.0, 2.0, 2), state(0.0))[0] for _ in range(300)])
    for later in range(1, 6):
        assert np.abs(sent[later:] - sent[:-later]).max() <= 0.15 + 1e-12
    assert np.abs(sent).max() > 0.3


def test_nan_trips_for_good() -> None:
    limiter = Limiter(two_joint_station(), ManualClock())
    limiter.rebase(np.zeros(2))
    with pytest.raises(SafetyStopError, match="is not finite"):
        limiter.filter(np.array([np.nan, 0.0]), state(0.0))
    with pytest.raises(SafetyStopError, match="stopped by safety envelope"):
        limiter.filter(np.zeros(2), state(0.0))


# The pace


def test_periods_do_not_drift_and_missed_ones_count() -> None:
    made_s = time.monotonic()
    pace = Pace(200.0)
    for _ in range(21):
        pace.wait()
    # The 21st period begins 21 x 5 ms after the pace was made, however late one woke up before.
    assert time.monotonic() - made_s >= 0.105 - 1e-6  # less what rounding to ns may cost
    before = pace.statistics()["missed"]
    time.sleep(0.027)
    pace.wait()
    found = pace.statistics()
    assert found["missed"] >= before + 4  # five beginnings within 27 ms; the last one is late
    assert found["cycles"] == 22
    assert found["cost_us"]["max"] >= 27_000
    assert found["late_us"]["p50"] <= found["late_us"]["p99"] <= found["late_us"]["p99_9"]


def test_priority_is_asked_for_and_never_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr("os.sched_setscheduler", refuse)
    monkeypatch.setattr("os.nice", refuse)
    switch_s = sys.getswitchinterval()
    try:
        assert raise_priority() == (
            "normal (SCHED_FIFO: [Errno 1] not permitted; nice: [Errno 1] not permitted)"
        )
        assert not gc.isenabled()
        assert sys.getswitchinterval() == pytest.approx(2e-4)
        monkeypatch.setattr("os.nice", lambda step: step)
        assert raise_priority() == "nice -10 (SCHED_FIFO: [Errno 1] not permitted)"
        monkeypatch.setattr("os.sched_setscheduler", lambda *_: None)
        assert raise_priority() == "SCHED_FIFO 50"
    finally:
        sys.setswitchinterval(switch_s)
        gc.enable()
        gc.unfreeze()
