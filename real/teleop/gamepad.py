"""A gamepad, by pygame (extra `teleop`): it needs no window.

With a dead man's switch: the person drives while they hold the right shoulder button.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from robot_rl.core.errors import DeviceError
from robot_rl.real.teleop.intent import Array, Hand, Intent

logger = logging.getLogger(__name__)

GRIPPER, STOP, FAIL, CONFIRM, DRIVE, SUCCESS = 0, 1, 2, 3, 5, 7
"""Buttons A, B, X, Y, right shoulder and start of an XInput pad."""

_DEAD_ZONE = 0.1
_AXES = {"tool.dx": (1, -1.0), "tool.dy": (0, -1.0), "tool.dz": (4, -1.0), "tool.yaw": (3, -1.0)}
"""Element -> (axis, sign): left stick forward and left, right stick up and left are positive."""


class Pad(Protocol):
    """The used part of `pygame.joystick.Joystick`."""

    def get_axis(self, axis_number: int, /) -> float: ...
    def get_button(self, button: int, /) -> bool: ...
    def get_numaxes(self) -> int: ...
    def get_numbuttons(self) -> int: ...


class Gamepad:
    """A `Teleop` that reads a gamepad."""

    def __init__(self, action_names: Sequence[str], *, pad: Pad | None = None) -> None:
        """Opens the first pad of the machine by default.

        Raises:
            DeviceError: pygame is missing, or there is no pad.
        """
        self._hand = Hand(action_names)
        self._pygame: Any = None
        if pad is None:
            self._pygame, pad = _first_pad()
        if pad.get_numaxes() < 5 or pad.get_numbuttons() <= SUCCESS:
            raise DeviceError(
                f"gamepad: it has {pad.get_numaxes()} axes and {pad.get_numbuttons()} buttons, allowed: at "
                f"least 5 and {SUCCESS + 1}, as XInput pads have."
            )
        self._pad = pad
        self._was_down: dict[int, bool] = dict.fromkeys((GRIPPER, FAIL, SUCCESS), False)
        self._drove = False
        self._stopped = False

    def begin(self) -> None:
        """Does nothing: verdicts are not kept."""

    def read(self, wanted: Array) -> Intent:
        self._pump()
        pressed = {button: self._pressed(button) for button in self._was_down}
        self._stopped |= bool(self._pad.get_button(STOP))
        drives = bool(self._pad.get_button(DRIVE))
        if drives and not self._drove:
            self._hand.follow(wanted)
        self._drove = drives
        if drives and pressed[GRIPPER]:
            self._hand.toggle_gripper()
        verdict: Literal["success", "fail"] | None = None
        if pressed[SUCCESS] or pressed[FAIL]:
            verdict = "success" if pressed[SUCCESS] else "fail"
        moves = {name: sign * self._axis(axis) for name, (axis, sign) in _AXES.items()}
        return Intent(
            takes_over=drives,
            action=self._hand.action(moves) if drives else None,
            verdict=verdict,
            stop=self._stopped,
        )

    def ask(self, question: str) -> None:
        """Waits for Y; raises `DeviceError` if the person presses stop. The question goes to the log."""
        logger.warning("%s [Y]", question)
        while not self._pad.get_button(CONFIRM):
            self._pump()
            if self._pad.get_button(STOP):
                raise DeviceError(f"gamepad: the person pressed stop when asked: {question}")
            time.sleep(0.02)

    def close(self) -> None:
        """Releases the pad."""
        if self._pygame is not None:
            self._pygame.joystick.quit()
            self._pygame = None

    def _pump(self) -> None:
        if self._pygame is None:
            return
        for event in self._pygame.event.get():
            if event.type == self._pygame.JOYDEVICEREMOVED:
                raise DeviceError("gamepad: it is gone. Look at its cable or battery, then resume.")

    def _pressed(self, button: int) -> bool:
        """Returns whether a button went down since the last time."""
        down, before = bool(self._pad.get_button(button)), self._was_down[button]
        self._was_down[button] = down
        return down and not before

    def _axis(self, number: int) -> float:
        value = self._pad.get_axis(number)
        return 0.0 if abs(value) < _DEAD_ZONE else value


def _first_pad() -> tuple[Any, Pad]:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # SDL wants a video driver before it gives events
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import pygame
    except ImportError as error:
        raise DeviceError("gamepad: pygame is missing. pip install -e '.[teleop]'") from error
    pygame.display.init()
    pygame.joystick.init()
    if pygame.joystick.get_count() == 0:
        pygame.joystick.quit()
        raise DeviceError("gamepad: none is connected. Plug one in, or use human.input=keyboard.")
    return pygame, pygame.joystick.Joystick(0)
