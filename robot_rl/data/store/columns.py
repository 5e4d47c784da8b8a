"""Turns what a caller hands over into columns of steps, or says what is wrong with it.

B lanes of one call, A action dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from robot_rl.core.errors import DatasetError, nearest
from robot_rl.data.episode import SOURCES, Array
from robot_rl.data.store.layout import Layout


class Columns:
    """The columns of one store."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        """Raises `DatasetError` where the layout has no state that fits its names."""
        self._folder = folder
        self._layout = layout
        self._check_features()

    def of_vectors(
        self, lanes: NDArray[np.int64], obs: Mapping[str, Array], action: Array, base_action: Array | None
    ) -> dict[str, Any]:
        """Returns the columns of the observation and the actions, checked."""
        count = len(lanes)
        if not count or lanes.min() < 0 or (count > 1 and len(np.unique(lanes)) != count):
            raise DatasetError(
                f"store {self._folder}: got lanes {lanes.tolist()}, allowed: different numbers from 0 on."
            )
        self.check_shapes("obs", obs, count)
        dim = len(self._layout.meta.action_names)
        base = action if base_action is None else base_action
        for name, value in (("action", action), ("base_action", base)):
            if value.shape != (count, dim):
                raise DatasetError(
                    f"store {self._folder}: {name} has shape {value.shape[1:]}, "
                    f"its {dim} names need ({dim},)."
                )
        numbers: dict[str, Any] = {f"obs.{key}": value for key, value in obs.items()}
        return numbers | {"action": action, "base_action": base}

    def of_scalars(self, lanes: NDArray[np.int64], **given: ArrayLike) -> dict[str, Any]:
        """Returns the columns of one number a step, checked."""
        numbers: dict[str, Any] = {}
        for name, value in given.items():
            numbers[name] = column = np.asarray(value, self._layout.columns[name].dtype)
            if column.shape not in ((), lanes.shape):
                raise DatasetError(
                    f"store {self._folder}: {name} has shape {column.shape}, "
                    f"allowed: one number, or {lanes.shape}."
                )
        return numbers

    def check_shapes(self, where: str, obs: Mapping[str, Array], count: int) -> None:
        """Verifies an observation (B, ...); pictures may be missing."""
        features = self._layout.features
        for key, feature in features.items():
            if key not in obs:
                if feature.is_picture:
                    continue
                raise DatasetError(
                    f"store {self._folder}: {where} has no {key!r}; it has {sorted(obs)}. "
                    "Every step needs every feature but pictures."
                )
            value = obs[key]
            if value.shape != (count, *feature.shape) or (feature.is_picture and value.dtype != np.uint8):
                raise DatasetError(
                    f"store {self._folder}: {where} {key!r} is {value.dtype} {value.shape[1:]}, "
                    f"the store holds {feature.dtype} {feature.shape}."
                )
        if len(obs) > len(features) or not obs.keys() <= features.keys():
            unknown = sorted(obs.keys() - features.keys())[0]
            raise DatasetError(
                f"store {self._folder}: {where} has {unknown!r}, which the store does not hold."
                f"{nearest(unknown, features)} The features are fixed when a store is made."
            )

    def _check_features(self) -> None:
        state = self._layout.features.get("state")
        names = self._layout.meta.state_names
        if state is None or state.shape != (len(names),):
            got = "is missing" if state is None else f"has shape {state.shape}"
            raise DatasetError(
                f"store {self._folder}: feature 'state' {got}, its {len(names)} names need ({len(names)},)."
            )


def source_index(source: str | Array) -> Any:
    """Returns what is written for a source: an index into `SOURCES`, or (B,) of them."""
    if not isinstance(source, str):
        if np.max(source) >= len(SOURCES) or np.min(source) < 0:
            raise DatasetError(
                f"store: got sources {source}, allowed: 0 to {len(SOURCES) - 1}, of {SOURCES}."
            )
        return source
    if source not in SOURCES:
        raise DatasetError(f"store: source {source!r} is unknown.{nearest(source, SOURCES)}")
    return SOURCES.index(source)
