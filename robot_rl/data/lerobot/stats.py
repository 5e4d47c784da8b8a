"""Statistics as LeRobot keeps them: per episode, and aggregated over episodes.

Those of numbers are exact; LeRobot reads quantiles from a histogram of 5000 bins. Those of pictures are per
channel in [0, 1], over the frames and pixels that LeRobot samples, from a histogram of the 256 values, and
exact too. Quantiles of several episodes are averaged, weighted by their counts, as in LeRobot.
T control steps, n elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Stats = dict[str, dict[str, Array]]
"""Feature -> min, max, mean, std, count, q01, q10, q50, q90, q99."""

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def of_columns(columns: Mapping[str, Array]) -> Stats:
    """Returns the statistics of columns (T,) or (T, n); values that are not finite are left out."""
    steps = len(next(iter(columns.values())))
    wide = np.concatenate([v.reshape(steps, -1).astype(np.float64) for v in columns.values()], axis=1)
    table = _of_matrix(wide)
    stats: Stats = {}
    start = 0
    for name, values in columns.items():
        end = start + values.reshape(steps, -1).shape[1]
        stats[name] = {stat: value[start:end] for stat, value in table.items()}
        stats[name]["count"] = np.array([steps])
        start = end
    return stats


def _of_matrix(values: Array) -> dict[str, Array]:
    if not np.isfinite(values).all():
        return _of_gaps(values)
    ordered = np.sort(values, axis=0)
    # Around a middle value: squares of large stamps would lose their small spread.
    middle = ordered[len(ordered) // 2]
    centred = values - middle
    stats = {"min": ordered[0], "max": ordered[-1], "mean": middle + centred.mean(0), "std": centred.std(0)}
    for name, share in QUANTILES.items():
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        stats[name] = ordered[low] + (position - low) * (ordered[high] - ordered[low])
    return stats


def _of_gaps(values: Array) -> dict[str, Array]:
    """Returns the statistics of columns with gaps; a column of gaps alone counts as zeros."""
    columns = [column[np.isfinite(column)] for column in values.T]
    parts = [_of_matrix((column if len(column) else np.zeros(1))[:, None]) for column in columns]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def sampled_steps(steps: int) -> Array:
    """Returns the frames of an episode that LeRobot takes: all of 100, some of more."""
    count = max(min(steps, 100), min(int(steps**0.75), 10_000))
    return np.unique(np.round(np.linspace(0, steps - 1, count)).astype(int))


class PictureStats:
    """Gathers the statistics of pictures, one at a time."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, 256), np.int64)
        self._pictures = 0

    def add(self, picture: Array) -> None:
        """Adds a picture (h, w, 3) uint8; from 300 pixels on only every second pixel, or fewer."""
        longer = max(picture.shape[:2])
        stride = longer // 150 if longer >= 300 else 1
        pixels = picture[::stride, ::stride].reshape(-1, 3)
        for channel, counts in enumerate(self._counts):
            counts += np.bincount(pixels[:, channel], minlength=256)
        self._pictures += 1

    def result(self) -> dict[str, Array]:
        """Returns the statistics, each (3, 1, 1)."""
        value = np.arange(256) / 255
        total = int(self._counts[0].sum())
        mean = self._counts @ value / total
        spread = (self._counts * (value - mean[:, None]) ** 2).sum(1) / total
        up_to = self._counts.cumsum(1)

        def ranked(rank: int) -> Array:
            return value[[int(np.searchsorted(row, rank, side="right")) for row in up_to]]

        stats = {"min": ranked(0), "max": ranked(total - 1), "mean": mean, "std": np.sqrt(spread)}
        for name, share in QUANTILES.items():
            position = share * (total - 1)
            low, high = ranked(int(position)), ranked(min(int(position) + 1, total - 1))
            stats[name] = low + (position - int(position)) * (high - low)
        shaped = {name: values.reshape(3, 1, 1) for name, values in stats.items()}
        return {**shaped, "count": np.array([self._pictures])}


def aggregate(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> Stats:
    """Returns the statistics of all parts together; what some part has no statistics of is left out."""
    joined: Stats = {}
    for name in [name for name in (parts[0] if parts else ()) if all(name in part for part in parts)]:
        each = [{k: np.asarray(v, np.float64) for k, v in part[name].items()} for part in parts]
        count = np.asarray([float(e["count"].reshape(-1)[0]) for e in each])
        share = (count / count.sum()).reshape(-1, *[1] * each[0]["mean"].ndim)
        mean = (share * np.stack([e["mean"] for e in each])).sum(0)
        spread = np.stack([e["std"] ** 2 + (e["mean"] - mean) ** 2 for e in each])
        joined[name] = {
            "min": np.min([e["min"] for e in each], axis=0),
            "max": np.max([e["max"] for e in each], axis=0),
            "mean": mean,
            "std": np.sqrt((share * spread).sum(0)),
            "count": np.asarray([int(count.sum())]),
        }
        quantiles = [key for key in each[0] if key not in joined[name] and all(key in e for e in each)]
        for quantile in quantiles:
            joined[name][quantile] = (share * np.stack([e[quantile] for e in each])).sum(0)
    return joined


def to_json(stats: Stats) -> dict[str, Any]:
    """Returns the statistics as lists."""
    return {name: {key: np.asarray(v).tolist() for key, v in of.items()} for name, of in stats.items()}


def from_json(content: Mapping[str, Mapping[str, Any]]) -> Stats:
    """Returns the statistics of `to_json`."""
    return {
        name: {key: np.atleast_1d(np.asarray(v)) for key, v in of.items()} for name, of in content.items()
    }
