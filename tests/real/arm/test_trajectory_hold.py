"""Holds of an arm that follows trajectories, again and again: driver, controller, a soft arm under load."""

from dataclasses import replace

import numpy as np
import pytest

from robot_rl.real.arm.controllers import Execution, JointTrajectoryController
from robot_rl.real.arm.trajectory import Tolerances, TrajectoryRules, tolerances
from robot_rl.real.drivers.rest import Holding
from robot_rl.real.drivers.ros2_commands import TrajectoryStream
from robot_rl.real.messages import Plan
from robot_rl.real.station import Ros2Config
from tests.real.arm.conftest import PERIOD_S, LagPlant, Loop
from tests.real.drivers.ros_graph import FakeNode
from tests.real.supervisor.rig import two_joint_station

SAG_RAD = 0.05
RULES = TrajectoryRules()


class LoadedPlant(LagPlant):
    """Joints on springs of 10 rad/s, that hang 0.05 rad below their targets."""

    def __init__(self, damping: float) -> None:
        super().__init__()
        self.damping, self.sag = damping, np.array([SAG_RAD, 0.0])
        self.position = -self.sag

    def step(self, dt_s: float) -> None:
        for _ in range(10):
            way = self.target - self.sag - self.position
            pull = 100.0 * way - 20.0 * self.damping * self.velocity
            self.velocity = self.velocity + 0.1 * dt_s * pull
            self.position = self.position + 0.1 * dt_s * self.velocity


class Chain:
    """A stream, a line that delays and loses, a controller and an arm that moves at 1 rad/s."""

    def __init__(self, damping: float, delay_s: float, lost: int) -> None:
        self.loop, self.node = Loop(), FakeNode()
        self.loop.plant = self.loop.body.plant = LoadedPlant(damping)
        self.loop.body.read(0)
        station = two_joint_station(driver="ros2", ros2=Ros2Config(command="trajectory"))
        self.stream = TrajectoryStream(self.node, "jtc", station, lambda: self.loop.now_ns)
        self.controller = JointTrajectoryController(("a", "b"))
        self.controller.activate(self.loop.body)
        self.holding = Holding(station.limits, self.hold)
        self.delay_ns, self.lost = round(1e9 * delay_s), lost
        self.line = []
        self.state = replace(self.loop.plant.measure(), stamp_ns=0)

    def hold(self) -> bool:
        self.stream.hold(self.state)
        if self.lost:
            self.lost -= 1
            self.node.published.pop()
        return True

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / PERIOD_S)):
            self.state = replace(self.loop.plant.measure(), stamp_ns=self.loop.now_ns)
            self.holding.update(self.state, self.loop.now_ns)
            self.line += [(self.loop.now_ns + self.delay_ns, sent) for _, sent in self.node.published]
            self.node.published.clear()
            while self.line and self.line[0][0] <= self.loop.now_ns:
                message = self.line.pop(0)[1]
                allowed = tolerances(None, ("a", "b"), RULES)
                assert isinstance(allowed, Tolerances)
                self.controller.follow(Execution(message, allowed))
            self.loop.cycle(self.controller)


@pytest.mark.parametrize("damping", [0.3, 1.0])
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_soft_arm_under_load_that_is_held_again_comes_to_rest_and_does_not_sink(damping, delay_s, lost):
    chain = Chain(damping, delay_s, lost)
    rows = np.outer(np.arange(1, 21), [0.05, 0.0])
    plan = Plan(number=1, start_ns=0, period_ns=50_000_000, targets_rad=rows, gripper=np.ones(20))
    chain.stream.send_plan(plan, chain.state)
    chain.run(0.5)
    before_rad = chain.state.position_rad[0]
    chain.holding.begin(chain.loop.now_ns)
    chain.run(2.5)
    assert chain.holding.is_done
    # 1 rad/s: 0.05 rad of braking, the time of the line, 0.1 s for each hold that was lost, and the swing.
    way_rad = chain.state.position_rad[0] - before_rad
    assert -0.03 < way_rad < 0.05 + 1.2 * (delay_s + 0.1 * lost) + 0.03
    target_rad = chain.loop.plant.target[0]
    for number in range(30):  # at rest it does not sink either
        chain.holding.begin(chain.loop.now_ns)
        chain.run(0.1)
        assert chain.loop.plant.target[0] == pytest.approx(target_rad, abs=1e-6), number
    chain.run(1.0)
    assert chain.state.position_rad[0] == pytest.approx(target_rad - SAG_RAD, abs=0.005)
