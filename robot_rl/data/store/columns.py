"""The columns of the steps that a caller appends, checked, and the lanes that they belong to.

B lanes of one call, L lanes in all, C cameras, A action dim.
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

NONE = -1
"""No episode, no picture, no stamp."""


class Columns:
    """Makes the columns of one store; refuses what does not fit its layout."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        """Raises `DatasetError` if the layout has no state that fits its names."""
        self._folder = folder
        self._layout = layout
        state, names = layout.features.get("state"), layout.meta.state_names
        if state is None or state.shape != (len(names),):
            got = "is missing" if state is None else f"has shape {state.shape}"
            raise DatasetError(
                f"store {folder}: feature 'state' {got}, its {len(names)} names need ({len(names)},)."
            )

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


class Lanes:
    """The state of every lane that was ever written to: its open episode, and the newest pictures."""

    def __init__(self, num_cameras: int) -> None:
        self.episode = np.full(0, NONE, np.int64)
        """(L,), `NONE` outside an episode."""
        self.step = np.zeros(0, np.int64)
        """(L,), the next one of the episode."""
        self.picture = np.full((0, num_cameras), NONE, np.int64)
        """(L, C), the newest one."""
        self.stamp = np.full((0, num_cameras), NONE, np.int64)
        """(L, C), in ns, when the newest one was taken."""

    def grow(self, lane: int) -> None:
        """Makes room for lanes up to this one."""
        more = lane + 1 - len(self.episode)
        if more > 0:
            empty = np.full((more, self.picture.shape[1]), NONE)
            self.episode = np.r_[self.episode, np.full(more, NONE)]
            self.step = np.r_[self.step, np.zeros(more, np.int64)]
            self.picture, self.stamp = np.r_[self.picture, empty], np.r_[self.stamp, empty]

    def state_dict(self) -> dict[str, Any]:
        return {name: values.copy() for name, values in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in vars(self):
            setattr(self, name, np.array(state[name], np.int64))


def source_index(source: str | Array) -> Any:
    """Returns the index of a source in `SOURCES`; given indices (B,) are checked and returned."""
    if not isinstance(source, str):
        if np.max(source) >= len(SOURCES) or np.min(source) < 0:
            raise DatasetError(
                f"store: got sources {source}, allowed: 0 to {len(SOURCES) - 1}, of {SOURCES}."
            )
        return source
    if source not in SOURCES:
        raise DatasetError(f"store: source {source!r} is unknown.{nearest(source, SOURCES)}")
    return SOURCES.index(source)
