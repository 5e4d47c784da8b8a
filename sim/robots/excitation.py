"""Targets that make a motion rich enough to tell friction, damping and inertia apart.

Each joint follows a sine about a middle pose, whose frequency grows exponentially (a chirp; of every second
joint it falls), so that slow motion shows dry friction and fast motion inertia. Amplitudes shrink with the
frequency, so that the joints, not only their targets, stay within a share of their limits. The range of
frequencies is that of PACE (Bjelonic et al. 2025). T times, n arm joints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import require
from robot_rl.hal.safety import SafetyLimits
from robot_rl.sim.robots.robot import Robot

Array = NDArray[Any]
_FADE_S = 1.0
"""Time in which the amplitude grows at the beginning, and shrinks at the end."""


@dataclass(frozen=True, kw_only=True)
class Chirp:
    """How joints are moved."""

    seconds: float = 20.0
    amplitude_rad: float = 0.2
    """Largest distance of a target from the middle pose; m of a slide."""
    low_hz: float = 0.1
    high_hz: float = 3.0
    share: float = 0.6
    """Of the limits of speed and acceleration, the most that a joint reaches."""

    def __post_init__(self) -> None:
        require(self.seconds >= 4 * _FADE_S, "seconds", self.seconds, f"{4 * _FADE_S:g} or more")
        require(self.amplitude_rad > 0, "amplitude_rad", self.amplitude_rad, "above 0")
        require(
            0 < self.low_hz < self.high_hz, "low_hz", self.low_hz, f"above 0, below high_hz {self.high_hz}"
        )
        require(0 < self.share <= 1, "share", self.share, "in (0, 1]")

    def targets(self, limits: SafetyLimits, middle_rad: Array, hz: float) -> Array:
        """Returns targets at `hz` (T, n), from the middle pose and back to it."""
        times_s = np.arange(0.0, self.seconds, 1.0 / hz)
        growth = (self.high_hz / self.low_hz) ** (times_s / self.seconds)
        rising_hz = self.low_hz * growth
        low, high = np.asarray(limits.position_low_rad), np.asarray(limits.position_high_rad)
        speed, acceleration = np.asarray(limits.velocity_rad_s), np.asarray(limits.acceleration_rad_s2)
        room = np.minimum(middle_rad - low, high - middle_rad)
        fade = np.clip(np.minimum(times_s, self.seconds - times_s) / _FADE_S, 0.0, 1.0)
        targets = np.empty((len(times_s), len(middle_rad)))
        for joint, middle in enumerate(middle_rad):
            frequency_hz = rising_hz if joint % 2 == 0 else rising_hz[::-1]
            omega = 2 * np.pi * frequency_hz
            # A servo with time constant s follows a sine of its target smaller by 1 / sqrt(1 + (omega s)^2).
            follows = 1.0 / np.sqrt(1.0 + (omega * limits.lookahead_s) ** 2)
            most = self.share * np.minimum(speed[joint] / omega, acceleration[joint] / omega**2) / follows
            amplitude = np.minimum(np.minimum(most, self.amplitude_rad), room[joint])
            phase = np.cumsum(omega) / hz
            targets[:, joint] = middle + fade * amplitude * np.sin(phase + joint)
        return targets


def lowest_point(robot: Robot, poses_rad: Array) -> tuple[float, str]:
    """Returns how low any moving part gets at poses (T, n), in m above the base plane, and the part's name.

    Of a geom's bounding sphere: a part may be higher, never lower.
    """
    model = robot.build().compile()
    scratch = mujoco.MjData(model)
    moved = [model.jnt_bodyid[model.joint(name).id] for name in robot.arm_joints[1:]]
    is_moved = np.array([_is_below(model, int(body), moved) for body in model.geom_bodyid])
    qpos = [int(model.joint(name).qposadr[0]) for name in robot.arm_joints]
    lowest, name = np.inf, ""
    for pose in poses_rad:
        scratch.qpos[qpos] = pose
        mujoco.mj_kinematics(model, scratch)
        bottoms = np.where(is_moved, scratch.geom_xpos[:, 2] - model.geom_rbound, np.inf)
        if bottoms.min() < lowest:
            lowest, name = float(bottoms.min()), model.body(model.geom_bodyid[bottoms.argmin()]).name
    return lowest, name


def _is_below(model: mujoco.MjModel, body: int, roots: list[int]) -> bool:
    """Returns whether a body hangs on one of the given ones."""
    while body > 0:
        if body in roots:
            return True
        body = int(model.body_parentid[body])
    return False
