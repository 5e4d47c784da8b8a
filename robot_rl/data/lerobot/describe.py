"""Statistics of a dataset in the terms of LeRobot, for policies. T rows, n pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_QUANTILES = (1, 10, 50, 90, 99)


def describe(values: Array) -> dict[str, Array]:
    """Returns min, max, mean, std, count and quantiles of each element, (T, ...) -> (...)."""
    wide = values.astype(np.float64)
    stats = {"min": wide.min(0), "max": wide.max(0), "mean": wide.mean(0), "std": wide.std(0)}
    found = np.percentile(wide, _QUANTILES, axis=0)
    stats |= {f"q{percent:02d}": row for percent, row in zip(_QUANTILES, found, strict=True)}
    return stats | {"count": np.asarray([len(values)])}


def describe_pictures(pictures: Array) -> dict[str, Array]:
    """Returns the same per channel in [0, 1], each (3, 1, 1), of (n, h, w, 3) uint8."""
    every = max(1, pictures.shape[1] // 96)
    pixels = pictures[:, ::every, ::every].reshape(-1, 3) / 255.0
    stats = {name: value.reshape(3, 1, 1) for name, value in describe(pixels).items() if name != "count"}
    return stats | {"count": np.asarray([len(pictures)])}


def joined_stats(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Array]]:
    """Returns the statistics of all episodes together; quantiles cannot be joined and are left out."""
    joined: dict[str, dict[str, Array]] = {}
    for name in parts[0] if parts else ():
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
    return joined
