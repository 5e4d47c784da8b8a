"""Control ticks at absolute deadlines: a late one is counted, and the next are not shorter."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from robot_rl.core.clock import Clock, MonotonicClock

Sleep = Callable[[float], None]
_LATE = 0.5
"""Share of a period by which a step may begin after its time."""
_WINDOW = 51
"""Control steps over which a running median is taken."""


class Pace:
    """When control steps are due, in nanoseconds of a monotonic clock."""

    def __init__(self, hz: float, clock: Clock | None = None, sleep: Sleep = time.sleep) -> None:
        self.period_ns = round(1e9 / hz)
        self._clock, self._sleep = clock or MonotonicClock(), sleep
        self.due_ns = 0
        """When the present step ends."""
        self.late = 0
        """Steps that began too late, since the beginning."""

    def now_ns(self) -> int:
        return round(1e9 * self._clock.now_s())

    def begin(self) -> None:
        """Begins to count: the first step begins now."""
        self.due_ns = self.now_ns()

    def step(self) -> bool:
        """Begins the next step; returns whether that is late, and then it has a whole period from now on."""
        now_ns = self.now_ns()
        is_late = now_ns > self.due_ns + _LATE * self.period_ns
        self.late += is_late
        self.due_ns = (now_ns if is_late else self.due_ns) + self.period_ns
        return is_late

    def wait(self, until_ns: int | None = None) -> None:
        """Sleeps until the present step ends, or until an earlier time."""
        left_ns = (self.due_ns if until_ns is None else until_ns) - self.now_ns()
        if left_ns > 0:
            self._sleep(1e-9 * left_ns)


class RunningMedian:
    """The median of the newest values; 0 before the first."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def value(self) -> float:
        return float(np.median(self._values)) if self._values else 0.0
