"""A process that only wakes up every period: what it misses, the machine misses, not the program.

    python -m robot_rl.bench.metronome RATE_HZ FILE

It has the priority of the control loops of arms. At SIGTERM it writes the times of its wake-ups to FILE
(`.npy`, monotonic ns).
"""

from __future__ import annotations

import array
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.real.supervisor.pace import Pace, raise_priority


@contextlib.contextmanager
def metronome(rate_hz: float, path: Path) -> Generator[None]:
    """Runs the process during the block; after it the file exists."""
    process = subprocess.Popen([sys.executable, "-m", "robot_rl.bench.metronome", str(rate_hz), str(path)])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def alone(missed_ns: NDArray[Any], wakes_ns: NDArray[Any], period_ns: float) -> int:
    """Returns how many of the late intervals (M, 2) had a metronome that kept time.

    It keeps time if no two of its wake-ups in the interval are more than a period and a half apart.
    """
    late = np.flatnonzero(np.diff(wakes_ns) > 1.5 * period_ns)
    waits_ns = list(zip(wakes_ns[late], wakes_ns[late + 1], strict=True))
    return sum(not any(b < end and begin < e for b, e in waits_ns) for begin, end in missed_ns)


def main(rate_hz: float, path: Path) -> None:
    """Wakes up until SIGTERM."""
    is_over = False

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGTERM, end)
    wakes_ns = array.array("q")
    raise_priority()
    pace = Pace(rate_hz)
    while not is_over:
        pace.wait()
        wakes_ns.append(time.monotonic_ns())
    np.save(path, np.frombuffer(wakes_ns, np.int64))


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
