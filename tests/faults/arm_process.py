"""Runs one process of the chain as it is, with two signals more that make its main thread hang.

    LD_PRELOAD=bad_process.so BAD_PROCESS=<page> python arm_process.py -m <module> ... | <script> ...

It hangs until the page says otherwise (`arm_shim.Shim`): HANG_ALL keeps Python's lock, so that no other
Python thread runs either; HANG_LOOP lets the others run.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType

HANG_ALL = signal.SIGRTMIN + 1
HANG_LOOP = signal.SIGRTMIN + 2


def listen() -> None:
    """Takes the two signals."""
    library = ctypes.PyDLL(None)  # calls keep the lock

    def hang_all(number: int, frame: FrameType | None) -> None:
        library.hang_with_the_lock()

    def hang_loop(number: int, frame: FrameType | None) -> None:
        while library.is_to_hang():
            pass

    signal.signal(HANG_ALL, hang_all)
    signal.signal(HANG_LOOP, hang_loop)


def main() -> None:
    """Becomes the module or the script."""
    listen()
    if sys.argv[1] == "-m":
        module, sys.argv = sys.argv[2], sys.argv[2:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
