"""The gamepad: a pad that says what a test tells it, and SDL without a screen or a pad."""

import numpy as np
import pytest

from robot_rl.core.errors import DeviceError
from robot_rl.real.teleop.gamepad import CONFIRM, DRIVE, FAIL, GRIPPER, STOP, SUCCESS, Gamepad
from robot_rl.real.teleop.intent import Array, Intent

NAMES = ("tool.dx", "tool.dy", "tool.dz", "tool.yaw", "gripper")
OPEN = np.array([0, 0, 0, 0, 1.0])


class FakePad:
    def __init__(self, axes: int = 6, buttons: int = 11) -> None:
        self.axes, self.down = [0.0] * axes, set[int]()
        self._buttons = buttons

    def get_axis(self, axis_number: int, /) -> float:
        return self.axes[axis_number]

    def get_button(self, button: int, /) -> bool:
        return button in self.down

    def get_numaxes(self) -> int:
        return len(self.axes)

    def get_numbuttons(self) -> int:
        return self._buttons


def sent(intent: Intent) -> Array:
    assert intent.action is not None
    return intent.action


def test_it_drives_only_while_the_shoulder_is_held() -> None:
    pad = FakePad()
    gamepad = Gamepad(NAMES, pad=pad)
    pad.axes[1], pad.axes[4] = -1.0, 0.05  # left stick forward; right stick within its dead zone
    assert not gamepad.read(OPEN).takes_over
    pad.down = {DRIVE}
    intent = gamepad.read(OPEN)
    assert intent.takes_over
    np.testing.assert_allclose(sent(intent), [1, 0, 0, 0, 1])
    pad.down = set()
    assert not gamepad.read(OPEN).takes_over


def test_a_button_held_toggles_the_gripper_once() -> None:
    pad = FakePad()
    gamepad = Gamepad(NAMES, pad=pad)
    pad.down = {DRIVE, GRIPPER}
    assert [sent(gamepad.read(OPEN))[4] for _ in range(3)] == [-1.0, -1.0, -1.0]
    pad.down = {DRIVE}
    gamepad.read(OPEN)
    pad.down = {DRIVE, GRIPPER}
    assert sent(gamepad.read(OPEN))[4] == 1.0


def test_verdicts_and_stop() -> None:
    pad = FakePad()
    gamepad = Gamepad(NAMES, pad=pad)
    pad.down = {SUCCESS}
    assert [gamepad.read(OPEN).verdict for _ in range(2)] == ["success", None]
    pad.down = {FAIL}
    assert gamepad.read(OPEN).verdict == "fail"
    pad.down = {STOP}
    assert gamepad.read(OPEN).stop
    pad.down = set()
    assert gamepad.read(OPEN).stop, "a stop is not lifted by letting go"


def test_a_question_waits_for_its_button() -> None:
    pad = FakePad()
    gamepad = Gamepad(NAMES, pad=pad)
    pad.down = {CONFIRM}
    gamepad.ask("Ready?")
    pad.down = {STOP}
    with pytest.raises(DeviceError, match="the person pressed stop when asked: Ready"):
        gamepad.ask("Ready?")


def test_a_pad_with_too_few_axes_is_refused() -> None:
    with pytest.raises(DeviceError, match="it has 2 axes and 11 buttons, allowed: at least 5 and 8"):
        Gamepad(NAMES, pad=FakePad(axes=2))


def test_sdl_without_a_pad_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("SDL_JOYSTICK_DISABLE_UDEV", "1")
    with pytest.raises(DeviceError, match=r"none is connected. Plug one in, or use human.input=keyboard"):
        Gamepad(NAMES)
