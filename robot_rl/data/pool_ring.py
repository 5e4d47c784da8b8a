"""The numbers of a pool: episodes one after the other in a ring of rows, the oldest first to go.

An episode of n steps takes n + 1 rows, contiguous: its steps and where it ended. It never wraps
around; the rows that are too few for it at the end of the ring stay empty.
R rows of the ring, A action dim.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Episode, Feature
from robot_rl.data.pool_memory import Memory
from robot_rl.data.transitions import discounted

Array = NDArray[Any]


@dataclass(frozen=True)
class Place:
    """Where an episode lies."""

    number: int
    """Its number in the pool, for ever the same."""
    start: int
    """Row of its first step."""
    steps: int
    """Steps that can be drawn; one more row follows them."""
    length: int
    """Steps its source had when it was read."""

    @property
    def stop(self) -> int:
        return self.start + self.steps + 1


class EpisodeRing:
    """Flat arrays of R rows, and which episode lies where."""

    def __init__(
        self,
        rows: int,
        features: Mapping[str, Feature],
        action_dim: int,
        memory: Memory,
        on_free: Callable[[Place], None],
    ) -> None:
        """Args: on_free: called with every place that is given up."""
        self.rows, self.used, self.steps, self.head = rows, 0, 0, 0
        self.places: OrderedDict[int, Place] = OrderedDict()
        """By number, in the order they were placed."""
        self._features = {key: feature for key, feature in features.items() if not feature.is_picture}
        self._needed = tuple(features)
        self._on_free = on_free
        self.columns = self._reserve(action_dim, memory)
        self.start = np.full(64, -1, np.int64)
        """Row of each number's first step; -1 when it is not here."""

    def usable_steps(self, episode: Episode) -> int:
        """Returns how many steps have a known outcome: all but a last one without its next observation."""
        length = len(episode)
        seen = length and all(key in episode.final_obs for key in self._needed)
        return length if seen or (length and episode.terminated[-1]) else max(0, length - 1)

    def make_room(self, rows: int) -> int:
        """Frees the oldest episodes and returns where `rows` rows are free.

        Raises:
            DatasetError: the ring is too small for them.
        """
        if rows > self.rows:
            raise DatasetError(
                f"pool: an episode takes {rows} rows, the pool has {self.rows}. Raise the capacity."
            )
        start = self.head
        if start + rows > self.rows:
            while self.places and self._oldest.start >= start:
                self.free(self._oldest)
            start = 0
        while self.places and self._oldest.start < start + rows and start < self._oldest.stop:
            self.free(self._oldest)
        self.head = start + rows
        return start

    def write(self, number: int, episode: Episode, base_action: Array, start: int) -> Place:
        """Copies an episode into free rows.

        Args:
            number: of the episode in the pool.
            episode: at least one of its steps is usable.
            base_action: (T, A), or (T + 1, A) with what the base proposes at the end.
            start: what `make_room` returned.
        """
        steps = self.usable_steps(episode)
        place = Place(number, start, steps, len(episode))
        span, end = slice(start, start + steps), start + steps
        final = episode.final_obs if steps == len(episode) else {}
        for key in self._features:
            column, values = self.columns[f"obs.{key}"], episode.obs[key]
            column[span] = values[:steps]
            column[end] = final[key] if key in final else values[len(episode) - 1]
        for name in ("action", "reward", "terminated", "source", "policy_version"):
            self.columns[name][span] = getattr(episode, name)[:steps]
        self.columns["base_action"][span] = base_action[:steps]
        self.columns["base_action"][end] = base_action[min(steps, len(base_action) - 1)]
        self.columns["number"][start : end + 1] = number
        self.columns["left"][start : end + 1] = np.arange(steps, -1, -1)
        self.places[number] = place
        self.start = enlarged(self.start, number, -1)
        self.start[number] = start
        self.steps += steps
        self.used = max(self.used, place.stop)
        return place

    def free(self, place: Place) -> None:
        """Gives up an episode's rows; if it was the last one placed, the head goes back."""
        if next(reversed(self.places)) == place.number:
            self.head = place.start
        del self.places[place.number]
        self.start[place.number] = -1
        self.columns["left"][place.start : place.stop] = 0
        self.steps -= place.steps
        self._on_free(place)

    def windows(self, rows: Array, size: int, gamma_step: float) -> tuple[Array, Array, Array, Array, Array]:
        """Returns what follows rows (B,) that are steps, up to the end of the episode.

        These are: rows (B, size), of which the last step's repeats; which of them count, (B, size);
        the row after them, (B,); their reward and bootstrap, (B,), see `discounted`.
        """
        column, offsets = self.columns, np.arange(size)
        length = np.minimum(column["left"].take(rows), size)
        inside = offsets < length[:, None]
        last = rows + length - 1
        window = np.minimum(rows[:, None] + offsets, last[:, None])
        terminated = column["terminated"].take(last)
        reward, bootstrap = discounted(column["reward"].take(window), inside, length, terminated, gamma_step)
        return window, inside, last + 1, reward, bootstrap

    @property
    def _oldest(self) -> Place:
        return next(iter(self.places.values()))

    def _reserve(self, action_dim: int, memory: Memory) -> dict[str, Array]:
        """Returns the arrays, narrow ones first: what every draw reads stays in memory."""
        columns: dict[str, tuple[Any, tuple[int, ...]]] = {
            "terminated": (bool, ()),
            "source": (np.uint8, ()),
            "left": (np.int32, ()),
            "number": (np.int32, ()),
            "reward": (np.float32, ()),
            "policy_version": (np.int32, ()),
            "action": (np.float32, (action_dim,)),
            "base_action": (np.float32, (action_dim,)),
        }
        columns |= {
            f"obs.{key}": (np.dtype(feature.dtype), feature.shape) for key, feature in self._features.items()
        }
        order = sorted(columns.items(), key=lambda item: np.dtype(item[1][0]).itemsize * np.prod(item[1][1]))
        return {
            name: memory.array((self.rows, *shape), dtype, f"column {name!r}")
            for name, (dtype, shape) in order
        }


def enlarged(table: Array, number: int, fill: Any) -> Array:
    """Returns the table, twice as long or more if it has no entry `number`."""
    if number < len(table):
        return table
    more = max(len(table), number + 1 - len(table))
    return np.concatenate([table, np.full(more, fill, table.dtype)])


def beginning(episode: Episode, length: int) -> Episode:
    """Returns the first `length` steps of an episode that has grown since."""
    if len(episode) == length:
        return episode
    names = ("action", "base_action", "reward", "terminated", "truncated", "success", "source")
    columns = {name: getattr(episode, name)[:length] for name in (*names, "policy_version", "stamp_ns")}
    return replace(episode, final_obs={}, **columns)
