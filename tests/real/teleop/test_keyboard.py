"""The keyboard, typed on at the other end of a pseudo-terminal."""

import os
import pty
import termios
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.real.teleop.intent import Array, Hand, Intent
from robot_rl.real.teleop.keyboard import Keyboard

NAMES = ("tool.dx", "tool.dy", "tool.dz", "tool.yaw", "gripper")
OPEN, SHUT = np.array([0, 0, 0, 0, 1.0]), np.array([0, 0, 0, 0, -1.0])


class Typist:
    """A person's end of the terminal, and the clock."""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        self.end, self.terminal = pty.openpty()
        self.before = termios.tcgetattr(self.terminal)
        self.now_s = 0.0
        self.keyboard = Keyboard(names, terminal=self.terminal, speed=0.5, clock=lambda: self.now_s)

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def shown(self, last: str) -> str:
        """Returns what was written, until `last`: a terminal gives it out in parts."""
        text = ""
        while last not in text:
            text += os.read(self.end, 4096).decode()
        return text

    def close(self) -> None:
        self.keyboard.close()
        os.close(self.end)
        os.close(self.terminal)


def sent(intent: Intent) -> Array:
    assert intent.action is not None
    return intent.action


@pytest.fixture
def typist() -> Iterator[Typist]:
    found = Typist()
    yield found
    found.close()


def test_it_shows_its_keys_and_gives_the_terminal_back(typist: Typist) -> None:
    assert "y success" in typist.shown("success")
    assert not termios.tcgetattr(typist.terminal)[3] & termios.ICANON
    typist.keyboard.close()
    assert termios.tcgetattr(typist.terminal) == typist.before


def test_nobody_drives_until_a_key_moves_the_tool(typist: Typist) -> None:
    assert not typist.keyboard.read(OPEN).takes_over
    typist.type("wa")
    intent = typist.keyboard.read(OPEN)
    assert intent.takes_over
    np.testing.assert_allclose(sent(intent), [0.5, 0.5, 0, 0, 1])


def test_a_key_counts_as_held_for_a_moment_and_control_goes_back_when_idle(typist: Typist) -> None:
    typist.type("f")
    assert sent(typist.keyboard.read(OPEN))[2] == -0.5
    typist.now_s = 0.2  # released: the person still drives, and stands still
    intent = typist.keyboard.read(OPEN)
    assert intent.takes_over
    assert sent(intent)[2] == 0.0
    typist.now_s = 1.6
    assert not typist.keyboard.read(OPEN).takes_over


def test_t_stays_until_enter(typist: Typist) -> None:
    typist.type("t")
    typist.keyboard.read(OPEN)
    typist.now_s = 60.0
    assert typist.keyboard.read(OPEN).takes_over
    typist.type("\n")
    assert not typist.keyboard.read(OPEN).takes_over


def test_taking_over_keeps_the_gripper_as_the_policy_holds_it(typist: Typist) -> None:
    typist.type("w")
    assert sent(typist.keyboard.read(SHUT))[4] == -1.0
    typist.type(" ")
    assert sent(typist.keyboard.read(OPEN))[4] == 1.0


@pytest.mark.parametrize(("key", "verdict"), [("y", "success"), ("n", "fail")])
def test_a_verdict_counts_once_and_not_for_the_next_episode(typist: Typist, key: str, verdict: str) -> None:
    typist.type(key)
    assert typist.keyboard.read(OPEN).verdict == verdict
    assert typist.keyboard.read(OPEN).verdict is None


def test_words_become_the_instruction_and_their_letters_are_no_keys(typist: Typist) -> None:
    typist.type("/pick the rex")
    assert not typist.keyboard.read(OPEN).takes_over
    typist.type("\x7fd cube\n")
    intent = typist.keyboard.read(OPEN)
    assert intent.instruction == "pick the red cube"
    assert not intent.stop
    assert typist.keyboard.read(OPEN).instruction is None


def test_stop_stays_pressed(typist: Typist) -> None:
    typist.type("x")
    assert typist.keyboard.read(OPEN).stop
    assert typist.keyboard.read(OPEN).stop


def test_a_question_waits_for_enter_and_heeds_stop(typist: Typist) -> None:
    answered = threading.Event()

    def ask() -> None:
        typist.keyboard.ask("Put the cube back.")
        answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.05)
    assert not answered.is_set()
    typist.type("w\n")
    thread.join(10.0)
    assert answered.is_set()
    typist.type("x")
    with pytest.raises(DeviceError, match="the person stopped at the question: Again"):
        typist.keyboard.ask("Again?")


def test_without_a_terminal_it_says_how_to_get_one() -> None:
    read, write = os.pipe()
    with pytest.raises(DeviceError, match=r"is no terminal .*Start from a terminal, or over ssh with one"):
        Keyboard(NAMES, terminal=read)
    os.close(read)
    os.close(write)


def test_joints_are_not_steered_by_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"keys and sticks move the tool, these actions do not: joint1.delta"
    ):
        Keyboard(("joint1.delta",), terminal=0)


def test_a_toggle_moves_a_gripper_that_is_stepped_and_nothing_before_does() -> None:
    hand = Hand((*NAMES[:-1], "gripper.step"))
    hand.follow(np.array([0.0, 0.0, 0.0, 0.0, -0.3]))  # the policy was closing it
    assert hand.action({"tool.dx": 1.0}).tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    hand.toggle_gripper()
    assert hand.action({})[-1] == 1.0
    hand.toggle_gripper()
    assert hand.action({})[-1] == -1.0
    hand.follow(np.zeros(5))
    assert hand.action({})[-1] == 0.0
