"""An arm that nobody watches."""

from __future__ import annotations

from robot_rl.core.errors import DeviceError
from robot_rl.real.teleop.intent import Array, Intent


class Nobody:
    """A `Teleop` without a person."""

    def begin(self) -> None:
        """Has nothing to forget."""

    def read(self, wanted: Array) -> Intent:
        """Lets everything pass."""
        return Intent()

    def ask(self, question: str) -> None:
        """Raises `DeviceError`: nobody would answer."""
        raise DeviceError(f"teleop: nobody is there to be asked: {question} Use human.input=keyboard.")

    def close(self) -> None:
        """Holds nothing."""
