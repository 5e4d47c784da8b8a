"""Judges what a fault did to an arm, by the arm's own log and by the store. n arm joints, N cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.data.store.check import verify
from robot_rl.data.store.reader import StoreReader
from robot_rl.hal.safety import SafetyLimits

Array = NDArray[Any]

STEP_S = 0.05
"""Within this time, the control step of training, a target may change by the action rate times it."""
_JITTER_S = 0.01
"""Commands that were sent that far apart may come nearer together by so much: a cycle of the supervisor."""
_SLACK_RAD = 1e-6
_START_RAD = 1e-3
"""By so much what the arm held before the first command and what was measured of it may differ."""
_STILL_SHARE = 0.02
"""Slower than this share of the velocity limits is at rest."""
_CONTROL_HZ = 20.0
_SWAY_RAD = np.array([0.3, 0.0, 0.0, 0.0, 0.0, 0.2, 0.3])
_SWAY_HZ = np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.7, 0.6])


def action_of(step: int) -> Array:
    """Returns (7,) float32: what the campaign's policy wants of the joints at a step, from home, in rad."""
    return (_SWAY_RAD * np.sin(2 * np.pi * _SWAY_HZ * step / _CONTROL_HZ)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class ArmLog:
    """What an arm commanded its servos and did; stamps are this host's monotonic clock."""

    stamp_ns: Array
    """(N,)"""
    commanded_rad: Array
    """(N, n) targets as they came, unlimited."""
    position_rad: Array
    """(N, n) without noise; empty where nobody measured."""
    velocity_rad_s: Array
    """(N, n)"""

    def without(self, targets_rad: Sequence[Array]) -> ArmLog:
        """Returns the log without the cycles in which one of these targets (n,) was the last to come."""
        others = {target.tobytes() for target in targets_rad}
        kept = [row for row, target in enumerate(self.commanded_rad) if target.tobytes() not in others]
        return ArmLog(**{name: value[kept] if len(value) else value for name, value in vars(self).items()})


def read_log(path: Path) -> ArmLog:
    """Returns the log of `robot-rl serve-sim-arm log=path`."""
    with np.load(path) as found:
        return ArmLog(**{name: found[name] for name in ArmLog.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Stop:
    """How an arm came to rest."""

    way_rad: Array
    """(n,) farthest from where it was when the fault began."""
    rest_s: float
    """From the fault to rest; NaN if it still moves at the end."""


def stop_of(log: ArmLog, limits: SafetyLimits, begun_ns: int, end_ns: int) -> Stop:
    """Returns how far an arm went from a fault to the end of its repeat, and when it was at rest."""
    rows = np.flatnonzero((log.stamp_ns >= begun_ns) & (log.stamp_ns <= end_ns))
    if len(rows) < 2:
        raise AssertionError(f"the arm's log has {len(rows)} cycles between the fault and its end")
    way = np.abs(log.position_rad[rows] - log.position_rad[rows[0]]).max(axis=0)
    is_moving = (np.abs(log.velocity_rad_s[rows]) > _STILL_SHARE * np.asarray(limits.velocity_rad_s)).any(
        axis=1
    )
    last = int(np.flatnonzero(is_moving).max(initial=-1))
    rest_ns = log.stamp_ns[rows[last + 1]] - begun_ns if last + 1 < len(rows) else np.nan
    return Stop(way_rad=way, rest_s=1e-9 * max(0.0, float(rest_ns)) if rest_ns == rest_ns else np.nan)


def largest_steps_rad(limits: SafetyLimits) -> Array:
    """Returns (n,) by how much targets may differ within `STEP_S`."""
    velocity, acceleration = np.asarray(limits.velocity_rad_s), np.asarray(limits.acceleration_rad_s2)
    rate = limits.action_rate_rad_s or velocity + acceleration * limits.lookahead_s
    return STEP_S * np.asarray(rate)


def beyond_limits(log: ArmLog, limits: SafetyLimits) -> list[str]:
    """Returns the commands that no arm may get: outside its positions, not finite, or changed too fast."""
    low, high = np.asarray(limits.position_low_rad), np.asarray(limits.position_high_rad)
    steps = largest_steps_rad(limits) + _START_RAD
    window_ns = round(1e9 * (STEP_S - _JITTER_S))
    is_new = np.ones(len(log.stamp_ns), bool)
    is_new[1:] = (log.commanded_rad[1:] != log.commanded_rad[:-1]).any(axis=1)  # NaN counts each time
    found: list[str] = []
    for row in np.flatnonzero(is_new):
        target, stamp_ns = log.commanded_rad[row], log.stamp_ns[row]
        at = f"at {1e-9 * stamp_ns:.3f} s"
        # NaN fails every comparison, so this finds it too.
        inside = (target >= low - _SLACK_RAD) & (target <= high + _SLACK_RAD)
        if not inside.all():
            joint = int(np.argmin(inside))
            found.append(f"{at}: joint {joint}: target {target[joint]:g} rad is outside of its limits")
            continue
        first = int(np.searchsorted(log.stamp_ns, stamp_ns - window_ns, side="right"))
        change = np.abs(log.commanded_rad[first:row] - target).max(axis=0, initial=0.0)
        if (change > steps).any():
            joint = int(np.argmax(change / steps))
            found.append(
                f"{at}: joint {joint}: target changed by {change[joint]:.3f} rad within "
                f"{1e-6 * window_ns:g} ms, allowed {steps[joint]:.3f}"
            )
    return found


def steps_in(store: Path) -> int:
    """Returns how many steps a store holds."""
    return int(StoreReader(store).lengths().sum())


def damage_of(store: Path) -> list[str]:
    """Returns what is wrong in a store of the campaign's policy: by its own check, and step by step."""
    # Damage is kept apart from `torn`: that a kill cuts the last write in two is no loss of what was flushed.
    wrong = [str(problem) for problem in verify(store).problems if problem.kind != "torn"]
    reader = StoreReader(store)
    for index in range(len(reader)):
        episode, first = reader.read(index), reader.first_step(index)
        for row in range(len(episode)):
            wanted = action_of(first + row)
            if not np.array_equal(episode.action[row], wanted) or episode.reward[row] != first + row:
                number = reader.store_episode(index)
                wrong.append(f"episode {number}, step {first + row}: holds {episode.action[row].tolist()}")
    return wrong
