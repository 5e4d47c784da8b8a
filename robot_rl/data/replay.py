"""Replay of control steps: per-env lanes, windows of n steps or of chunks.

A lane is a ring of frames. A step is stored as the frame it began in; the frame it led to is the
next one in the lane, so that no observation is stored twice. An episode of L steps therefore
takes L + 1 frames, the last of which (`final_obs`) begins no step. A lane is that of one env of one
actor: no transition links two sources.
B rows of a batch, N lanes, C frames per lane, H chunk length, A action dim, L latent dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.data.episode import SOURCES, Episode
from robot_rl.data.transitions import (
    ChunkBatch,
    Mixture,
    Origin,
    StepBatch,
    TransitionBatch,
    are_whole,
    concatenate,
    discounted,
    draw_rows,
    prefixes_of,
)

if TYPE_CHECKING:
    from robot_rl.data.demos import Episodes

__all__ = ["SOURCES", "Mixture", "ReplayBuffer", "StepBatch", "TransitionBatch", "concatenate"]

Array = NDArray[Any]

Keep = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Returns what a replay keeps of observations (B, ...): of pictures, what a frozen policy makes of them."""
_FINAL, _STEP = 0, 1  # what a frame is: the start of a step, or only the end of an episode


def shapes_of(
    episodes: Episodes, keep: Keep | None = None
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns shape and dtype of what a replay keeps of one observation."""
    first = {key: value[:1] for key, value in episodes.obs.items()}
    kept = first if keep is None else keep(first)
    return {key: (value.shape[1:], value.dtype) for key, value in kept.items()}


class ReplayBuffer:
    """A ring per env; samples steps uniformly, whatever lane they lie in."""

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]],
        action_dim: int,
        *,
        latent_dim: int = 0,
        actors: int = 1,
        imagined: bool = False,
        keep: Keep | None = None,
    ) -> None:
        """Reserves the memory.

        Args:
            capacity: frames over all lanes: control steps, and one more for each episode.
            num_envs: lanes of each actor.
            obs_shapes: shape and dtype of what is kept of one env's observation, by feature.
            action_dim: number of action elements.
            latent_dim: L, if the noise behind each chunk is kept, and where it begins; 0 keeps neither.
            actors: sources that add steps.
            imagined: it keeps the steps of world models, and no others; else all but those.
            keep: what is kept of observations; None keeps the features of `obs_shapes` as they are.
        """
        lanes = num_envs * actors
        if lanes < 1 or capacity < 2 * lanes:
            raise ValueError(
                f"replay: got capacity {capacity} for {lanes} envs, allowed: at least 2 steps "
                "per env. Raise the capacity, or use fewer envs."
            )
        self.num_envs, self._actors, self._imagined = num_envs, actors, imagined
        self._keep = keep
        self.action_dim = action_dim
        self._frames = -(-capacity // lanes) + 1
        rows = lanes * self._frames
        self._obs = {key: np.zeros((rows, *shape), dtype) for key, (shape, dtype) in obs_shapes.items()}
        self._columns: dict[str, Array] = {
            "base_action": np.zeros((rows, action_dim), np.float32),
            "action": np.zeros((rows, action_dim), np.float32),
            "reward": np.zeros(rows, np.float32),
            "terminated": np.zeros(rows, bool),
            "ended": np.zeros(rows, bool),
            "success": np.zeros(rows, bool),
            "kind": np.zeros(rows, np.uint8),
            "source": np.zeros(rows, np.uint8),
            "policy_version": np.zeros(rows, np.int32),
        }
        if latent_dim:
            self._columns["latent"] = np.zeros((rows, latent_dim), np.float32)
            self._columns["decides"] = np.zeros(rows, bool)
        # Frames ever written to each lane: the next step goes there, modulo C.
        self._head = np.zeros(lanes, np.int64)
        self._steps = 0
        self._cut_off: set[int] = set()
        """Frames that ended an episode which neither its task nor its clock ended, among others."""

    @classmethod
    def from_episodes(
        cls,
        episodes: Episodes,
        *,
        base_action: Array,
        final_base_action: Array,
        source: str = "demo",
        keep: Keep | None = None,
    ) -> ReplayBuffer:
        """Returns a buffer of exactly these episodes; see `add_episodes`."""
        frames = len(episodes.reward) + episodes.num_episodes
        shapes = shapes_of(episodes, keep)
        buffer = cls(max(2, frames), 1, shapes, episodes.action.shape[1], keep=keep)
        buffer.add_episodes(
            episodes, base_action=base_action, final_base_action=final_base_action, source=source
        )
        return buffer

    def __len__(self) -> int:
        """Returns the number of control steps that can be sampled."""
        return self._steps

    @property
    def keeps_all(self) -> bool:
        """Whether observations are kept as they are, as a record of the steps has them."""
        return self._keep is None

    def add(self, steps: StepBatch) -> None:
        """Appends one control step per row.

        Where a lane's episode goes on, `obs` is what its last step led to.

        Raises:
            ValueError: steps of another actor, env, observation or action than it has room for.
        """
        lanes = np.arange(len(steps.reward)) if steps.lanes is None else np.asarray(steps.lanes)
        keys = self._obs if self._keep is None else ()
        steps.check(self.num_envs, self.action_dim, keys, actors=self._actors, imagined=self._imagined)
        lanes = lanes + steps.actor * self.num_envs
        if steps.begins:
            self._cut(lanes)
        ended = steps.terminated | steps.truncated
        here = self._row(lanes, self._head[lanes])
        there = self._row(lanes, self._head[lanes] + 1)
        self._forget(there)
        columns = {
            "base_action": steps.base_action,
            "action": steps.action,
            "reward": steps.reward,
            "terminated": steps.terminated,
            "ended": ended,
            "success": False if steps.success is None else steps.success,
            "source": SOURCES.index(steps.source),
            "policy_version": steps.policy_version,
        }
        if "latent" in self._columns:
            columns |= {"latent": steps.latent, "decides": steps.decides}
        if (new := self._is_new(here)).any():
            self._write_observation(here[new], {key: value[new] for key, value in steps.obs.items()})
        self._write(here, columns)
        self._write_observation(there, steps.next_obs)
        self._columns["base_action"][there] = steps.next_base_action
        self._head[lanes] += 1 + ended
        self._forget(self._row(lanes, self._head[lanes]))

    def add_episodes(
        self,
        episodes: Episodes,
        *,
        base_action: Array,
        final_base_action: Array,
        source: str = "demo",
    ) -> None:
        """Appends whole episodes, each to the shortest lane.

        Args:
            episodes: E episodes of T steps in all.
            base_action: (T, A), what the base policy proposes at each observation.
            final_base_action: (E, A), what it proposes at each final observation.
            source: one of `SOURCES`.

        Raises:
            DatasetError: an episode that no lane can hold.
        """
        for episode, (start, end) in enumerate(zip(*episodes.bounds(), strict=True)):
            if end - start > self._frames - 2:
                raise DatasetError(
                    f"replay: episode {episode} has {end - start} steps, a lane holds {self._frames - 2}. "
                    "Raise the capacity of the replay."
                )
            lane, span = int(np.argmin(self._head)), slice(start, end)
            self._cut(np.array([lane]))
            rows = self._row(lane, self._head[lane] + np.arange(end - start + 2))
            self._forget(rows)
            columns = {
                "base_action": base_action[span],
                "action": episodes.action[span],
                "reward": episodes.reward[span],
                "terminated": episodes.terminated[span],
                "ended": episodes.terminated[span] | episodes.truncated[span],
                "success": episodes.success[span],
                "source": SOURCES.index(source),
                "policy_version": 0,
            }
            obs = {key: value[span] for key, value in episodes.obs.items()}
            self._write_observation(rows[:-2], obs)
            self._write(rows[:-2], columns)
            final = {key: value[episode][None] for key, value in episodes.final_obs.items()}
            self._write_observation(rows[-2:-1], final)
            self._columns["base_action"][rows[-2]] = final_base_action[episode]
            self._head[lane] += end - start + 1

    def sample(
        self,
        batch_size: int,
        *,
        n_step: int,
        gamma_step: float,
        rng: np.random.Generator,
        rows: Array | None = None,
    ) -> TransitionBatch:
        """Returns windows of at most `n_step` steps that begin at uniformly drawn steps.

        A window stops where its episode ends, and at the newest step of its lane. `rows` names
        the frames to begin at, all steps if None.

        Raises:
            DatasetError: the buffer is empty.
        """
        lanes, first = self._begin(batch_size, rng, rows)
        window, _, after, reward, bootstrap = self._windows(lanes, first, n_step, gamma_step)
        start, column = window[:, 0], self._columns
        return TransitionBatch(
            obs=self._observation(start),
            base_action=torch.from_numpy(column["base_action"].take(start, axis=0)),
            action=torch.from_numpy(column["action"].take(start, axis=0)),
            reward=torch.from_numpy(reward),
            bootstrap=torch.from_numpy(bootstrap),
            next_obs=self._observation(after),
            next_base_action=torch.from_numpy(column["base_action"].take(after, axis=0)),
            source=torch.from_numpy(column["source"].take(start)),
            origin=self._origin(lanes, first, start),
        )

    def sample_chunks(
        self,
        batch_size: int,
        *,
        horizon: int,
        gamma_step: float,
        rng: np.random.Generator,
        rows: Array | None = None,
        prefixes: Sequence[int] = (),
    ) -> ChunkBatch:
        """Returns chunks of H actions, what they (and `prefixes` of them) earned and led to; see `sample`."""
        lanes, first = self._begin(batch_size, rng, rows)
        windows = partial(self._windows, lanes, first, gamma_step=gamma_step)
        window, inside, after, reward, bootstrap = windows(horizon)
        start, column = window[:, 0], self._columns
        last = inside.sum(axis=1, keepdims=True) - 1
        held = np.take_along_axis(window, np.minimum(np.arange(horizon), last), axis=1)
        latent = torch.from_numpy(column["latent"].take(start, axis=0)) if "latent" in column else None
        return ChunkBatch(
            obs=self._observation(start),
            action=torch.from_numpy(column["action"].take(held, axis=0)),
            valid=torch.from_numpy(inside),
            reward=torch.from_numpy(reward),
            bootstrap=torch.from_numpy(bootstrap),
            next_obs=self._observation(after),
            source=torch.from_numpy(column["source"].take(start)),
            origin=self._origin(lanes, first, start),
            latent=latent,
            prefix=prefixes_of(prefixes, windows, column["ended"].take, self._observation),
            whole=torch.from_numpy(are_whole(inside, column["ended"].take(window))),
        )

    def _begin(self, batch_size: int, rng: np.random.Generator, rows: Array | None) -> tuple[Array, Array]:
        """Returns lane and position of the steps that windows begin at."""
        if not self._steps:
            raise DatasetError("replay: nothing to sample from. Add steps before the learner starts.")
        return self._draw(batch_size, rng) if rows is None else self._place(rng.choice(rows, batch_size))

    def _windows(
        self, lanes: Array, first: Array, length: int, gamma_step: float
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Returns frames (B, n), which are inside (B, n), the frame after (B,), reward and bootstrap (B,)."""
        offsets = np.arange(length)
        rows = self._row(lanes[:, None], first[:, None] + offsets)
        newest = self._head[lanes] - first
        ended = self._columns["ended"].take(rows)
        # Step i is in the window if no step before it ended the episode, and it has been written.
        before = np.zeros_like(ended)
        np.logical_or.accumulate(ended[:, :-1], axis=1, out=before[:, 1:])
        inside = ~before & (offsets < newest[:, None])
        steps = inside.sum(axis=1)
        last = np.take_along_axis(rows, steps[:, None] - 1, axis=1)[:, 0]
        reward, bootstrap = discounted(
            self._columns["reward"].take(rows),
            inside,
            steps,
            self._columns["terminated"].take(last),
            gamma_step,
        )
        return rows, inside, self._row(lanes, first + steps), reward, bootstrap

    def _origin(self, lanes: Array, first: Array, start: Array) -> Origin:
        return Origin(
            pool=torch.zeros(len(lanes), dtype=torch.int64),
            episode=torch.from_numpy(lanes),
            step=torch.from_numpy(first),
            policy_version=torch.from_numpy(self._columns["policy_version"].take(start).astype(np.int64)),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of every frame in use, and the heads of the lanes."""
        used = min(self._frames, int(self._head.max()) + 1)

        def kept(column: Array) -> Array:
            return column.reshape(len(self._head), self._frames, *column.shape[1:])[:, :used].copy()

        return {
            "frames": self._frames,
            "head": self._head.copy(),
            "obs": {key: kept(column) for key, column in self._obs.items()},
            "columns": {name: kept(column) for name, column in self._columns.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict` of a buffer of the same size.

        Raises:
            CheckpointError: a buffer of other size or other observations.
        """
        self._check_size(state)
        self._head[:] = state["head"]
        for mine, saved in ((self._obs, state["obs"]), (self._columns, state["columns"])):
            for key, column in mine.items():
                lanes = column.reshape(len(self._head), self._frames, *column.shape[1:])
                used = saved[key].shape[1]
                lanes[:, :used] = saved[key]
                lanes[:, used:] = 0
        self._steps = int(self._columns["kind"].sum())

    def unrecorded(self) -> dict[str, Any]:
        """Returns what a record of every step lacks: which frames are steps, and observations between them.

        An episode that goes on, or was cut short, ends in an observation that no record has.
        """
        is_step = self._columns["kind"].reshape(len(self._head), -1) == _STEP
        after = np.flatnonzero(np.roll(is_step, 1, axis=1) & ~is_step)
        self._cut_off.intersection_update(after.tolist())
        is_cut = np.isin(after, list(self._cut_off))
        last = after[is_cut | ~self._columns["ended"][self._next(after, -1)]]
        state = {
            "frames": self._frames,
            "head": self._head.copy(),
            "is_step": np.packbits(is_step),
            "after": after,
            "base_action": self._columns["base_action"][after],
            "last": last,
            "obs": {key: column[last] for key, column in self._obs.items()},
        }
        if "latent" in self._columns:
            latent, rows = self._columns["latent"], np.flatnonzero(is_step)
            as_bits = latent[rows].view(np.uint32)  # a chunk's steps have the same
            begins = np.flatnonzero(np.r_[True, (as_bits[1:] != as_bits[:-1]).any(axis=1)][: len(rows)])
            state |= {"latent": latent[rows[begins]], "latent_begins": begins}
            state["decides"] = np.packbits(self._columns["decides"])
        return state

    def load_recorded(
        self, state: Mapping[str, Any], newest_first: Callable[[int], Iterable[Episode]]
    ) -> None:
        """Restores a buffer of the same size from `unrecorded`, and the steps from their record.

        Args:
            state: what the record lacks.
            newest_first: returns the recorded episodes of a lane, the newest first.

        Raises:
            CheckpointError: a buffer of other size or other observations, or a record with fewer steps.
        """
        self._check_size(state)
        columns = self._columns
        self._head[:] = state["head"]
        is_step = np.unpackbits(state["is_step"], count=len(columns["kind"])).astype(bool)
        columns["kind"][:], self._steps = is_step, int(is_step.sum())
        columns["ended"][:] = is_step & ~is_step[self._next(np.arange(len(is_step)), 1)]
        newest = self._row(np.arange(len(self._head)), self._head - 1)
        columns["ended"][newest] = False  # where it is a step, its episode goes on
        for lane, head in enumerate(self._head):
            rows = self._row(lane, head + np.arange(1 - self._frames, 0))
            rows = rows[is_step[rows]]
            episodes = iter(newest_first(lane))
            while len(rows):
                if (episode := next(episodes, None)) is None:
                    raise CheckpointError(f"replay: {len(rows)} steps of lane {lane} are not in the record.")
                rows = self._take_back(rows, episode)
        columns["base_action"][state["after"]] = state["base_action"]
        for key, column in self._obs.items():
            column[state["last"]] = state["obs"][key]
        self._cut_off = set(state["last"].tolist())
        if "latent" in columns:
            rows = np.flatnonzero(is_step)
            repeats = np.diff(state["latent_begins"], append=len(rows))
            columns["latent"][rows] = np.repeat(state["latent"], repeats, axis=0)
            columns["decides"][:] = np.unpackbits(state["decides"], count=len(is_step))

    def _take_back(self, rows: Array, episode: Episode) -> Array:
        """Writes the newest steps of an episode into the last of the rows; returns the rows that are left."""
        count = min(len(rows), len(episode))
        left, here, newest = rows[:-count], rows[-count:], slice(len(episode) - count, None)
        for key, column in self._obs.items():
            column[here] = episode.obs[key][newest]
            if episode.is_complete:
                column[self._next(here[-1:], 1)] = episode.final_obs[key]
        names = ("base_action", "action", "reward", "terminated", "success", "source", "policy_version")
        for name in names:
            self._columns[name][here] = getattr(episode, name)[newest]
        return left

    def _check_size(self, state: Mapping[str, Any]) -> None:
        if int(state["frames"]) != self._frames or len(state["head"]) != len(self._head):
            raise CheckpointError(
                f"replay: the checkpoint holds {len(state['head'])} lanes of {state['frames']} frames, "
                f"this run has {len(self._head)} of {self._frames}. "
                "Resume with the same num_envs and capacity."
            )
        if set(state["obs"]) != set(self._obs):
            raise CheckpointError(
                f"replay: the checkpoint holds observations {sorted(state['obs'])}, "
                f"this run has {sorted(self._obs)}. Resume with the same task and cameras."
            )

    def _cut(self, lanes: Array) -> None:
        """Ends episodes that were cut short: what their last step led to stays, and nothing follows it."""
        last = self._row(lanes, self._head[lanes] - 1)
        unfinished = (self._head[lanes] > 0) & (self._columns["kind"][last] == _STEP)
        lanes, last = lanes[unfinished], last[unfinished]
        self._columns["ended"][last] = True
        self._cut_off.update(self._row(lanes, self._head[lanes]).tolist())
        self._head[lanes] += 1
        self._forget(self._row(lanes, self._head[lanes]))

    def rows_of(self, source: str) -> Array:
        """Returns the frames that are steps of one of `SOURCES`, for `sample`."""
        columns = self._columns
        return np.flatnonzero((columns["kind"] == _STEP) & (columns["source"] == SOURCES.index(source)))

    def decisions(self, n_exec: int = 1) -> Array:
        """Returns the frames at which chunks begin, for `sample_chunks`; needs `latent_dim`.

        Chunks that began within the newest `n_exec` - 1 frames of their lane are left out: their
        outcome is not known yet.
        """
        columns = self._columns
        begin = (columns["kind"] == _STEP) & columns["decides"]
        lanes, ago = np.arange(len(self._head))[:, None], np.arange(1, n_exec)
        begin[self._row(lanes, self._head[:, None] - ago)] = False
        return np.flatnonzero(begin)

    def _row(self, lanes: Array | int, position: Array) -> Array:
        return lanes * self._frames + position % self._frames

    def _next(self, rows: Array, by: int) -> Array:
        """Returns the frames that lie so many after these in their lanes."""
        return self._row(rows // self._frames, rows % self._frames + by)

    def _forget(self, rows: Array) -> None:
        """Frees frames: the steps in them can no longer be sampled."""
        self._steps -= int(self._columns["kind"][rows].sum())
        self._columns["kind"][rows] = _FINAL

    def _write(self, rows: Array, columns: Mapping[str, Any]) -> None:
        """Stores steps in freed frames."""
        for name, value in columns.items():
            self._columns[name][rows] = value
        self._columns["kind"][rows] = _STEP
        self._steps += len(rows)

    def _write_observation(self, rows: Array, obs: Mapping[str, Array]) -> None:
        """Stores the observations of frames: of those where steps begin, and of what the last one led to."""
        kept = obs if self._keep is None else self._keep(obs)
        for key, column in self._obs.items():
            column[rows] = kept[key]

    def _is_new(self, rows: Array) -> Array:
        """Returns which frames lack their observation: encoded once, as what the last step led to."""
        if self._keep is None:
            return np.ones(len(rows), bool)
        before = self._next(rows, -1)
        return (self._columns["kind"][before] != _STEP) | self._columns["ended"][before]

    def _draw(self, batch_size: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Returns lane and position of uniformly drawn steps: draws frames, keeps those that are steps."""
        stored = np.minimum(self._head, self._frames - 1)
        upper = np.cumsum(stored)

        def place(drawn: Array) -> tuple[Array, Array]:
            lanes = np.searchsorted(upper, drawn, side="right") if len(upper) > 1 else np.zeros_like(drawn)
            return lanes, self._head[lanes] - (upper[lanes] - drawn)

        def is_step(drawn: Array) -> Array:
            return self._columns["kind"].take(self._row(*place(drawn))) == _STEP

        return place(draw_rows(is_step, int(upper[-1]), self._steps, batch_size, rng))

    def _place(self, rows: Array) -> tuple[Array, Array]:
        """Returns lane and position of frames."""
        lanes, at = np.divmod(rows, self._frames)
        head = self._head[lanes] - 1
        return lanes, head - (head - at) % self._frames

    def _observation(self, rows: Array) -> dict[str, Tensor]:
        return {key: torch.from_numpy(column.take(rows, axis=0)) for key, column in self._obs.items()}
