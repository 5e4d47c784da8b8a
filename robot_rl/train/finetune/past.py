"""What is known when a chunk begins, apart from pictures: the state, its changes, the last actions.

B chunks, S state dim, A action dim, L lags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.names import EXECUTED_ACTION
from robot_rl.core.policy import DemoBatch
from robot_rl.data.lerobot.reader import Dataset

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known when each of B chunks begins."""

    state: Array
    """(B, S)"""
    state_change: Array
    """(B, L S), over each lag; 0 before the first step."""
    last_action: Array
    """(B, A); before the first one the present joints, or what `Past` was given."""
    action_change: Array
    """(B, L A), of the last action, over each lag."""

    def inputs(self, *, last_action: bool) -> Array:
        """Returns all of it side by side, in the order of `names_of`."""
        parts = [self.state, self.state_change]
        parts += [self.last_action, self.action_change] if last_action else []
        return np.concatenate(parts, axis=1)


class Past:
    """Looks up what is known when chunks of a dataset begin."""

    def __init__(self, dataset: Dataset, *, lags: Sequence[int], first_action: Array | None = None) -> None:
        """Prepares to look up.

        Args:
            dataset: what to read.
            lags: control steps of the changes.
            first_action: (A,), what stands for the last action before the first one where actions are no
                joints; None: 0.
        """
        self._dataset, self._lags = dataset, tuple(lags)
        self._first_action = first_action
        self.state = dataset.columns["state"]
        # An acting policy knows what it executed, not what an expert would have done.
        self.action = dataset.columns.get(EXECUTED_ACTION, dataset.columns["action"])
        names = dataset.meta.action_names
        self.same_names = dataset.meta.state_names[: len(names)] == names
        """The state begins with the joints of the action."""

    def width(self, *, last_action: bool) -> int:
        """Returns how many elements `Known.inputs` has."""
        seen = self.state.shape[1] + (self.action.shape[1] if last_action else 0)
        return seen * (1 + len(self._lags))

    def steps(self, episodes: Sequence[int]) -> Array:
        """Returns the rows of all steps of these episodes."""
        starts, ends = self._dataset.episode_starts, self._dataset.episode_ends
        return np.concatenate([np.arange(starts[episode], ends[episode]) for episode in episodes])

    def of(self, batch: DemoBatch) -> Known:
        """Returns what is known at the first steps of these chunks."""
        episode, step = (np.asarray(batch.source[name]) for name in ("episode", "step"))
        return self.at(self._dataset.episode_starts[episode] + step)

    def at(self, rows: Array) -> Known:
        """Returns what is known at these rows (B,) of the dataset."""
        first = self._dataset.episode_starts[np.searchsorted(self._dataset.episode_ends, rows, side="right")]
        state, num_actions = self.state[rows], self.action.shape[1]
        start = state[:, :num_actions]
        if not self.same_names:
            start = np.zeros(num_actions) if self._first_action is None else self._first_action
        is_first = (rows == first)[:, None]
        last = np.where(is_first, start, self.action[np.maximum(rows - 1, first)]).astype(np.float32)
        changes = [state - self.state[np.maximum(rows - lag, first)] for lag in self._lags]
        turns = [last - self.action[np.maximum(rows - 1 - lag, first)] for lag in self._lags]
        return Known(
            state=state,
            state_change=np.concatenate([state[:, :0], *changes], axis=1),
            last_action=last,
            action_change=np.concatenate(
                [last[:, :0], *(np.where(is_first, 0, turn) for turn in turns)], axis=1
            ),
        )


def names_of(
    state: Sequence[str], action: Sequence[str], *, lags: Sequence[int], last_action: bool
) -> tuple[str, ...]:
    """Returns the names of `Known.inputs`."""

    def with_changes(names: Sequence[str]) -> list[str]:
        return [*names, *(f"{name}.change_{lag}" for lag in lags for name in names)]

    behind = with_changes([f"{name}.last_action" for name in action]) if last_action else []
    return (*with_changes(state), *behind)
