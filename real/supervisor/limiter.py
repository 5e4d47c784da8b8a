"""The safety envelope at the rate of the supervisor, and the box of the tool.

n arm joints, H points of a plan, W cycles. Every target is checked by the tool's position at it; the least
squares only propose targets. Between two targets, and where the arm lags behind, the tool is watched, not
bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from robot_rl.core.clock import Clock
from robot_rl.core.errors import ConfigError
from robot_rl.hal.safety import SafetyEnvelope
from robot_rl.real.kinematics import Kinematics
from robot_rl.real.messages import ArmState, Array, Plan
from robot_rl.real.station import StationConfig

RATE_WINDOW_S = 0.05
"""Time over which the change of a target is bounded: the control step of training.

In training the envelope gets one target each 50 ms, which may differ at once from the one before by the
action rate times 50 ms. The same rate per cycle of 10 ms would spread each step over up to five cycles,
unlike in training. So every target here may differ by that much from all targets of the last 50 ms: the
same bound over any 50 ms, and the same steps pass."""
_FRACTIONS = np.array([[0.0], *([0.5**halvings] for halvings in range(14, -1, -1))])
"""Shares of a step to try, none to all; the next cycle goes on from the largest allowed one."""
_DAMPING_M = 1e-3
"""Of the least squares, which it keeps finite at singular poses."""
_NEWTON_STEPS = 10
_NEWTON_STEP_RAD = 0.2
"""Largest step: the tool does not move linearly with the joints."""
_NUDGE_RAD = 1e-6
_INSET_M = 1e-3
"""How far inside a wall the tool is led, so that a short step of the joints stays inside."""


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


class Box:
    """A box in the base frame, and the kinematic chain of the tool."""

    def __init__(self, station: StationConfig) -> None:
        limits = station.limits
        if station.kinematics is None or limits.workspace_low_m is None or limits.workspace_high_m is None:
            raise ConfigError(
                f"station {station.name}: no box without workspace_low_m, workspace_high_m, kinematics."
            )
        self._kinematics = Kinematics(station.kinematics, station.joints)
        self._low, self._high = np.asarray(limits.workspace_low_m), np.asarray(limits.workspace_high_m)
        self._inset_m = np.minimum(_INSET_M, 0.25 * (self._high - self._low))
        self._nudges = np.vstack([np.zeros(len(station.joints)), _NUDGE_RAD * np.eye(len(station.joints))])

    def outside_m(self, position_rad: Array) -> Array:
        """Returns the tool's distance from the box (...,), 0 inside, at joint positions (..., n)."""
        tool_m = self._kinematics.tool_m(position_rad)
        return np.linalg.norm(tool_m - np.clip(tool_m, self._low, self._high), axis=-1)

    def keep(
        self, before_rad: Array, asked_rad: Array, bounded: Callable[[Array], Array]
    ) -> tuple[Array, bool]:
        """Returns the next target (n,), its tool no farther outside than before, and if the box changed it.

        A target outside is replaced by one near it inside. If the tool would leave on a step, the step leads
        the tool straight to its goal instead, since no such line leaves a box. Of each step the arm makes the
        largest share of 1, 1/2, 1/4 ... on which the tool stays and the joints come no farther from their
        goal, or none. So the arm comes to rest, at the goal if no wall, limit or singular pose is in its way.

        Args:
            before_rad: (n,) the target sent last, within the position limits.
            asked_rad: (n,) the wanted target.
            bounded: limits a target (n,) by the limits of the joints.
        """
        allowed_m = self.outside_m(before_rad)
        goal_rad = asked_rad if self.outside_m(asked_rad) <= allowed_m else self._nearest(asked_rad)
        target_rad = bounded(goal_rad)
        if self.outside_m(target_rad) <= allowed_m:
            return target_rad, goal_rad is not asked_rad
        step = target_rad - before_rad
        if self.outside_m(goal_rad) <= allowed_m:
            step = self._led(before_rad, target_rad, goal_rad)
        step *= _share(step, bounded(before_rad + step) - before_rad)
        points = before_rad + _FRACTIONS * step
        outside_m, left_rad = self.outside_m(points), np.linalg.norm(points - goal_rad, axis=-1)
        is_allowed = (outside_m <= outside_m[0]) & (left_rad <= left_rad[0])
        return points[np.flatnonzero(is_allowed)[-1]], True

    def _nearest(self, asked_rad: Array) -> Array:
        """Returns joint positions (n,) near the asked ones with the tool inside, or outside if it finds none.

        By Gauss-Newton steps with the least change of the joints.
        """
        for _ in range(_NEWTON_STEPS):
            tool_m, jacobian = self._linearised(asked_rad)
            low_m, high_m = self._low + self._inset_m, self._high - self._inset_m
            step = _least_step(jacobian, np.clip(tool_m, low_m, high_m) - tool_m)
            asked_rad = asked_rad + step * min(1.0, _NEWTON_STEP_RAD / max(1e-9, float(np.linalg.norm(step))))
            if self.outside_m(asked_rad) == 0.0:
                break
        return asked_rad

    def _led(self, before_rad: Array, target_rad: Array, goal_rad: Array) -> Array:
        """Returns the step (n,) that takes the tool straight to its goal, nearest to the one to the target.

        To first order; the tool moves as far as it would with the target.
        """
        before_m, jacobian = self._linearised(before_rad)
        target_m, goal_m = self._kinematics.tool_m(np.stack([target_rad, goal_rad]))
        low_m, high_m = self._low + self._inset_m, self._high - self._inset_m
        length_m, step_m = np.linalg.norm(goal_m - before_m), np.linalg.norm(target_m - before_m)
        share = step_m / max(step_m, length_m)  # step_m > 0: the target's tool is farther outside
        aim_m = np.clip(before_m + share * (goal_m - before_m), low_m, high_m)
        step = target_rad - before_rad
        return step + _least_step(jacobian, aim_m - before_m - jacobian @ step)

    def _linearised(self, position_rad: Array) -> tuple[Array, Array]:
        """Returns the tool's position (3,), and its Jacobian (3, n)."""
        tool_m = self._kinematics.tool_m(position_rad + self._nudges)
        return tool_m[0], (tool_m[1:] - tool_m[0]).T / _NUDGE_RAD


def _least_step(jacobian: Array, way_m: Array) -> Array:
    """Returns the smallest step (n,) that moves the tool by (3,), by damped least squares."""
    gram = jacobian @ jacobian.T + _DAMPING_M**2 * np.eye(3)
    return jacobian.T @ np.linalg.solve(gram, way_m)


def _share(step_rad: Array, allowed_rad: Array) -> float:
    """Returns the share, 0 to 1, of a step (n,) that all joints may make: its direction stays."""
    moves = step_rad != 0.0
    return float(np.clip(allowed_rad[moves] / step_rad[moves], 0.0, 1.0).min(initial=1.0))
