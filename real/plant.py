"""The physics of a simulated arm: MuJoCo in `robot_rl.sim.plant`, or another implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from robot_rl.real.messages import ArmState, Array


class Plant(Protocol):
    """An arm, its gripper and its surroundings; the caller advances the time."""

    @property
    def joint_names(self) -> tuple[str, ...]: ...

    @property
    def finger_names(self) -> tuple[str, ...]:
        """Joints of the gripper; published in /joint_states with the arm's."""
        ...

    @property
    def gripper_range(self) -> tuple[float, float]:
        """Closed and open."""
        ...

    @property
    def position_limits_rad(self) -> tuple[Array, Array]:
        """Lowest and highest (n,)."""
        ...

    @property
    def velocity_limits_rad_s(self) -> Array:
        """Largest joint speeds (n,)."""
        ...

    @property
    def effort_limits_n_m(self) -> Array:
        """Largest joint torques (n,): the servos saturate there."""
        ...

    @property
    def servo_s(self) -> Array:
        """Time constants of the servos (n,): how far a joint lags behind its target, over its speed."""
        ...

    def command(self, target_rad: Array, gripper: float) -> None:
        """Sets the servos' targets; they hold until the next command."""

    def targets(self) -> tuple[Array, float]:
        """Returns the targets of the servos: arm (n,) and gripper."""
        ...

    def step(self, dt_s: float) -> None:
        """Advances time by whole physics steps; keeps the rest for the next call."""

    def measure(self) -> ArmState:
        """Returns position, velocity, torque and gripper opening; stamps are 0, the server sets them."""
        ...

    def fingers(self) -> Array:
        """Returns positions of `finger_names`."""
        ...

    def objects(self) -> Mapping[str, Array]:
        """Returns the pose (7,) of each tracked object: position and quaternion (w, x, y, z)."""
        ...

    def tool_pose(self) -> Array:
        """Returns the tool's pose in the base frame, (7,) as those of objects."""
        ...

    def jacobian(self) -> Array:
        """Returns (6, n): the tool's linear and angular velocity in the base frame by joint speeds."""
        ...

    def state(self) -> Array:
        """Returns the full state as one row, for `set_state` of an equal plant."""
        ...

    def set_state(self, row: Array) -> None: ...

    def picture(self, camera: str) -> Array:
        """Returns uint8 (h, w, 3)."""
        ...

    def reset(self, seed: int) -> None:
        """Begins the episode of a seed: arm at its start, objects at theirs."""

    def close(self) -> None: ...
