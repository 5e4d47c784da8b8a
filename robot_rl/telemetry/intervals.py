"""Confidence intervals of a success rate, and of a mean over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, 97.5 %, for 1 to 10 degrees of freedom."""


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


def mean_interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Returns Student's 95 % interval of a mean over seeds; a single number has none.

    It is wide for few seeds: 2.5 standard deviations to either side for three.
    """
    if len(values) < 2:
        return None, None
    freedom, mean = len(values) - 1, statistics.mean(values)
    half = _t_975(freedom) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def _t_975(freedom: int) -> float:
    """Returns the quantile; beyond the table by the first terms of Abramowitz and Stegun 26.7.5."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = 1.96
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
