"""What a late line does to an arm: parts of the supervisor, streams of the driver, controllers, the plant.

Time is counted in milliseconds; supervisor and controllers have cycles of 10 ms.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.hal.arm import ArmState
from robot_rl.real.arm.body import Body, StopConfig
from robot_rl.real.arm.controllers import (
    Cycle,
    Execution,
    ForwardVelocityController,
    JointTrajectoryController,
)
from robot_rl.real.arm.trajectory import Tolerances, TrajectoryRules, tolerances
from robot_rl.real.drivers.rest import STILL_SHARE
from robot_rl.real.drivers.ros2_commands import Stream, TrajectoryStream, VelocityStream
from robot_rl.real.messages import Plan
from robot_rl.real.station import load_station
from robot_rl.real.supervisor.limiter import Limiter
from robot_rl.real.supervisor.pieces import POINT_NS, Pieces
from robot_rl.real.supervisor.plan import Aim
from robot_rl.sim.plant import MujocoPlant
from tests.real.drivers.ros_graph import FakeNode

MS = 1_000_000
CYCLE_MS = 10
STATION = load_station("sim_arm_trajectory")
LIMITS_RAD_S = np.asarray(STATION.limits.velocity_rad_s)


class Late:
    """An arm at the far end of a line, and what it measured."""

    def __init__(self, make: Callable[[tuple[str, ...]], Any], delay_ms: int, spread_ms: float) -> None:
        """Takes what makes the controller, and how late the line is each way; `spread_ms` more on average."""
        self.plant = MujocoPlant("pick_cube")
        self.body = Body(self.plant, StopConfig(over_speed=99.0), rng=np.random.default_rng(0))
        self.controller, self.node, self.now_ns = make(self.plant.joint_names), FakeNode(), 0
        self.controller.activate(self.body)
        self._rng, self._delay_ms, self._spread_ms = np.random.default_rng(1), delay_ms, spread_ms
        self._down, self._up = list[tuple[int, Any]](), list[tuple[int, ArmState]]()
        self.state = replace(self.body.read(0), stamp_ns=0)
        self.log = list[ArmState]()

    def run(self, until_ms: int, supervise: Callable[[], None]) -> None:
        """Runs; `supervise` publishes on `node`."""
        allowed = tolerances(None, self.plant.joint_names, TrajectoryRules())
        assert isinstance(allowed, Tolerances)
        while self.now_ns < until_ms * MS:
            self.now_ns += MS
            if self.now_ns // MS % CYCLE_MS == 0:
                while self._up and self._up[0][0] <= self.now_ns:
                    self.state = self._up.pop(0)[1]
                supervise()
                self._down += [(self._due_ns(self._down), message) for _, message in self.node.published]
                self.node.published.clear()
            if self.now_ns // MS % CYCLE_MS == CYCLE_MS // 2:
                while self._down and self._down[0][0] <= self.now_ns:
                    self._take(self._down.pop(0)[1], allowed)
                state = self.body.read(self.now_ns)
                cycle_s = 1e-3 * CYCLE_MS
                now = Cycle(now_ns=self.now_ns, ros_ns=self.now_ns, dt_s=cycle_s, state=state)
                self.controller.update(now, self.body)
                self.body.write(cycle_s)
                state = replace(state, stamp_ns=self.now_ns)
                self._up.append((self._due_ns(self._up), state))
                self.log.append(state)

    def _take(self, message: Any, allowed: Tolerances) -> None:
        if isinstance(self.controller, JointTrajectoryController):
            self.controller.follow(Execution(message, allowed))
        else:
            self.controller.set(message.data)

    def _due_ns(self, line: list[tuple[int, Any]]) -> int:
        late_ms = self._delay_ms + self._rng.exponential(self._spread_ms)
        return max(self.now_ns + round(late_ms * MS), line[-1][0] if line else 0)  # in order

    def speeds(self) -> np.ndarray[Any, Any]:
        """Returns (T, n), shares of the limits."""
        return np.abs([state.velocity_rad_s for state in self.log]) / LIMITS_RAD_S


def far(arm: Late, stream: TrajectoryStream) -> Callable[[], None]:
    """Returns a supervisor whose policy wants base and wrist 10 rad away, and back again."""
    aim, pieces, limiter = Aim(STATION, streams=False), Pieces(STATION), Limiter(STATION, ManualClock())
    aim.rest(arm.state.position_rad)
    home_rad = np.asarray(STATION.home_rad)

    def cycle() -> None:
        now_ns = arm.now_ns
        if now_ns % POINT_NS == 0:
            targets_rad = np.tile(home_rad, (40, 1))
            targets_rad[:, [0, 6]] += np.array([10.0, -10.0]) * (1 if now_ns // MS % 3000 < 1500 else -1)
            pieces.follow(
                Plan(
                    number=now_ns // POINT_NS,
                    start_ns=now_ns,
                    period_ns=POINT_NS,
                    targets_rad=targets_rad,
                    gripper=np.zeros(40),
                )
            )
        here_rad, speed_rad_s = aim.motion(now_ns)
        piece = pieces.due(now_ns, here_rad, speed_rad_s)
        if piece is None:
            return
        allowed, _ = limiter.filter_plan(piece, here_rad)
        aim.follow(allowed)
        there_rad = arm.state.position_at(now_ns)
        sent = pieces.caught_up(allowed, here_rad, there_rad, arm.state.velocity_rad_s)
        stream.send_plan(limiter.filter_plan(sent, there_rad)[0], arm.state)

    return cycle


@pytest.mark.parametrize(("delay_ms", "spread_ms"), [(1, 0.0), (10, 4.0), (30, 10.0)])
def test_trajectories_do_not_make_an_arm_swing_on_a_late_line(delay_ms: int, spread_ms: float) -> None:
    arm = Late(JointTrajectoryController, delay_ms, spread_ms)
    arm.run(6000, far(arm, TrajectoryStream(arm.node, "jtc", STATION, lambda: arm.now_ns)))
    speeds = arm.speeds()[:, [0, 6]]
    assert speeds.max() < 1.1  # the supervisor stops an arm at 1.2
    assert speeds.mean() > 0.4
    assert np.abs(np.diff(speeds, axis=0)).mean() < 0.05


@pytest.mark.parametrize(("delay_ms", "most_s"), [(1, 0.6), (10, 0.8)])
def test_speeds_bring_an_arm_to_rest_without_a_swing(delay_ms: int, most_s: float) -> None:
    """At its speed limit the base is to stay where it is: 0.15 s of braking, 0.39 s to 2 % of the way."""
    arm = Late(ForwardVelocityController, delay_ms, 0.0)
    stream: Stream = VelocityStream(arm.node, "velocity", STATION, lambda: arm.now_ns)
    goal_rad = arm.state.position_rad.copy()

    def cycle() -> None:
        if arm.now_ns < 1000 * MS:
            goal_rad[:] = arm.state.position_rad
            goal_rad[0] += 0.1 * LIMITS_RAD_S[0]
        stream.send(goal_rad, arm.state)

    arm.run(3000, cycle)
    last = int(np.flatnonzero(arm.speeds()[:, 0] > STILL_SHARE)[-1])
    assert 1e-9 * arm.log[last].stamp_ns - 1.0 < most_s
    assert max(state.position_rad[0] for state in arm.log) - goal_rad[0] < 0.01


def test_a_speed_that_left_late_does_not_allow_the_next_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine stood still for 68 ms before it left: the arm gets both within 10 ms."""
    now_ns, node = [0], FakeNode()
    stream: Stream = VelocityStream(node, "velocity", STATION, lambda: now_ns[0])
    state = Late(ForwardVelocityController, 1, 0.0).state
    make, far_rad = node.message, state.position_rad + 10.0

    def late(*given: Any, **fields: Any) -> Any:
        now_ns[0] += 68 * MS
        return make(*given, **fields)

    now_ns[0] = 10 * MS
    stream.send(far_rad, state)
    with monkeypatch.context() as patch:
        patch.setattr(node, "message", late)
        now_ns[0] += 10 * MS
        stream.send(far_rad, state)
    now_ns[0] += 10 * MS
    stream.send(far_rad, state)
    speeds = np.array([message.data for _, message in node.published])
    most = 0.0101 * np.asarray(STATION.limits.acceleration_rad_s2)
    assert (np.diff(speeds, axis=0) <= most).all()
    assert (np.diff(speeds, axis=0) > 0.5 * most).all()


@pytest.mark.parametrize("delay_ms", [1, 10, 20])
def test_a_stop_which_is_two_holds_brakes_on_a_late_line_and_never_speeds_up(delay_ms: int) -> None:
    """The second one is said when the controller is taken away, before the first one is there."""
    arm = Late(JointTrajectoryController, delay_ms, 0.0)
    stream = TrajectoryStream(arm.node, "jtc", STATION, lambda: arm.now_ns)
    drive = far(arm, stream)

    def cycle() -> None:
        if arm.now_ns <= 1000 * MS:
            drive()
        elif arm.now_ns <= 1020 * MS:
            stream.hold(arm.state)

    arm.run(2000, cycle)
    speeds = arm.speeds()[:, 0]
    held = 1000 // CYCLE_MS
    assert speeds[held] > 0.5
    assert speeds[held:].max() < speeds[held] + 0.1
    assert np.abs(np.diff(speeds[held:])).max() < 0.6
    assert speeds[held + 60 :].max() < STILL_SHARE
