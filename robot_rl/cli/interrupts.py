"""Ctrl-C while modules load: never raised inside an import.

There it may become another exception, or none, and leave half a module behind: `import numpy` within
`import torch` fails in silence. What the command itself loads comes before its work, so the process ends at
once; an import that the work asks for is let to its end first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import CodeType, FrameType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[[int, FrameType | None], object]

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""

_AGAIN_S = 0.02
_IMPORTLIB = ("<frozen importlib", os.path.dirname(os.__file__) + os.sep + "importlib")
_COMMANDS = os.path.dirname(__file__)


def exit_interrupted(*_: object) -> None:
    """Ends the process with the one line: nothing was begun that must be tidied up."""
    sys.stdout.flush()
    print("interrupted.", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


def begin() -> None:
    """Ends the process at Ctrl-C in an import, until `main` is loaded."""
    _replace(signal.default_int_handler, _while_loading)


def end() -> None:
    """Lets Python raise KeyboardInterrupt again."""
    _replace(_while_loading, signal.default_int_handler)


def _while_loading(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTLIB):
            exit_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt  # whoever imported a command for its own use is not loading any more


class Interrupts:
    """A block in which `main` runs: Ctrl-C is raised in it, but not within imports."""

    def __init__(self, main: CodeType) -> None:
        self._main = main
        self._again: threading.Timer | None = None

    def __enter__(self) -> None:
        _replace(signal.default_int_handler, self._heard)

    def __exit__(self, *_: object) -> None:
        _replace(self._heard, signal.default_int_handler)
        if self._again is not None:
            self._again.cancel()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        asks = asked_for_import(frame, self._main)
        if asks is None:
            raise KeyboardInterrupt
        if os.path.dirname(asks) == _COMMANDS:
            exit_interrupted()
        if self._again is None:  # however often it is pressed, it is raised once
            self._again = threading.Timer(_AGAIN_S, self._press)
            self._again.daemon = True
            self._again.start()

    def _press(self) -> None:
        """Interrupts the main thread: an interrupt of another one would end no sleep."""
        self._again = None
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def asked_for_import(frame: FrameType | None, main: CodeType) -> str | None:
    """Returns the file below `main` whose import is running in a frame, None if none is."""
    asks, is_importing = None, False
    while frame is not None and frame.f_code is not main:
        file = frame.f_code.co_filename
        if file.startswith(_IMPORTLIB):
            is_importing = True
        elif is_importing:
            asks, is_importing = file, False
        frame = frame.f_back
    return main.co_filename if is_importing else asks


def _replace(before: object, after: Handler) -> None:
    """Sets the handler of Ctrl-C, unless it is another than before: somebody else's, or ignored."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == before:
        signal.signal(signal.SIGINT, after)
