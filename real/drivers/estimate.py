"""Joint speeds of arms that measure positions only."""

from __future__ import annotations

from collections import deque

import numpy as np

from robot_rl.real.messages import Array


class VelocityEstimate:
    """Differences of positions over `window_s`: a longer window is smoother, and later by half of it."""

    def __init__(self, window_s: float) -> None:
        self._window_ns = round(1e9 * window_s)
        self._moments: deque[tuple[int, Array]] = deque()

    def update(self, stamp_ns: int, position_rad: Array) -> Array:
        """Returns the velocity (n,) after one more position (n,); zeros until there are two."""
        moments = self._moments
        if moments and stamp_ns <= moments[-1][0]:
            moments.clear()
        moments.append((stamp_ns, position_rad))
        while len(moments) > 2 and moments[1][0] <= stamp_ns - self._window_ns:
            moments.popleft()
        elapsed_s = 1e-9 * (stamp_ns - moments[0][0])
        return (position_rad - moments[0][1]) / elapsed_s if elapsed_s > 0 else np.zeros_like(position_rad)
