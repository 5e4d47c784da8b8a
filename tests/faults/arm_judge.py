"""Judges what a fault did to an arm: by the arm's own log, by what was sent, and by the store.

n arm joints, N cycles, M messages, H points of a trajectory.
"""

from __future__ import annotations

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
_SLACK_RAD_S = 1e-3
_SLACK_S = 0.1
"""By so much a trajectory may be longer than the longest piece: it begins at the end of a period."""
STILL_SHARE = 0.02
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


def read_log(path: Path) -> ArmLog:
    """Returns the log of `robot-rl serve-sim-arm log=path`."""
    with np.load(path) as found:
        return ArmLog(**{name: found[name] for name in ArmLog.__dataclass_fields__})


def position_at(log: ArmLog, stamp_ns: int) -> Array | None:
    """Returns (n,) where an arm was at a moment; None outside of its log."""
    row = int(np.searchsorted(log.stamp_ns, stamp_ns))
    return log.position_rad[row] if 0 < row < len(log.position_rad) else None


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
    is_moving = (np.abs(log.velocity_rad_s[rows]) > STILL_SHARE * np.asarray(limits.velocity_rad_s)).any(
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


@dataclass(frozen=True, kw_only=True)
class TrajectorySent:
    """One message to a joint_trajectory_controller."""

    times_s: Array
    """(H,) from its arrival on."""
    position_rad: Array
    """(H, n)"""
    velocity_rad_s: Array
    """(H, n), or (0, n) where the message says none."""

    @classmethod
    def of(cls, message: Any) -> TrajectorySent:
        """Returns what a trajectory_msgs/JointTrajectory says."""
        points, width = list(message.points), len(message.joint_names)
        stamps = [point.time_from_start for point in points]
        return cls(
            times_s=np.array([stamp.sec + 1e-9 * stamp.nanosec for stamp in stamps]),
            position_rad=np.array([point.positions for point in points], float).reshape(-1, width),
            velocity_rad_s=np.array([point.velocities for point in points], float).reshape(-1, width),
        )


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A command that no arm may get."""

    stamp_ns: int
    what: str

    def __str__(self) -> str:
        return f"at {1e-9 * self.stamp_ns:.3f} s: {self.what}"


def beyond_limits(sent: ArmLog, limits: SafetyLimits, arm: ArmLog | None = None) -> list[Wrong]:
    """Returns the joint targets that no arm may get: outside of its limits, not finite, changed too fast.

    A joint's target where it is, if the arm's log is known, is a stop and may come at once: an arm that
    somebody else has stopped is farther and farther from targets that go on.
    """
    steps, rows = largest_steps_rad(limits) + _START_RAD, np.arange(len(sent.stamp_ns))
    is_held = np.zeros(sent.commanded_rad.shape, bool)
    if arm is not None and len(arm.stamp_ns):
        there = arm.position_rad[np.searchsorted(arm.stamp_ns, sent.stamp_ns, side="right") - 1]
        is_held = np.abs(sent.commanded_rad - there) < _START_RAD
    return _jumps(sent, steps, limits, np.maximum.accumulate(np.where(is_held, rows[:, None], 0), axis=0))


def beyond_motion(log: ArmLog, limits: SafetyLimits, *, leads: bool = False) -> list[Wrong]:
    """Returns the joint targets that an arm should not have made of speeds, twists or poses by itself.

    They may change as fast as the joints may turn; a target where the arm is is a stop and may come at once.
    Where an arm has a speed v at once (`leads`), its soft servos' targets lead by lookahead x v: that may end
    at once too, and else change as speeds may.
    """
    velocity, acceleration = np.asarray(limits.velocity_rad_s), np.asarray(limits.acceleration_rad_s2)
    steps = STEP_S * velocity + _START_RAD
    if leads:
        steps = steps + limits.lookahead_s * np.maximum(velocity, STEP_S * acceleration)
    # Of this cycle or, if the controller was switched between two, of the one before.
    before = np.concatenate([log.position_rad[:1], log.position_rad[:-1]])
    is_held = np.zeros(len(log.stamp_ns), bool)
    for position in (log.position_rad, before):
        is_held |= (np.abs(log.commanded_rad - position) < _START_RAD).all(axis=1)
    rows = np.arange(len(log.stamp_ns))
    since = np.maximum.accumulate(np.where(is_held, rows, 0))
    return _jumps(log, steps, limits, np.tile(since[:, None], (1, log.commanded_rad.shape[1])))


def _jumps(log: ArmLog, steps: Array, limits: SafetyLimits, since: Array) -> list[Wrong]:
    """Returns where targets are outside, or differ by more than `steps` from any within `STEP_S` before.

    Rows before `since` (N, n) do not count.
    """
    low, high = np.asarray(limits.position_low_rad), np.asarray(limits.position_high_rad)
    window_ns = round(1e9 * (STEP_S - _JITTER_S))
    is_new = np.ones(len(log.stamp_ns), bool)
    is_new[1:] = (log.commanded_rad[1:] != log.commanded_rad[:-1]).any(axis=1)  # NaN counts each time
    found: list[Wrong] = []
    for row in np.flatnonzero(is_new):
        target, stamp_ns = log.commanded_rad[row], int(log.stamp_ns[row])
        # NaN fails every comparison, so this finds it too.
        inside = (target >= low - _SLACK_RAD) & (target <= high + _SLACK_RAD)
        if not inside.all():
            joint = int(np.argmin(inside))
            what = f"joint {joint}: target {target[joint]:g} rad is outside of its limits"
            found.append(Wrong(stamp_ns=stamp_ns, what=what))
            continue
        first = int(np.searchsorted(log.stamp_ns, stamp_ns - window_ns, side="right"))
        counts = np.arange(first, row)[:, None] >= since[row]
        change = (np.abs(log.commanded_rad[first:row] - target) * counts).max(axis=0, initial=0.0)
        if (change > steps).any():
            joint = int(np.argmax(change / steps))
            what = (
                f"joint {joint}: target changed by {change[joint]:.3f} rad within "
                f"{1e-6 * window_ns:g} ms, allowed {steps[joint]:.3f}"
            )
            found.append(Wrong(stamp_ns=stamp_ns, what=what))
    return found


def beyond_speeds(stamp_ns: Array, speed_rad_s: Array, limits: SafetyLimits) -> list[Wrong]:
    """Returns the joint speeds (M, n) that no arm may get: above its limits, or changed too fast.

    Speed 0 of all joints is a stop, and may come at once.
    """
    largest = np.asarray(limits.velocity_rad_s)
    steps = STEP_S * np.asarray(limits.acceleration_rad_s2) + _SLACK_RAD_S
    window_ns = round(1e9 * (STEP_S - _JITTER_S))
    found: list[Wrong] = []
    stopped = 0  # row of the newest stop: what was before it does not count any more
    for row, (at_ns, speed) in enumerate(zip(stamp_ns.tolist(), speed_rad_s, strict=True)):
        inside = np.abs(speed) <= largest + _SLACK_RAD_S
        if not inside.all():
            joint = int(np.argmin(inside))
            what = f"joint {joint}: {speed[joint]:g} rad/s, allowed {largest[joint]:g}"
            found.append(Wrong(stamp_ns=at_ns, what=what))
        elif not speed.any():
            stopped = row
        else:
            first = max(stopped, int(np.searchsorted(stamp_ns, at_ns - window_ns, side="right")))
            change = np.abs(speed_rad_s[first:row] - speed).max(axis=0, initial=0.0)
            if (change > steps).any():
                joint = int(np.argmax(change / steps))
                what = (
                    f"joint {joint}: speed changed by {change[joint]:.3f} rad/s within "
                    f"{1e-6 * window_ns:g} ms, allowed {steps[joint]:.3f}"
                )
                found.append(Wrong(stamp_ns=at_ns, what=what))
    return found


def beyond_trajectory(
    stamp_ns: int, sent: TrajectorySent, position_rad: Array | None, limits: SafetyLimits, longest_s: float
) -> list[Wrong]:
    """Returns what is wrong with a trajectory: its points, its speeds, its length, its end, its first target.

    Args:
        stamp_ns: when it came.
        sent: what it says.
        position_rad: (n,) where the arm was then; None if nobody knows.
        limits: of the arm. Speeds may be beyond them by `motion_tolerance`, as measured ones.
        longest_s: how long it may be.
    """
    low, high = np.asarray(limits.position_low_rad), np.asarray(limits.position_high_rad)
    largest = (1.0 + limits.motion_tolerance) * np.asarray(limits.velocity_rad_s)
    found: list[str] = []
    inside = (sent.position_rad >= low - _SLACK_RAD) & (sent.position_rad <= high + _SLACK_RAD)
    if not inside.all():
        point, joint = np.argwhere(~inside)[0]
        value = sent.position_rad[point, joint]
        found.append(f"point {point}, joint {joint}: target {value:g} rad is outside of its limits")
    spans_s = np.diff(sent.times_s, prepend=0.0)
    if not (len(spans_s) and (spans_s > 0).all()):
        found.append(f"its times do not increase: {sent.times_s.tolist()}")
    else:
        implied = np.diff(sent.position_rad, axis=0) / spans_s[1:, None]
        for what, speeds in (("from point to point", implied), ("as it says", sent.velocity_rad_s)):
            inside = np.abs(speeds) <= largest + _SLACK_RAD_S
            if not inside.all():
                joint = int(np.argwhere(~inside)[0][1])
                value = float(np.abs(speeds[:, joint]).max())
                found.append(f"joint {joint}: {value:.3f} rad/s {what}, allowed {largest[joint]:.3f}")
        if position_rad is not None:
            # As every target of a soft servo, the first one may lead by the way of a lookahead.
            way = np.abs(sent.position_rad[0] - position_rad)
            allowed = largest * (limits.lookahead_s + sent.times_s[0]) + _START_RAD
            if not (way <= allowed).all():
                joint = int(np.argmax(way / allowed))
                found.append(
                    f"joint {joint}: begins {way[joint]:.3f} rad from the arm, allowed {allowed[joint]:.3f}"
                )
        if sent.times_s[-1] > longest_s + _SLACK_S:
            found.append(f"it lasts {sent.times_s[-1]:.2f} s, allowed {longest_s:g} s")
    if len(sent.velocity_rad_s) and sent.velocity_rad_s[-1].any():
        found.append(f"it does not end at rest: {sent.velocity_rad_s[-1].tolist()}")
    return [Wrong(stamp_ns=stamp_ns, what=f"trajectory: {what}") for what in found]


def beyond_twist(stamp_ns: int, twist: Array) -> list[Wrong]:
    """Returns whether a twist (6,), in shares of MoveIt Servo's scales, is not finite or above them."""
    if np.isfinite(twist).all() and np.abs(twist).max() <= 1.0 + _SLACK_RAD_S:
        return []
    return [Wrong(stamp_ns=stamp_ns, what=f"twist {twist.tolist()}, allowed: shares of -1 to 1")]


def beyond_pose(stamp_ns: int, pose: Array) -> list[Wrong]:
    """Returns whether a pose (7,) is not finite, or its quaternion no rotation."""
    if np.isfinite(pose).all() and abs(float(np.linalg.norm(pose[3:])) - 1.0) < _SLACK_RAD_S:
        return []
    return [Wrong(stamp_ns=stamp_ns, what=f"pose {pose.tolist()}, allowed: finite, a quaternion of length 1")]


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
