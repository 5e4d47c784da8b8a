"""Episodes at another rate: rows are picked, never interpolated.

Each instant of the new clock gets the newest row at or before it, as for an arm that holds its last command.
That fits actions that are positions. Actions that say how far to move in one control step would move the arm
farther, or less far; the caller must refuse them.
T control steps of an episode, N of the resampled one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.data.episode import Episode, EpisodeSource, Feature, Frames
from robot_rl.data.episodes import EpisodesMeta

_SLACK = 1e-6
"""Part of a row: rounding must not miss a row at exactly this instant."""


class Resampled:
    """The episodes of a source at another rate; an `EpisodeSource`."""

    def __init__(self, source: EpisodeSource, control_hz: float) -> None:
        self.source, self._control_hz = source, control_hz

    @property
    def meta(self) -> EpisodesMeta:
        return dataclasses.replace(self.source.meta, control_hz=self._control_hz)

    @property
    def features(self) -> Mapping[str, Feature]:
        return self.source.features

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> NDArray[np.int64]:
        share = self._control_hz / self.source.meta.control_hz
        return np.ceil(self.source.lengths() * share - _SLACK).astype(np.int64)

    def read(self, episode: int) -> Episode:
        return resampled(self.source.read(episode), self._control_hz)

    def refresh(self) -> None:
        self.source.refresh()


def rows_at(steps: int, from_hz: float, to_hz: float) -> NDArray[np.int64]:
    """Returns (N,): the newest of `steps` rows at each instant of the new rate, during the episode."""
    count = int(np.ceil(steps * to_hz / from_hz - _SLACK))
    rows = np.floor(np.arange(count) * from_hz / to_hz + _SLACK).astype(np.int64)
    return np.minimum(rows, steps - 1)  # the slack may reach after the last one


def resampled(episode: Episode, control_hz: float) -> Episode:
    """Returns the episode at another rate.

    A new step stands for the row that it shows and the skipped rows after it: their rewards are summed, and
    their ends and successes kept. If several new steps show one row, the last of them gets these.
    """
    rows = rows_at(len(episode), episode.meta.control_hz, control_hz)
    # The last new step that shows this row, or a row before it.
    owner = np.searchsorted(rows, np.arange(len(episode)), side="right") - 1

    def any_of(values: NDArray[np.bool_]) -> NDArray[np.bool_]:
        found = np.zeros(len(rows), bool)
        np.logical_or.at(found, owner, values)
        return found

    reward = np.zeros(len(rows), episode.reward.dtype)
    np.add.at(reward, owner, episode.reward)
    values = {name: getattr(episode, name)[rows] for name in _PICKED}
    values |= {name: any_of(getattr(episode, name)) for name in ("terminated", "truncated", "success")}
    return dataclasses.replace(
        episode,
        meta=dataclasses.replace(episode.meta, control_hz=control_hz),
        obs={key: _picked(value, rows) for key, value in episode.obs.items()},
        picture_stamp_ns={key: stamps[rows] for key, stamps in episode.picture_stamp_ns.items()},
        reward=reward,
        **values,
    )


_PICKED = ("action", "base_action", "source", "policy_version", "stamp_ns")


def _picked(values: Any, rows: NDArray[np.int64]) -> Any:
    return values[rows] if isinstance(values, np.ndarray) else _PickedFrames(values, rows)


class _PickedFrames:
    """Some pictures of an episode, decoded when they are indexed."""

    def __init__(self, frames: Frames, rows: NDArray[np.int64]) -> None:
        self._frames, self._rows = frames, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, step: Any) -> Any:
        wanted = self._rows[step]
        return self._frames[int(wanted) if wanted.ndim == 0 else wanted]
