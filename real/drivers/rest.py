"""Bringing an arm to rest: where it is held, and holding it again until it is seen at rest. n arm joints."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from robot_rl.hal.arm import ArmState
from robot_rl.hal.safety import SafetyLimits
from robot_rl.real.messages import Array

STILL_SHARE = 0.02
"""A joint slower than this share of its velocity limit is at rest."""
_AGAIN_NS = 100_000_000
"""Time from one hold to the next, while the arm still moves or is not seen."""
_SETTLE_NS = 50_000_000
"""A state that is younger than a hold by less than this may be from before it."""
_REST_NS = 100_000_000
"""How long an arm has to be still to count as at rest: one that turns round is still for a moment."""
_SLACK_RAD = 1e-6


class HoldTarget:
    """Where to hold an arm: at its last target, or where it is measured if that is farther than a lead.

    An arm that carries a load hangs a little below its target. Held where it is measured, it would
    hang below that, and sink with every hold; held at its last target, it stays.
    """

    def __init__(self, limits: SafetyLimits) -> None:
        self._lead_rad = limits.lookahead_s * np.asarray(limits.velocity_rad_s) + _SLACK_RAD
        self._target_rad: Array | None = None

    def note(self, target_rad: Array) -> None:
        """Remembers a target that was sent, (n,)."""
        self._target_rad = target_rad

    def forget(self) -> None:
        """Forgets the target: others may have moved the arm, so it is held where it is measured."""
        self._target_rad = None

    def choose(self, position_rad: Array) -> Array:
        """Returns the target (n,) of a hold, which becomes the last target."""
        target_rad = position_rad if self._target_rad is None else self._target_rad
        self._target_rad = np.where(self.is_far(target_rad, position_rad), position_rad, target_rad)
        return self._target_rad

    def is_far(self, target_rad: Array, position_rad: Array) -> Array:
        """Returns (n,), which joints are farther than a lead; one that measures NaN is not."""
        return np.abs(target_rad - position_rad) > self._lead_rad


class Holding:
    """Holds an arm again and again until it is seen at rest: a hold may be lost, or refused."""

    def __init__(self, limits: SafetyLimits, hold: Callable[[], bool]) -> None:
        """Takes `hold`, which holds the arm at the same place each time, and returns whether it did."""
        self._hold, self._still_rad_s = hold, STILL_SHARE * np.asarray(limits.velocity_rad_s)
        self._held_ns: int | None = None
        self._still_since_ns: int | None = None
        self._is_held = False

    @property
    def is_done(self) -> bool:
        """Whether the arm was seen at rest since it was held, or is commanded again."""
        return self._held_ns is None

    def begin(self, now_ns: int) -> bool:
        """Holds now, and again until the arm is at rest; returns whether the first one was done."""
        self._held_ns, self._still_since_ns = now_ns, None
        self._is_held = self._hold()
        return self._is_held

    def end(self) -> None:
        """Ends the hold: a command moves the arm again."""
        self._held_ns = None

    def update(self, state: ArmState | None, now_ns: int) -> None:
        """Judges the newest state, None before the first, and holds again if that is due."""
        if self._held_ns is None:
            return
        if state is not None and state.stamp_ns > self._held_ns + _SETTLE_NS:
            is_still = bool((np.abs(state.velocity_rad_s) < self._still_rad_s).all())
            self._still_since_ns = (self._still_since_ns or state.stamp_ns) if is_still else None
            if self._is_held and is_still and state.stamp_ns - (self._still_since_ns or 0) >= _REST_NS:
                self._held_ns = None
                return
        is_seen = state is not None and now_ns - state.stamp_ns < _AGAIN_NS
        if self._is_held and is_seen and self._still_since_ns is not None:
            return  # nearly at rest
        if now_ns - self._held_ns >= _AGAIN_NS:
            self._held_ns = now_ns
            self._is_held = self._hold()
