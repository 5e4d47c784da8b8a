"""What may be wrong with a recorded dataset, found and said by name."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import listed
from robot_rl.data.lerobot.decode import VideoHeader, lost_frames, read_header
from robot_rl.data.lerobot.index import DatasetIndex, VideoSpans, open_index
from robot_rl.data.lerobot.layout import OWN
from robot_rl.data.lerobot.selection import odd_names
from robot_rl.data.lerobot.stats import of_columns
from robot_rl.data.lerobot.tables import Tables, element, file_damage, read_rows, row_problems
from robot_rl.data.lerobot.v21 import read_episode_stats

Array = NDArray[Any]

_COMPARED = ("min", "max", "mean", "std", "count")
_REMEDY = "Record the episode again, or drop it."
_RATE = "Correct fps in meta/info.json, or record the episode again."
_STATS_REMEDY = "Policies normalise with them. Compute them again: robot-rl replay stats <dataset>"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    kind: str
    """`missing-metadata`, `damaged-metadata`, `odd-names`, `unreadable-rows`, `unequal-lengths`,
    `duplicate-index`, `not-finite`, `wrong-shape`, `wrong-fps`, `unreadable-video`, `damaged-video`,
    `unknown-codec`, `missing-video`, `short-video`, `wrong-stats`."""
    message: str
    """Where, got, allowed, remedy."""
    episode: int | None = None
    """By the dataset's own number; None if it concerns all."""
    is_fatal: bool = True
    """Whether the episode cannot be trained on; recorded statistics are not needed for that."""


def check(
    folder: str | Path,
    index: DatasetIndex | None = None,
    *,
    thorough: bool = False,
    on_video: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Reads every row and every video packet of a dataset and returns what is wrong.

    Args:
        folder: of the dataset.
        index: of it, where the caller has one.
        thorough: also decode every video, and compare the page checksums of every parquet file whole.
        on_video: called with videos decoded and in all.
    """
    folder = Path(folder)
    if thorough:
        texts = map(file_damage, [path for path in listed(folder / "meta") if path.suffix == ".parquet"])
        damaged = [Problem(kind="damaged-metadata", message=text) for text in texts if text]
        if damaged:  # nothing that it says can be relied on
            return damaged
    try:
        index = index or open_index(folder)
    except DatasetError as error:
        return [Problem(kind="missing-metadata", message=str(error))]
    if not (folder / OWN).is_file() and (text := odd_names(index)):
        return [Problem(kind="odd-names", message=text)]
    problems = list(_table_problems(index)) if thorough else []
    unreadable = {problem.episode for problem in problems}
    tables, sound = (
        Tables(folder, 1 << 28, checksums=True, renamed=index.renamed),
        dict[int, dict[str, Array]](),
    )
    for episode in range(len(index)):
        number = int(index.episode[episode])
        if number in unreadable:
            continue
        try:
            rows = read_rows(tables, index, episode)
        except DatasetError as error:
            problems.append(Problem(kind="unreadable-rows", message=str(error), episode=number))
            continue
        found = [
            Problem(
                kind=kind,
                message=f"{folder}: episode {number}: {text}. {_RATE if kind == 'wrong-fps' else _REMEDY}",
                episode=number,
            )
            for kind, text in row_problems(index, episode, rows)
        ]
        problems += found
        if not found:
            sound[number] = {name: rows[name] for name in ("action", "observation.state") if name in rows}
    problems += _video_problems(index)
    if thorough:
        problems += _decoding_problems(index, on_video or (lambda done, total: None))
    problems += _stats_problems(folder, index, sound)
    return problems


def lines(problems: Iterable[Problem]) -> list[str]:
    """Returns what to print: what differs by the episode alone, wrong rates, missing files in one line."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        shared = re.sub(rf"\bepisode {problem.episode}\b", "{}", problem.message)
        if "file is missing" in shared:
            shared = re.sub(r"(file-|episode_)\d+", "", shared)
        groups.setdefault("wrong-fps" if problem.kind == "wrong-fps" else shared, []).append(problem)
    said: list[str] = []
    for group in groups.values():
        message = group[0].message
        numbers = sorted({problem.episode for problem in group if problem.episode is not None})
        name = f"episode {spans(numbers)}" if len(numbers) == 1 else f"episodes {spans(numbers)}"
        own = rf"\bepisode {group[0].episode}\b"
        if numbers and re.search(own, message):
            message = re.sub(own, name, message, count=1)
        elif numbers:
            message = f"{name}: {message}"
        if "file is missing" in message and len({problem.message for problem in group}) > 1:
            message += f" So are {len({problem.message for problem in group}) - 1} more beside it."
        said.append(message)
    return said


def spans(numbers: Iterable[int]) -> str:
    """Returns ascending numbers as `0-9,12`."""
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda p: p[1] - p[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _table_problems(index: DatasetIndex) -> Iterator[Problem]:
    """Yields the episodes of parquet files that are damaged, also in pictures and in `final/`."""
    for number, file in enumerate(index.files):
        for path in (index.folder / file, index.folder / file.replace("data/", "final/", 1)):
            text = file_damage(path) if path.is_file() else None
            if text:
                for episode in index.episode[index.file == number].tolist():
                    yield Problem(kind="unreadable-rows", message=text, episode=episode)


def _decoding_problems(index: DatasetIndex, on_video: Callable[[int, int], None]) -> Iterator[Problem]:
    """Decodes every video, several at a time; yields the episodes with frames that nobody can decode."""
    files = [
        (of, number)
        for of in index.videos.values()
        for number, file in enumerate(of.files)
        if (index.folder / file).is_file()
    ]

    def decode(file: tuple[VideoSpans, int]) -> tuple[Array, int] | None:
        path = index.folder / file[0].files[file[1]]
        try:
            return lost_frames(path)
        except DatasetError:
            return None  # said of its header already

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for done, (result, (of, number)) in enumerate(zip(pool.map(decode, files), files, strict=True)):
            on_video(done + 1, len(files))
            if result is None or not len(result[0]):
                continue
            lost, total = result
            which = f"frame{'s' * (len(lost) > 1)} {spans(lost.tolist())}"
            message = (
                f"{index.folder / of.files[number]}: {len(lost)} of {total} frames cannot be decoded "
                f"({which}): the video is damaged. Copy it again, or leave the episode out."
            )
            for episode in np.flatnonzero(of.file == number).tolist():
                begin = of.first[episode]
                if ((lost >= begin) & (lost < begin + index.lengths[episode])).any():
                    yield Problem(kind="damaged-video", message=message, episode=int(index.episode[episode]))


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
            if abs(header.fps - index.fps) > 0.01 * index.fps:
                yield Problem(
                    kind="wrong-fps",
                    message=f"{at}: the video has {header.fps:g} fps, meta/info.json says {index.fps:g}. "
                    "Correct fps in meta/info.json, or encode the video again.",
                    episode=number,
                )
            elif header.frames < needed:
                yield Problem(
                    kind="short-video",
                    message=f"{at}: has {header.frames} frames of {name!r}, its parquet rows need {needed}. "
                    "Record or copy the episode again, or drop it.",
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
            problem = _difference(index, name, recorded.get(index.renamed.get(name, name)), values)
            if problem:
                yield Problem(
                    kind="wrong-stats", message=f"{path}: {problem}. {_STATS_REMEDY}", is_fatal=False
                )
    for number, stats in read_episode_stats(folder).items():
        for name, values in sound.get(number, {}).items():
            problem = _difference(index, name, stats.get(index.renamed.get(name, name)), values)
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
