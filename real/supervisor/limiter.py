"""The safety envelope at the rate of the supervisor. n arm joints, H points of a plan, W cycles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from robot_rl.core.clock import Clock
from robot_rl.hal.safety import SafetyEnvelope
from robot_rl.real.messages import ArmState, Array, Plan
from robot_rl.real.station import StationConfig
from robot_rl.real.supervisor.box import Box

RATE_WINDOW_S = 0.05
"""Time over which the change of a target is bounded: the control step of training.

In training the envelope gets one target each 50 ms, which may differ at once from the one before by the
action rate times 50 ms. The same rate per cycle of 10 ms would spread each step over up to five cycles,
unlike in training. So every target here may differ by that much from all targets of the last 50 ms: the
same bound over any 50 ms, and the same steps pass."""


class Limiter:
    """Limits targets as far as the envelope requires; see `SafetyEnvelope` for the limits."""

    def __init__(self, station: StationConfig, clock: Clock) -> None:
        limits = station.limits
        self.envelope = SafetyEnvelope(limits, control_dt_s=RATE_WINDOW_S, real=True, clock=clock)
        cycles = max(1, round(RATE_WINDOW_S * station.supervisor.command_hz))
        self._window = np.zeros((cycles, len(station.joints)))
        self._cycle = 0
        self._low, self._high = np.asarray(limits.position_low_rad), np.asarray(limits.position_high_rad)
        self._shut, self._open = sorted((station.gripper.closed, station.gripper.open))
        self._clock = clock
        self.box = None if limits.workspace_low_m is None else Box(station)
        """Of the tool, if there is one. It is the last limit, so it wins, even over the lead: where a person
        pushes the arm away from a target to which no allowed step leads."""
        self.is_boxed = False
        """Whether the box changed the newest target or plan."""
        self.lead_rad = limits.lookahead_s * min(limits.velocity_rad_s)
        """Smallest of the joints' largest leads: nearer is near."""

    def rebase(self, position_rad: Array) -> None:
        """Sets what the servos hold now; the next targets start there."""
        self._window[:], self.is_boxed = position_rad, False

    def filter(self, target_rad: Array, state: ArmState) -> tuple[Array, bool]:
        """Returns the nearest allowed target (n,), and whether it differs from the given one.

        Raises:
            SafetyStopError: stopped, or something is not finite.
        """
        before = self._window[self._cycle]
        safe, self.is_boxed = self._boxed(before, target_rad, lambda target: self._bounded(target, state))
        self._cycle = (self._cycle + 1) % len(self._window)
        self._window[self._cycle] = safe
        return safe, bool((safe != target_rad).any())

    def clamp(self, target_rad: Array) -> Array:
        """Returns a target within the position limits."""
        return np.minimum(np.maximum(target_rad, self._low), self._high)

    def clamp_gripper(self, opening: Array) -> Array:
        """Returns openings within the range of the gripper."""
        return np.clip(opening, self._shut, self._open)

    def outside_rad(self, position_rad: Array) -> float:
        """Returns how far the worst joint is outside of its position limits; 0 inside."""
        return float(np.abs(position_rad - self.clamp(position_rad)).max())

    def filter_plan(self, plan: Plan, position_rad: Array) -> tuple[Plan, bool]:
        """Returns a plan that begins now, as far as it is allowed, from where the arm is aimed at.

        The arm follows it by itself, so its speed is not visible in a lead. Instead the envelope runs ahead
        and takes each point as the measured position of the next: the lead is then the step of a period.

        Raises:
            SafetyStopError: something is not finite.
        """
        period_s = 1e-9 * plan.period_ns
        limits = replace(self.envelope.limits, lookahead_s=period_s)
        ahead = SafetyEnvelope(limits, control_dt_s=period_s, real=True, clock=self._clock)
        safe, here = np.empty_like(plan.targets_rad), position_rad[None]
        still = np.zeros_like(here)

        def bounded(target: Array) -> Array:
            ahead.reset(target_rad=here)
            return ahead.filter(target[None], here, still)[0][0]

        self.is_boxed = False
        for index, target in enumerate(plan.targets_rad):
            safe[index], is_boxed = self._boxed(here[0], target, bounded)
            self.is_boxed |= is_boxed
            here = safe[index][None]
        return replace(plan, targets_rad=safe), bool((safe != plan.targets_rad).any())

    def _bounded(self, target_rad: Array, state: ArmState) -> Array:
        """Returns the nearest target (n,) within the limits of the joints."""
        lowest, highest = self._window.min(axis=0), self._window.max(axis=0)
        # The envelope bounds the change from one reference; of all in the window the binding one is
        # the lowest for a target above their middle, else the highest.
        reference = np.where(target_rad + target_rad >= lowest + highest, lowest, highest)
        self.envelope.reset(target_rad=reference[None])
        safe, _ = self.envelope.filter(target_rad[None], state.position_rad[None], state.velocity_rad_s[None])
        return safe[0]

    def _boxed(self, before: Array, asked: Array, bounded: Callable[[Array], Array]) -> tuple[Array, bool]:
        """Returns the nearest target (n,) within the limits of joints and box, and if the box changed it."""
        return (
            (bounded(asked), False) if self.box is None else self.box.keep(self.clamp(before), asked, bounded)
        )
