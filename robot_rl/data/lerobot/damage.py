"""Finds and names what is wrong with a dataset."""

from __future__ import annotations

import itertools
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
from robot_rl.data.lerobot.checksums import MAIN, Checksums, number_of
from robot_rl.data.lerobot.decode import VideoHeader, decode_pictures, lost_frames, other_size, read_header
from robot_rl.data.lerobot.index import (
    NOT_UNDERSTOOD,
    DatasetIndex,
    VideoSpans,
    not_understood,
    not_written,
    picture_shape,
    read_info,
    read_stats,
)
from robot_rl.data.lerobot.layout import OWN, STATS
from robot_rl.data.lerobot.opening import open_index
from robot_rl.data.lerobot.own_files import OwnFiles
from robot_rl.data.lerobot.selection import Reading, odd_names
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
    """One defect of a dataset."""

    kind: str
    """`missing-metadata`, `nothing-written`, `damaged-metadata`, `odd-names`, `changed-file`,
    `missing-checksums`, `unreadable-rows`, `unequal-lengths`, `duplicate-index`, `not-finite`, `wrong-shape`,
    `wrong-fps`, `unreadable-video`, `damaged-video`, `unknown-codec`, `missing-video`, `short-video`,
    `unreadable-picture`, `wrong-stats`."""
    message: str
    """Where, got, allowed, remedy."""
    episode: int | None = None
    """By the dataset's own number; None if it concerns all."""
    is_fatal: bool = True
    """Whether the episode cannot be trained on; wrong statistics do not prevent that."""


NO_LOOK = frozenset({"missing-metadata", "damaged-metadata", "odd-names"})
"""Kinds of problems after which nothing else is checked."""


def check(
    folder: str | Path,
    index: DatasetIndex | None = None,
    *,
    reading: Reading | None = None,
    thorough: bool = False,
    on_video: Callable[[int, int], None] | None = None,
) -> list[Problem]:
    """Reads every row and every video packet of a dataset and returns the problems.

    Args:
        reading: selects what is checked, and under which names; None: all.
        thorough: also decode every video, and compare the page checksums of every parquet file whole.
        on_video: called with the number of decoded videos, and of all.

    Raises:
        DatasetError: `reading` selects names, cameras or episodes that do not exist.
    """
    folder = Path(folder)
    if thorough:
        texts = map(file_damage, [path for path in listed(folder / "meta") if path.suffix == ".parquet"])
        damaged = [Problem(kind="damaged-metadata", message=text) for text in texts if text]
        if damaged:  # its content is not reliable
            return damaged
    try:
        if index is None and not read_info(folder)["total_episodes"]:
            return list(_nothing_written(folder))
        index = open_index(folder) if index is None else index
    except DatasetError as error:
        return [Problem(kind="missing-metadata", message=str(error))]
    index = index if reading is None else reading.apply(index)
    try:
        tables = Tables(folder, 1 << 28, renamed=index.renamed)  # changed files are reported below
        own_files = OwnFiles(index, tables)
        stats = read_stats(folder, index.sums)
        episode_stats = read_episode_stats(folder, index.sums)
        odd = None if (folder / OWN).is_file() else odd_names(index)
    except DatasetError as error:
        return [Problem(kind="missing-metadata", message=str(error))]
    if odd:
        return [Problem(kind="odd-names", message=odd)]
    changed, problems = _changed_files(index, own_files.own, thorough)
    if thorough:
        problems += _table_problems(index, changed)
    unreadable = {problem.episode for problem in problems if problem.kind == "unreadable-rows"}
    sound: dict[int, dict[str, Array]] = {}
    for episode in range(len(index)):
        number = int(index.episode[episode])
        if number in unreadable or index.files[index.file[episode]] in changed:
            continue
        found, rows = _row_problems(index, tables, episode)
        problems += found
        if not found:
            sound[number] = {name: rows[name] for name in ("action", "observation.state") if name in rows}
            if thorough:
                problems += _picture_problems(index, tables, episode)
    problems += _video_problems(index, changed)
    if thorough:
        problems += _decoding_problems(index, changed, on_video or (lambda done, total: None))
    problems += _stats_problems(index, stats, episode_stats, sound)
    return problems


def _nothing_written(folder: Path) -> Iterator[Problem]:
    """Yields the problems of a dataset without an episode; if we only began it, none is fatal."""
    is_ours = (folder / OWN).is_file()
    yield Problem(kind="nothing-written", message=not_written(folder), is_fatal=not is_ours)
    # Other files of the first commit may be missing.
    for _, message in Checksums(folder).problems(-1, lambda name: (folder / name).is_file()):
        yield Problem(kind="changed-file", message=message)


def last_file(index: DatasetIndex) -> int:
    """Returns the highest number of the files that episodes lie in; -1 if there are none."""
    files = [*index.files, *(file for spans in index.videos.values() for file in spans.files)]
    return max((number for number in map(number_of, files) if number is not None), default=-1)


def _changed_files(index: DatasetIndex, own: dict[str, Any], others: bool) -> tuple[set[str], list[Problem]]:
    """Compares every file with its checksum; returns those that differ, and the episodes in them.

    Args: own: meta/robot_rl.json; others: also compares files of others.
    """
    sums, changed, problems = index.sums, set[str](), list[Problem]()
    if not sums.exist and own.get("checksums"):
        message = (
            f"{index.folder / MAIN}: this file is missing, so changes of the other files cannot be found. "
            f"Restore it, or accept the files as they are: robot-rl replay checksum {index.folder}"
        )
        problems.append(Problem(kind="missing-checksums", message=message))
    is_whole = len(index) == index.info["total_episodes"] and not index.left_out

    def is_read(name: str) -> bool:
        return is_whole or name.startswith("meta/") or bool(_episodes_in(index, name))

    for name, message in sums.problems(last_file(index), is_read, others=others):
        if name.startswith(("data/", "videos/")) and not (index.folder / name).is_file():
            continue  # reading its rows or frames reports it
        changed.add(name)
        numbers = index.episode[_episodes_in(index, name)].tolist() or [None]
        problems += [Problem(kind="changed-file", message=message, episode=number) for number in numbers]
    return changed, problems


def _episodes_in(index: DatasetIndex, name: str) -> list[int]:
    """Returns the episodes that lie in a file; none for metadata, which concerns all."""
    for spans in index.videos.values():
        if name in spans.files:
            return np.flatnonzero(spans.file == spans.files.index(name)).tolist()
    if name.startswith(("data/", "final/", "arrays/")):
        own = number_of(name)  # version 2.1 has none
        files = [
            number
            for number, file in enumerate(index.files)
            if file == name or (own is not None and number_of(file) == own)
        ]
        return np.flatnonzero(np.isin(index.file, files)).tolist()
    return []


def _row_problems(
    index: DatasetIndex, tables: Tables, episode: int
) -> tuple[list[Problem], dict[str, Array]]:
    """Returns the problems of the numbers of an episode, and the numbers."""
    number = int(index.episode[episode])
    try:
        rows = read_rows(tables, index, episode)
        found = list(row_problems(index, episode, rows))
    except (DatasetError, *NOT_UNDERSTOOD) as error:
        at = index.folder / index.files[index.file[episode]]
        message = str(error) if isinstance(error, DatasetError) else not_understood(at, error)
        return [Problem(kind="unreadable-rows", message=message, episode=number)], {}
    return [
        Problem(
            kind=kind,
            message=f"{index.folder}: episode {number}: {text}. {_RATE if kind == 'wrong-fps' else _REMEDY}",
            episode=number,
        )
        for kind, text in found
    ], rows


def _picture_problems(index: DatasetIndex, tables: Tables, episode: int) -> Iterator[Problem]:
    file, number = index.files[index.file[episode]], int(index.episode[episode])
    first, count = int(index.first[episode]), int(index.lengths[episode])
    for name in index.named("image"):
        at = f"{index.folder / file}: {name}, episode {number}, picture"
        try:
            column = tables.rows(file, first, count, [name])
            pictures = column[name].to_pylist() if name in column.column_names else []
            for row, picture in enumerate(pictures):
                shape = decode_pictures([picture["bytes"]], f"{at} {row},").shape[1:]
                if shape != picture_shape(index.features[name]):
                    raise DatasetError(other_size(f"{at} {row}", shape, picture_shape(index.features[name])))
        except (DatasetError, *NOT_UNDERSTOOD) as error:
            message = str(error) if isinstance(error, DatasetError) else not_understood(Path(at), error)
            yield Problem(kind="unreadable-picture", message=message, episode=number)


def lines(problems: Iterable[Problem]) -> list[str]:
    """Returns lines to print; problems that differ by the episode alone, and missing files, share one."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        shared = re.sub(rf"\bepisode {problem.episode}\b", "{}", problem.message)
        if "file is missing" in shared:
            shared = re.sub(r"(file-|episode_)\d+", "", shared)
        groups.setdefault("wrong-fps" if problem.kind == "wrong-fps" else shared, []).append(problem)
    printed: list[str] = []
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
            message += f" So are {len({problem.message for problem in group}) - 1} more."
        printed.append(message)
    return printed


def left_out(problems: Iterable[Problem]) -> list[str]:
    """Returns lines to print about the episodes that a dataset was opened without."""
    damaged = (problem for problem in problems if problem.is_fatal and problem.episode is not None)
    return [f"left out: {line}" for line in lines(damaged)]


def spans(numbers: Iterable[int]) -> str:
    """Returns ascending numbers as `0-9,12`."""
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda p: p[1] - p[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _table_problems(index: DatasetIndex, changed: set[str]) -> Iterator[Problem]:
    """Yields the episodes of damaged parquet files, also of pictures and of `final/`."""
    for number, file in enumerate(index.files):
        for name in (file, file.replace("data/", "final/", 1)):
            path = index.folder / name
            text = file_damage(path) if path.is_file() and name not in changed else None
            if text:
                for episode in index.episode[index.file == number].tolist():
                    yield Problem(kind="unreadable-rows", message=text, episode=episode)


def _decoding_problems(
    index: DatasetIndex, changed: set[str], on_video: Callable[[int, int], None]
) -> Iterator[Problem]:
    """Decodes every video, several at a time; yields the episodes with frames that cannot be decoded."""
    files = [
        (of, number)
        for of in index.videos.values()
        for number, file in enumerate(of.files)
        if (of.file == number).any() and (index.folder / file).is_file() and file not in changed
    ]

    def decode(file: tuple[VideoSpans, int]) -> tuple[Array, int] | None:
        path = index.folder / file[0].files[file[1]]
        try:
            return lost_frames(path)
        except DatasetError:
            return None  # its header is reported already

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


def _video_problems(index: DatasetIndex, changed: set[str]) -> Iterator[Problem]:
    headers: dict[str, VideoHeader | str] = {}
    for name, spans in index.videos.items():
        for episode, number in enumerate(index.episode.tolist()):
            file = spans.files[spans.file[episode]]
            if file in changed:
                continue
            if file not in headers:
                try:
                    headers[file] = read_header(index.folder / file)
                except DatasetError as error:
                    headers[file] = str(error)
            header = headers[file]
            if isinstance(header, str):
                kinds = {"is missing": "missing-video", "no decoder": "unknown-codec"}
                kind = next((kind for words, kind in kinds.items() if words in header), "unreadable-video")
                yield Problem(kind=kind, message=header, episode=number)
                continue
            at = f"{index.folder / file}: episode {number}"
            needed = int(spans.first[episode] + index.lengths[episode])
            size, shape = (header.height, header.width), picture_shape(index.features[name])
            if size != shape[:2]:
                yield Problem(kind="wrong-shape", message=other_size(at, size, shape), episode=number)
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


def _stats_problems(
    index: DatasetIndex,
    recorded: dict[str, dict[str, Any]],
    of_episodes: dict[int, dict[str, Any]],
    sound: dict[int, dict[str, Array]],
) -> Iterator[Problem]:
    """Compares recorded statistics with those of the rows, but not those of pictures, which are samples."""
    path = index.folder / STATS
    if path.is_file() and sound and len(sound) == index.info["total_episodes"]:
        for name in next(iter(sound.values())):
            values = np.concatenate([rows[name] for rows in sound.values()])
            problem = _difference(index, name, recorded.get(index.renamed.get(name, name)), values)
            if problem:
                yield Problem(
                    kind="wrong-stats", message=f"{path}: {problem}. {_STATS_REMEDY}", is_fatal=False
                )
    for number, stats in of_episodes.items():
        for name, values in sound.get(number, {}).items():
            problem = _difference(index, name, stats.get(index.renamed.get(name, name)), values)
            if problem:
                message = (
                    f"{index.folder}: meta/episodes_stats.jsonl, episode {number}: {problem}. {_STATS_REMEDY}"
                )
                yield Problem(kind="wrong-stats", message=message, episode=number, is_fatal=False)


def _difference(index: DatasetIndex, name: str, recorded: dict[str, Any] | None, values: Array) -> str | None:
    """Returns where recorded statistics differ by more than rounding, a thousandth of the range."""
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
