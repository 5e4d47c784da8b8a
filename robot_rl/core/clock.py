"""Clocks that are passed in, so that tests can set the time."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock; never wall-clock time."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds_s: float) -> None:
        self._now_s += seconds_s
