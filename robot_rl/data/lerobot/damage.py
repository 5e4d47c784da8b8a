"""What may be wrong with a recorded dataset, found and said by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.decode import VideoHeader, read_header
from robot_rl.data.lerobot.index import DatasetIndex, open_index
from robot_rl.data.lerobot.stats import of_columns
from robot_rl.data.lerobot.tables import Tables, element, read_rows, row_problems
from robot_rl.data.lerobot.v21 import read_episode_stats

Array = NDArray[Any]

_COMPARED = ("min", "max", "mean", "std", "count")
_STATS_REMEDY = "Compute the statistics again: policies normalise with them."


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    kind: str
    """`missing-metadata`, `unreadable-rows`, `unequal-lengths`, `duplicate-index`, `not-finite`,
    `wrong-shape`, `wrong-fps`, `unreadable-video`, `unknown-codec`, `missing-video`, `short-video`,
    `wrong-stats`."""
    message: str
    """Where, got, allowed, remedy."""
    episode: int | None = None
    """By the dataset's own number; None if it concerns all."""
    is_fatal: bool = True
    """Whether the episode cannot be trained on; recorded statistics are not needed for that."""


def check(folder: str | Path, index: DatasetIndex | None = None) -> list[Problem]:
    """Reads every row and every video packet of a dataset (nothing is decoded) and returns what is wrong."""
    folder = Path(folder)
    try:
        index = index or open_index(folder)
    except DatasetError as error:
        return [Problem(kind="missing-metadata", message=str(error))]
    problems: list[Problem] = []
    tables, sound = Tables(folder, 1 << 28), dict[int, dict[str, Array]]()
    for episode in range(len(index)):
        number = int(index.episode[episode])
        try:
            rows = read_rows(tables, index, episode)
        except DatasetError as error:
            problems.append(Problem(kind="unreadable-rows", message=str(error), episode=number))
            continue
        found = [
            Problem(
                kind=kind,
                message=f"{folder}: episode {number}: {text}. Record the episode again, or drop it.",
                episode=number,
            )
            for kind, text in row_problems(index, episode, rows)
        ]
        problems += found
        if not found:
            sound[number] = {name: rows[name] for name in ("action", "observation.state") if name in rows}
    problems += _video_problems(index)
    problems += _stats_problems(folder, index, sound)
    return problems


def _video_problems(index: DatasetIndex) -> Iterator[Problem]:
    headers: dict[str, VideoHeader | DatasetError] = {}
    for name, spans in index.videos.items():
        for episode, number in enumerate(index.episode.tolist()):
            file = spans.files[spans.file[episode]]
            if file not in headers:
                headers[file] = _header(index.folder / file)
            header = headers[file]
            if isinstance(header, DatasetError):
                yield Problem(kind=_video_kind(str(header)), message=str(header), episode=number)
                continue
            at = f"{index.folder / file}: episode {number}"
            needed = int(spans.first[episode] + index.lengths[episode])
            if header.frames < needed:
                yield Problem(
                    kind="short-video",
                    message=f"{at}: has {header.frames} frames of {name!r}, its parquet rows need {needed}. "
                    "Record or copy the episode again, or drop it.",
                    episode=number,
                )
            if abs(header.fps - index.fps) > 0.01 * index.fps:
                yield Problem(
                    kind="wrong-fps",
                    message=f"{at}: the video has {header.fps:g} fps, meta/info.json says {index.fps:g}. "
                    "Correct fps in meta/info.json, or encode the video again.",
                    episode=number,
                )


def _header(path: Path) -> VideoHeader | DatasetError:
    try:
        return read_header(path)
    except DatasetError as error:
        return error


def _video_kind(message: str) -> str:
    if "is missing" in message:
        return "missing-video"
    return "unknown-codec" if "no decoder" in message else "unreadable-video"


def _stats_problems(
    folder: Path, index: DatasetIndex, sound: dict[int, dict[str, Array]]
) -> Iterator[Problem]:
    """Compares recorded statistics with those of the rows; those of pictures were sampled, so not them."""
    path = folder / "meta/stats.json"
    if path.is_file() and len(sound) == len(index) and len(index):
        recorded = json.loads(path.read_text())
        for name in next(iter(sound.values())):
            values = np.concatenate([rows[name] for rows in sound.values()])
            problem = _difference(index, name, recorded.get(name), values)
            if problem:
                yield Problem(
                    kind="wrong-stats", message=f"{path}: {problem}. {_STATS_REMEDY}", is_fatal=False
                )
    for number, stats in read_episode_stats(folder).items():
        for name, values in sound.get(number, {}).items():
            problem = _difference(index, name, stats.get(name), values)
            if problem:
                message = f"{folder}: meta/episodes_stats.jsonl, episode {number}: {problem}. {_STATS_REMEDY}"
                yield Problem(kind="wrong-stats", message=message, episode=number, is_fatal=False)


def _difference(index: DatasetIndex, name: str, recorded: dict[str, Any] | None, values: Array) -> str | None:
    """Says where recorded statistics differ by more than rounding, a thousandth of the range."""
    if recorded is None:
        return f"feature {name!r} has no statistics"
    true = of_columns({name: values})[name]
    slack = 1e-3 * (true["max"] - true["min"]) + 1e-5 * np.abs(true["max"]) + 1e-6
    for stat in _COMPARED:
        if stat not in recorded:
            return f"feature {name!r} has no {stat}"
        got = np.asarray(recorded[stat], np.float64).reshape(-1)
        if got.shape != true[stat].reshape(-1).shape:
            return f"feature {name!r}: {stat} has {got.size} elements, the rows have {true[stat].size}"
        far = np.abs(got - true[stat]) > (0 if stat == "count" else slack)
        if far.any():
            at = int(np.flatnonzero(far)[0])
            where = "" if stat == "count" else f" of {element(index.features[name], at)}"
            want = true[stat].reshape(-1)[at]
            return f"feature {name!r}: {stat}{where} is {got[at]:g}, of the rows it is {want:g}"
    return None
