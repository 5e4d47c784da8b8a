"""What hands that push in directions make of an action: shared by keyboard and gamepad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from robot_rl.core.errors import ConfigError
from robot_rl.real.teleop.intent import Array

GRIPPER = "gripper"


class Hand:
    """An action of named elements; the gripper stays as it was last told."""

    def __init__(self, action_names: Sequence[str]) -> None:
        """Raises `ConfigError` where the actions do not move a tool: nobody steers seven joints by keys."""
        if "tool.dx" not in action_names:
            raise ConfigError(
                f"teleop: keys and sticks move the tool, these actions do not: {', '.join(action_names)}. "
                "Use a leader arm (human.input=leader)."
            )
        self._index = {name: i for i, name in enumerate(action_names)}
        # Yaw is rz where the tool turns about all axes.
        self._index.setdefault("tool.yaw", self._index.get("tool.rz", -1))
        self._dim = len(action_names)
        self._closed = False

    def follow(self, wanted: Array) -> None:
        """Takes over the gripper as the policy holds it, so that taking over drops nothing."""
        if GRIPPER in self._index:
            self._closed = bool(wanted[self._index[GRIPPER]] < 0)

    def toggle_gripper(self) -> None:
        self._closed = not self._closed

    def action(self, moves: Mapping[str, float]) -> Array:
        """Returns (A,) of the given elements; those that the action lacks are left out."""
        action = np.zeros(self._dim, np.float32)
        for name, value in moves.items():
            if self._index.get(name, -1) >= 0:
                action[self._index[name]] = np.clip(value, -1.0, 1.0)
        if GRIPPER in self._index:
            action[self._index[GRIPPER]] = -1.0 if self._closed else 1.0
        return action
