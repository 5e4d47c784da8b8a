"""Periods that begin at absolute times, and how well that went."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
from typing import Any

import numpy as np

_BINS = 50_000
"""Of 1 us each; the last one is for all that is longer."""
_PRIORITY = 50
WATCHER_PRIORITY = 60
"""Of the process that watches the one above, and that must run even if the watched one spins."""
_NICE = -10
_PR_SET_TIMERSLACK = 29
_SWITCH_S = 2e-4
"""How long a thread that writes logs may keep the interpreter when a period begins."""


class Pace:
    """Wakes at the beginning of each period; the times are absolute, so that delays do not add up."""

    def __init__(self, rate_hz: float) -> None:
        self.rate_hz = rate_hz
        self._period_ns = round(1e9 / rate_hz)
        self._late, self._jitter, self._cost = _Histogram(), _Histogram(), _Histogram()
        self._missed = 0
        self._begun_ns = 0
        self._next_ns = time.monotonic_ns() + self._period_ns

    def wait(self) -> None:
        """Ends a period and sleeps until the next one; periods that are over already count as missed."""
        now_ns = time.monotonic_ns()
        if self._begun_ns:
            self._cost.add(now_ns - self._begun_ns)
        behind = (now_ns - self._next_ns) // self._period_ns
        if behind > 0:
            self._missed += behind
            self._next_ns += behind * self._period_ns
        if self._next_ns > now_ns:
            time.sleep(1e-9 * (self._next_ns - now_ns))
        begun_ns = time.monotonic_ns()
        self._late.add(begun_ns - self._next_ns)
        if self._begun_ns:
            self._jitter.add(abs(begun_ns - self._begun_ns - self._period_ns))
        self._begun_ns, self._next_ns = begun_ns, self._next_ns + self._period_ns

    def statistics(self) -> dict[str, Any]:
        """Returns percentiles in microseconds.

        `late`: wake-up after the beginning of a period; `jitter`: |period - nominal|; `cost`: time of
        the work. `missed`: beginnings that passed before the work of the period before was done.
        """
        return {
            "command_hz": self.rate_hz,
            "cycles": self._late.count,
            "missed": self._missed,
            "jitter_us": self._jitter.percentiles(),
            "late_us": self._late.percentiles(),
            "cost_us": self._cost.percentiles(),
        }


class _Histogram:
    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self.count, self._max_ns = 0, 0

    def add(self, duration_ns: int) -> None:
        self._counts[min(max(duration_ns, 0) // 1000, _BINS - 1)] += 1
        self.count += 1
        self._max_ns = max(self._max_ns, duration_ns)

    def percentiles(self) -> dict[str, float]:
        below = np.cumsum(self._counts)
        ranks = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999}
        found = {name: float(np.searchsorted(below, rank * self.count)) for name, rank in ranks.items()}
        return {**found, "max": 1e-3 * self._max_ns}


def raise_priority() -> str:
    """Asks for priority and short timers, and ends garbage collection; returns what it got."""
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(_SWITCH_S)
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    return take_priority(_PRIORITY)


def take_priority(priority: int) -> str:
    """Asks for real-time priority for this thread, or else for a better nice value; returns what it got.

    Only this thread gets it: a library's thread that spins must not take the machine.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
        return f"SCHED_FIFO {priority}"
    except (OSError, AttributeError) as error:
        refused = f"SCHED_FIFO: {error}"
    try:
        return f"nice {os.nice(_NICE)} ({refused})"
    except OSError as error:
        return f"normal ({refused}; nice: {error})"
