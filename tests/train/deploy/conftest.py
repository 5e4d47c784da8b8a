"""A station whose arm and supervisor are in the test: physics and all clocks are turned by hand."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from robot_rl.core.clock import ManualClock
from robot_rl.core.errors import DeviceError
from robot_rl.hal.arm import ArmState
from robot_rl.hal.safety import SafetyEnvelope
from robot_rl.real.client import ArmClient
from robot_rl.real.messages import Answer, Frame, Operation, Phase, Plan, Status
from robot_rl.real.station import StationConfig, load_station
from robot_rl.sim.plant import MujocoPlant
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.deploy.env import StationEnv

CYCLE_S = 0.01
CONFIG = EnvConfig(task="pick_cube", num_threads=1)


class FakeArm:
    """A supervisor on a simulated arm; it limits targets as simulation does, and can lie about everything."""

    def __init__(self, clock: ManualClock, plant: MujocoPlant, *, lag_s: float = 0.0) -> None:
        """Args: lag_s: a command reaches the arm so much later."""
        self._clock, self._plant = clock, plant
        self._lag_s = lag_s
        station = load_station("sim_in_process")
        self._envelope = SafetyEnvelope(station.limits, control_dt_s=0.05)
        self._waiting: list[tuple[float, Plan]] = []
        self.plans: list[Plan] = []
        self.orders: list[tuple[str, int]] = []
        self.phase: Phase = "paused"
        self.reason = ""
        self.frozen: ArmState | None = None
        """What is measured from now on, whatever happens."""
        self.mistakes: dict[str, str] = {}
        self.lost: set[str] = set()
        """Objects of which nothing comes any more."""
        self.cameras: Callable[[int], Mapping[str, Frame]] = lambda now_ns: {}
        """What cameras show at a moment."""
        self.arrived_at = np.zeros(7)
        """Where the arm was when the newest plan reached it."""
        self._followed: Plan | None = None
        self.sent_rad = plant.measure().position_rad
        """What the arm was sent last, after safety."""
        self._status = self._told()

    # What the policy sees

    @property
    def status(self) -> Status:
        return self._status

    def wait(self, newer_than_ns: int = -1, timeout_s: float = 1.0) -> Status:
        until_s = self._clock.now_s() + timeout_s
        while self._status.stamp_ns <= newer_than_ns:
            if self._clock.now_s() > until_s:
                raise DeviceError("the supervisor says nothing new")
            self.pass_time(CYCLE_S)
        return self._status

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._waiting.append((self._clock.now_s() + self._lag_s, plan))
        self._take_plans()
        self._status = self._told()

    def control(
        self, operation: Operation, *, by: str = "", seed: int = 0, timeout_s: float = 20.0
    ) -> Answer:
        self.orders.append((operation, seed))
        if operation == "reset":
            self._plant.reset(seed)
            self._envelope.reset(target_rad=self._plant.measure().position_rad[None])
        if operation in ("pause", "start") and self.phase != "stopped":
            self.phase = "paused" if operation == "pause" else "running"
            self._followed, self._waiting = None, []
        if operation == "stop" or self.phase == "stopped":
            self.phase, self.reason = "stopped", self.reason or f"stop by {by}"
        self._status = self._told()
        return Answer(operation=operation, done=True)

    def forget_plan(self) -> None:
        """Holds, as where a policy is too late: no plan is followed any more."""
        self._followed, self._waiting = None, []
        self._status = self._told()

    def close(self) -> None:
        self.orders.append(("close", 0))

    def read(self) -> Mapping[str, Frame]:
        """Returns what trackers and cameras see; this arm brings them along."""
        stamp_ns = round(1e9 * self._clock.now_s())
        objects = self._plant.objects().items()
        tracked = {
            name: Frame(name=name, stamp_ns=stamp_ns, array=pose)
            for name, pose in objects
            if name not in self.lost
        }
        return tracked | dict(self.cameras(stamp_ns))

    # What happens

    def pass_time(self, seconds: float) -> None:
        """Lets the arm live, a cycle at a time; the last one may be shorter."""
        while seconds > 1e-9:
            step_s = min(CYCLE_S, seconds)
            plan = self._followed
            if plan is not None:
                passed_ns = max(round(1e9 * self._clock.now_s()) - plan.start_ns, 0)
                index = min(passed_ns // plan.period_ns, len(plan.gripper) - 1)
                self.sent_rad = plan.targets_rad[index]
                self._plant.command(self.sent_rad, float(plan.gripper[index]))
            self._plant.step(step_s)
            self._clock.advance(step_s)
            self._take_plans()
            self._status = self._told()
            seconds -= step_s

    def _take_plans(self) -> None:
        """Follows what has arrived from now on."""
        for due_s, plan in list(self._waiting):
            if due_s <= self._clock.now_s() + 1e-9:
                state = self._plant.measure()
                self.arrived_at = state.position_rad
                safe, _ = self._envelope.filter(
                    plan.targets_rad[:1], state.position_rad[None], state.velocity_rad_s[None]
                )
                self._followed = replace(plan, targets_rad=np.concatenate([safe, plan.targets_rad[1:]]))
                self._waiting.remove((due_s, plan))

    def _told(self) -> Status:
        stamp_ns = round(1e9 * self._clock.now_s())
        return Status(
            stamp_ns=stamp_ns,
            state=self.frozen or replace(self._plant.measure(), stamp_ns=stamp_ns),
            phase=self.phase,
            plan=-1 if self._followed is None else self._followed.number,
            sent_rad=self.sent_rad,
            sent_gripper=self._plant.targets()[1],
            limited=False,
            reason=self.reason,
        )


@pytest.fixture
def station_env() -> "MakeStationEnv":
    """Returns what makes an env on a fake arm, with the arm and the clock of both."""
    return make_env


def make_env(
    *,
    lag_s: float = 0.0,
    compensate: bool = True,
    config: EnvConfig = CONFIG,
    station: StationConfig | None = None,
    ask: Callable[[str], None] | None = None,
) -> tuple[StationEnv, FakeArm, ManualClock]:
    clock = ManualClock(100.0)
    arm = FakeArm(clock, MujocoPlant(config.task), lag_s=lag_s)
    env = StationEnv(
        station or load_station("sim_in_process"),
        config,
        cast(ArmClient, arm),
        arm,
        compensate=compensate,
        ask=ask,
        clock=clock,
        sleep=arm.pass_time,
    )
    return env, arm, clock


MakeStationEnv = Callable[..., tuple[StationEnv, FakeArm, ManualClock]]
