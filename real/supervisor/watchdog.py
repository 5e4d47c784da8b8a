"""The reasons to stop an arm. n arm joints."""

from __future__ import annotations

import numpy as np

from robot_rl.core.errors import SafetyStopError
from robot_rl.hal.safety import SafetyEnvelope
from robot_rl.real.messages import ArmState, Array
from robot_rl.real.station import StationConfig
from robot_rl.real.supervisor.limiter import Box

_FOLLOWS_SHARE = 0.25
"""An arm follows its target if it has at least this share of the speed that its servos should give it."""


class Watchdog:
    """Judges each state; an empty reason is none."""

    def __init__(self, station: StationConfig, envelope: SafetyEnvelope, box: Box | None = None) -> None:
        limits, config = station.limits, station.supervisor
        self._box, self._margin_m = box, limits.workspace_margin_m
        self._joints, self._envelope = station.joints, envelope
        self._lookahead_s, self._speed_rad_s = limits.lookahead_s, np.asarray(limits.velocity_rad_s)
        lead = 1.5 * limits.lookahead_s * self._speed_rad_s
        self._tracking_rad = lead if config.tracking_rad is None else np.asarray(config.tracking_rad)
        self._tracking_ns = round(1e9 * config.tracking_s)
        self._max_age_ns = round(1e9 * config.max_state_age_s)
        self.restart()

    def restart(self) -> None:
        """Forgets the states: the arm was stopped, or its scene was reset."""
        self._device_stamp_ns: int | None = None
        self._fresh_ns = 0
        self._tracked_ns: int | None = None

    def age_s(self, now_ns: int) -> float:
        """Returns the age of the arm's newest measurement."""
        return 1e-9 * (now_ns - self._fresh_ns)

    def note(self, state: ArmState) -> None:
        """Takes a new state; one that repeats the arm's own stamp is no new measurement."""
        if state.device_stamp_ns == 0 or state.device_stamp_ns != self._device_stamp_ns:
            self._fresh_ns, self._device_stamp_ns = state.stamp_ns, state.device_stamp_ns

    def arm_reason(self, state: ArmState, now_ns: int) -> str:
        """Returns why the arm must be stopped, independent of its commands."""
        if state.stop_reason:
            return f"the arm stopped itself: {state.stop_reason}"
        for name, values in (("position", state.position_rad), ("velocity", state.velocity_rad_s)):
            if len(values) != len(self._joints):
                return f"the arm measures {len(values)} joints, the station has {len(self._joints)}"
            if not np.isfinite(values).all():
                return f"{self._joints[int(np.argmin(np.isfinite(values)))]}: measured {name} is not finite"
        age_ns = now_ns - self._fresh_ns
        if age_ns > self._max_age_ns:
            return (
                f"the newest joint state is {1e-6 * age_ns:.0f} ms old, allowed "
                f"{1e-6 * self._max_age_ns:.0f} ms (supervisor.max_state_age_s)"
            )
        return ""

    def motion_reason(self, state: ArmState) -> str:
        """Returns an error if a joint is faster or stronger than its limit."""
        try:
            self._envelope.check_motion(state.velocity_rad_s, state.effort_n_m)
        except SafetyStopError:
            stop = self._envelope.stopped
            assert stop is not None
            return stop.reason
        return ""

    def box_reason(self, position_rad: Array) -> str:
        """Returns an error if the tool is farther outside of its box than its margin."""
        outside_m = 0.0 if self._box is None else float(self._box.outside_m(position_rad))
        if outside_m <= self._margin_m:
            return ""
        return (
            f"the tool is {outside_m:.3f} m outside of its box, allowed {self._margin_m:g} m "
            "(limits.workspace_margin_m)"
        )

    def tracking_reason(self, target_rad: Array, state: ArmState, now_ns: int) -> str:
        """Returns an error if a joint was far from its target for too long without coming nearer."""
        way = target_rad - state.position_rad
        error = np.abs(way)
        if not (error > self._tracking_rad).any():
            self._tracked_ns = now_ns
            return ""
        # A joint that comes nearer is no fault: the servos close the way at error / lookahead.
        due = _FOLLOWS_SHARE * np.minimum(error / self._lookahead_s, self._speed_rad_s)
        over = (error > self._tracking_rad) & (np.sign(way) * state.velocity_rad_s < due)
        if not over.any():
            self._tracked_ns = now_ns
            return ""
        if self._tracked_ns is None:
            self._tracked_ns = now_ns
        silent_ns = now_ns - self._tracked_ns
        if silent_ns <= self._tracking_ns:
            return ""
        joint = int(np.argmax(over))
        return (
            f"{self._joints[joint]}: {error[joint]:.3f} rad away from its target for "
            f"{1e-9 * silent_ns:.2f} s, allowed {self._tracking_rad[joint]:.3f} rad (supervisor.tracking_rad)"
        )
