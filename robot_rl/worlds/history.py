"""Real experience as a world model reads it: states in episodes, and windows of control steps.

N rows, S state elements, A action dim, k control steps of a stride.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.data.episodes import Episodes, EpisodesMeta

Array = NDArray[Any]

TRAIN, CALIBRATION, AUDIT = "train", "calibration", "audit"
SHARES = {TRAIN: 0.7, CALIBRATION: 0.15, AUDIT: 0.15}
"""Of the episodes: the first are learned from, the second choose weights and scales, the third only judge."""
_SPLIT_SEED = 20_261


@dataclass(frozen=True, kw_only=True)
class History:
    """Complete episodes of L control steps each, one after the other, with the L + 1 states of each."""

    meta: EpisodesMeta
    state: Array
    """(N, S) float32: of each episode its observations, then what its last step led to."""
    action: Array
    """(N, A) float32: executed from that state; zero in the last row of an episode."""
    success: Array
    """(N,) bool: whether the task was solved in that state; False in the first one of an episode: unknown."""
    episode: Array
    """(N,) int64, ascending from 0."""
    first: Array
    """(E,) row of the first state of each episode."""
    last: Array
    """(E,) row of the last state."""
    ended: Array
    """(E,) bool: the task ended the episode; else the clock did."""
    start: Array | None = None
    """(E,) text: the class of a start bank in which each episode began, empty where that was not recorded;
    None: of no episode it was."""
    pictures: dict[str, Array] = field(default_factory=lambda: dict[str, Array]())
    """Camera -> (P, h, w, 3) uint8, where they are learned from; a model on the disk has none."""
    pictured: Array | None = None
    """(P,) rows of which there are pictures, ascending; None: all."""

    @classmethod
    def of(cls, episodes: Episodes, *, cameras: Sequence[str] = ()) -> History:
        """Returns the history of episodes in memory, from their `state` and the pictures of some cameras.

        Raises:
            DatasetError: a camera is not there.
        """
        begin, end = episodes.bounds()
        number, steps = np.arange(len(begin)), np.arange(len(episodes.action))
        rows = steps + episodes.episode_index  # one state more for each episode before
        last = end + number
        size, (_, state_dim) = len(steps) + len(begin), episodes.obs["state"].shape
        state = np.zeros((size, state_dim), np.float32)
        state[rows], state[last] = episodes.obs["state"], episodes.final_obs["state"]
        action = np.zeros((size, episodes.action.shape[1]), np.float32)
        action[rows] = episodes.action
        pictures = dict[str, Array]()
        for camera in cameras:
            shown, final = (_pictures_of(part, camera) for part in (episodes.obs, episodes.final_obs))
            pictures[camera] = np.empty((size, *shown.shape[1:]), np.uint8)
            pictures[camera][rows], pictures[camera][last] = shown, final
        success = np.zeros(size, bool)
        success[rows + 1] = episodes.success.astype(bool)
        episode = np.zeros(size, np.int64)
        episode[rows], episode[last] = episodes.episode_index, number
        return cls(
            meta=episodes.meta,
            state=state,
            action=action,
            success=success,
            episode=episode,
            first=begin + number,
            last=last,
            ended=episodes.terminated[end - 1].astype(bool),
            start=episodes.start,
            pictures=pictures,
        )

    @classmethod
    def joined(cls, parts: Sequence[History]) -> History:
        """Returns the histories one after the other.

        Raises:
            DatasetError: they are of different tasks, robots or states.
        """
        meta = parts[0].meta
        for part in parts[1:]:
            if part.meta != meta:
                raise DatasetError(
                    f"histories: got {part.meta.task} on {part.meta.robot} behind {meta.task} on "
                    f"{meta.robot}, allowed: one task, robot and list of state elements"
                )
        sizes = np.cumsum([0, *(len(part.state) for part in parts[:-1])])
        counts = np.cumsum([0, *(part.num_episodes for part in parts[:-1])])
        return cls(
            meta=meta,
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in ("state", "action", "success", "ended")
            },
            episode=np.concatenate([part.episode + count for part, count in zip(parts, counts, strict=True)]),
            first=np.concatenate([part.first + size for part, size in zip(parts, sizes, strict=True)]),
            last=np.concatenate([part.last + size for part, size in zip(parts, sizes, strict=True)]),
            start=None
            if all(part.start is None for part in parts)
            else np.concatenate([part.begun_in() for part in parts]),
            pictures={
                camera: np.concatenate([part.pictures[camera] for part in parts])
                for camera in parts[0].pictures
            },
            pictured=None
            if all(part.pictured is None for part in parts)
            else np.concatenate([part._rows_shown() + size for part, size in zip(parts, sizes, strict=True)]),
        )

    @property
    def num_episodes(self) -> int:
        return len(self.first)

    @property
    def steps(self) -> int:
        """Control steps, over all episodes."""
        return len(self.state) - self.num_episodes

    def solved(self) -> Array:
        """Returns (E,) bool: which episodes were solved at any step."""
        return np.logical_or.reduceat(self.success, self.first)

    def begun_in(self) -> Array:
        """Returns (E,) text: `start`, empty where it was not recorded."""
        return np.full(self.num_episodes, "") if self.start is None else self.start

    def split(self, name: str) -> Array:
        """Returns the episodes of a split; see `split_of`."""
        return split_of(self.num_episodes, name)

    def shown(self, camera: str, rows: Array) -> Array:
        """Returns a camera's pictures (n, h, w, 3) in these rows (n,), of which there are pictures."""
        pictures = self.pictures[camera]
        return pictures[rows if self.pictured is None else np.searchsorted(self.pictured, rows)]

    def with_pictures_of(self, episodes: Array) -> History:
        """Returns the same with the pictures of these episodes alone, of those that have any."""
        rows = self._rows_shown()
        kept = np.isin(self.episode[rows], episodes)
        pictures = {camera: shown[kept] for camera, shown in self.pictures.items()}
        return replace(self, pictures=pictures, pictured=rows[kept])

    def _rows_shown(self) -> Array:
        return np.arange(len(self.state)) if self.pictured is None else self.pictured


def split_of(episodes: int, name: str) -> Array:
    """Returns which of that many episodes are of a split: each draws its own, whatever others there are."""
    at = EpisodeRng(np.arange(episodes), np.full(episodes, _SPLIT_SEED)).uniform()[:, 0]
    low = 0.0
    for other, share in SHARES.items():
        if other == name:
            return np.flatnonzero((at >= low) & (at < low + share))
        low += share
    raise KeyError(name)


def _pictures_of(obs: Mapping[str, Array], camera: str) -> Array:
    """Returns a camera's pictures."""
    key = f"{camera}.rgb"
    if key not in obs:
        there = ", ".join(name.removesuffix(".rgb") for name in obs if name.endswith(".rgb")) or "none"
        raise DatasetError(f"images.cameras: got {camera!r}, the episodes have pictures of: {there}")
    return obs[key]


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a model predicts from, at B moments: the state, the stride before it, and actions to come."""

    state: Array
    """(B, S)"""
    past_state: Array
    """(B, S): k control steps before; the state itself where `has_past` is False."""
    past_action: Array
    """(B, k, A): executed in between; zero where `has_past` is False."""
    has_past: Array
    """(B,) bool: whether the episode is as old as a stride."""


class Windows:
    """Windows of a history's episodes; none crosses an episode."""

    def __init__(self, history: History, episodes: Array, *, stride: int, strides: int = 1) -> None:
        """Finds the windows.

        Args:
            history: the episodes.
            episodes: numbers of those that count.
            stride: k, control steps that a model predicts at once.
            strides: how many follow on each other in a window, all inside of the episode.

        Raises:
            DatasetError: no episode is long enough.
        """
        self.history, self.stride, self.strides = history, stride, strides
        ahead = stride * strides
        rows = [np.arange(history.first[e], history.last[e] - ahead + 1) for e in episodes]
        self.rows = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        if not len(self.rows):
            raise DatasetError(
                f"world model: no episode of {len(episodes)} has {ahead} control steps, which a window "
                "needs. Give longer episodes, or a smaller stride."
            )

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, rows: Array) -> Window:
        """Returns the windows that begin in these rows (B,) of the history."""
        return window_at(self.history, rows, self.stride)

    def actions(self, rows: Array, stride: int = 0) -> Array:
        """Returns the actions (B, k, A) of the stride of that number."""
        steps = rows[:, None] + np.arange(self.stride * stride, self.stride * (stride + 1))
        return self.history.action[steps]

    def states(self, rows: Array, steps: Array | int) -> Array:
        """Returns the states (B, S) that many control steps (B,) later."""
        return self.history.state[rows + steps]


def stride_before(history: History, rows: Array, stride: int) -> tuple[Array, Array]:
    """Returns the rows (B,) a stride before, where the episodes are as old, else the rows; and where."""
    has_past = rows - stride >= history.first[history.episode[rows]]
    return np.where(has_past, rows - stride, rows), has_past


def window_at(history: History, rows: Array, stride: int) -> Window:
    """Returns what a model knows in these rows (B,) of a history."""
    before, has_past = stride_before(history, rows, stride)
    steps = before[:, None] + np.arange(stride)
    within = np.minimum(steps, len(history.action) - 1)
    return Window(
        state=history.state[rows],
        past_state=history.state[before],
        past_action=history.action[within] * has_past[:, None, None],
        has_past=has_past,
    )
