"""Limits between a policy and an arm, simulated or real, on by default.

B envs, n arm joints. Commands are targets of joint position servos. A servo closes its lead
(target minus position) with a time constant of about `lookahead_s`, so the lead is a commanded
velocity times `lookahead_s`: that is how the velocity limit bounds it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from robot_rl.core.arrays import Array, assign, copied, like, to_numpy
from robot_rl.core.clock import Clock, MonotonicClock
from robot_rl.core.errors import ConfigError, SafetyStopError, StaleObservationError, require

logger = logging.getLogger(__name__)

Floats = tuple[float, ...]
_PER_JOINT = ("position_low_rad", "position_high_rad", "velocity_rad_s", "acceleration_rad_s2", "effort_n_m")


@dataclass(frozen=True, kw_only=True)
class SafetyLimits:
    """What an arm may do; one entry per arm joint in every joint list, none for a robot without joints.

    The names say radians, as nearly all joints turn; a slide's entries are in m, m/s, m/s^2 and N.
    """

    position_low_rad: Floats
    """Lowest target positions."""
    position_high_rad: Floats
    """Highest target positions."""
    velocity_rad_s: Floats
    """Largest joint speeds: bound the lead of a target, its rate, and the measured speed."""
    acceleration_rad_s2: Floats
    """Largest joint accelerations: bound how fast the lead of a target may change."""
    effort_n_m: Floats
    """Largest measured joint torques; see `SafetyEnvelope.check_motion`."""
    workspace_low_m: tuple[float, float, float] | None = None
    """Corner of the box for the tool, in the base frame; no box if None."""
    workspace_high_m: tuple[float, float, float] | None = None
    workspace_margin_m: float = 0.05
    """How far outside of the box the tool may be measured before the arm is stopped: what it overshoots,
    and cuts off between two targets."""
    lookahead_s: float = 0.1
    """How far targets may lead: |target - position| <= velocity_rad_s * lookahead_s. The time
    constant kd / kp of the servo, so that the largest lead commands the largest speed."""
    action_rate_rad_s: Floats | None = None
    """Fastest change of the target. If None, velocity_rad_s + acceleration_rad_s2 * lookahead_s:
    the target of an arm at full speed whose commanded velocity changes at full acceleration."""
    motion_tolerance: float = 0.2
    """By what share measured speed and torque may exceed their limits before the arm is stopped."""
    max_observation_age_s: float = 0.2
    """Largest age of an observation; older ones are refused."""

    def __post_init__(self) -> None:
        names = [*_PER_JOINT, *(["action_rate_rad_s"] if self.action_rate_rad_s is not None else [])]
        sizes = {name: len(getattr(self, name)) for name in names}
        if len(set(sizes.values())) != 1:
            raise ConfigError(f"safety: one entry per arm joint is needed in every list, got {sizes}.")
        pairs = list(zip(self.position_low_rad, self.position_high_rad, strict=True))
        for joint, (low, high) in enumerate(pairs):
            if not low < high:
                raise ConfigError(
                    f"safety: joint {joint}: position_low_rad {low} must be below position_high_rad {high}."
                )
        for name in names[2:]:
            given = getattr(self, name)
            require(all(value > 0 for value in given), f"safety.{name}", given, "above 0 in every entry")
        for name in ("lookahead_s", "max_observation_age_s"):
            require(getattr(self, name) > 0, f"safety.{name}", getattr(self, name), "above 0")
        for name in ("motion_tolerance", "workspace_margin_m"):
            require(getattr(self, name) >= 0, f"safety.{name}", getattr(self, name), "0 or more")
        self._check_workspace_box()

    def _check_workspace_box(self) -> None:
        low, high = self.workspace_low_m, self.workspace_high_m
        if (low is None) != (high is None):
            raise ConfigError("safety: give both workspace_low_m and workspace_high_m, or neither.")
        if low is not None and high is not None and not all(a < b for a, b in zip(low, high, strict=True)):
            raise ConfigError(
                f"safety: workspace_low_m {low} must be below workspace_high_m {high} in x, y and z."
            )

    @property
    def num_joints(self) -> int:
        return len(self.position_low_rad)

    @property
    def target_rate_rad_s(self) -> Array:
        """Fastest change of the target, (n,); see `action_rate_rad_s`."""
        if self.action_rate_rad_s is not None:
            return np.asarray(self.action_rate_rad_s)
        return np.asarray(self.velocity_rad_s) + np.asarray(self.acceleration_rad_s2) * self.lookahead_s


@dataclass(frozen=True)
class Stop:
    """A latched stop: who stopped, why and when."""

    by: str
    reason: str
    at_s: float
    """Seconds of the envelope's monotonic clock."""


class SafetyEnvelope:
    """Limits commands, watches observations, and latches stops.

    Two kinds of stop. `trip` stops everything until a person calls `clear(by=...)`; no reset
    lifts it. A command with NaN or infinity trips a real robot; in simulation it holds that one
    row where it is until `reset` begins its next episode, so that one bad row does not end a run.
    """

    def __init__(
        self,
        limits: SafetyLimits,
        *,
        control_dt_s: float,
        num_envs: int = 1,
        real: bool = False,
        clock: Clock | None = None,
        xp: Any = np,
        device: Any = "cpu",
    ) -> None:
        """Makes an envelope.

        Args:
            limits: of one arm; the same for every env.
            control_dt_s: period of `filter` calls.
            real: whether a command that is not finite trips the whole envelope.
            clock: monotonic, for the watchdogs.
            xp: the array API functions of the arrays it is given; see `robot_rl.core.arrays`.
            device: where they are.
        """
        require(control_dt_s > 0, "safety.control_dt_s", control_dt_s, "above 0")
        self.limits = limits
        self._clock = clock or MonotonicClock()
        self._real, self._xp = real, xp
        shape = (num_envs, limits.num_joints)

        def rows(per_joint: ArrayLike) -> Array:
            # One contiguous copy a row: broadcasting would cost a third more in every call.
            values = np.broadcast_to(np.asarray(per_joint, np.float64), shape)
            return xp.asarray(np.array(values, order="C"), device=device)

        self._low, self._high = rows(limits.position_low_rad), rows(limits.position_high_rad)
        self._lead = rows(np.asarray(limits.velocity_rad_s) * limits.lookahead_s)
        self._step = rows(limits.target_rate_rad_s * control_dt_s)
        share = 1.0 + limits.motion_tolerance
        self._most_speed = xp.asarray(share * np.asarray(limits.velocity_rad_s), device=device)
        self._most_effort = xp.asarray(share * np.asarray(limits.effort_n_m), device=device)
        low_m, high_m = limits.workspace_low_m, limits.workspace_high_m
        has_box = low_m is not None and high_m is not None
        self._box = [xp.asarray(np.asarray(m, float), device=device) for m in (low_m, high_m) if has_box]
        self._previous, self._held = rows(np.full(shape, np.nan)), rows(np.full(shape, np.nan))
        self._row_stopped = xp.zeros(num_envs, dtype=xp.bool, device=device)
        self._any_row_stopped = False
        self._stop: Stop | None = None

    # Commands

    def filter(
        self, target_rad: Array, position_rad: Array, velocity_rad_s: Array, active: Array | None = None
    ) -> tuple[Array, Array]:
        """Returns the nearest allowed targets (B, n), and which rows differ from the asked ones (B,).

        In this order, so that the later wins: the change since the previous target, the lead over
        the measured position, the position limits.

        Args:
            target_rad: asked joint positions (B, n).
            position_rad: measured (B, n).
            velocity_rad_s: measured (B, n).
            active: (B,) rows that are commanded at all; the others keep their previous target.

        Raises:
            SafetyStopError: stopped, or a real robot's command or measurement is not finite.
        """
        if self._stop is not None:
            raise self._stop_error()
        if target_rad.shape != self._low.shape:
            raise ConfigError(
                f"safety.filter: got targets of shape {target_rad.shape}, need {self._low.shape}"
            )
        xp, previous = self._xp, self._previous
        with np.errstate(invalid="ignore", over="ignore"):
            is_finite = math.isfinite((target_rad - position_rad + velocity_rad_s).sum())
        if not is_finite:
            self._stop_rows(target_rad, position_rad, velocity_rad_s, active)
        # fmax and fmin ignore NaN: a row without a previous target has no rate limit yet.
        safe = xp.fmin(xp.fmax(target_rad, previous - self._step), previous + self._step)
        safe = xp.minimum(xp.maximum(safe, position_rad - self._lead), position_rad + self._lead)
        safe = xp.minimum(xp.maximum(safe, self._low), self._high)
        if self._any_row_stopped:
            safe[self._row_stopped] = self._held[self._row_stopped]
        limited = (safe != target_rad).any(axis=1)
        if active is None:
            previous[:] = safe
        else:
            previous[active] = safe[active]
            limited &= active
        return safe, limited

    def reset(self, mask: Array | None = None, target_rad: Array | None = None) -> None:
        """Lifts the row stops of the masked envs; a tripped stop stays.

        Args:
            mask: (B,) bool, all if None.
            target_rad: (B, n) what the servos hold now, from which the next command may differ by
                the action rate; unknown if None, and then the next command has no rate limit.
        """
        rows = slice(None) if mask is None else mask
        assign(self._previous, rows, np.nan if target_rad is None else target_rad[rows])
        if self._any_row_stopped:
            self._row_stopped[rows] = False
            self._held[rows] = np.nan
            self._any_row_stopped = bool(self._row_stopped.any())

    def check_workspace(self, tool_m: Array) -> tuple[Array, Array]:
        """Returns tool positions (B, 3) clamped into the box, and which rows were outside (B,).

        Raises:
            SafetyStopError: stopped, or a position is not finite.
        """
        if self._stop is not None:
            raise self._stop_error()
        is_finite = self._xp.isfinite(tool_m)
        if not is_finite.all():
            self.trip(f"tool position is not finite: {tool_m[~is_finite.all(axis=1)][0].tolist()}")
            raise self._stop_error()
        clamped = self._xp.clip(tool_m, *self._box) if self._box else copied(tool_m)
        return clamped, (clamped != tool_m).any(axis=1)

    def check_motion(self, velocity_rad_s: Array, effort_n_m: Array | None = None) -> None:
        """Trips if measured speed or torque exceeds its limit by more than `motion_tolerance`.

        Raises:
            SafetyStopError: names the joint, the measured value and the limit.
        """
        limits = self.limits
        checks = [("speed", "rad/s", velocity_rad_s, limits.velocity_rad_s, self._most_speed)]
        if effort_n_m is not None:
            checks.append(("torque", "N m", effort_n_m, limits.effort_n_m, self._most_effort))
        for what, unit, measured, limit, most in checks:
            is_over = ~(self._xp.abs(measured) <= most)  # NaN is over
            if is_over.any():
                env, joint = np.argwhere(np.atleast_2d(to_numpy(is_over)))[0]
                value = np.atleast_2d(to_numpy(measured))[env, joint]
                self.trip(
                    f"joint {joint}: {what} {value:.4g} {unit} is over the limit {limit[joint]:g} {unit}"
                )
        if self._stop is not None:
            raise self._stop_error()

    # Watchdogs

    def observe(self, age_s: float) -> None:
        """Passes observations that are young enough to act on.

        Raises:
            StaleObservationError: with the age and the limit.
        """
        limit_s = self.limits.max_observation_age_s
        if not age_s <= limit_s:
            raise StaleObservationError(
                f"safety: the observation is {1e3 * age_s:.0f} ms old, allowed is {1e3 * limit_s:.0f} ms "
                "(max_observation_age_s). Look for a slow camera, a busy bus or a lost connection."
            )

    # Latched stop

    @property
    def stopped(self) -> Stop | None:
        """The latched stop, or None."""
        return self._stop

    @property
    def row_stopped(self) -> Array:
        """Which rows are held after a command that was not finite, (B,) bool."""
        return copied(self._row_stopped)

    def trip(self, reason: str, by: str = "safety envelope") -> None:
        """Latches a stop; the first one counts until it is cleared."""
        if self._stop is None:
            self._stop = Stop(by, reason, self._clock.now_s())
            logger.error("safety stop by %s: %s", by, reason)

    def clear(self, by: str) -> None:
        """Lifts the stop; `by` names the person, or the test, that looked at the robot."""
        if not by.strip():
            raise ConfigError(f"safety.clear: got by={by!r}, need the name of who looked at the robot.")
        if self._stop is not None:
            logger.warning("safety stop by %s (%s) cleared by %s", self._stop.by, self._stop.reason, by)
        self._stop = None
        self.reset()

    def require_clear(self) -> None:
        """Passes unless a stop is latched.

        Raises:
            SafetyStopError: says who stopped, when, why, and what clears it.
        """
        if self._stop is not None:
            raise self._stop_error()

    def _stop_error(self) -> SafetyStopError:
        assert self._stop is not None
        age_s = self._clock.now_s() - self._stop.at_s
        return SafetyStopError(
            f"safety: stopped by {self._stop.by} {age_s:.1f} s ago: {self._stop.reason}. "
            "Nothing moves until somebody has looked at the robot and calls clear(by=<name>)."
        )

    def _stop_rows(self, target: Array, position: Array, velocity: Array, active: Array | None) -> None:
        """Latches the rows that are not finite: a real robot stops, a simulated one holds still."""
        xp = self._xp
        bad = ~(xp.isfinite(target) & xp.isfinite(position) & xp.isfinite(velocity)).all(axis=1)
        if active is not None:
            bad &= active
        if not bad.any():
            return
        if self._real:
            row = int(xp.nonzero(bad)[0][0])
            self.trip(
                f"env {row}: target {target[row].tolist()} at position {position[row].tolist()} is not finite"
            )
            raise self._stop_error()
        # Where the arm is; if that is unknown, where it was sent; if it never was, the allowed zero.
        held = xp.where(xp.isfinite(position), position, self._previous)
        held = xp.clip(xp.where(xp.isfinite(held), held, 0.0), self._low, self._high)
        new = bad & ~self._row_stopped
        self._held[new] = held[new]
        self._row_stopped |= bad
        self._any_row_stopped = True

    # Resume

    def state_dict(self) -> dict[str, Any]:
        """Returns what an exact resume needs, in numpy arrays; a latched stop survives a restart."""
        return {
            "previous_rad": to_numpy(copied(self._previous)),
            "held_rad": to_numpy(copied(self._held)),
            "row_stopped": to_numpy(copied(self._row_stopped)),
            "stop": None if self._stop is None else {"by": self._stop.by, "reason": self._stop.reason},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; the stop's age counts from now, clocks do not outlive a process."""
        if np.shape(state["previous_rad"]) != self._previous.shape:
            raise ConfigError(
                f"safety: got a state of shape {np.shape(state['previous_rad'])}, "
                f"need {self._previous.shape}; it is of another number of envs or another arm."
            )
        self._previous[:] = like(state["previous_rad"], self._previous)
        self._held[:] = like(state["held_rad"], self._held)
        self._row_stopped[:] = like(state["row_stopped"], self._row_stopped)
        self._any_row_stopped = bool(self._row_stopped.any())
        stop = state["stop"]
        self._stop = None if stop is None else Stop(stop["by"], stop["reason"], self._clock.now_s())
