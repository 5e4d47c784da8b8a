"""The chunks and the statistics of a fine-tuning run's dataset, for training and held-out episodes.

E episodes, B chunks, H chunk length, A action dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.core.policy import DemoBatch
from robot_rl.core.seeding import train_seed
from robot_rl.data.episode import Feature
from robot_rl.data.facts import DatasetFacts
from robot_rl.data.lerobot.pictures import PictureCache, PictureReader
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.stats import of_columns
from robot_rl.data.loader import ChunkLoader
from robot_rl.data.store.layout import is_store
from robot_rl.data.store.reader import StoreReader
from robot_rl.train.finetune.config import EVAL_BATCH, FinetuneConfig
from robot_rl.train.finetune.past import Past, names_of
from robot_rl.train.finetune.split import Split


class DemoData:
    """The chunks of a dataset as one run reads them: one split, one size of pictures, one device."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        *,
        picture: tuple[int, int] | None,
        device: str,
        cache: PictureCache,
        workers: int = 0,
        past: PolicyPast | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            dataset: what to read.
            split: which of its episodes are for what.
            picture: height and width of pictures; None leaves them as they are.
            device: where batches go.
            cache: where decoded pictures are kept.
            workers: processes that read ahead for the learner.
            past: what of the past stands behind the state; None: nothing.
        """
        self.dataset, self.split, self.picture = dataset, split, picture
        self._device, self._cache, self._workers = device, cache, workers
        self._past = past

    def decode(self, progress: Callable[[int, int], None]) -> None:
        """Decodes every picture once, if the cache keeps them in files."""
        PictureReader(self.dataset, resize=self.picture, cache=self._cache, progress=progress).close()

    def num_pictures(self) -> int:
        """Returns the pictures of all episodes and cameras."""
        return int(self.dataset.lengths().sum()) * len(self.dataset.cameras)

    def facts(self, episodes: Sequence[int] | None = None) -> DatasetFacts:
        """Returns sizes, names and statistics of the training episodes, or of those given."""
        chosen = episodes or self.split.train
        return read_facts(self.dataset, chosen, picture=self.picture, past=self._past)

    def random_chunks(
        self, episodes: Sequence[int], *, horizon: int, batch: int, seed: int
    ) -> RecordedChunks:
        """Returns random chunks of these episodes for the learner."""
        return RecordedChunks(self._loader(episodes, horizon, batch, seed, self._workers), self._ready)

    def batches(
        self, episodes: Sequence[int], *, horizon: int, stride: int, pictures: bool = True
    ) -> Iterator[DemoBatch]:
        """Yields the chunks that begin at every `stride`-th step of these episodes, in order."""
        keys = None if pictures else ("state",)
        with self._loader(episodes, horizon, EVAL_BATCH, 0, keys=keys) as loader:
            for batch in loader.batches(steps_stride=stride):
                yield self._ready(batch)

    def _ready(self, batch: DemoBatch) -> DemoBatch:
        """Returns a batch as the policies see it, on the learner's device."""
        if self._past is not None:
            batch.obs["state"] = torch.from_numpy(self._past.of(batch))
        return batch if self._device == "cpu" else batch.to(self._device)

    def _loader(
        self,
        episodes: Sequence[int],
        horizon: int,
        batch: int,
        seed: int,
        workers: int = 0,
        keys: Sequence[str] | None = None,
    ) -> ChunkLoader:
        return ChunkLoader(
            self.dataset,
            horizon=horizon,
            batch=batch,
            seed=seed,
            episodes=list(episodes),
            resize=self.picture,
            cache=self._cache,
            num_workers=workers,
            keys=keys,
        )


class PolicyPast:
    """The part of the past that a policy sees, appended to the state, name by name."""

    def __init__(self, dataset: Dataset, *, lags: tuple[int, ...], last_action: bool) -> None:
        """Prepares to look up.

        Args:
            dataset: what to read.
            lags: control steps of the changes.
            last_action: whether the last action is part of it.
        """
        self._lags = lags
        self._last_action = last_action
        self._past = Past(dataset, lags=self._lags)

    def of(self, batch: DemoBatch) -> NDArray[np.float32]:
        """Returns the states of chunks, with the past behind them."""
        return self._past.of(batch).inputs(last_action=self._last_action)

    def extended(self, facts: DatasetFacts, episodes: Sequence[int]) -> DatasetFacts:
        """Returns facts whose state has the past appended."""
        states = self._past.at(self._past.steps(episodes)).inputs(last_action=self._last_action)
        meta = facts.meta
        names = names_of(meta.state_names, meta.action_names, lags=self._lags, last_action=self._last_action)
        return replace(
            facts,
            meta=replace(meta, state_names=names),
            features={**facts.features, "state": Feature("float32", (len(names),))},
            stats={**facts.stats, "state": of_columns({"state": states})["state"]},
        )


class RecordedChunks:
    """A batch recipe: random chunks of recorded episodes."""

    def __init__(self, loader: ChunkLoader, ready: Callable[[DemoBatch], DemoBatch]) -> None:
        self._loader, self._ready = loader, ready

    def close(self) -> None:
        self._loader.close()

    def sample(self) -> DemoBatch:
        return self._ready(self._loader.sample())

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])


def policy_past(config: FinetuneConfig, dataset: Dataset) -> PolicyPast | None:
    """Returns what of the past a run shows its learners, or None."""
    if not config.lags and not config.last_action:
        return None
    return PolicyPast(dataset, lags=config.lags, last_action=config.last_action)


def read_facts(
    dataset: Dataset,
    episodes: Sequence[int],
    *,
    picture: tuple[int, int] | None,
    past: PolicyPast | None,
    decode: bool = True,
) -> DatasetFacts:
    """Returns sizes, names and statistics of these episodes, as the policies see them.

    Args:
        dataset: what to read.
        episodes: whose statistics.
        picture: height and width of pictures; None leaves them as they are.
        past: as of `DemoData`.
        decode: False leaves out the statistics of pictures, which take long.
    """
    facts = dataset.facts(episodes, picture, decode=decode)
    return facts if past is None else past.extended(facts, episodes)


def in_journal(folder: Path) -> int:
    """Returns how many episodes of a store are not part of its dataset yet; 0 for a plain dataset."""
    if not is_store(folder):
        return 0
    source = StoreReader(folder)
    return sum(source.sealed(episode) is None for episode in range(len(source)))


def moving_joints(dataset: Dataset, episodes: Sequence[int]) -> NDArray[np.bool_]:
    """Returns which actions (A,) move: within an episode, a tenth as far as the farthest, or more.

    The others stand where each episode found them, like the arm that a task does not need. All are
    compared in the dataset's own units.
    """
    starts, ends = dataset.episode_starts, dataset.episode_ends
    actions = dataset.columns["action"]
    ranges = [np.ptp(actions[starts[episode] : ends[episode]], axis=0) for episode in episodes]
    far = np.mean(ranges, axis=0)
    return far > far.max() / 10


def decoded_bytes(dataset: Dataset, picture: tuple[int, int] | None) -> int:
    """Returns the memory of all pictures once they are decoded."""
    shapes = [dataset.features[camera].shape for camera in dataset.cameras]
    pixels = sum(math.prod(picture or shape[:2]) for shape in shapes)
    return 3 * pixels * int(dataset.lengths().sum())


def stream_seed(config: FinetuneConfig, stream: str) -> int:
    """Returns the seed of a named stream of this run."""
    return train_seed(config.seed, f"finetune {stream}")
