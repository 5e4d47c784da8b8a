"""A keyboard in a terminal, also over ssh: it needs no window and no key-up events.

A terminal repeats a held key, after a first pause of up to half a second; so a key counts as held for a while
after it was last seen.
"""

from __future__ import annotations

import atexit
import os
import select
import termios
import time
import tty
from collections.abc import Callable, Sequence
from typing import Any, Literal

from robot_rl.core.errors import DeviceError
from robot_rl.real.teleop.intent import Array, Hand, Intent

KEYS = """\
keys  w/s forward, back   a/d left, right   r/f up, down   q/e turn   space gripper   (any takes over)
      enter gives control back   t takes over and stays   y success   n failure   x stop   / new instruction
"""
"""Shown when it is opened."""

_MOVES: dict[str, tuple[str, float]] = {
    "w": ("tool.dx", 1.0),
    "s": ("tool.dx", -1.0),
    "a": ("tool.dy", 1.0),
    "d": ("tool.dy", -1.0),
    "r": ("tool.dz", 1.0),
    "f": ("tool.dz", -1.0),
    "q": ("tool.yaw", 1.0),
    "e": ("tool.yaw", -1.0),
}
_ENTER, _ESCAPE, _ERASE = "\r\n", "\x1b", "\x7f\b"


def check_terminal() -> None:
    """Raises `DeviceError` if this process has no terminal."""
    os.close(_own_terminal())


class Keyboard:
    """A `Teleop` that reads a terminal."""

    def __init__(
        self,
        action_names: Sequence[str],
        *,
        terminal: int | None = None,
        speed: float = 0.6,
        held_s: float = 0.12,
        idle_s: float = 1.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Puts the terminal into a mode without line buffering, and shows the keys.

        Args:
            action_names: of the policy; empty where keys only judge and stop.
            terminal: an open terminal; the process's own if None.
            speed: share of full scale at which a key moves.
            held_s: how long a key counts as held after it was last seen.
            idle_s: time without a key until the policy drives again (not after `t`).
            clock: monotonic seconds.

        Raises:
            DeviceError: there is no terminal.
        """
        self._hand = Hand(action_names) if action_names else None
        self._speed, self._held_s, self._idle_s, self._clock = speed, held_s, idle_s, clock
        self._is_own = terminal is None
        self._terminal = _own_terminal() if terminal is None else terminal
        try:
            self._before: Any = termios.tcgetattr(self._terminal)
        except termios.error as error:
            raise DeviceError(
                f"keyboard: file {self._terminal} is no terminal ({error}). Start from a terminal, or over "
                "ssh with one (ssh -t)."
            ) from error
        tty.setcbreak(self._terminal)  # Ctrl-C still interrupts
        atexit.register(self.close)
        self._seen_s: dict[str, float] = {}
        self._last_s = -1e9
        self._stays = False
        self._drives = False
        self._typed: str | None = None
        self._instruction: str | None = None
        self._verdict: Literal["success", "fail"] | None = None
        self._stopped = False
        self._write(KEYS if self._hand else KEYS.split("\n", 1)[1])

    def begin(self) -> None:
        self._verdict = None

    def read(self, wanted: Array) -> Intent:
        for key in self._keys():
            self._press(key, wanted)
        now_s = self._clock()
        if self._drives and not self._stays and now_s - self._last_s > self._idle_s:
            self._give_back()
        instruction, self._instruction = self._instruction, None
        verdict, self._verdict = self._verdict, None
        return Intent(
            takes_over=self._drives,
            action=self._action(now_s) if self._drives and self._hand is not None else None,
            verdict=verdict,
            instruction=instruction,
            stop=self._stopped,
        )

    def ask(self, question: str) -> None:
        """Shows a question and waits for enter; raises `DeviceError` if the person presses stop."""
        self._write(f"{question} [enter]\n")
        while True:
            select.select([self._terminal], [], [], 0.1)
            for key in self._keys():
                if key in _ENTER:
                    self._give_back()
                    return
                if key == "x":
                    raise DeviceError(f"keyboard: the person stopped at the question: {question}")

    def close(self) -> None:
        """Resets the terminal to its old mode."""
        if self._before is None:
            return
        before, self._before = self._before, None
        atexit.unregister(self.close)
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, before)
        if self._is_own:
            os.close(self._terminal)

    def _press(self, key: str, wanted: Array) -> None:
        if self._typed is not None:
            self._spell(key)
            return
        now_s = self._clock()
        if key in _ENTER:
            self._give_back()
        elif key == "x":
            self._stopped = True
        elif key in "yn":
            self._verdict = "success" if key == "y" else "fail"
        elif key == "/":
            self._typed = ""
            self._write("instruction: ")
        elif key == "t" or (self._hand is not None and (key in _MOVES or key == " ")):
            if not self._drives:
                self._drives = True
                if self._hand is not None:
                    self._hand.follow(wanted)
                self._write("you drive\n")
            self._stays |= key == "t"
            self._last_s = now_s
            if key in _MOVES:
                self._seen_s[key] = now_s
            elif key == " " and self._hand is not None:
                self._hand.toggle_gripper()

    def _spell(self, key: str) -> None:
        """Adds a letter to the instruction; enter ends it, escape deletes it."""
        assert self._typed is not None
        if key in _ENTER or key == _ESCAPE:
            if key in _ENTER and self._typed.strip():
                self._instruction = self._typed.strip()
            self._typed = None
            self._write("\n")
        elif key in _ERASE:
            if self._typed:
                self._typed = self._typed[:-1]
                self._write("\b \b")
        elif key.isprintable():
            self._typed += key
            self._write(key)

    def _give_back(self) -> None:
        if self._drives:
            self._write("the policy drives\n")
        self._drives = self._stays = False
        self._seen_s.clear()

    def _action(self, now_s: float) -> Array:
        assert self._hand is not None
        moves: dict[str, float] = {}
        for key, seen_s in self._seen_s.items():
            if now_s - seen_s <= self._held_s:
                name, sign = _MOVES[key]
                moves[name] = moves.get(name, 0.0) + sign * self._speed
        return self._hand.action(moves)

    def _keys(self) -> str:
        """Returns the new keys."""
        found = b""
        while select.select([self._terminal], [], [], 0)[0]:
            octets = os.read(self._terminal, 1024)
            if not octets:
                raise DeviceError("keyboard: the terminal is gone.")
            found += octets
        return found.decode(errors="ignore")

    def _write(self, text: str) -> None:
        os.write(self._terminal, text.encode())


def _own_terminal() -> int:
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        raise DeviceError(
            f"keyboard: this process has no terminal ({error.strerror}). Start it from a terminal, or over "
            "ssh with one (ssh -t)."
        ) from error
