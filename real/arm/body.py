"""The arm's own electronics around a plant: encoders, limits, power, protective stop.

A protective stop brings the arm to rest by itself; then the arm ignores its controllers until a person clears
the stop. n arm joints.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from robot_rl.core.errors import require
from robot_rl.hal.arm import ArmState
from robot_rl.real.messages import Array
from robot_rl.real.plant import Plant

logger = logging.getLogger(__name__)

POWER_OFF = "power is off"
_AT_LIMIT = 0.999
"""Share of the largest torque from which a servo counts as saturated."""
_AT_REST_RAD_S = 0.05


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """When the arm stops itself, and how."""

    over_position_rad: float = 0.05
    """How far a joint may be beyond its position limits."""
    over_speed: float = 1.5
    """Measured speed over the joint's limit."""
    torque_s: float = 1.0
    """How long a servo may be at its largest torque; simulated policies press for half a second."""
    ramp_s: float = 0.2
    """Time from any speed to rest, at constant deceleration."""

    def __post_init__(self) -> None:
        require(self.over_position_rad >= 0, "stop.over_position_rad", self.over_position_rad, "0 or more")
        for key in ("over_speed", "torque_s", "ramp_s"):
            require(getattr(self, key) > 0, f"stop.{key}", getattr(self, key), "above 0")


class Body:
    """A plant that measures with noise, stays within its limits, and stops itself."""

    def __init__(
        self, plant: Plant, stop: StopConfig, *, encoder_noise_rad: float = 0.0, rng: np.random.Generator
    ) -> None:
        self.plant, self._stop = plant, stop
        self._noise_rad, self._rng = encoder_noise_rad, rng
        self._low, self._high = plant.position_limits_rad
        self._largest_speed = stop.over_speed * plant.velocity_limits_rad_s
        self._largest_effort = _AT_LIMIT * plant.effort_limits_n_m
        self.stop_reason = ""
        """Why the arm ignores commands; empty while it runs."""
        self.num_stops = 0
        self.num_beyond_limits = 0
        """Cycles with a commanded target beyond the position limits."""
        self._begin()

    def _begin(self) -> None:
        self.truth = self.plant.measure()
        """The newest state without noise."""
        self.state = self._measured(0)
        """The newest state as the encoders measure it."""
        self.target_rad, self.gripper = self.plant.targets()
        """The controllers' targets, (n,) and the gripper: unlimited, for the record."""
        self.applied_rad = self.target_rad.copy()
        """The servos' targets (n,)."""
        self._gripper_applied = self.gripper
        self._saturated_s = np.zeros(len(self.target_rad))
        self._stop_elapsed_s = 0.0
        self._stop_from: tuple[Array, Array] = (self.target_rad, np.zeros(len(self.target_rad)))

    def read(self, now_ns: int) -> ArmState:
        """Measures."""
        self.truth = self.plant.measure()
        self.state = self._measured(now_ns)
        return self.state

    def write(self, dt_s: float) -> None:
        """Gives the servos their targets and lets `dt_s` pass."""
        self._check(dt_s)
        if self.stop_reason:
            self.applied_rad = self._ramp(dt_s)
        else:
            self.applied_rad = np.clip(self.target_rad, self._low, self._high)
            self.num_beyond_limits += int((self.applied_rad != self.target_rad).any())
            closed, opened = sorted(self.plant.gripper_range)
            self._gripper_applied = float(np.clip(self.gripper, closed, opened))
        self.plant.command(self.applied_rad, self._gripper_applied)
        self.plant.step(dt_s)

    def trip(self, reason: str) -> None:
        """Stops the arm; the first reason stays until `clear`."""
        if self.stop_reason:
            return
        logger.warning("protective stop: %s", reason)
        self.stop_reason = reason
        self.num_stops += 1
        self._stop_elapsed_s = 0.0
        self._stop_from = (self.truth.position_rad.copy(), self.truth.velocity_rad_s.copy())

    def clear(self) -> str:
        """Lets commands through again; returns why not, empty if it does."""
        if not self.stop_reason:
            return ""
        fastest = float(np.abs(self.truth.velocity_rad_s).max())
        if fastest > _AT_REST_RAD_S:
            return f"still moving at {fastest:.2f} rad/s, allowed: {_AT_REST_RAD_S} rad/s. Try again."
        self.stop_reason = ""
        self._saturated_s[:] = 0.0
        self.hold()
        return ""

    def power(self, *, on: bool) -> str:
        """Turns the drives on or off; returns why not, empty if it is done."""
        if not on:
            self.trip(POWER_OFF)
            self.stop_reason = POWER_OFF
            return ""
        return self.clear() if self.is_off else ""

    @property
    def is_off(self) -> bool:
        return self.stop_reason == POWER_OFF

    def hold(self) -> None:
        """Makes the target where the arm is."""
        self.target_rad = self.state.position_rad.copy()

    def reset(self, seed: int) -> None:
        """Begins an episode of the plant; a stop stays."""
        self.plant.reset(seed)
        self._begin()

    def _measured(self, now_ns: int) -> ArmState:
        position = self.truth.position_rad
        if self._noise_rad:
            position = position + self._noise_rad * self._rng.standard_normal(len(position))
        return replace(self.truth, stamp_ns=now_ns, position_rad=position, stop_reason=self.stop_reason)

    def _check(self, dt_s: float) -> None:
        """Stops the arm as real arms do: for positions, speeds, torques, and commands that are not finite."""
        truth = self.truth
        assert truth.effort_n_m is not None, "a plant's arm has torques"
        if not (np.isfinite(self.target_rad).all() and np.isfinite(self.gripper)):
            self.trip(f"command is not finite: {self.target_rad.tolist()}, gripper {self.gripper}")
        beyond = np.maximum(self._low - truth.position_rad, truth.position_rad - self._high)
        is_saturated = np.abs(truth.effort_n_m) >= self._largest_effort
        self._saturated_s = np.where(is_saturated, self._saturated_s + dt_s, 0.0)
        speed = np.abs(truth.velocity_rad_s)
        for is_over, what in (
            (beyond > self._stop.over_position_rad, "position beyond its limit"),
            (speed > self._largest_speed, f"speed over {self._stop.over_speed:g} times its limit"),
            (self._saturated_s >= self._stop.torque_s, f"largest torque for {self._stop.torque_s:g} s"),
        ):
            if is_over.any():
                joint = int(np.flatnonzero(is_over)[0])
                self.trip(
                    f"{self.plant.joint_names[joint]}: {what} (at {truth.position_rad[joint]:.3f} rad, "
                    f"{truth.velocity_rad_s[joint]:.3f} rad/s, {truth.effort_n_m[joint]:.1f} N m)"
                )

    def _ramp(self, dt_s: float) -> Array:
        """Returns the targets of a stop: a constant deceleration from its first speed to rest."""
        position, velocity = self._stop_from
        ramp_s = self._stop.ramp_s
        self._stop_elapsed_s = min(ramp_s, self._stop_elapsed_s + dt_s)
        passed_s = self._stop_elapsed_s * (1.0 - self._stop_elapsed_s / (2 * ramp_s))
        return np.clip(position + passed_s * velocity, self._low, self._high)
