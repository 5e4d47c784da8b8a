"""The dataset of a fine-tuning run: training and held-out episodes, and what must fit.

E episodes, B chunks, H chunk length, A action dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, DatasetError
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
from robot_rl.sim.robots.loading import load_robot
from robot_rl.train.finetune.config import EVAL_BATCH, FinetuneConfig
from robot_rl.train.finetune.past import Past, names_of

COMMANDED = re.compile(r"tool\.\w+|gripper")
"""Actions that move the tool: every arm with a gripper understands them."""


@dataclass(frozen=True)
class Split:
    """Which episodes are learned from, and which are only measured on."""

    train: tuple[int, ...]
    heldout: tuple[int, ...]

    def text(self) -> str:
        return f"training on episodes {_spans(self.train)}, held out: {_spans(self.heldout)}"

    def inner(self) -> Split:
        """Splits the training episodes alone, the same way: what settings may be chosen on."""
        held = min(len(self.heldout), max(1, len(self.train) // 4))
        return Split(self.train[:-held], self.train[-held:])


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


def open_data(config: FinetuneConfig) -> tuple[Dataset, Split]:
    """Opens the dataset and divides its episodes.

    Raises:
        DatasetError: no dataset, one that is not sealed, a damaged one, too few episodes, or none as
            long as a chunk.
        ConfigError: the robot has other joints.
    """
    folder = Path(config.dataset)
    if is_store(folder) and not (folder / "meta/info.json").is_file():
        waiting = len(StoreReader(folder))
        raise DatasetError(
            f"dataset: {folder} is a store whose {waiting} episodes are in its journal; fine-tuning reads "
            f"datasets. Seal it first: robot-rl replay seal {folder}"
        )
    dataset = Dataset(folder, **config.reading.options())
    if "state" not in dataset.features:
        there = ", ".join(dataset.index.features)
        raise DatasetError(
            f"{config.dataset}: no feature 'observation.state', there are {there}. "
            "Every policy here reads a state: name the column that is one, rename=<column>:observation.state"
        )
    if config.robot is not None:
        check_robot(config.robot, dataset.meta.action_names, at=config.dataset)
    longest, wrong = int(dataset.lengths().max()), list[str]()
    if longest < config.horizon:
        wrong.append(
            f"{config.dataset}: the longest episode has {longest} control steps, a chunk needs "
            f"{config.at}horizon={config.horizon}. Use {config.at}horizon={longest} or less."
        )
    try:
        split = split_episodes(len(dataset), config.heldout, at=config.dataset, key=f"{config.at}heldout")
    except DatasetError as error:
        raise DatasetError("\n".join([str(error), *wrong])) from error
    if wrong:
        raise DatasetError(wrong[0])
    return dataset, split


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


def split_episodes(episodes: int, heldout: int, *, at: str, key: str = "heldout") -> Split:
    """Holds out the last episodes: no random choice.

    Raises:
        DatasetError: fewer than two episodes are left to learn from.
    """
    if episodes - heldout < 2:
        fewer = f"Say {key}={max(1, episodes // 5)}, or record more." if episodes > 2 else "Record more."
        raise DatasetError(
            f"{at}: {episodes} episodes, {key}={heldout} leaves {max(0, episodes - heldout)} to learn "
            f"from, needed: 2 or more. {fewer}"
        )
    first = episodes - heldout
    return Split(tuple(range(first)), tuple(range(first, episodes)))


def check_robot(robot: str, action_names: Sequence[str], *, at: str) -> None:
    """Refuses a robot whose joints are not those that the dataset's actions move.

    Raises:
        ConfigError: the message names the joints that only one of them has.
    """
    found = load_robot(robot)
    names = [re.sub(r"\.(pos|delta)$", "", name) for name in action_names]
    if all(COMMANDED.fullmatch(name) for name in names):
        return
    joints = [*found.arm_joints, "gripper"]
    lacking = [name for name in names if name not in joints]
    unused = [joint for joint in joints if joint not in names and joint != "gripper"]
    if lacking or unused:
        parts = [f"{robot} lacks {_listed(lacking)}"] if lacking else []
        parts += [f"the dataset lacks {_listed(unused)}"] if unused else []
        raise ConfigError(
            f"robot: {robot!r} does not fit {at}: {'; '.join(parts)}. "
            "Leave robot out to train for the robot that was recorded."
        )


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


def _spans(numbers: Sequence[int]) -> str:
    """Returns `0-15 (16)`."""
    span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    return f"{span} ({len(numbers)})"


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
