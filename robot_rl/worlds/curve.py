"""How the held-out error of a model falls with the episodes it learns from, and how many an error needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import read_json, write_json
from robot_rl.worlds.build import RealEnv
from robot_rl.worlds.config import WorldSettings
from robot_rl.worlds.fit import Fitter, new_model
from robot_rl.worlds.history import CALIBRATION, SHARES, TRAIN, Array, History

_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Of the episodes to learn from, behind each model."""
_MIN_POINTS = 3
"""A line through two has no spread."""
_FAR = 10
"""Times the most episodes measured, beyond which a power law is a guess, and no number is named."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """How many episodes, in all three splits, an error needs by a power law through measured errors."""

    error: float
    """The error that is wanted."""
    episodes: float | None
    """None where the error does not fall with the number of episodes."""
    low: float | None
    """Least of the numbers that follow where one of the measured errors is left out; None: it then never
    falls."""
    high: float | None
    """The largest of these; None where the error then does not fall."""
    measured: float
    """Most episodes behind a measured error, in all three splits."""
    reached: float | None = None
    """Fewest episodes from which on each measured error is as small as is wanted; None: the last is not."""

    def words(self) -> str:
        """Returns it as a sentence without a full stop."""
        wanted, far = f"an error of {self.error:g}", _FAR * self.measured
        if self.reached is not None:
            return f"{wanted} is already reached, by {self.reached:.0f} episodes"
        if self.episodes is None:
            return (
                f"up to {self.measured:.0f} episodes the error does not fall with their number: the curve "
                f"does not tell how many {wanted} needs"
            )
        number = f"some {self.episodes:.0f} episodes"
        if self.episodes > far:
            number = f"more than {far:.0f} episodes, {_FAR} times the most measured: a guess,"
        if self.low is None or self.low > far:
            spread = f"more than {far:.0f}"
        elif self.high is None or self.high > _FAR * max(self.episodes, self.measured):
            spread = f"{self.low:.0f} or more"
        else:
            spread = f"{self.low:.0f} to {self.high:.0f}"
        return (
            f"{wanted} needs {number} by a power law through the curve ({spread} if one of its points is "
            "left out)"
        )


def curve_counts(history: History, settings: WorldSettings) -> list[int]:
    """Returns how many episodes the models of a curve learn from; each count has a window to learn from.

    Raises:
        DatasetError: too few, or too short ones, for three points and a held-out error.
    """
    train, held_out = history.split(TRAIN), history.split(CALIBRATION)
    steps = settings.model.stride * settings.fit.ahead
    is_long = (history.last - history.first) >= steps
    counts = {count for share in _SHARES if (count := max(2, int(len(train) * share))) <= len(train)}
    if len(counts) < _MIN_POINTS or not len(held_out):
        raise DatasetError(
            f"curve: got {len(train)} episodes to learn from and {len(held_out)} held out, of "
            f"{history.num_episodes}; need 6 and 1 or more. Collect more."
        )
    useful = sorted(count for count in counts if is_long[train[:count]].any())
    if len(useful) < _MIN_POINTS or not is_long[held_out].any():
        raise DatasetError(
            f"curve: {int(is_long[train].sum())} of {len(train)} episodes to learn from and "
            f"{int(is_long[held_out].sum())} of {len(held_out)} held out have the {steps} control steps of "
            f"fit.ahead strides; {len(useful)} points have one of these, need {_MIN_POINTS}, and 1 held out. "
            "Collect longer ones, or set fit.ahead to less."
        )
    return useful


def learning_curve(
    history: History,
    real: RealEnv,
    settings: WorldSettings,
    *,
    seed: int,
    shown: Callable[[int], None],
    device: str = "cpu",
) -> list[dict[str, float]]:
    """Returns the held-out error of models of more and more episodes, the same updates each.

    The error is the root mean square after `fit.ahead` strides, in deviations of what changes in a stride.

    Args:
        history: fewer episodes than a fit needs may do.
        real: what they are of.
        settings: of each fit.
        seed: of weights and batches.
        shown: called with how many of the models are done.
        device: of torch, where they learn.

    Raises:
        DatasetError: too few or too short episodes for three points and an error.
    """
    rows, train = list[dict[str, float]](), history.split(TRAIN)
    for number, count in enumerate(curve_counts(history, settings)):
        fitter = Fitter(
            new_model(settings.model, history, marks=real.marks, seed=seed).to(device),
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
    reached: float | None = None
    for row in sorted(rows, key=lambda row: row["episodes"], reverse=True):
        if row["held_out_error"] > error:
            break
        reached = row["episodes"] / SHARES[TRAIN]
    every, low, high = (
        value if math.isfinite(value) else None
        for value in (_solved(number, found, error), min(without), max(without))
    )
    return Needed(
        error=error,
        episodes=every,
        low=low,
        high=high,
        measured=math.exp(number.max()) / SHARES[TRAIN],
        reached=reached,
    )


def kept_curve(path: Path, counts: list[int]) -> list[dict[str, float]] | None:
    """Returns the curve that `keep_curve` wrote; None: none is there, or it is of other episodes.

    Raises:
        DatasetError: the file is damaged.
    """
    if not path.is_file():
        return None
    kept = read_json(path, DatasetError, f"Remove {path}: the curve is measured again.")
    return kept["rows"] if [row["episodes"] for row in kept["rows"]] == counts else None


def keep_curve(path: Path, rows: list[dict[str, float]], needed: Needed) -> None:
    """Writes a curve, and what was read off it."""
    write_json(path, {"rows": rows, "needed": asdict(needed)})


def _solved(number: Array, found: Array, error: float) -> float:
    """Returns the episodes, in all splits, at which a line through logarithms (n,) reaches an error."""
    slope, level = np.polyfit(number, found, 1)
    if slope >= 0:
        return math.inf
    return math.exp(min((math.log(error) - level) / slope, 700.0)) / SHARES[TRAIN]
