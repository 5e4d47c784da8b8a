"""Where the arm should be now: on a plan, on the way to a pose, braking, or at rest.

n arm joints, H points of a plan. Target k of a plan belongs to the interval from start_ns + k
period_ns to the next: `hold` is there for all of it, as in training; the other interpolations reach it
at the end, so that no target is a jump.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import ruckig

from robot_rl.core.errors import DeviceError
from robot_rl.real.messages import Array, Plan
from robot_rl.real.station import StationConfig
from robot_rl.real.supervisor.pieces import POINT_NS

HOME_SPEED = 0.25
"""Share of the velocity and acceleration limits that homing uses."""
_JERK_PER_ACCELERATION = 100.0
_PRECISION = 1e-9
"""s and rad."""


class Path(Protocol):
    """A motion through targets that become known one by one."""

    def begin(self, position_rad: Array, velocity_rad_s: Array) -> None:
        """Forgets the target, and starts here."""

    def aim(self, goal_rad: Array, velocity_rad_s: Array, now_ns: int, due_ns: int) -> None:
        """Sets the target of time `due_ns`, and the speed there."""

    def at(self, now_ns: int) -> tuple[Array, Array]:
        """Returns position and velocity (n,); times only grow."""
        ...


class Hold:
    """Jumps to each target: soft servos make the motion."""

    def begin(self, position_rad: Array, velocity_rad_s: Array) -> None:
        self._goal, self._still = position_rad, np.zeros(len(position_rad))

    def aim(self, goal_rad: Array, velocity_rad_s: Array, now_ns: int, due_ns: int) -> None:
        self._goal = goal_rad

    def at(self, now_ns: int) -> tuple[Array, Array]:
        return self._goal, self._still


class Linear:
    """Straight lines at constant speed."""

    def begin(self, position_rad: Array, velocity_rad_s: Array) -> None:
        self._goal, self._slope, self._still = position_rad, velocity_rad_s, np.zeros(len(position_rad))
        self._due_ns = 0

    def aim(self, goal_rad: Array, velocity_rad_s: Array, now_ns: int, due_ns: int) -> None:
        here, _ = self.at(now_ns)
        self._goal, self._due_ns = goal_rad, due_ns
        self._slope = (goal_rad - here) / max(1e-9 * (due_ns - now_ns), _PRECISION)

    def at(self, now_ns: int) -> tuple[Array, Array]:
        left_s = 1e-9 * (self._due_ns - now_ns)
        return (self._goal, self._still) if left_s <= 0 else (self._goal - left_s * self._slope, self._slope)


class JerkLimited:
    """The fastest motion within velocity, acceleration and jerk limits that is not early.

    ruckig: Berscheid and Kroeger, "Jerk-limited Real-time Trajectory Generation with Arbitrary
    Target States" (2021); computed when the target changes, read in between.
    """

    def __init__(self, station: StationConfig, *, share: float = 1.0, leads: bool = False) -> None:
        """Takes the limits.

        Args:
            station: has the limits.
            share: of the velocity and acceleration limits.
            leads: whether targets lead the arm, as a policy's do: soft servos at x, with velocity v, have the
                target x + servo_s v, so the targets of an arm within its limits move faster than the arm.
        """
        limits, joints = station.limits, len(station.joints)
        velocity, acceleration = np.asarray(limits.velocity_rad_s), np.asarray(limits.acceleration_rad_s2)
        jerk = _JERK_PER_ACCELERATION * acceleration
        if station.supervisor.jerk_rad_s3 is not None:
            jerk = np.asarray(station.supervisor.jerk_rad_s3)
        if leads:
            servo_s, per_acceleration = limits.lookahead_s, jerk / acceleration
            rate = limits.action_rate_rad_s  # the bound of the envelope, which has the same reason
            velocity = velocity + servo_s * acceleration if rate is None else np.asarray(rate)
            acceleration = acceleration + servo_s * jerk
            jerk = per_acceleration * acceleration
        self._solver, self._input = ruckig.Ruckig(joints), ruckig.InputParameter(joints)
        self._path = ruckig.Trajectory(joints)
        self._high = share * velocity
        self._input.max_velocity, self._input.max_jerk = self._high.tolist(), jerk.tolist()
        self._input.max_acceleration = (share * acceleration).tolist()
        self._input.target_acceleration = self._still = [0.0] * joints
        self._began_ns: int | None = None

    def begin(self, position_rad: Array, velocity_rad_s: Array) -> None:
        self._position, self._velocity = position_rad, velocity_rad_s
        self._acceleration, self._began_ns = self._still, None

    def aim(self, goal_rad: Array, velocity_rad_s: Array, now_ns: int, due_ns: int) -> None:
        """Sets the target; if ruckig finds no motion, as at some limits, it rests there or brakes."""
        self._input.control_interface = ruckig.ControlInterface.Position
        self._input.target_position = goal_rad.tolist()
        self._input.target_velocity = np.clip(velocity_rad_s, -self._high, self._high).tolist()
        self._input.minimum_duration = max(1e-9 * (due_ns - now_ns), _PRECISION)
        if not self._is_solved(now_ns):
            self._input.target_velocity, self._input.minimum_duration = self._still, None
            if not self._is_solved(now_ns, in_step=False):
                self.brake(now_ns)

    def brake(self, now_ns: int) -> None:
        """Comes to rest as soon as the limits allow, wherever that is.

        Raises:
            DeviceError: ruckig finds no such motion.
        """
        self._input.control_interface = ruckig.ControlInterface.Velocity
        self._input.target_velocity, self._input.minimum_duration = self._still, None
        if not self._is_solved(now_ns) and not self._is_solved(now_ns, in_step=False):
            position, velocity = (np.round(values, 3).tolist() for values in self.at(now_ns))
            raise DeviceError(
                f"supervisor: no way to rest within the limits from {position} rad at {velocity} rad/s."
            )

    def at(self, now_ns: int) -> tuple[Array, Array]:
        if self._began_ns is not None:
            position, velocity, self._acceleration = self._path.at_time(1e-9 * (now_ns - self._began_ns))
            self._position, self._velocity = np.array(position), np.array(velocity)
        return self._position, self._velocity

    def is_done(self, now_ns: int) -> bool:
        """Whether the target of `aim` or the rest of `brake` is reached."""
        return self._began_ns is None or 1e-9 * (now_ns - self._began_ns) >= self._path.duration

    def sampled(self, now_ns: int, period_ns: int, most: int) -> Array:
        """Returns positions (N, n) until the end, one a period, the present one left out; `most` at most."""
        assert self._began_ns is not None, "aim comes first"
        passed_s, period_s = 1e-9 * (now_ns - self._began_ns), 1e-9 * period_ns
        steps = min(most, max(1, math.ceil((self._path.duration - passed_s) / period_s)))
        return np.array([self._path.at_time(passed_s + period_s * step)[0] for step in range(1, steps + 1)])

    def _is_solved(self, now_ns: int, *, in_step: bool = True) -> bool:
        """Begins the motion if ruckig finds one; with `in_step`, all joints end together."""
        kinds = ruckig.Synchronization
        self._input.synchronization = kinds.Time if in_step else kinds.No
        position, velocity = self.at(now_ns)
        self._input.current_position, self._input.current_velocity = position.tolist(), velocity.tolist()
        self._input.current_acceleration = self._acceleration
        path = ruckig.Trajectory(len(self._still))  # a failure leaves the one before
        try:
            result = self._solver.calculate(self._input, path)
        except ruckig.RuckigError:
            return False
        if result not in (ruckig.Result.Working, ruckig.Result.Finished):
            return False
        self._path, self._began_ns = path, now_ns
        return True


class Aim:
    """The present target; there is none before the first call of `rest`."""

    def __init__(self, station: StationConfig, *, streams: bool = True) -> None:
        """Takes the station, and whether its arm gets targets one by one or follows plans by itself."""
        interpolate = station.supervisor.interpolate if streams else "linear"
        self._path: Path = {"hold": Hold, "linear": Linear}.get(
            interpolate, lambda: JerkLimited(station, leads=True)
        )()
        self._homing, self._braking = JerkLimited(station, share=HOME_SPEED), JerkLimited(station)
        self._zeros = np.zeros(len(station.joints))
        self._fastest = np.asarray(station.limits.velocity_rad_s)
        self._now: Path = self._path
        self._plan: Plan | None = None
        self._next: Plan | None = None
        self._index = -1
        self.gripper = station.gripper.open
        """Opening of the plan's present target; without a plan, the last one."""

    @property
    def plan(self) -> int:
        """Number of the plan that is followed; -1 if none."""
        return -1 if self._plan is None else self._plan.number

    def rest(self, position_rad: Array) -> None:
        """Stays at a position, and forgets all plans."""
        self._forget()
        self._now = self._path
        self._now.begin(position_rad.copy(), self._zeros)

    def follow(self, plan: Plan) -> None:
        """Follows a plan from its start on, and the one before until then."""
        self._next = plan

    def home(self, goal_rad: Array, position_rad: Array, now_ns: int) -> None:
        """Moves to a pose, slowly, from the position last sent and the speed last aimed at."""
        _, velocity = self._now.at(now_ns)
        self._forget()
        self._now = self._homing
        self._homing.begin(position_rad, velocity)
        self._homing.aim(goal_rad, self._zeros, now_ns, now_ns)

    def ahead(self, now_ns: int, most: int) -> Plan:
        """Returns the next piece of the way of `home`, for arms that follow plans by themselves."""
        targets = self._homing.sampled(now_ns, POINT_NS, most)
        gripper = np.full(len(targets), self.gripper)
        return Plan(number=-1, start_ns=now_ns, period_ns=POINT_NS, targets_rad=targets, gripper=gripper)

    def brake(self, position_rad: Array, now_ns: int) -> None:
        """Comes to rest, from the position last sent and the speed last aimed at, or the arm's largest."""
        _, velocity = self._now.at(now_ns)
        self._forget()
        self._now = self._braking
        self._braking.begin(position_rad, np.clip(velocity, -self._fastest, self._fastest))
        self._braking.brake(now_ns)

    def is_done(self, now_ns: int) -> bool:
        """Whether the end of `home` or `brake` is reached."""
        return not isinstance(self._now, JerkLimited) or self._now.is_done(now_ns)

    def at(self, now_ns: int) -> Array:
        """Returns the joint targets (n,) of now."""
        return self.motion(now_ns)[0]

    def motion(self, now_ns: int) -> tuple[Array, Array]:
        """Returns the joint targets (n,) of now, and how fast they move (n,)."""
        if self._next is not None and now_ns >= self._next.start_ns:
            self._adopt(now_ns)
        plan = self._plan
        if plan is not None:
            index = min((now_ns - plan.start_ns) // plan.period_ns, len(plan.gripper) - 1)
            if index != self._index:
                self._index = index
                self._aim(plan, index, now_ns)
        return self._now.at(now_ns)

    def _adopt(self, now_ns: int) -> None:
        if self._now is not self._path:
            self._path.begin(*self._now.at(now_ns))
            self._now = self._path
        self._plan, self._next, self._index = self._next, None, -1

    def _aim(self, plan: Plan, index: int, now_ns: int) -> None:
        targets, last = plan.targets_rad, len(plan.gripper) - 1
        speed = self._zeros
        if index < last:
            before = targets[index - 1] if index else self._now.at(now_ns)[0]
            speed = _passing_speed(before, targets[index], targets[index + 1], 1e-9 * plan.period_ns)
        due_ns = plan.start_ns + (index + 1) * plan.period_ns
        self._now.aim(targets[index], speed, now_ns, due_ns)
        self.gripper = float(plan.gripper[index])

    def _forget(self) -> None:
        self._plan, self._next, self._index = None, None, -1


def _passing_speed(before: Array, target: Array, after: Array, period_s: float) -> Array:
    """Returns the speed (n,) at which to pass a target: the mean of both sides, 0 where the way turns.

    It is at most twice that of the slower side, so that no target is overshot (Fritsch and Carlson 1980).
    """
    come, go = (target - before) / period_s, (after - target) / period_s
    slower = np.minimum(np.abs(come), np.abs(go))
    speed = np.minimum(0.5 * np.abs(come + go), 2.0 * slower)
    return np.where(come * go > 0, np.sign(come) * speed, 0.0)


def plan_error(plan: Plan, joints: int, latest_ns: int, now_ns: int) -> str:
    """Returns why an arm of that many joints cannot follow a plan; it may start at `latest_ns` or before."""
    shape, need = plan.targets_rad.shape, (len(plan.gripper), joints)
    if shape != need or not len(plan.gripper) or plan.gripper.ndim != 1:
        return f"targets of shape {shape}, gripper {plan.gripper.shape}; need {need}"
    if plan.period_ns <= 0 or plan.start_ns > latest_ns:
        return f"period {plan.period_ns} ns, start in {1e-9 * (plan.start_ns - now_ns):.3f} s"
    if not (np.isfinite(plan.targets_rad).all() and np.isfinite(plan.gripper).all()):
        return f"not finite: {plan.targets_rad.tolist()}, gripper {plan.gripper.tolist()}"
    return ""
