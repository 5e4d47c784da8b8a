"""Sizes, names, statistics and instructions of a dataset, which a policy needs when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from robot_rl.data.episode import Feature
from robot_rl.data.episodes import EpisodesMeta


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """Sizes, names and statistics of the episodes that a policy is trained on."""

    meta: EpisodesMeta
    features: Mapping[str, Feature]
    """Observation key -> type and shape, as the policy will see it (pictures after resizing)."""
    stats: Mapping[str, Mapping[str, NDArray[Any]]]
    """Observation key, or `action` -> min, max, mean, std, count, q01, q10, q50, q90, q99.

    Over the training episodes alone. Pictures: per channel in [0, 1], shape (3, 1, 1).
    """
    instructions: tuple[str, ...]
    """Every instruction of the dataset."""

    @property
    def cameras(self) -> tuple[str, ...]:
        """Returns the cameras, without the `.rgb` of their observation keys."""
        return tuple(key.removesuffix(".rgb") for key, f in self.features.items() if f.is_picture)
