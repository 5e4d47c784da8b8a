"""Appends to a store from the control thread, in less than a millisecond.

Many lanes (robots, envs) write to one store; each has one open episode at a time. B lanes of one call,
A action dim.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.refusal import refusing
from robot_rl.data.episode import Array, Feature, Starts
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.store.columns import NONE, Columns, Lanes, source_index
from robot_rl.data.store.flusher import Flusher, JournalFile, Picture, WritingError, block_capacity
from robot_rl.data.store.journal import Problem
from robot_rl.data.store.layout import Layout, PictureFormat, check_picture_options
from robot_rl.data.store.lock import WriterLock
from robot_rl.data.store.recovery import cut_off, lengths_below, recover
from robot_rl.data.store.seal import Sealed, SealOptions, seal_episodes

logger = logging.getLogger(__name__)

_WAITING = "Steps that are not on the disk wait in memory."


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Counts of a writer so far."""

    steps: int
    flushed_steps: int
    """On the disk."""
    pictures: int
    repeated_pictures: int
    """Pictures of steps whose camera had no new one: they refer to that of an earlier step."""
    dropped_pictures: int
    """Not kept because too many waited to be compressed; their steps refer to the picture before."""
    waits: int
    """Calls of `append` that waited for the disk."""
    waited_s: float
    written_bytes: int
    thread_cpu_s: float
    """CPU time of the writer thread."""


class StoreWriter:
    """The one writer of a store.

    Numbers are never dropped. `queue_steps` may wait for the disk (by default an hour of a robot); beyond
    that `append` waits and counts it. Pictures may be dropped: when `queue_bytes` of pixels wait to be
    compressed, a picture is dropped and counted, and its step refers to the picture before, with its stamp
    (`when_behind="wait"`, for simulators: `append` waits). The first picture of an episode is always kept.
    """

    @refusing(DatasetError)
    def __init__(
        self,
        folder: str | Path,
        meta: EpisodesMeta,
        features: Mapping[str, Feature],
        *,
        flush_s: float = 1.0,
        queue_steps: int = 1 << 19,
        queue_bytes: int = 128 << 20,
        when_behind: Literal["drop", "wait"] = "drop",
        device: str = "",
        picture: PictureFormat = "jpeg",
        quality: int = 90,
        segment_bytes: int = 256 << 20,
        starts: Starts | None = None,
    ) -> None:
        """Opens a store to append to, or makes it; cleans up what a crash left.

        Args:
            meta: what the episodes are of; `instruction` is the default of every episode.
            features: type and shape of every element of the observation.
            flush_s: a crash loses at most so much.
            queue_steps: steps that may wait for the disk.
            queue_bytes: pixels that may wait to be compressed.
            when_behind: what happens to a picture beyond that.
            device: default name of the device that acts.
            picture: jpeg, or png (without loss, 30 times slower).
            quality: of jpeg, 1 to 100.
            segment_bytes: size at which the next file of the journal begins.
            starts: says what the observation `reset_row` means, if there is one. A store that does not say
                it of its first episodes says it of none.

        Raises:
            DatasetError: another writer has it, or it is of another robot, task, layout or bank of starts.
        """
        for name, value in (("flush_s", flush_s), ("queue_steps", queue_steps), ("queue_bytes", queue_bytes)):
            if value <= 0:
                raise ValueError(f"store: got {name} {value}, allowed: more than 0")
        if when_behind not in ("drop", "wait"):
            raise ValueError(f"store: got when_behind {when_behind!r}, allowed: drop, wait")
        check_picture_options(picture, quality)
        self.folder = Path(folder)
        self.layout = Layout(meta=meta, features=dict(features), starts=starts)
        self._columns = Columns(self.folder, self.layout)
        self._lock = WriterLock(self.folder)
        try:
            found = recover(self.folder, self.layout)
            self.recovered: tuple[Problem, ...] = found.lost
            """What an earlier crash left unfinished; it was cut off now."""
            self.layout = replace(self.layout, starts=found.starts)
            self._file = JournalFile(
                self.folder, self.layout, first=found.next_segment, segment_bytes=segment_bytes
            )
        except BaseException:
            self._lock.release()
            raise
        self._device = device
        self._queue_steps, self._queue_bytes, self._drops = queue_steps, queue_bytes, when_behind == "drop"
        self._capacity = min(block_capacity(self.layout), queue_steps)
        self._flusher = Flusher(
            self._file,
            self.layout,
            flush_s=flush_s,
            capacity=self._capacity,
            hurry_steps=max(1, queue_steps // 4),
            picture=picture,
            quality=quality,
        )
        self._next_episode, self._next_picture = found.next_episode, found.next_picture
        self._lanes = Lanes(len(self.layout.cameras))
        self._pictures = self._repeated = self._dropped = self._waits = 0
        self._waited_s = 0.0
        self._is_closed = False
        os.register_at_fork(after_in_child=_forgetting(weakref.ref(self)))

    # --- recording ---------------------------------------------------------------------------------

    @refusing(DatasetError)
    def begin_episode(
        self, lane: int = 0, *, instruction: str | None = None, device: str | None = None
    ) -> int:
        """Begins an episode and returns its number; without it `append` begins one with the defaults."""
        self._check_open()
        with self._flusher.changed:
            self._lanes.grow(lane)
            if self._lanes.episode[lane] != NONE:
                raise DatasetError(
                    f"store {self.folder}: lane {lane} is inside episode {self._lanes.episode[lane]}. "
                    "End it first with end_episode."
                )
            return self._begin(lane, instruction, device)

    def append(
        self,
        *,
        obs: Mapping[str, ArrayLike],
        action: ArrayLike,
        base_action: ArrayLike | None = None,
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
        success: bool = False,
        source: str = "real",
        policy_version: int = 0,
        stamp_ns: int | None = None,
        picture_stamp_ns: Mapping[str, int] | None = None,
        final_obs: Mapping[str, ArrayLike] | None = None,
        lane: int = 0,
    ) -> None:
        """Appends one step of one lane; see `append_lanes`."""

        def one_row(values: Mapping[str, ArrayLike]) -> dict[str, Array]:
            return {key: np.asarray(value)[None] for key, value in values.items()}

        self.append_lanes(
            np.array([lane]),
            obs=one_row(obs),
            action=np.asarray(action)[None],
            base_action=None if base_action is None else np.asarray(base_action)[None],
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            success=success,
            source=source,
            policy_version=policy_version,
            stamp_ns=stamp_ns,
            picture_stamp_ns=picture_stamp_ns,
            final_obs=None if final_obs is None else one_row(final_obs),
        )

    @refusing(DatasetError)
    def append_lanes(
        self,
        lanes: Array,
        *,
        obs: Mapping[str, Array],
        action: Array,
        base_action: Array | None = None,
        reward: ArrayLike = 0.0,
        terminated: ArrayLike = False,
        truncated: ArrayLike = False,
        success: ArrayLike = False,
        source: str | Array = "sim",
        policy_version: ArrayLike = 0,
        stamp_ns: ArrayLike | None = None,
        picture_stamp_ns: Mapping[str, ArrayLike] | None = None,
        final_obs: Mapping[str, Array] | None = None,
    ) -> None:
        """Appends one step of each of B different lanes.

        Args:
            lanes: (B,) numbers from 0 on.
            obs: (B, ...) of every feature, at the beginning of the step. A picture may be missing, or
                repeat its stamp: then its camera had no new one, and the step refers to the last.
            action: (B, A), the executed actions.
            base_action: (B, A), the actions that the base policy proposed; None: there is no base policy.
            reward: (B,) or one; so are `terminated`, `truncated`, `success` and `policy_version`.
            terminated: the task ended.
            truncated: a time limit, or a person, ended the episode.
            success: the task's predicate after the step.
            source: one of `SOURCES`, or (B,) indices into it.
            policy_version: number of learner updates of the weights that acted.
            stamp_ns: (B,) or one: monotonic time of the observation; None: now.
            picture_stamp_ns: camera -> time of its picture, (B,) or one; `stamp_ns` if missing.
            final_obs: (B, ...), read where the step ended the episode; None: unknown.

        Raises:
            DatasetError: a wrong key or shape, or the disk refuses the steps (see `flush`).
        """
        self._check_open()
        lanes = np.asarray(lanes, np.int64)
        numbers = self._columns.of_vectors(lanes, obs, action, base_action)
        numbers |= self._columns.of_scalars(
            lanes,
            reward=reward,
            success=success,
            policy_version=policy_version,
            source=source_index(source),
            terminated=terminated,
            truncated=truncated,
            stamp_ns=time.monotonic_ns() if stamp_ns is None else stamp_ns,
        )
        stamps = np.broadcast_to(numbers["stamp_ns"], lanes.shape)
        is_over = numbers["terminated"] | numbers["truncated"]
        ended = np.flatnonzero(np.broadcast_to(is_over, lanes.shape)) if is_over.any() else ()
        final = None if final_obs is None or not len(ended) else dict(final_obs)
        if final is not None:
            self._columns.check_shapes("final_obs", final, len(lanes))
        with self._flusher.changed:
            if self._flusher.waiting_steps >= self._queue_steps:
                self._wait(lambda: self._flusher.waiting_steps < self._queue_steps)
            self._lanes.grow(int(lanes.max()))
            self._check_first_pictures(lanes, obs)
            for lane in lanes[self._lanes.episode[lanes] == NONE]:
                self._begin(int(lane), None, None)
            if self.layout.cameras:
                self._take_pictures(lanes, obs, stamps, picture_stamp_ns or {})
                for camera, key in enumerate(self.layout.cameras):
                    numbers[f"picture.{key}"] = self._lanes.picture[lanes, camera]
            self._put_rows(lanes, numbers)
            for row in ended:
                self._end(
                    int(lanes[row]),
                    final and {key: value[row] for key, value in final.items()},
                    int(stamps[row]),
                )

    @refusing(DatasetError)
    def end_episode(self, lane: int = 0, *, final_obs: Mapping[str, ArrayLike] | None = None) -> None:
        """Ends an episode that was cut short: neither terminated nor truncated."""
        self._check_open()
        final = None if final_obs is None else {key: np.asarray(value) for key, value in final_obs.items()}
        if final is not None:
            self._columns.check_shapes("final_obs", {key: value[None] for key, value in final.items()}, 1)
        with self._flusher.changed:
            if lane < len(self._lanes.episode) and self._lanes.episode[lane] != NONE:
                self._end(lane, final, int(self._lanes.stamp[lane].max(initial=0)))

    # --- the disk ----------------------------------------------------------------------------------

    @refusing(DatasetError, kept=_WAITING)
    def flush(self) -> int:
        """Waits until all steps are on the disk; returns how many this writer has written there.

        After a failure it tries again, so nothing is lost if there is room now.

        Raises:
            DatasetError: the disk refuses the steps; they wait in memory.
        """
        return self._flushed(self._flusher.flush)

    def _flushed(self, flush: Callable[[], int]) -> int:
        self._check_not_closed()
        with self._failures():
            return flush()

    @refusing(DatasetError, kept=_WAITING)
    def mark(self) -> dict[str, Any]:
        """Flushes everything and returns the state of this writer for `rewind`."""
        segment = self._flushed(self._flusher.rotate)
        return {
            "segment": segment,
            "lengths": lengths_below(self.folder, segment),
            "next_episode": self._next_episode,
            "next_picture": self._next_picture,
            "lanes": self._lanes.state_dict(),
            "open": self._file.mark(),
        }

    @refusing(DatasetError, kept="Nothing before the mark is lost.")
    def rewind(self, state: Mapping[str, Any]) -> None:
        """Takes this newly opened writer back to the `mark` that an earlier one of the same store made.

        Raises:
            DatasetError: what was recorded after the mark was sealed meanwhile, or what was recorded before
                it has changed.
        """
        segment, next_episode = int(state["segment"]), int(state["next_episode"])
        unfinished = [(int(episode), int(lane), str(words)) for episode, lane, words in state["open"]]
        cut_off(
            self.folder,
            segment=segment,
            lengths=state.get("lengths"),
            next_episode=next_episode,
            unfinished={episode for episode, _, _ in unfinished},
        )
        self._file.rewind(segment, unfinished)
        self._next_episode, self._next_picture = next_episode, int(state["next_picture"])
        self._lanes.load_state_dict(state["lanes"])

    @refusing(DatasetError, kept=_WAITING)
    def seal(self, options: SealOptions | None = None) -> Sealed:
        """Moves finished episodes into the dataset of this folder; other threads may go on appending."""
        with self._flusher.changed:
            before, unfinished = self._next_episode, self.open_episodes()
        below = self._flushed(self._flusher.rotate)
        return seal_episodes(
            self.folder,
            options or SealOptions(),
            goes_on=lambda episode: episode >= before or episode in unfinished,
            below=below,
        )

    @refusing(DatasetError)
    def close(self) -> None:
        """Flushes, and lets another writer in; episodes that are open stay unfinished.

        Raises:
            DatasetError: the disk refuses the last steps, which are lost.
        """
        if self._is_closed:
            return
        try:
            self.flush()
        except DatasetError as error:
            lost = self._flusher.waiting_steps
            raise DatasetError(
                f"{error} This writer was closed instead: {lost} steps are lost."
            ) from error.__cause__
        finally:
            self._is_closed = True
            self._flusher.close()
            try:
                self._file.close()
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def stats(self) -> StoreStats:
        return StoreStats(
            steps=self._flusher.appended_steps,
            flushed_steps=self._flusher.flushed_steps,
            pictures=self._pictures,
            repeated_pictures=self._repeated,
            dropped_pictures=self._dropped,
            waits=self._waits,
            waited_s=self._waited_s,
            written_bytes=self._file.written_bytes,
            thread_cpu_s=self._flusher.busy_s,
        )

    def open_episodes(self) -> set[int]:
        """Returns the open episodes of all lanes."""
        return {int(episode) for episode in self._lanes.episode if episode != NONE}

    # --- helpers, `changed` held ---------------------------------------------------------------------

    def _begin(self, lane: int, instruction: str | None, device: str | None) -> int:
        episode = self._next_episode
        self._next_episode += 1
        words = {
            "instruction": self.layout.meta.instruction if instruction is None else instruction,
            "device": self._device if device is None else device,
        }
        self._flusher.block.begun.append((episode, lane, json.dumps(words).encode()))
        self._lanes.episode[lane] = episode
        self._lanes.step[lane] = 0
        self._lanes.picture[lane] = self._lanes.stamp[lane] = NONE
        return episode

    def _end(self, lane: int, final: dict[str, Array] | None, stamp_ns: int) -> None:
        content = b""
        if final is not None:
            pictures = {key: value[None] for key, value in final.items() if key in self.layout.cameras}
            # Their time was not measured; with the stamp of the step they would count as repeated pictures.
            after_ns = stamp_ns + round(1e9 / self.layout.meta.control_hz)
            self._take_pictures(np.array([lane]), pictures, np.array([after_ns]), {})
            ids = dict(zip(self.layout.cameras, self._lanes.picture[lane].tolist(), strict=True))
            content = self.layout.pack_final(final, ids)
        ended = (int(self._lanes.episode[lane]), int(self._lanes.step[lane]), content)
        self._flusher.block.ended.append(ended)
        self._lanes.episode[lane] = NONE

    def _put_rows(self, lanes: NDArray[np.int64], numbers: Mapping[str, Any]) -> None:
        """Writes the steps into the block, and hands it over when it is full."""
        count, done = len(lanes), 0
        while done < count:
            if self._flusher.block.size == self._capacity:
                self._flusher.cut()
            block = self._flusher.block
            take = min(count - done, self._capacity - block.size)
            rows, at = slice(block.size, block.size + take), slice(done, done + take)
            for name, column in block.columns.items():
                value = numbers[name]
                column[rows] = value[at] if isinstance(value, np.ndarray) and value.ndim else value
            block.episode[rows] = self._lanes.episode[lanes[at]]
            block.step[rows] = self._lanes.step[lanes[at]]
            # From here on they count as appended, whatever fails in later rows.
            self._lanes.step[lanes[at]] += 1
            block.size += take
            self._flusher.appended_steps += take
            done += take

    def _take_pictures(
        self,
        lanes: NDArray[np.int64],
        obs: Mapping[str, Array],
        step_stamps: Array,
        stamps: Mapping[str, ArrayLike],
    ) -> None:
        """Copies the pictures that are new, and notes the last one of each lane."""
        last = self._lanes
        for camera, key in enumerate(self.layout.cameras):
            if key not in obs:
                self._repeated += len(lanes)
                continue
            taken = np.broadcast_to(np.asarray(stamps.get(key, step_stamps), np.int64), lanes.shape)
            for row, lane in enumerate(lanes):
                if last.picture[lane, camera] != NONE and last.stamp[lane, camera] == taken[row]:
                    self._repeated += 1
                elif self._put_picture(
                    obs[key][row],
                    int(last.episode[lane]),
                    int(taken[row]),
                    camera,
                    is_first=bool(last.picture[lane, camera] == NONE),
                ):
                    last.picture[lane, camera] = self._next_picture - 1
                    last.stamp[lane, camera] = taken[row]

    def _put_picture(
        self, picture: Array, episode: int, stamp_ns: int, camera: int, *, is_first: bool
    ) -> bool:
        """Hands a copy over; returns False if it was dropped, which never happens to `is_first`."""
        flusher = self._flusher
        limit = max(0, self._queue_bytes - picture.nbytes)
        if flusher.waiting_bytes > limit:
            if self._drops and not is_first:
                self._dropped += 1
                return False
            if not self._drops:
                self._wait(lambda: flusher.waiting_bytes <= limit)
        pixels = flusher.take_pixels(picture.nbytes)
        # memoryview keeps the GIL; numpy releases it for a copy and has to wait for it afterwards.
        memoryview(pixels)[:] = np.ascontiguousarray(picture).data.cast("B")
        number = self._next_picture
        self._next_picture += 1
        flusher.put(Picture(pixels, episode, number, stamp_ns, camera))
        self._pictures += 1
        return True

    def _wait(self, is_free: Any) -> None:
        began = time.perf_counter()
        self._waits += 1
        if self._flusher.block.size:
            self._flusher.cut()
        try:
            with self._failures():
                self._flusher.wait_until(is_free)
        finally:
            self._waited_s += time.perf_counter() - began

    # --- checks ------------------------------------------------------------------------------------

    def _check_first_pictures(self, lanes: NDArray[np.int64], obs: Mapping[str, Array]) -> None:
        """Refuses an episode whose first step has no picture."""
        for key in self.layout.cameras:
            begins = (self._lanes.episode[lanes] == NONE) | (self._lanes.step[lanes] == 0)
            if key not in obs and begins.any():
                raise DatasetError(
                    f"store {self.folder}: the first step of an episode has no {key!r}. "
                    "Give it the newest picture of each camera, with its stamp."
                )

    def _check_open(self) -> None:
        self._check_not_closed()
        with self._failures():
            self._flusher.check()

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise DatasetError(
                f"store {self.folder}: this writer is closed, or belongs to the process that this one was "
                "forked from. Open another."
            )

    @contextlib.contextmanager
    def _failures(self) -> Generator[None]:
        """Turns an error of the writing thread into one that counts the steps and names a remedy."""
        try:
            yield
        except WritingError as error:
            raise self._failure(error.__cause__) from error.__cause__

    def _failure(self, error: BaseException | None) -> DatasetError:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what, remedy = ("the disk is full", "make room") if full else ("writing failed", "repair it")
        why = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        then = f"{remedy}, then flush() writes them; appending goes on after that."
        if not self._flusher.is_alive:
            then = "they are lost. Close this writer and open another."
        return DatasetError(
            f"store {self.folder}: {what} ({why}). {self._flusher.flushed_steps} steps are safe, "
            f"{self._flusher.waiting_steps} wait in memory: {then}"
        )


def _forgetting(writer: weakref.ref[StoreWriter]) -> Any:
    """Returns a function that makes a forked child forget the writer: lock and thread are its parent's."""

    def forget() -> None:
        mine = writer()
        if mine is not None and not mine._is_closed:
            mine._is_closed = True
            mine._lock.release()

    return forget
