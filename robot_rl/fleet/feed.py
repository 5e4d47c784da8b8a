"""What the programs that look at an arm for the fleet page share (`camera_feed.py`, `scene_feed.py`).

The page's server (`feeds.py`) starts one with the folder of the arm's sockets, reads its standard output, and
closes its standard input to end it. Messages are msgpack: [name, stamp_ns, bytes] of what there is to
show, [name, 0, text] of why it cannot be shown; the name is empty where that holds for all of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from robot_rl.core.errors import RobotRLError

_NICE = 19
"""All others go first: those of the arm, above all."""


class Output:
    """The way to the server: standard output. What libraries print there is dropped from now on."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb")
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)

    def send(self, name: str, stamp_ns: int, content: bytes | str) -> None:
        """Sends a message.

        Raises:
            BrokenPipeError: the server is gone.
        """
        octets: Any = msgpack.packb([name, stamp_ns, content])
        self._file.write(octets)
        self._file.flush()


def has_ended(seconds: float) -> bool:
    """Waits for so long; returns True, and at once, when the program has to end."""
    ready, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
    return bool(ready)


def run(feed: Callable[[Path, Output], None]) -> int:
    """Runs a program until it has to end; 1 if something is not there."""
    out = Output()
    os.nice(_NICE)
    with contextlib.suppress(BrokenPipeError):
        try:
            feed(Path(sys.argv[1]), out)
        except RobotRLError as error:
            out.send("", 0, str(error))
            return 1
    return 0
