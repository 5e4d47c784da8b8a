"""A fake arm that misbehaves on purpose, for tests of the supervisor and its clients."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from robot_rl.core.clock import Clock, MonotonicClock
from robot_rl.core.errors import DeviceError
from robot_rl.real.messages import ArmState, Array, Command, Frame, Plan
from robot_rl.real.station import StationConfig
from robot_rl.testing.devices import Behaviour, ok


class FakeArm:
    """A driver of an arm whose soft servos follow a target with the time constant `lookahead_s`.

    It follows a whole plan exactly. It measures every `period_s`, each time by the next entry of its script,
    and by `ok` after the script. `drop` lasts until `reconnect`, `protective_stop` until a person's `clear`.
    """

    def __init__(
        self,
        station: StationConfig,
        script: Sequence[Behaviour] = (),
        *,
        period_s: float = 0.005,
        clock: Clock | None = None,
    ) -> None:
        self.joint_names = station.joints
        self.script = list(script)
        self._clock = clock or MonotonicClock()
        self._home, self._tau_s, self._period_s = station.home_rad, station.limits.lookahead_s, period_s
        self.calls: list[str] = []
        """Calls in order, except `send`."""
        self.sent: list[Command] = []
        """Commands that reached the arm."""
        self.plans: list[Plan] = []
        self.is_started = False
        self.is_blocked = False
        """Whether something blocks the motion of the arm."""
        self.position_rad = np.asarray(station.home_rad)
        self._velocity = np.zeros(len(station.joints))
        self._target, self._gripper = self.position_rad, station.gripper.open
        self._way: tuple[Array, Array] | None = None  # times and positions of a plan
        self._protective, self._dropped = "", False
        self._moved_s = self._due_s = self._clock.now_s()
        self._state: ArmState | None = None

    def connect(self) -> None:
        self.calls.append("connect")

    def reconnect(self) -> None:
        self._dropped = False

    def wait(self, timeout_s: float) -> bool:
        left_s = self._due_s - self._clock.now_s()
        if left_s > 0:
            time.sleep(min(left_s, timeout_s))
        return self._clock.now_s() >= self._due_s

    def read(self) -> ArmState | None:
        now_s = self._clock.now_s()
        while now_s >= self._due_s:
            self._due_s += self._period_s
            self._measure(self.script.pop(0) if self.script else ok)
        if self._dropped:
            raise DeviceError("fake arm: connection lost; call reconnect().")
        return self._state

    def frames(self) -> Sequence[Frame]:
        return ()

    def start(self) -> None:
        self.calls.append("start")
        self.is_started = True

    def send(self, command: Command) -> None:
        self._advance()
        if not np.isfinite(command.target_rad).all():
            raise DeviceError(f"fake arm: target {command.target_rad.tolist()} is not finite.")
        self.sent.append(command)
        self._target, self._gripper, self._way = command.target_rad, command.gripper, None

    def send_plan(self, plan: Plan) -> None:
        self._advance()
        self.plans.append(plan)
        self._target, self._gripper = plan.targets_rad[-1], float(plan.gripper[-1])
        due_s = 1e-9 * (plan.start_ns + plan.period_ns * np.arange(1, len(plan.gripper) + 1))
        self._way = (np.append(self._moved_s, due_s), np.vstack([self.position_rad, plan.targets_rad]))

    def hold(self) -> None:
        self.calls.append("hold")
        self._advance()
        self._target, self._way = self.position_rad, None

    def stop(self, reason: str) -> None:
        self.calls.append("stop")
        self.hold()
        self.is_started = False

    def clear(self, by: str) -> None:
        self.calls.append(f"clear by {by}")
        self._protective = ""

    def reset(self, seed: int) -> None:
        self.calls.append(f"reset {seed}")
        self.push(np.asarray(self._home) + 0.001 * seed)

    def close(self) -> None:
        self.calls.append("close")

    def push(self, position_rad: Array) -> None:
        """Moves the arm to a position, at rest."""
        self._advance()
        self.position_rad = self._target = np.array(position_rad)
        self._velocity = np.zeros(len(position_rad))

    def _advance(self) -> None:
        """Moves to now: along a plan on straight lines, else lead(t) = lead(0) exp(-t / tau)."""
        now_s = self._clock.now_s()
        if self._way is not None and now_s > self._moved_s:
            here = np.array([np.interp(now_s, self._way[0], joint) for joint in self._way[1].T])
            self._velocity = (here - self.position_rad) / (now_s - self._moved_s)
            self.position_rad = here
        elif not self.is_blocked and self._way is None:
            lead = (self._target - self.position_rad) * math.exp((self._moved_s - now_s) / self._tau_s)
            self.position_rad, self._velocity = self._target - lead, lead / self._tau_s
        self._moved_s = now_s

    def _measure(self, behaviour: Behaviour) -> None:
        self._advance()
        if behaviour.kind == "drop":
            self._dropped = True
        if behaviour.kind == "freeze" and self._state is not None:
            return
        if behaviour.kind == "protective_stop":
            self._protective = "collision"
        if self._protective:
            self._target = self.position_rad
            self._velocity = np.zeros_like(self._velocity)
        position = self.position_rad.copy()
        if behaviour.kind == "faulty":
            position[0] = math.nan
        stamp_ns = round(1e9 * (self._clock.now_s() - behaviour.age_s))
        self._state = ArmState(
            stamp_ns=stamp_ns,
            device_stamp_ns=stamp_ns,
            position_rad=position,
            velocity_rad_s=self._velocity.copy(),
            gripper=self._gripper,
            stop_reason=self._protective,
        )
