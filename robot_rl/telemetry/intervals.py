"""How sure one is of a share of solved episodes."""

from __future__ import annotations

import math


def wilson_interval(successes: float, trials: float, z: float = 1.96) -> tuple[float, float]:
    """Returns the Wilson score interval of a proportion (Wilson 1927); (0, 1) for no trials.

    Args:
        successes: how many of the trials succeeded.
        trials: how many there were.
        z: quantile of the normal distribution, 1.96 for 95 %.
    """
    if trials == 0:
        return 0.0, 1.0
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
