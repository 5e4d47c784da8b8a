"""The pieces for an arm that follows plans by itself: the motion of soft servos, piece by piece.

Joint targets have one meaning everywhere: soft servos close the distance with a time constant of
`limits.lookahead_s` (`robot_rl.hal.safety`). An arm with a trajectory controller is at each target in time,
so it gets the positions that such servos would have. A piece begins now and ends at most `max_plan_s`
ahead: the arm may move for this long without a watcher. The next one follows when half of that is left,
before the arm slows down for the end. A controller begins a piece at the measured position: an arm that
lags makes up only as much of the lag as its speed limits leave over. n arm joints, H points of a plan,
N of a piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from robot_rl.core.errors import require
from robot_rl.real.messages import Array, Plan
from robot_rl.real.station import StationConfig

POINT_NS = 50_000_000
"""Between two points of a piece."""
_STEPS = 5
"""Steps of the servos from one point to the next."""
_SOON = 4
"""The motion of this many points bounds how fast a lag is made up: those of a policy's next pieces."""
_HARD = 3.0
"""Acceleration of an arm that catches up, as a multiple of its limit.

A piece arrives some time after it was cut, and the arm loses that time: on a line of 20 ms the simulated arm
has 0.6 of its mean speed at 1, and 0.75 at 3, and stays below its speed limit at both."""
_CLOSED = 5.0
"""Time constants after which the last target is reached."""


Way = Callable[[int, int], Plan]
"""A motion that is known in advance, like the way home: for a time and a largest number of points it gives
the positions at the ends of the next periods of `POINT_NS`, fewer if it ends."""


class Pieces:
    """Cuts the newest plan, or the way home, into pieces."""

    def __init__(self, station: StationConfig) -> None:
        limits, longest_s = station.limits, station.supervisor.max_plan_s
        require(longest_s >= 2e-9 * POINT_NS, "supervisor.max_plan_s", longest_s, "0.1 or more")
        self._most = round(1e9 * longest_s) // POINT_NS
        self._servo_s = limits.lookahead_s
        self._speed = np.asarray(limits.velocity_rad_s)
        self._acceleration = np.asarray(limits.acceleration_rad_s2)
        self._plan: Plan | None = None
        self._next: Plan | None = None
        self._way: Way | None = None
        self._again_ns = self._end_ns = 0

    def follow(self, plan: Plan) -> None:
        """Follows a plan from its start on, and the one before until then."""
        self._next = plan

    def home(self, way: Way) -> None:
        """Follows a way from now on."""
        self.drop()
        self._way = way

    def drop(self) -> None:
        """Forgets plans and way."""
        self._plan = self._next = self._way = None
        self._again_ns = self._end_ns = 0

    def is_done(self, now_ns: int) -> bool:
        """Whether the end of the last piece is reached, and nothing follows it."""
        return self._next is None and self._plan is None and self._way is None and now_ns >= self._end_ns

    def due(self, now_ns: int, position_rad: Array, velocity_rad_s: Array) -> Plan | None:
        """Returns the piece to send now, if any, from the arm's intended position (n,) and speed (n,)."""
        if self._next is not None and now_ns >= self._next.start_ns:
            self._plan, self._next, self._way, self._again_ns = self._next, None, None, now_ns
        if now_ns < self._again_ns:
            return None
        if self._way is not None:
            piece = self._way(now_ns, self._most)
        elif self._plan is not None:
            piece = self._followed(self._plan, now_ns, position_rad, velocity_rad_s)
        else:
            return None
        length_ns = len(piece.gripper) * POINT_NS
        self._end_ns, self._again_ns = now_ns + length_ns, now_ns + self._most * POINT_NS // 2
        if len(piece.gripper) < self._most:  # this is the last one
            self._plan = self._way = None
        return piece

    def caught_up(self, piece: Plan, aimed_rad: Array, measured_rad: Array, speed_rad_s: Array) -> Plan:
        """Returns a piece changed for an arm that is not where it should be when the piece begins.

        The arm makes up the lag at the speed that the limits leave over during the motion of the next few
        points, and that it reaches within one by the acceleration limit. A policy sends a piece each 50 ms:
        to make up all of the lag in that time, as the controller does by itself, the arm would move too fast.
        No point is farther than the arm gets from its own speed: an arm that stands when its aim is at full
        speed would overshoot that speed on the controller's cubic.

        Args:
            piece: where the arm should be.
            aimed_rad: (n,) where it should be now.
            measured_rad: (n,) where it is now.
            speed_rad_s: (n,) of the arm.
        """
        lag_rad = aimed_rad - measured_rad
        sign, points_s = np.sign(lag_rad), 1e-9 * POINT_NS * np.arange(1, len(piece.gripper) + 1)
        soon = np.vstack([aimed_rad, piece.targets_rad[:_SOON]])
        spare_rad_s = self._speed - (sign * np.diff(soon, axis=0)).max(axis=0) / (1e-9 * POINT_NS)
        reached_rad_s = np.minimum(1e-9 * POINT_NS * self._acceleration, self._speed)
        made_up = np.clip(spare_rad_s, 0.0, reached_rad_s) * points_s[:, None]
        left = sign * np.maximum(np.abs(lag_rad) - made_up, 0.0)
        ahead_s, speed_rad_s = points_s[:, None], np.clip(speed_rad_s, -self._speed, self._speed)
        low = measured_rad - self._reach_rad(-speed_rad_s, ahead_s)
        high = measured_rad + self._reach_rad(speed_rad_s, ahead_s)
        return replace(piece, targets_rad=np.clip(piece.targets_rad - left, low, high))

    def _reach_rad(self, speed_rad_s: Array, ahead_s: Array) -> Array:
        """Returns the largest way (N, n) of a joint from a speed (n,) within times (N, 1)."""
        hard = _HARD * self._acceleration
        rise_s = np.minimum((self._speed - speed_rad_s) / hard, ahead_s)
        return speed_rad_s * rise_s + 0.5 * hard * rise_s**2 + self._speed * (ahead_s - rise_s)

    def _followed(self, plan: Plan, now_ns: int, position_rad: Array, velocity_rad_s: Array) -> Plan:
        """Returns the positions of soft servos, with each target for its period and then the last one."""
        last, step_ns = len(plan.gripper) - 1, POINT_NS // _STEPS
        end_ns = plan.start_ns + (last + 1) * plan.period_ns + round(1e9 * _CLOSED * self._servo_s)
        points = max(1, min(self._most, -(-(end_ns - now_ns) // POINT_NS)))
        step_s = 1e-9 * step_ns
        rate = -math.expm1(-step_s / self._servo_s) / step_s  # of the distance, on average over a step
        where, speed = position_rad, velocity_rad_s
        rows, grippers = np.empty((points, len(where))), np.empty(points)
        for step in range(points * _STEPS):
            index = min(max(0, (now_ns + step * step_ns - plan.start_ns) // plan.period_ns), last)
            wanted = self._braked(rate * (plan.targets_rad[index] - where), rate)
            change = step_s * self._acceleration
            speed = np.clip(wanted, speed - change, speed + change)
            where = where + step_s * speed
            if step % _STEPS == 0:
                grippers[step // _STEPS] = plan.gripper[index]
            rows[step // _STEPS] = where
        return replace(plan, start_ns=now_ns, period_ns=POINT_NS, targets_rad=rows, gripper=grippers)

    def _braked(self, wanted_rad_s: Array, rate: float) -> Array:
        """Returns speeds (n,) from which the arm can stop within the acceleration limit at the target.

        To close a distance at `rate` takes a deceleration of rate x speed: over the limit for speeds above
        a / rate. There the speed is that of a constant deceleration, which continues it smoothly.
        """
        size, even = np.abs(wanted_rad_s), self._acceleration / rate
        largest = np.where(size > even, np.sqrt(even * np.maximum(2.0 * size - even, 0.0)), size)
        return np.sign(wanted_rad_s) * np.minimum(largest, self._speed)
