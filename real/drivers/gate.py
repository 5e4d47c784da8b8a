"""The last check of a command before an arm gets it: what no supervisor may send is refused here too.

n arm joints, H points of a plan.
"""

from __future__ import annotations

import numpy as np

from robot_rl.core.errors import DeviceError, LeaseError
from robot_rl.hal.device import Fence
from robot_rl.real.messages import Array, Beat, Command, Plan
from robot_rl.real.station import StationConfig

_SLACK_RAD = 1e-6
"""Float noise of a target clamped to its limit."""
_PLAN_SLACK_S = 0.25
"""A plan may end this much later than `supervisor.max_plan_s` from now: it is sent before its start."""


class Gate:
    """Returns the reasons to refuse a command; an empty one lets it pass."""

    def __init__(self, station: StationConfig, fence: Fence | None = None) -> None:
        """Makes the gate of an arm; without a fence it makes one that remembers nothing."""
        self._fence = fence or Fence(station.name)
        self._joints = station.joints
        self._low = np.asarray(station.limits.position_low_rad) - _SLACK_RAD
        self._high = np.asarray(station.limits.position_high_rad) + _SLACK_RAD
        self._max_age_ns = round(1e9 * station.supervisor.max_state_age_s)
        self._max_plan_ns = round(1e9 * (station.supervisor.max_plan_s + _PLAN_SLACK_S))
        self._last_plan = -1
        self.refused = 0
        """Commands and plans that did not pass."""

    def refuses(self, message: Command | Plan, now_ns: int) -> str:
        """Returns why a message must not reach the arm, or an empty text."""
        reason = self.overtaken(message.token) or self._old(message, now_ns)
        if isinstance(message, Command):
            reason = reason or self._wrong(message.target_rad, np.array(message.gripper), ())
        else:
            reason = reason or self._wrong(message.targets_rad, message.gripper, message.gripper.shape)
        if not reason and isinstance(message, Plan):
            self._last_plan = message.number
        self.refused += bool(reason)
        return reason

    def overtaken(self, token: int) -> str:
        """Returns why the arm must not move under a fencing token, or an empty text."""
        try:
            self._fence.check(token)
        except (LeaseError, DeviceError) as error:
            return str(error)
        return ""

    def is_fresh(self, message: Command | Plan | Beat, now_ns: int) -> bool:
        """Returns whether its sender is alive now: a message that waited in a queue does not show that."""
        # The first target of a plan is due at the end of its first period.
        stamp_ns = message.start_ns + message.period_ns if isinstance(message, Plan) else message.stamp_ns
        ahead_ns = self._max_plan_ns if isinstance(message, Plan) else self._max_age_ns
        return -self._max_age_ns <= stamp_ns - now_ns <= ahead_ns

    def restart(self) -> None:
        """Forgets the number of the last plan: another supervisor counts from its own start."""
        self._last_plan = -1

    def _old(self, message: Command | Plan, now_ns: int) -> str:
        if isinstance(message, Command):
            age_ns = now_ns - message.stamp_ns
            if age_ns <= self._max_age_ns:
                return ""
            age_ms, allowed_ms = 1e-6 * age_ns, 1e-6 * self._max_age_ns
            return f"command {message.number} is {age_ms:.0f} ms old, allowed {allowed_ms:.0f} ms"
        if message.period_ns <= 0:
            return f"plan {message.number} has a period of {message.period_ns} ns, allowed: above 0"
        if message.number <= self._last_plan:
            return f"plan {message.number} comes after plan {self._last_plan}"
        late_ns = now_ns - message.start_ns - message.period_ns
        if late_ns > self._max_age_ns:
            late_ms, allowed_ms = 1e-6 * late_ns, 1e-6 * self._max_age_ns
            return f"plan {message.number} comes {late_ms:.0f} ms late, allowed {allowed_ms:.0f} ms"
        left_ns = message.start_ns + len(message.targets_rad) * message.period_ns - now_ns
        if left_ns > self._max_plan_ns:
            left_s, allowed_s = 1e-9 * left_ns, 1e-9 * self._max_plan_ns
            return (
                f"plan {message.number} ends in {left_s:.2f} s, allowed {allowed_s:.2f} s "
                f"(supervisor.max_plan_s and {_PLAN_SLACK_S:g} s)"
            )
        return ""

    def _wrong(self, targets_rad: Array, gripper: Array, rows: tuple[int, ...]) -> str:
        shape = (*rows, len(self._joints))
        if targets_rad.shape != shape or gripper.shape != rows or rows == (0,):
            return f"targets of shape {targets_rad.shape}, gripper {gripper.shape}; allowed {shape}, {rows}"
        # NaN fails every comparison, so this finds it too.
        inside = (targets_rad >= self._low) & (targets_rad <= self._high)
        if inside.all() and np.isfinite(gripper).all():
            return ""
        if inside.all():
            return f"gripper target {gripper.tolist()} is not finite"
        where = tuple(np.argwhere(~inside)[0])
        joint = where[-1]
        return (
            f"{self._joints[joint]}: target {targets_rad[where]:g} rad, "
            f"allowed {self._low[joint] + _SLACK_RAD:g} to {self._high[joint] - _SLACK_RAD:g}"
        )
