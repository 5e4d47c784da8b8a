"""Demonstrations: complete episodes in memory, read from a LeRobotDataset v3, and windows of them.

B windows, H chunk length, T control steps, E episodes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from robot_rl.core.errors import DatasetError, nearest
from robot_rl.core.names import EXECUTED_ACTION
from robot_rl.core.policy import DemoBatch
from robot_rl.data.episode import (
    EXECUTED,
    POLICY_ACTION,
    RESET_ROW,
    SOURCES,
    Episode,
    feature_of,
    refuse_imagined,
)
from robot_rl.data.episodes import Array, Episodes, EpisodesMeta
from robot_rl.data.fit import misfit
from robot_rl.data.lerobot.damage import left_out
from robot_rl.data.lerobot.edit import write_new
from robot_rl.data.lerobot.layout import INFO, OWN
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.reading import ReadingConfig, ReadOptions
from robot_rl.data.store.layout import is_store, read_layout

__all__ = ["ChunkSampler", "Episodes", "EpisodesMeta", "each", "load_episodes", "save_episodes"]

_RECORDED = (POLICY_ACTION, EXECUTED, RESET_ROW, EXECUTED_ACTION)
"""Groups that a run records in addition to the observation."""
_REQUIRED = {"state": "observation.state", "action": "action"} | {
    name: name for name in ("next.reward", "next.terminated", "next.truncated", "next.success")
}
"""Our key -> LeRobot's name of the columns without which these are no demonstrations."""


class ChunkSampler:
    """Draws windows of H actions with the observation of their first step."""

    def __init__(
        self, episodes: Episodes, horizon: int, kept: Array | None = None, by: Array | None = None
    ) -> None:
        """Makes the sampler.

        Args:
            episodes: to draw from.
            horizon: H.
            kept: (T,) bool, steps at which windows may begin; None: all.
            by: (T,) bool, steps whose actions are learned from: a window begins at one, and is valid up to
                the first other step. None: all.

        Raises:
            DatasetError: no window may begin.
        """
        if horizon < 1:
            raise ValueError(f"chunk sampler: got horizon {horizon}, allowed: 1 or more")
        self._episodes = episodes
        self._offsets = np.arange(horizon)
        self._last = episodes.bounds()[1][episodes.episode_index] - 1
        self._by = np.ones(len(self._last), bool) if by is None else by
        self._starts = np.flatnonzero(self._by if kept is None else self._by & kept)
        if not len(self._starts):
            raise DatasetError("chunk sampler: no step of the episodes is kept. Keep more of them.")

    def __len__(self) -> int:
        """Returns the number of windows: one begins at every kept step."""
        return len(self._starts)

    def sample(self, batch: int, rng: np.random.Generator) -> DemoBatch:
        """Returns B windows that begin at kept steps; see `rows`."""
        return self.at(rng.integers(0, len(self), batch))

    def at(self, numbers: Array) -> DemoBatch:
        """Returns the windows of these numbers, 0 to len - 1; see `rows`."""
        return self.rows(self._starts[numbers])

    def rows(self, start: Array) -> DemoBatch:
        """Returns the windows at these steps; after an episode its last action repeats, not valid."""
        import torch  # not at the top: `open_demonstrations` answers mistakes before it is loaded

        last = self._last[start]
        rows = start[:, None] + self._offsets
        within = np.minimum(rows, last[:, None])
        learned = np.logical_and.accumulate(self._by[within], axis=1)
        return DemoBatch(
            obs={key: torch.from_numpy(value[start]) for key, value in self._episodes.obs.items()},
            actions=torch.from_numpy(self._episodes.action[within]),
            valid=torch.from_numpy((rows <= last[:, None]) & learned),
        )


def save_episodes(
    folder: str | Path,
    episodes: Episodes,
    *,
    images: Literal["png", "video"] = "png",
    source: Literal["demo", "sim"] = "demo",
) -> Path:
    """Writes the dataset under a temporary name, then renames it; returns the folder.

    Args:
        folder: the new dataset.
        episodes: to write; many share a file.
        images: pictures without loss, or as video, which is smaller.
        source: an expert acted (`demo`), or a policy in simulation (`sim`).

    Raises:
        DatasetError: the folder exists, or the episodes do not pass their checks.
    """
    folder = Path(folder)
    if folder.exists():
        raise DatasetError(f"{folder}: exists already. Choose another folder, or remove it first.")
    episodes.check(str(folder))
    features = {key: feature_of(values) for key, values in episodes.obs.items()}
    return write_new(folder, episodes.meta, features, each(episodes, source), images=images)


def each(episodes: Episodes, source: Literal["demo", "sim"]) -> Iterator[Episode]:
    """Yields the episodes one by one, views of their arrays; a demonstration has no base and no clock."""
    for number, (start, end) in enumerate(zip(*episodes.bounds(), strict=True)):
        rows = slice(start, end)
        steps = np.arange(end - start)
        yield Episode(
            meta=episodes.meta,
            obs={key: values[rows] for key, values in episodes.obs.items()},
            final_obs={key: values[number] for key, values in episodes.final_obs.items()},
            action=episodes.action[rows],
            base_action=episodes.action[rows],
            reward=episodes.reward[rows],
            terminated=episodes.terminated[rows],
            truncated=episodes.truncated[rows],
            success=episodes.success[rows],
            source=np.full(len(steps), SOURCES.index(source), np.uint8),
            policy_version=np.zeros(len(steps), np.int64),
            stamp_ns=np.rint(steps * (1e9 / episodes.meta.control_hz)).astype(np.int64),
        )


def load_episodes(
    folder: str | Path,
    *,
    expect: EpisodesMeta | None = None,
    read: ReadingConfig | None = None,
    say: Callable[[str], None] | None = None,
    as_executed: bool = False,
) -> Episodes:
    """Reads a dataset into memory and verifies it.

    Args:
        folder: of a dataset that `save_episodes` or a recording wrote.
        expect: robot, task, rate and names of elements that the episodes must have.
        read: selects what is read, and under which names; None: all.
        say: called with a line on damaged episodes that are left out.
        as_executed: with the actions that were executed, where `action` is an expert's label.

    Raises:
        DatasetError: no dataset, a missing or misnamed feature, another robot or task, other
            shapes, NaN, no sound episode, imagined steps. The message names the feature, the row and the
            remedy.
    """
    dataset, meta = open_demonstrations(folder, expect=expect, read=read, say=say)
    episodes = _joined(dataset, meta, as_executed)
    episodes.check(str(folder))
    refuse_imagined(episodes.source, at=str(folder))
    return episodes


def open_demonstrations(
    folder: str | Path,
    *,
    expect: EpisodesMeta | None = None,
    read: ReadingConfig | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Dataset, EpisodesMeta]:
    """Opens a dataset of demonstrations without torch, and checks it before an episode is read.

    Args and errors: those of `load_episodes`.
    """
    folder = Path(folder)
    if (folder / INFO).is_file() and not (folder / OWN).is_file():
        raise DatasetError(
            f"{folder}: no {OWN} in it, so task, rewards and ends of its episodes are unknown. "
            "Collect demonstrations with `robot-rl collect out=<new folder>`."
        )
    options = ReadOptions() if read is None else read.options("demos.read.")
    # importing torchcodec takes longer than reading this
    dataset = Dataset(folder, backend="pyav", **options)
    for line in left_out(dataset.skipped):
        if say is not None:
            say(line)
    if not len(dataset):
        raise DatasetError(
            f"{folder}: no episode is left. `robot-rl replay verify {folder}` says what is wrong."
        )
    _check_required(folder, dataset)
    own: dict[str, Any] = json.loads((folder / OWN).read_text())
    meta = dataclasses.replace(dataset.meta, instruction=own["instruction"])
    if expect is not None:
        check_meta(folder, meta, expect)
    return dataset, meta


def _joined(dataset: Dataset, meta: EpisodesMeta, as_executed: bool) -> Episodes:
    """Returns all episodes in arrays that are filled one episode after the other; see `load_episodes`."""
    lengths = dataset.lengths()
    steps, ends = int(lengths.sum()), np.cumsum(lengths)

    # What a run recorded in addition to the observation is no input of a policy.
    shown = {key: f for key, f in dataset.features.items() if key not in _RECORDED}

    def empty(rows: int) -> dict[str, Array]:
        return {key: np.empty((rows, *f.shape), f.dtype) for key, f in shown.items()}

    flags = ("terminated", "truncated", "success")
    joined = Episodes(
        meta=meta,
        obs=empty(steps),
        action=np.empty((steps, len(meta.action_names)), np.float32),
        reward=np.empty(steps, np.float32),
        episode_index=np.repeat(np.arange(len(lengths)), lengths),
        final_obs=empty(len(lengths)),
        source=np.empty(steps, np.uint8),
        **{name: np.empty(steps, bool) for name in flags},
    )
    is_known = RESET_ROW in dataset.features and is_store(dataset.folder)
    starts, begun = read_layout(dataset.folder).starts if is_known else None, list[str]()
    for number, end in enumerate(ends):
        episode, rows = dataset.read(number), slice(end - lengths[number], end)
        episode = episode.as_executed() if as_executed else episode
        for name in ("action", "reward", "source", *flags):
            getattr(joined, name)[rows] = getattr(episode, name)
        if not episode.final_obs:
            raise DatasetError(
                f"{dataset.folder}: it was not recorded what the last step of episode "
                f"{dataset.index.episode[number]} led to. Leave it "
                "out with demos.read.episodes=<the others>, or robot_rl.data.lerobot.edit.filter(..., "
                "keep=lambda episode: episode.is_complete)."
            )
        for key, values in joined.obs.items():
            values[rows] = episode.obs[key][np.arange(len(episode))]
            joined.final_obs[key][number] = episode.final_obs[key]
        if starts is not None:
            begun.append(starts.of(episode.obs[RESET_ROW])[0])
    return joined if starts is None else dataclasses.replace(joined, start=np.array(begun))


def _check_required(folder: Path, dataset: Dataset) -> None:
    """Refuses a dataset without a column that demonstrations need."""
    for key, name in _REQUIRED.items():
        if key not in dataset.columns:
            known = [feature for feature in dataset.info["features"] if feature != name]
            raise DatasetError(
                f"{folder}: feature {name!r} is missing.{nearest(name, known)} Say which column it is, "
                f"demos.read.rename=<column>:{name}, or collect the dataset again with `robot-rl collect`."
            )


def check_meta(folder: Path, got: EpisodesMeta, expect: EpisodesMeta) -> None:
    """Raises `DatasetError` for data of another robot, task or rate, or with other elements."""
    problem = misfit(got, expect, also=("robot", "task"))
    if problem is not None:
        raise DatasetError(
            f"{folder}: the dataset does not fit this run: {problem}. Collect demonstrations with the env "
            "settings of this run, or set env to those of the dataset."
        )
