"""The index of a LeRobotDataset: the files, rows and first video frames of every episode.

It is made from `meta/` alone, so opening a dataset reads no episode. E episodes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import listed
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.store.layout import is_store

Array = NDArray[Any]

STATE = "observation.state"
_NUMBERS = ("float", "int", "uint", "bool")
NOT_UNDERSTOOD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, pa.ArrowException)
"""Errors that invalid metadata causes."""


@dataclass(kw_only=True)
class VideoSpans:
    """The places of the frames of one camera."""

    files: list[str]
    """Paths below the folder."""
    file: Array
    """(E,): which of `files`."""
    first: Array
    """(E,): the first frame, or row, of the episode in that file."""


@dataclass(kw_only=True)
class DatasetIndex:
    """A dataset's metadata, the same for every version of the format."""

    folder: Path
    info: dict[str, Any]
    tasks: dict[int, str]
    """task_index -> instruction."""
    episode: Array
    """(E,): number of the episode in the data (`episode_index`)."""
    lengths: Array
    """(E,)"""
    files: list[str]
    """Parquet files below the folder, in the order of their episodes."""
    file: Array
    """(E,): which of `files`."""
    first: Array
    """(E,): the first row of the episode in that file."""
    videos: dict[str, VideoSpans]
    """LeRobot's name of a camera -> places of its frames."""
    instructions: list[str]
    """(E,): the first instruction of every episode."""
    sums: Checksums
    """Checksums of its files."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Other columns of meta/episodes that are ours: `device`, `store_episode`."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Name of a column, as it is read -> its name in the files, where the two differ."""
    left_out: tuple[str, ...] = ()
    """Features in the files that are not read."""
    files_left_out: tuple[str, ...] = ()
    """Videos of these features."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        return self.info["features"]

    def named(self, *dtypes: str) -> list[str]:
        """Returns LeRobot's names of the features of these dtypes."""
        return [name for name, feature in self.features.items() if feature["dtype"] in dtypes]

    @property
    def numeric(self) -> list[str]:
        """Names of the features that are numbers."""
        return [name for name, feature in self.features.items() if feature["dtype"].startswith(_NUMBERS)]

    def kept(self, episodes: Array) -> DatasetIndex:
        return replace(
            self,
            episode=self.episode[episodes],
            lengths=self.lengths[episodes],
            file=self.file[episodes],
            first=self.first[episodes],
            videos={
                name: VideoSpans(files=v.files, file=v.file[episodes], first=v.first[episodes])
                for name, v in self.videos.items()
            },
            instructions=[self.instructions[e] for e in episodes],
            columns={name: [values[e] for e in episodes] for name, values in self.columns.items()},
        )


def read_info(folder: Path, sums: Checksums | None = None) -> dict[str, Any]:
    """Returns meta/info.json. Raises `DatasetError`: it is missing, changed, cut short, or lacks an entry."""
    path = folder / lay.INFO
    if not path.is_file():
        if is_store(folder) and (folder / "data").is_dir():
            raise DatasetError(f"{path}: it is missing, and data/ holds episodes. Restore it from a copy.")
        if is_store(folder):
            raise DatasetError(not_written(folder))
        raise DatasetError(
            f"{folder}: no meta/info.json in it, so it is no LeRobot dataset. Give the folder that holds "
            f"meta/ and data/; `robot-rl collect out={folder}` makes one."
        )
    info = (Checksums(folder) if sums is None else sums).json(lay.INFO)
    for entry in ("codebase_version", "fps", "features", "data_path", "total_episodes"):
        if entry not in info:
            raise DatasetError(
                f"{path}: entry {entry!r} is missing, it has {sorted(info)}. Restore the file."
            )
    for entry, what, is_good in _ENTRIES:
        if entry in info and not is_good(info[entry]):
            raise DatasetError(
                f"{path}: {entry} is {str(info[entry])[:60]!r}, allowed: {what}. Restore the file."
            )
    for name, feature in info["features"].items():
        if not _is_feature(feature):
            raise DatasetError(
                f"{path}: feature {name!r} is {str(feature)[:60]!r}, allowed: a dtype and a shape of whole "
                "numbers. Restore the file from a copy."
            )
    return info


def read_stats(folder: Path, sums: Checksums) -> dict[str, dict[str, Any]]:
    """Returns meta/stats.json; empty if there is none.

    Raises:
        DatasetError: it has changed, or holds other values than numbers.
    """
    if not (folder / lay.STATS).is_file():
        return {}
    stats = sums.json(lay.STATS)
    try:
        for of in stats.values():
            for value in of.values():
                np.asarray(value, np.float64)
    except NOT_UNDERSTOOD as error:
        raise DatasetError(not_understood(folder / lay.STATS, error)) from error
    return stats


def picture_shape(feature: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns (h, w, 3) of a camera's pictures; some datasets declare the channels first."""
    shape = tuple(feature["shape"])
    return (*shape[1:], 3) if len(shape) == 3 and shape[2] != 3 and shape[0] == 3 else shape


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_feature(feature: Any) -> bool:
    if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
        return False
    shape, dtype = feature.get("shape"), feature["dtype"]
    try:
        np.dtype(dtype if dtype.startswith(_NUMBERS) else "uint8")
    except TypeError:
        return False
    return isinstance(shape, list | tuple) and all(_is_count(size) for size in shape)


_ENTRIES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("fps", "a rate above 0 in Hz", lambda fps: _is_number(fps) and 0 < fps < math.inf),
    ("total_episodes", "a whole number from 0", _is_count),
    ("features", "an object", lambda features: isinstance(features, dict)),
    ("data_path", "a path with places for the numbers", lambda path: isinstance(path, str)),
    ("video_path", "a path or null", lambda path: path is None or isinstance(path, str)),
    ("robot_type", "a name or null", lambda name: name is None or isinstance(name, str)),
)
"""Entry of meta/info.json, the allowed values in words, and a test of them."""


def read_v3(
    folder: Path, info: dict[str, Any], sums: Checksums, known: dict[Path, Any] | None = None
) -> DatasetIndex:
    """Returns the index of a dataset of version 3.

    Args: known: tables read before, by path; those of unchanged files are not read again.

    Raises:
        DatasetError: missing or damaged metadata, or an episode that is listed twice or not at all.
    """
    if not info["total_episodes"]:
        raise DatasetError(not_written(folder))
    table = _episode_table(folder, sums, {} if known is None else known)
    videos = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    _check_columns(folder, table.column_names, videos)
    rows = {name: table[name].to_pylist() for name in table.column_names}
    order = np.argsort(np.asarray(rows["episode_index"], np.int64), kind="stable")
    # meta/info.json is replaced last: episodes that it does not count are not committed.
    order = order[np.asarray(rows["episode_index"], np.int64)[order] < info["total_episodes"]]
    columns = {name: [values[i] for i in order] for name, values in rows.items()}
    episode = np.asarray(columns["episode_index"], np.int64)
    check_listed(f"{folder}: meta/episodes", episode, int(info["total_episodes"]))
    tasks = _read_tasks(folder, sums)
    start = np.asarray(columns["dataset_from_index"], np.int64)
    lengths = np.asarray(columns["length"], np.int64)
    files, file = _files(columns, "data", info["data_path"])
    first_of_file = np.full(len(files), np.iinfo(np.int64).max)
    np.minimum.at(first_of_file, file, start)
    first = start - first_of_file[file] if len(file) else start
    listed_of = columns.get("tasks", [None] * len(episode))
    instructions = first_instructions(folder, listed_of, tasks, files, file, first, sums)
    return DatasetIndex(
        folder=folder,
        info=info,
        tasks=tasks,
        episode=episode,
        lengths=lengths,
        files=files,
        file=file,
        first=first,
        videos={name: _spans(info, columns, name) for name in videos},
        instructions=instructions,
        sums=sums,
        columns={name: columns[name] for name in ("device", "store_episode") if name in columns},
    )


def first_instructions(
    folder: Path,
    listed_of: Sequence[Sequence[str] | None],
    tasks: dict[int, str],
    files: Sequence[str],
    file: Array,
    first: Array,
    sums: Checksums,
) -> list[str]:
    """Returns the first instruction of every episode, (E,).

    Args:
        listed_of: instructions that meta/ lists for each episode; if none, the first row of it names one.
        files: data files below the folder.
        file: (E,): which of them.
        first: (E,): first row of the episode in its file.
    """
    opened: dict[str, Array] = {}
    instructions: list[str] = []
    for episode, texts in enumerate(listed_of):
        if texts:
            instructions.append(texts[0])
            continue
        at = files[int(file[episode])]
        if at not in opened:
            opened[at] = _task_column(folder, at, sums)
        column, row = opened[at], int(first[episode])
        # Reading its episodes reports a file that is missing or too short.
        instructions.append(tasks.get(int(column[row]), "") if row < len(column) else "")
    return instructions


def columns_of(index: DatasetIndex, file: str) -> list[str]:
    """Returns the columns of a data file under the names that are read; none if the file is missing.

    Raises:
        DatasetError: it is damaged.
    """
    path = index.folder / file
    if not path.is_file():
        return []
    index.sums.require(file)
    read_as = {old: new for new, old in index.renamed.items()}
    names: list[str] = read_schema(path).names
    return [read_as.get(name, name) for name in names]


def _task_column(folder: Path, file: str, sums: Checksums) -> Array:
    """Returns the task_index of every row of a data file; nothing if it has no such column."""
    if not (folder / file).is_file():
        return np.zeros(0, np.int64)
    is_whole = sums.require(file)
    table = read_table(folder / file, "task_index".__eq__, is_whole=is_whole)
    return table["task_index"].to_numpy() if table.column_names else np.zeros(0, np.int64)


def _episode_table(folder: Path, sums: Checksums, known: dict[Path, Any]) -> Any:
    paths = listed(folder / "meta/episodes", "*/*.parquet")
    if not paths:
        raise DatasetError(
            f"{folder}: no meta/episodes/*/*.parquet, so it is unknown where an episode begins. "
            "Restore the folder from a copy, or write the dataset again from its data files."
        )

    changed: dict[Path, tuple[Any, bool]] = {}
    for path in paths:  # not in the pool: threads with many short waits would compete for Python's lock
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if known.get(path, (None,))[0] != stamp:
            changed[path] = stamp, sums.require(str(path.relative_to(folder)))

    def read(path: Path) -> None:
        stamp, is_whole = changed[path]
        table = read_table(path, lambda name: not name.startswith("stats/"), is_whole=is_whole)
        known[path] = (stamp, table)

    # A file has hundreds of columns of statistics, and its footer takes milliseconds.
    with ThreadPoolExecutor() as pool:
        list(pool.map(read, changed))
    return pa.concat_tables([known[path][1] for path in paths], promote_options="permissive")


def read_table(
    path: Path, wanted: Callable[[str], bool] = lambda name: True, *, is_whole: bool = False
) -> Any:
    """Returns the columns of a parquet file whose names are wanted.

    Args: is_whole: the file was compared as a whole; else its pages are compared one by one.

    Raises:
        DatasetError: it is damaged, or it has no footer because its writer was killed.
    """
    with _parquet_errors(path), pq.ParquetFile(path, page_checksum_verification=not is_whole) as file:
        return file.read(columns=[name for name in file.schema_arrow.names if wanted(name)])


def episode_tables(
    folder: Path, sums: Checksums, wanted: Callable[[str], bool] = lambda name: True
) -> list[Any]:
    """Returns the tables in meta/episodes, compared with their checksums, with the wanted columns."""
    tables: list[Any] = []
    for path in listed(folder / "meta/episodes", "*/*.parquet"):
        sums.require(str(path.relative_to(folder)))
        tables.append(read_table(path, wanted))
    return tables


def read_schema(path: Path) -> Any:
    """Returns the columns of a parquet file; raises `DatasetError` if its footer cannot be read."""
    with _parquet_errors(path):
        return pq.read_schema(path)


@contextmanager
def _parquet_errors(path: Path) -> Generator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk
            raise
        raise DatasetError(cut_short(path, error)) from error


def not_written(folder: Path) -> str:
    """Returns the message for a dataset that was begun, and has no episode yet."""
    if is_store(folder):
        return (
            f"{folder}: nothing is sealed in it yet. Its episodes are in the journal, also where a seal was "
            f"interrupted: `robot-rl replay seal {folder}` begins it, or goes on with it."
        )
    return (
        f"{folder}: {lay.INFO} counts no episode: the command that writes them was interrupted, or wrote "
        "none. Run it again."
    )


def cut_short(path: Path, error: Exception) -> str:
    """Returns the message for a parquet file that cannot be read."""
    if "CRC checksum" in str(error):
        return (
            f"{path}: a page does not match its checksum: bytes of the file have changed since it was "
            "written. Copy it again, or drop its episodes."
        )
    return (
        f"{path}: no readable parquet file ({first_line(error)}); its writer was killed, or the copy "
        "stopped early. Copy it again, or drop its episodes (on_damage=skip)."
    )


def not_understood(at: Path, error: Exception) -> str:
    """Returns the message for a file or folder whose content makes no sense."""
    return (
        f"{at}: its content makes no sense ({type(error).__name__}: {first_line(error)}): bytes "
        "have changed, or another program wrote it. Restore it from a copy."
    )


def first_line(error: Exception) -> str:
    """Returns the beginning of another library's message, cut between words."""
    return textwrap.shorten((str(error).splitlines() or [""])[0], 100, placeholder=" ...")


def _check_columns(folder: Path, names: list[str], videos: list[str]) -> None:
    """Refuses metadata without the columns that locate an episode."""
    places = ("data", *(f"videos/{name}" for name in videos))
    needed = ["episode_index", "length", "dataset_from_index"]
    needed += [f"{place}/{number}_index" for place in places for number in ("chunk", "file")]
    needed += [f"videos/{name}/from_timestamp" for name in videos]
    absent = [name for name in needed if name not in names]
    if absent:
        raise DatasetError(
            f"{folder}: meta/episodes has no column {absent[0]!r}, so the place of an episode is unknown. "
            "Restore meta/episodes from a copy."
        )


def check_listed(at: str, episode: Array, total: int) -> None:
    """Refuses metadata `at` that lists one of the ascending episodes twice, or not at all."""
    twice = episode[1:][np.diff(episode) == 0]
    if len(twice):
        raise DatasetError(
            f"{at} lists episode {int(twice[0])} more than once. Remove the file or line that repeats it: "
            "two writers, or a resumed one, wrote the same number."
        )
    if len(episode) != total:
        absent = np.setdiff1d(np.arange(total), episode)
        missing = f"; episode {int(absent[0])} is missing" if len(absent) else ""
        raise DatasetError(
            f"{at} lists {len(episode)} episodes, meta/info.json counts {total}{missing}. Restore it, or "
            "correct total_episodes."
        )


def _read_tasks(folder: Path, sums: Checksums) -> dict[int, str]:
    path = folder / "meta/tasks.parquet"
    if not path.is_file():
        raise DatasetError(f"{folder}: no meta/tasks.parquet, so no instruction is known. Restore the file.")
    sums.read(lay.TASKS)
    table = read_table(path)
    # pandas writes the instruction as its index, under the name it had: `task`, or none.
    text = "task" if "task" in table.column_names else "__index_level_0__"
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))


def _files(columns: dict[str, list[Any]], at: str, path: str, **names: str) -> tuple[list[str], Array]:
    """Returns the files in order of first use, and the one in which each episode lies."""
    pairs = list(zip(columns[f"{at}/chunk_index"], columns[f"{at}/file_index"], strict=True))
    number = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
    files = [path.format(chunk_index=chunk, file_index=index, **names) for chunk, index in number]
    return files, np.asarray([number[pair] for pair in pairs], np.int64)


def _spans(info: dict[str, Any], columns: dict[str, list[Any]], name: str) -> VideoSpans:
    files, file = _files(columns, f"videos/{name}", info["video_path"], video_key=name)
    began_s = np.asarray(columns[f"videos/{name}/from_timestamp"], np.float64)
    return VideoSpans(files=files, file=file, first=np.rint(began_s * info["fps"]).astype(np.int64))
