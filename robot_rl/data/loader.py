"""Draws batches of action chunks from a dataset, for behaviour cloning; seeded, with exact resume.

Every epoch is a permutation of all steps, drawn from the seed and the number of the epoch. So the state of
the loader is one number, and neither workers nor caches change the batches.
B batch, H chunk length, A action dim.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.core.errors import CheckpointError, DatasetError
from robot_rl.core.language import INSTRUCTION, encode_text
from robot_rl.core.policy import DemoBatch
from robot_rl.data.lerobot.pictures import PictureCache, PictureReader, Size
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.windows import ReadPictures, Windows
from robot_rl.data.lerobot.workers import PictureWorkers, WorkerTask

Array = NDArray[Any]


class ChunkLoader:
    """Draws windows of H actions with the observation at their first step.

    Actions have the units of the dataset. After the end of an episode its last action repeats and is not
    valid. Only pictures of the first step are decoded.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        horizon: int,
        batch: int,
        seed: int,
        episodes: Sequence[int] | None = None,
        resize: Size | None = None,
        num_workers: int = 0,
        cache: PictureCache | None = None,
        deltas: Mapping[str, Sequence[int]] | None = None,
        keys: Sequence[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Prepares to draw.

        Args:
            dataset: to draw from.
            horizon: H.
            batch: B.
            seed: of the order.
            episodes: to draw from; None: all.
            resize: height and width of pictures; None: unchanged.
            num_workers: processes that decode ahead; 0 decodes in threads of this process.
            cache: of decoded pictures.
            deltas: observation key -> offsets in steps, for policies that see more than one step: the
                observation becomes (B, n, ...), with `<key>_is_pad` (B, n).
            keys: observations to load; None: all but depth, which is no column.
            progress: called with the number of decoded pictures, and of all, while `cache.folder` is filled.

        Raises:
            DatasetError: nothing to draw from, or an unknown episode or key.
        """
        if horizon < 1 or batch < 1:
            raise ValueError(f"chunk loader: got horizon {horizon}, batch {batch}, allowed: 1 or more")
        self.dataset = dataset
        self._batch = batch
        self._seed = seed
        self._horizon = horizon
        self._rows = _rows_of(dataset, episodes)
        observed = [key for key in dataset.features if key in dataset.columns or key in dataset.cameras]
        deltas = {**(deltas or {}), "action": range(horizon)}
        self._windows = Windows(dataset, deltas, keys=observed if keys is None else keys)
        self._texts = _encoded_instructions(dataset)
        cache = cache or PictureCache()
        self._pictures = PictureReader(
            dataset, resize=resize, cache=cache, progress=progress, threads=1 if num_workers else 0
        )
        self._workers = self._start_workers(num_workers, resize, cache) if num_workers else None
        self._number = 0  # of the next batch
        self._asked: deque[tuple[int, Array]] = deque()  # batches that were requested, and their rows
        self._order: tuple[int, Array] | None = None

    def __enter__(self) -> ChunkLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Returns the number of windows of an epoch, one for every step."""
        return len(self._rows)

    @property
    def hit_rate(self) -> float:
        """Share of the pictures that needed no decoding."""
        counts = self._workers.counts if self._workers else self._pictures.counts
        total = sum(counts.values())
        return 1 - counts["decoded"] / total if total else 0.0

    def sample(self) -> DemoBatch:
        """Returns the next B windows, in random order without repetition within an epoch."""
        number, self._number = self._number, self._number + 1
        if self._workers is None:
            return self._read(self._drawn(number))
        if not self._asked:
            self._ask(number)
        while len(self._asked) < self._workers.ahead:
            self._ask(self._asked[-1][0] + 1)
        asked, rows = self._asked.popleft()
        assert asked == number, f"chunk loader: batch {asked} is first in line, not {number}"
        return self._read(rows, functools.partial(self._workers.collect, number))

    def batches(self, steps_stride: int = 1) -> Iterator[DemoBatch]:
        """Yields every `steps_stride`-th window once, in order; the last batch may be smaller."""
        rows = self._rows[::steps_stride]
        for begin in range(0, len(rows), self._batch):
            yield self._read(rows[begin : begin + self._batch])

    def state_dict(self) -> dict[str, int]:
        """Returns the number of the next batch, and the settings that `load_state_dict` compares."""
        return {"number": self._number, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on with the batch after `state_dict`.

        Raises:
            CheckpointError: the state is of other data or settings, so that the order would differ.
        """
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise CheckpointError(
                    f"chunk loader: the checkpoint has {name} {state[name]}, this run has {mine}. "
                    "Resume with the same dataset, episodes and settings."
                )
        while self._asked:  # batches that were requested for another position
            number, rows = self._asked.popleft()
            assert self._workers is not None
            self._workers.collect(number, self._windows.picture_rows(rows))
        self._number = state["number"]

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        self._pictures.close()

    def _identity(self) -> dict[str, int]:
        return {"seed": self._seed, "batch": self._batch, "horizon": self._horizon, "windows": len(self)}

    def _drawn(self, number: int) -> Array:
        """Returns the rows of batch k: positions B k to B (k + 1) of the permutations of all epochs."""
        positions = np.arange(number * self._batch, (number + 1) * self._batch)
        epochs, places = np.divmod(positions, len(self))
        parts = [self._permutation(int(e))[places[epochs == e]] for e in np.unique(epochs)]
        return self._rows[np.concatenate(parts)]

    def _permutation(self, epoch: int) -> Array:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self))
        return self._order[1]

    def _read(self, rows: Array, pictures: ReadPictures | None = None) -> DemoBatch:
        read = self._windows.read(rows, pictures or self._pictures.read)
        actions, is_pad = read.pop("action"), read.pop("action_is_pad")
        episode = np.searchsorted(self.dataset.episode_ends, rows, side="right")
        obs = {key: torch.from_numpy(values) for key, values in read.items()}
        if self._texts is not None:
            obs[INSTRUCTION] = torch.from_numpy(self._texts[self.dataset.columns["task_index"][rows]])
        return DemoBatch(
            obs=obs,
            actions=torch.from_numpy(actions),
            valid=torch.from_numpy(~is_pad),
            source={"episode": episode, "step": rows - self.dataset.episode_starts[episode]},
        )

    def _ask(self, number: int) -> None:
        assert self._workers is not None
        rows = self._drawn(number)
        self._workers.submit(number, self._windows.picture_rows(rows))
        self._asked.append((number, rows))

    def _start_workers(self, num_workers: int, resize: Size | None, cache: PictureCache) -> PictureWorkers:
        """Starts the workers; each has its share of the memory for decoded pictures."""
        shapes = self._pictures.shapes
        per_batch = self._windows.picture_rows(np.zeros(self._batch, np.int64))
        size = sum(len(rows) * int(np.prod(shapes[key])) for key, rows in per_batch.items())
        page = -(-size // 4096) * 4096
        task = WorkerTask(
            folder=self.dataset.folder,
            backend=self.dataset.backend,
            kept=self.dataset.index.episode,
            resize=resize,
            cache=PictureCache(folder=cache.folder, ram_bytes=cache.ram_bytes // num_workers),
            slot_bytes=page,
            rename=self.dataset.reading.rename,
        )
        return PictureWorkers(task, num_workers, shapes)


def _rows_of(dataset: Dataset, episodes: Sequence[int] | None) -> Array:
    chosen = list(range(len(dataset)) if episodes is None else episodes)
    unknown = [e for e in chosen if not 0 <= e < len(dataset)]
    if unknown:
        raise DatasetError(
            f"{dataset.folder}: episode {unknown[0]} is unknown, allowed 0 to {len(dataset) - 1}."
        )
    if not chosen or not sum(int(dataset.lengths()[e]) for e in chosen):
        raise DatasetError(f"{dataset.folder}: no steps to draw from. Choose at least one episode.")
    starts, ends = dataset.episode_starts, dataset.episode_ends
    return np.concatenate([np.arange(starts[e], ends[e]) for e in chosen])


def _encoded_instructions(dataset: Dataset) -> Array | None:
    """Returns a row of bytes for each task number, or None if the dataset has none."""
    tasks = dataset.index.tasks
    if not tasks or "task_index" not in dataset.columns:
        return None
    return encode_text([tasks.get(number, "") for number in range(max(tasks) + 1)])
