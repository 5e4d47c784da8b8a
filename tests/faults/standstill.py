"""Says when one processor of this machine stood still.

    python tests/faults/standstill.py <processor> <file>

The host of a virtual machine may take one processor away for a quarter of a second while the others go on.
The thread that ran on it stands still; it may be the one on which an arm receives commands. A process of the
highest priority, bound to the processor, looks at the clock every 5 ms and notes when it is late. Each time
is a line of the file: begin and end, in ns of the monotonic clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

BUSY_S = 0.05
"""What a busy machine may add to any time."""
_LOOK_NS = 5_000_000
_PRIORITY = 90
"""Above arms, supervisors and tests."""


@contextlib.contextmanager
def watched(folder: Path) -> Generator[None]:
    """Watches all processors while the context lasts; none where real-time priority is refused."""
    command = [sys.executable, __file__]
    running = [
        subprocess.Popen([*command, str(cpu), str(folder / f"{cpu}.still")], stderr=subprocess.DEVNULL)
        for cpu in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for one in running:
            one.terminate()
            one.wait()


def stood_still(folder: Path, begun_ns: int, end_ns: int) -> bool:
    """Returns whether a processor stood still meanwhile, for longer than the bounds allow for."""
    spans = [
        [int(word) for word in line.split()]
        for path in folder.glob("*.still")
        for line in path.read_text().splitlines()
    ]
    return any(begin < end_ns and end > begun_ns for begin, end in spans)


def main(words: list[str]) -> int:
    cpu, path = int(words[0]), Path(words[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parent = os.getppid()
    os.sched_setaffinity(0, {cpu})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except PermissionError:
        return 1
    with path.open("w", buffering=1) as file:
        before_ns = time.monotonic_ns()
        while os.getppid() == parent:
            time.sleep(1e-9 * _LOOK_NS)
            now_ns = time.monotonic_ns()
            if now_ns - before_ns > 1e9 * BUSY_S + _LOOK_NS:
                file.write(f"{before_ns} {now_ns}\n")
            before_ns = time.monotonic_ns()  # a slow disk is no processor that stands still
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
