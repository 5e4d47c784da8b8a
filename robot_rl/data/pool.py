"""Replay over episodes: windows from stores and datasets, however many writers are still at it.

If it is unknown where an episode's last step led to (it is being recorded, or was cut short), that
step is left out and its observation ends the episode: nothing bootstraps from what was not seen.
Numbers are copied into flat arrays; pictures stay compressed in their source and pass through a
cache. B rows of a batch, R rows of the ring, T steps, H chunk length, A action dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.data.episode import SOURCES, Episode, EpisodeSource
from robot_rl.data.fit import common_features
from robot_rl.data.pool_draw import Priorities, Prioritised, Strata, Stratified, Uniform
from robot_rl.data.pool_memory import Memory, PoolBudget
from robot_rl.data.pool_pictures import FrameCache, PictureReader
from robot_rl.data.pool_ring import EpisodeRing, Place, beginning, enlarged
from robot_rl.data.transitions import (
    ChunkBatch,
    Origin,
    TransitionBatch,
    are_whole,
    draw_rows,
    prefixes_of,
)

__all__ = ["EpisodePool", "PoolBudget", "Prioritised", "Relabel", "Stratified", "Uniform"]

Array = NDArray[Any]

Relabel = Callable[[int, Episode], Array]
"""Number in the pool and episode -> (T + 1, A): what the present base proposes, at the end too."""


class EpisodePool:
    """Draws windows from the episodes of several sources; the oldest go when it is full."""

    def __init__(
        self,
        sources: Sequence[EpisodeSource],
        *,
        capacity: int,
        budget: PoolBudget | None = None,
        draw: Uniform | Prioritised | Stratified | None = None,
        keys: Collection[str] | None = None,
        relabel: Relabel | None = None,
    ) -> None:
        """Reserves the memory and reads what there is.

        Args:
            sources: of one robot, with equal names and features; `refresh` looks for more in them.
            capacity: R: control steps, and one more for each episode.
            budget: bytes of memory and disk; None is 4 GiB of memory.
            draw: how steps are drawn; None is uniformly.
            keys: observations to keep; None keeps all.
            relabel: replaces what the base policy proposed. Without it the recorded proposals stand,
                and at the end of an episode, where none was recorded, the last one does.

        Raises:
            DatasetError: the sources do not fit one another, or not into the budget.
        """
        if not sources or capacity < 2:
            raise ValueError(
                f"pool: got {len(sources)} sources and capacity {capacity}, allowed: 1, 2 or more"
            )
        self._sources = list(sources)
        self.meta = sources[0].meta
        self.features = common_features(sources, keys)
        self._memory = Memory(budget or PoolBudget())
        self._draw = draw or Uniform()
        self._relabel = relabel
        self._priorities = Priorities(capacity, self._draw) if isinstance(self._draw, Prioritised) else None
        if self._priorities is not None:
            self._memory.take(self._priorities.nbytes, "the tree of priorities")
        width = len(self.meta.action_names)
        self._ring = EpisodeRing(capacity, self.features, width, self._memory, self._freed)
        shapes = {key: feature.shape for key, feature in self.features.items() if feature.is_picture}
        self._frames = FrameCache(shapes, capacity, self._memory, self._decode)
        self._number: dict[tuple[int, int], int] = {}
        self._who: list[tuple[int, int]] = []
        self._success = np.zeros(64, bool)
        self._is_complete = np.zeros(64, bool)
        self._instruction = np.zeros(64, np.int32)
        self._instructions: list[str] = []
        self._seen: list[Array] = [np.zeros(0, np.int64) for _ in sources]
        self._reader = PictureReader(shapes, self._read)
        self._strata: Strata | None = None
        self.refresh()

    def __len__(self) -> int:
        """Returns the number of control steps that can be sampled."""
        return self._ring.steps

    @property
    def num_episodes(self) -> int:
        return len(self._ring.places)

    def locate(self, number: int) -> tuple[int, int]:
        """Returns source and episode there, of a number that `Origin.episode` holds."""
        return self._who[number]

    def refresh(self) -> int:
        """Takes in what writers flushed since; returns how many steps can be sampled now."""
        changed: list[tuple[int, int, int]] = []
        for index, source in enumerate(self._sources):
            source.refresh()
            lengths = source.lengths().astype(np.int64)
            seen = np.zeros_like(lengths)
            seen[: len(self._seen[index])] = self._seen[index]
            changed += [
                (index, int(episode), int(lengths[episode])) for episode in np.flatnonzero(lengths > seen)
            ]
            self._seen[index] = lengths.copy()
        if changed:
            self._reader.close()
            self._take_in(changed)
        return len(self)

    def sample(
        self, batch_size: int, *, n_step: int, gamma_step: float, rng: np.random.Generator
    ) -> TransitionBatch:
        """Returns windows of at most `n_step` steps, as `ReplayBuffer.sample` does.

        Raises:
            DatasetError: the pool is empty.
        """
        rows, weight = self._drawn(batch_size, rng)
        _, _, after, reward, bootstrap = self._ring.windows(rows, n_step, gamma_step)
        obs, next_obs = self._observations(rows, after)
        column = self._ring.columns
        return TransitionBatch(
            obs=obs,
            base_action=torch.from_numpy(column["base_action"].take(rows, axis=0)),
            action=torch.from_numpy(column["action"].take(rows, axis=0)),
            reward=torch.from_numpy(reward),
            bootstrap=torch.from_numpy(bootstrap),
            next_obs=next_obs,
            next_base_action=torch.from_numpy(column["base_action"].take(after, axis=0)),
            source=torch.from_numpy(column["source"].take(rows)),
            origin=self._origin(rows),
            weight=None if weight is None else torch.from_numpy(weight),
        )

    def sample_chunks(
        self,
        batch_size: int,
        *,
        horizon: int,
        gamma_step: float,
        rng: np.random.Generator,
        prefixes: Sequence[int] = (),
    ) -> ChunkBatch:
        """Returns chunks of H actions, what they earned and where they led to (Li et al. 2025, Q-chunking).

        Raises:
            DatasetError: the pool is empty.
        """
        rows, weight = self._drawn(batch_size, rng)
        windows = partial(self._ring.windows, rows, gamma_step=gamma_step)
        window, inside, after, reward, bootstrap = windows(horizon)
        obs, next_obs = self._observations(rows, after)
        return ChunkBatch(
            obs=obs,
            action=torch.from_numpy(self._ring.columns["action"].take(window, axis=0)),
            valid=torch.from_numpy(inside),
            reward=torch.from_numpy(reward),
            bootstrap=torch.from_numpy(bootstrap),
            next_obs=next_obs,
            source=torch.from_numpy(self._ring.columns["source"].take(rows)),
            origin=self._origin(rows),
            weight=None if weight is None else torch.from_numpy(weight),
            prefix=prefixes_of(prefixes, windows, self._ended, lambda at: self._observations(at, at[:0])[0]),
            whole=torch.from_numpy(are_whole(inside, self._ended(window))),
        )

    def update_priorities(self, origin: Origin, priority: Tensor) -> None:
        """Sets the priorities of sampled steps; those that are no longer here are passed over.

        Args:
            origin: of the sampled batch.
            priority: (B,), 0 or more: absolute TD errors.

        Raises:
            DatasetError: a priority is negative or no number.
        """
        if self._priorities is None:
            raise ValueError("pool: made without priorities. Make it with draw=Prioritised().")
        start = self._ring.start[origin.episode.numpy()]
        here = start >= 0
        rows = (start + origin.step.numpy())[here]
        self._priorities.update(rows, priority.detach().cpu().numpy()[here])

    def metrics(self) -> dict[str, float]:
        """Returns fill, bytes, and how the cache of pictures does."""
        return {
            "steps": float(len(self)),
            "episodes": float(self.num_episodes),
            "ram_bytes": float(self._memory.ram_bytes),
            "disk_bytes": float(self._memory.disk_bytes),
            **self._frames.metrics(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns which episodes lie where, and priorities; the steps are read again from the sources."""
        ring = self._ring
        places = [(place.number, place.start, place.length) for place in ring.places.values()]
        state: dict[str, Any] = {
            "rows": ring.rows,
            "head": ring.head,
            "used": ring.used,
            "places": np.array(places, np.int64).reshape(-1, 3),
            "who": np.array(self._who, np.int64).reshape(-1, 2),
            "seen": [seen.copy() for seen in self._seen],
            "priorities": None,
        }
        if self._priorities is not None:
            state["priorities"] = self._priorities.state_dict(ring.used)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the pool: the same generator then draws the same batches.

        Raises:
            CheckpointError: another capacity or way to draw, or a source lost what the pool had of it.
        """
        ring, sources = self._ring, self._sources
        got = (int(state["rows"]), len(state["seen"]), state["priorities"] is not None)
        if got != (ring.rows, len(sources), self._priorities is not None):
            raise CheckpointError(
                f"pool: the checkpoint has {got[0]} rows, {got[1]} sources and priorities: {got[2]}; "
                f"this run has {ring.rows} rows, {len(sources)} sources. Resume with the pool that was saved."
            )
        for place in list(ring.places.values()):
            ring.free(place)
        self._reader.close()
        self._who = [(int(source), int(episode)) for source, episode in state["who"]]
        self._number = {who: number for number, who in enumerate(self._who)}
        self._seen = [np.asarray(seen, np.int64) for seen in state["seen"]]
        lengths = [source.lengths() for source in sources]
        for number, start, length in state["places"].tolist():
            source, index = self._who[number]
            there = int(lengths[source][index]) if index < len(lengths[source]) else 0
            if there < length:
                raise CheckpointError(
                    f"pool: episode {index} of source {source} had {length} steps when the checkpoint was "
                    f"made, and has {there} now. Bring that data back to resume."
                )
            self._write(number, beginning(sources[source].read(index), length), start)
        ring.head, ring.used = int(state["head"]), int(state["used"])
        if self._priorities is not None:
            self._priorities.load_state_dict(state["priorities"])

    # Drawing.

    def _drawn(self, batch_size: int, rng: np.random.Generator) -> tuple[Array, Array | None]:
        """Returns rows (B,) that are steps, and their importance weights."""
        ring = self._ring
        if not ring.steps:
            raise DatasetError("pool: nothing to sample from. Give it a source with steps, or refresh it.")
        if self._priorities is not None:
            return self._priorities.draw(batch_size, ring.steps, rng)
        if isinstance(self._draw, Stratified):
            self._strata = self._strata or self._stratify(self._draw)
            return self._strata.draw(batch_size, rng), None
        left = ring.columns["left"]
        return draw_rows(lambda rows: left.take(rows) > 0, ring.used, ring.steps, batch_size, rng), None

    def _ended(self, rows: Array) -> Array:
        """Returns which steps are the last of an episode whose end was seen."""
        column = self._ring.columns
        return (column["left"].take(rows) == 1) & self._is_complete.take(column["number"].take(rows))

    def _observations(self, rows: Array, after: Array) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the observations of two sets of rows."""
        first: dict[str, Tensor] = {}
        then: dict[str, Tensor] = {}
        for key, feature in self.features.items():
            if feature.is_picture:
                both = torch.from_numpy(self._frames.take(key, np.concatenate([rows, after])))
                first[key], then[key] = both[: len(rows)], both[len(rows) :]
            else:
                values = self._ring.columns[f"obs.{key}"]
                first[key] = torch.from_numpy(values.take(rows, axis=0))
                then[key] = torch.from_numpy(values.take(after, axis=0))
        return first, then

    def _origin(self, rows: Array) -> Origin:
        number = self._ring.columns["number"].take(rows).astype(np.int64)
        return Origin(
            pool=torch.zeros(len(rows), dtype=torch.int64),
            episode=torch.from_numpy(number),
            step=torch.from_numpy(rows - self._ring.start.take(number)),
            policy_version=torch.from_numpy(self._ring.columns["policy_version"].take(rows).astype(np.int64)),
        )

    def _stratify(self, draw: Stratified) -> Strata:
        """Returns the index of strata for the rows as they are."""
        rows = slice(0, self._ring.used)
        number = self._ring.columns["number"][rows]
        if draw.by == "source":
            code, names = self._ring.columns["source"][rows].astype(np.int32), dict(enumerate(SOURCES))
        elif draw.by == "success":
            code, names = self._success[number].astype(np.int32), {0: "failure", 1: "success"}
        elif draw.by == "instruction":
            code, names = self._instruction[number], dict(enumerate(self._instructions))
        else:
            code = self._ring.columns["policy_version"][rows].copy()
            names = {int(version): str(version) for version in np.unique(code)}
        code[self._ring.columns["left"][rows] == 0] = -1
        return Strata(code, names, draw)

    # Taking in and giving up.

    def _take_in(self, changed: list[tuple[int, int, int]]) -> None:
        """Reads the episodes that are new or grew; if not all fit, the last of them.

        Whole episodes come first, those that may still grow last: when they have grown, the ring's
        head goes back over them, and they are written again where they were.
        """
        first, rows = len(changed), 0
        while first and (not rows or rows + changed[first - 1][2] < self._ring.rows):
            first, rows = first - 1, rows + changed[first - 1][2] + 1
        kept = [self._number_of(source, episode) for source, episode, _ in changed[first:]]
        wanted = set(kept)
        before: dict[int, tuple[Place, Array | None]] = {}
        for number in [number for number in reversed(self._ring.places) if number in wanted]:
            place = self._ring.places[number]
            leaves = self._priorities.leaves(place.start, place.stop - 1) if self._priorities else None
            before[number] = (place, leaves)
            self._ring.free(place)
        growing: list[tuple[int, Episode]] = []
        for number in kept:
            episode = self._read(number)
            if episode.is_complete:
                self._place(number, episode, before.get(number))
            else:
                growing.append((number, episode))
        for number, episode in growing:
            self._place(number, episode, before.get(number))

    def _place(self, number: int, episode: Episode, before: tuple[Place, Array | None] | None) -> None:
        """Writes an episode at the head of the ring; the oldest make room."""
        rows = self._ring.usable_steps(episode) + 1
        if rows == 1:
            return
        place = self._write(number, episode, self._ring.make_room(rows))
        if self._priorities is not None and before is not None and before[1] is not None:
            self._priorities.restore(place.start, before[1])

    def _write(self, number: int, episode: Episode, start: int) -> Place:
        """Writes an episode at `start`, with what the present base makes of it."""
        episode = episode.as_executed()
        base = episode.base_action if self._relabel is None else self._relabel(number, episode)
        place = self._ring.write(number, episode, base, start)
        self._success = enlarged(self._success, number, False)
        self._success[number] = bool(episode.success.any())
        self._is_complete = enlarged(self._is_complete, number, False)
        self._is_complete[number] = place.steps == place.length and episode.is_complete
        if episode.meta.instruction not in self._instructions:
            self._instructions.append(episode.meta.instruction)
        self._instruction = enlarged(self._instruction, number, 0)
        self._instruction[number] = self._instructions.index(episode.meta.instruction)
        self._strata = None
        if self._priorities is not None:
            self._priorities.begin(place.start, place.stop - 1)
        return place

    def _freed(self, place: Place) -> None:
        """Forgets what was known of rows that are given up."""
        self._strata = None
        self._frames.forget(place.start, place.stop)
        if self._priorities is not None:
            self._priorities.forget(place.start, place.stop)

    def _number_of(self, source: int, episode: int) -> int:
        """Returns an episode's number in the pool; a new one for a new episode."""
        number = self._number.setdefault((source, episode), len(self._who))
        if number == len(self._who):
            self._who.append((source, episode))
        return number

    def _read(self, number: int) -> Episode:
        source, index = self._who[number]
        return self._sources[source].read(index)

    def _decode(self, key: str, rows: Array) -> Array:
        """Returns pictures (n, h, w, 3) of rows (n,), decoded episode by episode."""
        pictures = np.empty((len(rows), *self.features[key].shape), np.uint8)
        numbers = self._ring.columns["number"].take(rows)
        for number in np.unique(numbers).tolist():
            which, place = np.flatnonzero(numbers == number), self._ring.places[number]
            pictures[which] = self._reader.read(number, key, rows[which] - place.start, place.length)
        return pictures
