"""How the held-out error of a model falls with the episodes it learns from, and how many an error needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from robot_rl.core.errors import DatasetError
from robot_rl.worlds.build import RealEnv
from robot_rl.worlds.config import WorldSettings
from robot_rl.worlds.fit import Fitter, new_model
from robot_rl.worlds.history import CALIBRATION, SHARES, TRAIN, Array, History

_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the episodes to learn from, behind each model."""
_MIN_POINTS = 3
"""A line through two has no spread."""
_FAR = 10
"""Times the most episodes measured, beyond which a power law is a guess."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """How many episodes, in all three splits, an error needs by a power law through measured errors."""

    error: float
    """The error that is wanted."""
    episodes: float
    """Infinite where the error does not fall with the number of episodes."""
    low: float
    """Least of the numbers that follow where one of the measured errors is left out."""
    high: float
    """The largest of these; infinite where the error then does not fall."""
    measured: float
    """Most episodes behind a measured error, in all three splits."""

    def words(self) -> str:
        """Returns it as a sentence without a full stop."""
        if not math.isfinite(self.episodes):
            return (
                f"up to {self.measured:.0f} episodes the error does not fall with their number: the curve "
                f"does not tell how many an error of {self.error:g} needs"
            )
        spread = (
            f"{self.low:.0f} to {self.high:.0f}" if math.isfinite(self.high) else f"{self.low:.0f} or more"
        )
        far = f", far beyond the {self.measured:.0f} measured: a guess" * (
            self.episodes > _FAR * self.measured
        )
        return (
            f"an error of {self.error:g} needs some {self.episodes:.0f} episodes by a power law through the "
            f"curve ({spread} if one of its points is left out){far}"
        )


def curve_counts(history: History) -> list[int]:
    """Returns how many episodes the models of a curve learn from.

    Raises:
        DatasetError: too few for three points and a held-out error.
    """
    train, held_out = len(history.split(TRAIN)), len(history.split(CALIBRATION))
    counts = sorted({count for share in _SHARES if (count := max(2, int(train * share))) <= train})
    if len(counts) < _MIN_POINTS or not held_out:
        raise DatasetError(
            f"curve: got {train} episodes to learn from and {held_out} held out, of {history.num_episodes}; "
            "need 6 and 1 or more. Collect more."
        )
    return counts


def learning_curve(
    history: History, real: RealEnv, settings: WorldSettings, *, seed: int, shown: Callable[[int], None]
) -> list[dict[str, float]]:
    """Returns the held-out error of models of more and more episodes, the same updates each.

    The error is the root mean square after `fit.ahead` strides, in deviations of what changes in a stride.

    Args:
        history: fewer episodes than a fit needs may do.
        real: what they are of.
        settings: of each fit.
        seed: of weights and batches.
        shown: called with how many of the models are done.

    Raises:
        DatasetError: too few episodes for three points and an error.
    """
    rows, train = list[dict[str, float]](), history.split(TRAIN)
    for number, count in enumerate(curve_counts(history)):
        fitter = Fitter(
            new_model(settings.model, history, marks=real.marks, seed=seed),
            history,
            settings.fit,
            seed=seed,
            train=train[:count],
        )
        rows.append({"episodes": float(count), **fitter.run()})
        shown(number + 1)
    return rows


def episodes_needed(rows: Sequence[Mapping[str, float]], error: float) -> Needed:
    """Returns how many episodes a held-out error needs, by a power law `a n^-b` through a curve.

    Least squares of logarithms. A power law has no floor: where the error has one, more are needed.

    Args: rows: of `learning_curve`, three or more.
    """
    number, found = np.log([[row["episodes"], row["held_out_error"]] for row in rows]).T
    without = [_solved(np.delete(number, i), np.delete(found, i), error) for i in range(len(rows))]
    return Needed(
        error=error,
        episodes=_solved(number, found, error),
        low=min(without),
        high=max(without),
        measured=math.exp(number.max()) / SHARES[TRAIN],
    )


def _solved(number: Array, found: Array, error: float) -> float:
    """Returns the episodes, in all splits, at which a line through logarithms (n,) reaches an error."""
    slope, level = np.polyfit(number, found, 1)
    if slope >= 0:
        return math.inf
    return math.exp(min((math.log(error) - level) / slope, 700.0)) / SHARES[TRAIN]
