"""A loop at a fixed rate, by absolute deadlines, that knows how well it kept them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import numpy as np

from robot_rl.core.errors import require


class Pacer:
    """Waits for the cycles of a loop.

    Cycle k is due at start + k / rate, whatever happened before: nothing adds up. A cycle that takes
    too long costs the periods it covers, they are not made up for in a burst.
    """

    def __init__(
        self,
        rate_hz: float,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        require(0 < rate_hz <= 2000, "rate_hz", rate_hz, "above 0, at most 2000")
        self._period_ns, self._clock_ns, self._sleep_s = 1e9 / rate_hz, clock_ns, sleep_s
        self._start_ns = clock_ns()
        self._number = 0
        self._lateness_ns = array("q")
        self.missed = 0
        """Periods in which no cycle began."""

    def wait(self) -> int:
        """Sleeps until the next cycle is due; returns how many periods have passed since the last."""
        due_ns = self._due_ns(self._number + 1)
        while (now_ns := self._clock_ns()) < due_ns:
            self._sleep_s(1e-9 * (due_ns - now_ns))
        self._lateness_ns.append(now_ns - due_ns)
        passed = 1
        while self._due_ns(self._number + passed + 1) <= now_ns:
            passed += 1
        self.missed += passed - 1
        self._number += passed
        return passed

    def summary(self) -> dict[str, float | int]:
        """Returns cycles, missed periods, and how late cycles began."""
        late_ms = 1e-6 * np.frombuffer(self._lateness_ns, np.int64)
        if not len(late_ms):
            late_ms = np.zeros(1)
        shares = {"p50": 50, "p99": 99, "p999": 99.9}
        return {
            "cycles": len(self._lateness_ns),
            "missed": self.missed,
            **{f"late_{name}_ms": round(float(np.percentile(late_ms, q)), 3) for name, q in shares.items()},
            "late_worst_ms": round(float(late_ms.max()), 3),
        }

    def _due_ns(self, number: int) -> int:
        return self._start_ns + round(number * self._period_ns)
