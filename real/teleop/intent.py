"""A person's intent for the arm, and the interface of input devices.

A action dim of the policy, n arm joints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.core.names import GRIPPER, GRIPPER_STEP, GRIPPERS

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Intent:
    """One reading of a person's input."""

    takes_over: bool = False
    """The person drives: `action` or `joints_rad` goes to the arm instead of the policy's action."""
    action: Array | None = None
    """(A,) in [-1, 1], in the policy's action space."""
    joints_rad: Array | None = None
    """(n,) joint targets, of leader arms; `gripper` goes with them."""
    gripper: float | None = None
    """-1 closed to +1 open, with `joints_rad`."""
    verdict: Literal["success", "fail"] | None = None
    """The person ends the episode with this result."""
    instruction: str | None = None
    """The new instruction that the person typed."""
    stop: bool = False
    """The arm has to stop and stay stopped."""


class Teleop(Protocol):
    """An input device of a person, or a script instead of a person."""

    def begin(self) -> None:
        """Begins an episode: earlier verdicts and instructions no longer count."""

    def read(self, wanted: Array) -> Intent:
        """Returns the person's present intent; never waits. `wanted` (A,) is the policy's action."""
        ...

    def ask(self, question: str) -> None:
        """Shows the person a request and waits until they confirm."""

    def close(self) -> None:
        """Releases the device."""


class NoTeleop:
    """A `Teleop` without a person."""

    def begin(self) -> None:
        """Does nothing."""

    def read(self, wanted: Array) -> Intent:
        return Intent()

    def ask(self, question: str) -> None:
        raise DeviceError(f"teleop: nobody is there to be asked: {question} Use human.input=keyboard.")

    def close(self) -> None:
        """Does nothing."""


class Hand:
    """An action from pushes in directions, for keyboard and gamepad; the gripper keeps its last state.

    An action that changes the gripper's command leaves it until the person toggles it, then moves it on.
    """

    def __init__(self, action_names: Sequence[str]) -> None:
        """Raises `ConfigError` if the actions do not move a tool: keys cannot steer seven joints."""
        if "tool.dx" not in action_names:
            raise ConfigError(
                f"teleop: keys and sticks move the tool, these actions do not: {', '.join(action_names)}. "
                "Use a leader arm (human.input=leader)."
            )
        self._index = {name: i for i, name in enumerate(action_names)}
        # Yaw is rz where the tool turns about all axes.
        self._index.setdefault("tool.yaw", self._index.get("tool.rz", -1))
        self._dim = len(action_names)
        self._closed, self._has_toggled = False, False

    def follow(self, wanted: Array) -> None:
        """Takes the gripper over in the policy's state, so that nothing is dropped."""
        self._has_toggled = False
        for name in GRIPPERS:
            if name in self._index and wanted[self._index[name]]:
                self._closed = bool(wanted[self._index[name]] < 0)

    def toggle_gripper(self) -> None:
        self._closed, self._has_toggled = not self._closed, True

    def action(self, moves: Mapping[str, float]) -> Array:
        """Returns (A,) of the given elements, without those that the action lacks."""
        action = np.zeros(self._dim, np.float32)
        for name, value in moves.items():
            if self._index.get(name, -1) >= 0:
                action[self._index[name]] = np.clip(value, -1.0, 1.0)
        direction = -1.0 if self._closed else 1.0
        if GRIPPER in self._index:
            action[self._index[GRIPPER]] = direction
        if GRIPPER_STEP in self._index:
            action[self._index[GRIPPER_STEP]] = direction * self._has_toggled
        return action


def check_intent(intent: Intent, action_dim: int) -> None:
    """Checks that an intent that takes over has joint targets or an action.

    Raises:
        DeviceError: an input device that takes over without, or with another robot's action.
    """
    if not intent.takes_over or intent.joints_rad is not None:
        return
    if intent.action is None or intent.action.shape != (action_dim,) or not np.isfinite(intent.action).all():
        got = "nothing" if intent.action is None else f"{intent.action}"
        raise DeviceError(
            f"teleop: took over with action {got}, allowed: {action_dim} finite numbers, or joint targets. "
            "Choose the input device that fits the policy's action space."
        )
