"""Ctrl-C while modules load: KeyboardInterrupt is never raised inside an import.

Inside an import it may turn into another exception or get lost, and leave half a module: `import numpy` in
`import torch` then fails silently. A command loads its own modules before its work, so there the process ends
at once. An import during the work ends first, then KeyboardInterrupt is raised.
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

_RETRY_S = 0.02
_IMPORTLIB = ("<frozen importlib", os.path.dirname(os.__file__) + os.sep + "importlib")
_COMMANDS = os.path.dirname(__file__)


def exit_interrupted(*_: object) -> None:
    """Prints one line and ends the process: no work has begun, so there is nothing to clean up."""
    sys.stdout.flush()
    print("interrupted.", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


def begin() -> None:
    """Until `main` is loaded, lets Ctrl-C during an import end the process."""
    _replace(signal.default_int_handler, _while_loading)


def end() -> None:
    """Lets Python raise KeyboardInterrupt again."""
    _replace(_while_loading, signal.default_int_handler)


def _while_loading(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTLIB):
            exit_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt  # another program imported a command, and nothing is loading now


class Interrupts:
    """A block in which `main` runs: Ctrl-C raises KeyboardInterrupt in it, but not within imports."""

    def __init__(self, main: CodeType) -> None:
        self._main = main
        self._retry: threading.Timer | None = None

    def __enter__(self) -> None:
        _replace(signal.default_int_handler, self._on_interrupt)

    def __exit__(self, *_: object) -> None:
        _replace(self._on_interrupt, signal.default_int_handler)
        if self._retry is not None:
            self._retry.cancel()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        asks = asked_for_import(frame, self._main)
        if asks is None:
            raise KeyboardInterrupt
        if os.path.dirname(asks) == _COMMANDS:
            exit_interrupted()
        if self._retry is None:  # one interrupt, however often Ctrl-C is pressed
            self._retry = threading.Timer(_RETRY_S, self._send)
            self._retry.daemon = True
            self._retry.start()

    def _send(self) -> None:
        """Sends SIGINT to the main thread, since only there it ends a sleep."""
        self._retry = None
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def asked_for_import(frame: FrameType | None, main: CodeType) -> str | None:
    """Returns the file, called by `main`, whose import statement is running; None if none is."""
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
    """Sets the handler of Ctrl-C if it still is `before`; other programs may have set their own."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == before:
        signal.signal(signal.SIGINT, after)
