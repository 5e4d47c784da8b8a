"""Copies episodes of LeRobotDatasets into a new one of version 3, with everything that they hold.

Rows are copied whole, unknown columns included; only the numbers of episodes, rows and texts change. Videos
are copied packet by packet. Statistics of numbers are computed again, those of pictures are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import json_bytes, write_synced
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.batch import episode_table
from robot_rl.data.lerobot.encode import ArrayFile
from robot_rl.data.lerobot.foreign import (
    Moved,
    copy_foreign,
    refuse_not_fetched,
    refuse_unlisted,
)
from robot_rl.data.lerobot.index import DatasetIndex, episode_tables, first_line, read_stats
from robot_rl.data.lerobot.layout import place, placed
from robot_rl.data.lerobot.own_files import OwnFiles
from robot_rl.data.lerobot.parquet import TableFile, table_bytes, write_table
from robot_rl.data.lerobot.remux import Stretch, copy_stretches
from robot_rl.data.lerobot.stats import aggregate, of_columns, to_json
from robot_rl.data.lerobot.tables import Tables, flat_names, numbers, row_problems, rows_of
from robot_rl.data.lerobot.texts import JoinedTexts, tasks_of, text_tables
from robot_rl.data.lerobot.v21 import read_episode_stats, read_lines

logger = logging.getLogger(__name__)

Array = NDArray[Any]

_MB = 1 << 20
_CACHED_BYTES = 1 << 26
_ROW_GROUP_BYTES = 64 * _MB
_OF_OLD = ("total_chunks", "total_videos")
_TASK = "task_index"
PLACED = ("episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index", "store_episode")
"""Columns of meta/episodes that the new dataset computes itself; so are those that begin with `PLACES`."""
PLACES = ("data/", "videos/", "meta/episodes/", "stats/")
_SIZES = ("chunks_size", "data_files_size_in_mb", "video_files_size_in_mb")
_TOTALS = ("total_episodes", "total_frames", "total_tasks")
_WRITTEN = ("codebase_version", "splits", "data_path", "video_path", "features")
ENTRIES = ("robot_type", "fps", *_SIZES, *_TOTALS, *_WRITTEN, *_OF_OLD)
"""Entries of meta/info.json that LeRobot knows."""
_FEATURE = ("dtype", "shape", "names", "info")
_STATS = ("min", "max", "mean", "std", "count")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Episodes of one dataset, in the order in which they are copied."""

    index: DatasetIndex
    episodes: Sequence[int]
    """Places in the index."""


def copy_episodes(
    parts: Sequence[Part],
    new: Path,
    *,
    drop: Collection[str] = (),
    apart: bool = False,
    keep_texts: bool = False,
) -> None:
    """Writes the episodes of all parts, one part after the other, into an empty folder.

    Args:
        parts: of datasets with the same features.
        new: the folder.
        drop: columns, files and entries of meta/info.json that are left out.
        apart: each data and video file becomes one new file; else they are joined.
        keep_texts: also keeps instructions that no row names; of one part.

    Raises:
        DatasetError: damage, a number without a text, files of one name or entries of meta/info.json that
            differ, files whose episodes are unknown, or links to files that were not fetched.
    """
    for part in parts:
        refuse_unlisted(part.index, drop)
        refuse_not_fetched(part.index, drop)
        part.index.sums.require_all_others()
    info = _joined_info(parts, drop)
    copy = _Copy(parts, new, drop, apart, keep_texts)
    try:
        for number, part in enumerate(parts):
            for episode in part.episodes:
                copy.add(number, episode)
        copy.finish()
    except BaseException:
        copy.files.abandon()
        raise
    numbers: list[dict[int, list[int]]] = [{} for _ in parts]
    for new_number, (part, episode) in enumerate(copy.order):
        numbers[part].setdefault(int(parts[part].index.episode[episode]), []).append(new_number)
    moved = [
        Moved(index=source.index, numbers=of, known=source.row_of.keys())
        for source, of in zip(copy.sources, numbers, strict=True)
    ]
    copy_foreign(moved, new, drop)
    _write_info(parts, copy, info, drop)


class Source:
    """One dataset that is read."""

    def __init__(self, index: DatasetIndex) -> None:
        self.index = index
        self.tables = Tables(index.folder, _CACHED_BYTES, index.sums, renamed=index.renamed)
        self.own_files = OwnFiles(index, self.tables)
        self.rows = episode_rows(index)
        self.row_of = {n: row for row, n in enumerate(self.rows["episode_index"].to_pylist())}
        self.old_stats = {} if _is_v3(index) else read_episode_stats(index.folder, index.sums)
        self.words = text_tables(index.folder, index.sums)
        if not _is_v3(index):
            self.words[_TASK] = tasks_of(index.tasks)

    def path(self, episode: int) -> Path:
        return self.index.folder / self.index.files[self.index.file[episode]]

    def table(self, episode: int) -> Any:
        """Returns the rows of an episode, all columns."""
        at, first = self.index, int(self.index.first[episode])
        return self.tables.rows(at.files[at.file[episode]], first, int(at.lengths[episode]), None)

    def picture_stats(self, episode: int) -> dict[str, Any]:
        """Returns the recorded statistics of an episode's pictures."""
        names = self.index.named("image", "video")
        number = int(self.index.episode[episode])
        if not _is_v3(self.index):
            of_episode = self.old_stats.get(number, {})
            stored = {name: self.index.renamed.get(name, name) for name in names}
            return {name: of_episode[old] for name, old in stored.items() if old in of_episode}
        row = self.rows.slice(self.row_of[number], 1)
        read_as = {old: new for new, old in self.index.renamed.items()}
        columns: list[str] = row.column_names
        stats: dict[str, dict[str, Any]] = {}
        for column in columns:
            kind, _, name = column.partition("/")
            stored, _, stat = name.rpartition("/")
            feature = read_as.get(stored, stored)
            value = row[column][0].as_py() if kind == "stats" and feature in names else None
            if value is not None:
                stats.setdefault(feature, {})[stat] = value
        return stats


class _Copy:
    """The new dataset while it is being written."""

    def __init__(
        self, parts: Sequence[Part], new: Path, drop: Collection[str], apart: bool, keep_texts: bool
    ) -> None:
        self.order: list[tuple[int, int]] = []
        """Part and place in its index of every new episode."""
        self.stats: list[dict[str, Any]] = []
        self.steps = 0
        self.new, self.drop = new, drop
        self._parts, self._apart = parts, apart
        self.sources = [Source(part.index) for part in parts]
        columns = dict.fromkeys(column for source in self.sources for column in source.words)
        self.words = {
            column: JoinedTexts(
                column,
                [source.words.get(column) for source in self.sources],
                keep_all=keep_texts or column != _TASK,
            )
            for column in columns
            if column not in drop
        }
        self._rows: list[dict[str, Any]] = []
        limit = float(parts[0].index.info.get("data_files_size_in_mb", 100)) * _MB
        self.files = DataFiles(new, limit, apart=apart)

    @cached_property
    def whole_stats(self) -> list[dict[str, Any]]:
        """Statistics of pictures in meta/stats.json of every part, under the names that are read."""
        found: list[dict[str, Any]] = []
        for index in (part.index for part in self._parts):
            stats = read_stats(index.folder, index.sums)
            stored = {name: index.renamed.get(name, name) for name in index.named("image", "video")}
            found.append({name: stats[old] for name, old in stored.items() if old in stats})
        return found

    def add(self, part: int, episode: int) -> None:
        source, number = self.sources[part], len(self.order)
        index, table = source.index, source.table(episode)
        length = int(index.lengths[episode])
        rows = rows_of(table, index, index.files[index.file[episode]])
        at = f"{index.folder}: episode {index.episode[episode]}"
        for kind, problem in row_problems(index, episode, rows):
            raise DatasetError(f"{at}: {kind}: {problem}. Repair it first, or leave it out.")
        tasks = self._tasks(part, episode, rows)
        changed: dict[str, Array] = {
            "episode_index": np.full(length, number),
            "index": self.steps + np.arange(length),
        }
        for column, words in self.words.items():
            if column in table.column_names:
                changed[column] = words.renumbered(part, numbers(table[column], ()), at)
        for column in changed.keys() & set(table.column_names):
            field = table.schema.field(column)
            values = pa.array(changed[column]).cast(field.type)
            table = table.set_column(table.column_names.index(column), field, values)
        rows |= {column: values for column, values in changed.items() if column in rows}
        drop = {*self.drop, *index.left_out}
        table = table.drop_columns([name for name in table.column_names if name in drop])
        file = self.files.add(table, source, episode, number, drop)
        self._rows.append(
            {
                "episode_index": number,
                "tasks": tasks,
                "length": length,
                **placed("data", file),
                "dataset_from_index": self.steps,
                "dataset_to_index": self.steps + length,
                "store_episode": None,
                **placed("meta/episodes", 0),
            }
        )
        stats = {**number_stats(rows, index), **source.picture_stats(episode)}
        self.stats.append({name: of for name, of in stats.items() if name not in self.drop})
        self.order.append((part, episode))
        self.steps += length

    def finish(self) -> None:
        """Completes the data files, and writes videos, meta/episodes and the tables of texts."""
        if not self.order:
            raise DatasetError("no episode is left to write. Choose other episodes, or a weaker test.")
        self.files.finish()
        picked = [(self.sources[part].index, episode) for part, episode in self.order]
        limit = float(self._parts[0].index.info.get("video_files_size_in_mb", 200)) * _MB
        for name in self._parts[0].index.videos:
            if name not in self.drop:
                copy_videos(name, picked, self.new, self._rows, limit=limit, apart=self._apart)
        path = self.new / place(lay.EPISODES, 0)
        path.parent.mkdir(parents=True)
        write_table(path, self._episode_table())
        for column, words in self.words.items():
            name = f"meta/{column.removesuffix('_index')}s.parquet"
            write_synced(self.new / name, table_bytes(words.table()))

    def _tasks(self, part: int, episode: int, rows: dict[str, Any]) -> list[str]:
        """Returns the instructions of an episode: those in meta/, then others of its rows."""
        source = self.sources[part]
        tasks, row = source.index.tasks, source.row_of[int(source.index.episode[episode])]
        texts: list[str] = []
        if "tasks" in source.rows.column_names:
            texts += source.rows["tasks"][row].as_py() or []
        named = rows.get(_TASK, np.zeros(0, np.int64))
        for number in named[np.sort(np.unique(named, return_index=True)[1])].tolist():
            texts += [tasks[number]] if number in tasks else []
        for number, text in tasks.items():
            if text in texts:
                self.words[_TASK].number(part, number)
        return list(dict.fromkeys(texts))

    def _episode_table(self) -> Any:
        """Returns meta/episodes: new columns, statistics, then the columns of others."""
        columns = stats_columns(self.stats)
        rows = [{**row, **of} for row, of in zip(self._rows, columns, strict=True)]
        table = episode_table(rows)
        others: list[Any] = []
        for source, part in zip(self.sources, self._parts, strict=True):
            known = {*PLACED, *self.drop, *(n for n in source.rows.column_names if n.startswith(PLACES))}
            names = [name for name in source.rows.column_names if name not in known]
            numbers = [source.row_of[int(part.index.episode[episode])] for episode in part.episodes]
            # With a column that all have: a table without columns has no rows.
            others.append(source.rows.select(["length", *names]).take(pa.array(numbers, pa.int64())))
        other = pa.concat_tables(others, promote_options="permissive")
        for name in other.column_names[1:]:
            table = table.append_column(name, other[name])
        return table


class DataFiles:
    """The data files of a new dataset, with our own files of each; the last one is being written."""

    def __init__(self, new: Path, limit: float, *, apart: bool = False) -> None:
        """Args: limit: bytes at which the next file begins; apart: each old file becomes one new file."""
        self._new, self._limit, self._apart = new, limit, apart
        self._number = -1
        self._schema: Any = None
        self._origin: Path | None = None
        self._finals: list[Any] = []
        self._arrays: dict[str, ArrayFile] = {}
        self._file: TableFile | None = None

    def add(self, table: Any, source: Source, episode: int, number: int, drop: Collection[str] = ()) -> int:
        """Appends an episode, in row groups that fit into the memory; returns the number of its file.

        Args:
            table: its rows.
            source: of the episode.
            episode: place in the index.
            number: of the new episode.
            drop: columns of `final/` that are left out.
        """
        file = self._file_for(table, source.path(episode))
        step = max(1, len(table) * _ROW_GROUP_BYTES // max(1, table.nbytes))
        for first in range(0, len(table), step):
            file.add(table.slice(first, step))
        final = source.own_files.final_row(episode) if source.own_files.own else None
        if final is not None:
            final = final.drop_columns([name for name in final.column_names if name in drop])
            at = final.column_names.index("episode_index")
            self._finals.append(final.set_column(at, "episode_index", pa.array([number], pa.int64())))
        for key in source.own_files.arrays():
            values = source.own_files.steps(key, episode, 0)
            if key not in self._arrays:
                path = self._path(lay.ARRAYS, key=key)
                self._arrays[key] = ArrayFile(path, str(values.dtype), values.shape[1:])
            self._arrays[key].add(values)
        return self._number

    def finish(self) -> None:
        """Completes the file that is being written, if there is one."""
        if self._file is None:
            return
        self._file.finish()
        for array in self._arrays.values():
            array.finish()
        if self._finals:
            write_table(self._path(lay.FINAL), pa.concat_tables(self._finals))
        self._file, self._finals, self._arrays = None, [], {}

    def abandon(self) -> None:
        for file in (self._file, *self._arrays.values()):
            if file is not None:
                file.abandon()

    def _file_for(self, table: Any, origin: Path) -> TableFile:
        """Returns the file that rows go into: a new one where they do not fit into the last."""
        if self._file is not None:
            is_of_it = not self._apart or origin == self._origin
            if is_of_it and self._schema.equals(table.schema) and self._file.bytes < self._limit:
                return self._file
            self.finish()
        self._number += 1
        self._schema, self._origin = table.schema, origin
        self._file = TableFile(self._path(lay.DATA), table.schema)
        return self._file

    def _path(self, template: str, **names: str) -> Path:
        path = self._new / place(template, self._number, **names)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def copy_videos(
    name: str,
    picked: Sequence[tuple[DatasetIndex, int]],
    new: Path,
    rows: Sequence[dict[str, Any]],
    *,
    limit: float,
    apart: bool = False,
) -> None:
    """Copies the videos of one camera, and notes in `rows` of meta/episodes where each episode lies.

    Args:
        name: LeRobot's name of the camera.
        picked: index and place in it of every new episode.
        new: folder of the new dataset.
        rows: one of each new episode.
        limit: largest new file, in bytes.
        apart: each old file becomes one new file.
    """
    stretches: list[Stretch] = []
    for index, episode in picked:
        spans = index.videos[name]
        file = spans.files[spans.file[episode]]
        index.sums.require(file)
        first, frames = int(spans.first[episode]), int(index.lengths[episode])
        stretches.append(Stretch(path=index.folder / file, first=first, frames=frames))
    fps, at = picked[0][0].info["fps"], f"videos/{name}"

    def target(number: int) -> Path:
        return new / place(lay.VIDEO, number, video_key=name)

    places = copy_stretches(stretches, target, fps=fps, limit=limit, apart=apart)
    for row, stretch, (number, first) in zip(rows, stretches, places, strict=True):
        row |= placed(at, number)
        row[f"{at}/from_timestamp"] = first / fps
        row[f"{at}/to_timestamp"] = (first + stretch.frames) / fps


def _write_info(parts: Sequence[Part], copy: _Copy, info: dict[str, Any], drop: Collection[str]) -> None:
    """Writes statistics, meta/robot_rl.json, and last meta/info.json, from `info` of the parts."""
    new = copy.new
    write_synced(new / lay.STATS, json_bytes(to_json(_joined_stats(parts, copy, drop))))
    first = parts[0].index
    own = [source.own_files.own for source in copy.sources]
    if own[0]:
        drop = (*drop, *first.left_out)
        kept = {name: key for name, key in own[0]["features"].items() if name not in drop}
        dropped = set(own[0]["features"].values()) - set(kept.values())
        observations = {key: value for key, value in own[0]["observations"].items() if key not in dropped}
        task = own[0]["task"] if len({one["task"] for one in own}) == 1 else "mixed"
        changed = {"task": task, "features": kept, "observations": observations, "checksums": True}
        write_synced(new / lay.OWN, json_bytes({**own[0], **changed}))
    written = {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200, **info} | {
        "codebase_version": "v3.0",
        "total_episodes": len(copy.order),
        "total_frames": copy.steps,
        "total_tasks": len(copy.words[_TASK].table()),
        "chunks_size": lay.FILES_PER_CHUNK,
        "data_path": lay.DATA,
        "video_path": lay.VIDEO if first.videos else None,
    }
    write_synced(new / lay.INFO, json_bytes(written))


def _joined_stats(parts: Sequence[Part], copy: _Copy, drop: Collection[str]) -> dict[str, Any]:
    """Returns the statistics of all episodes.

    Those of pictures that meta/episodes lacks are taken from meta/stats.json, of parts that are a whole
    dataset.
    """
    stats: dict[str, Any] = aggregate(copy.stats)
    lost: list[str] = []
    for name in [n for n in parts[0].index.named("image", "video") if n not in drop and n not in stats]:
        found = [pieces for pieces in _picture_stats(parts, copy, name) if pieces is not None]
        pieces = [piece for each in found for piece in each]
        if len(found) < len(parts):
            lost += [name] if any(name in of for of in copy.whole_stats) else []
        elif len(pieces) == 1:
            stats[name] = pieces[0]
        else:
            stats |= aggregate([{name: piece} for piece in pieces])
    if lost:
        logger.warning(
            "%s: statistics of pictures are kept there for all episodes together; those of the chosen ones "
            "are unknown: %s. `robot-rl replay stats` computes them",
            parts[0].index.folder,
            ", ".join(lost),
        )
    return stats


def _joined_info(parts: Sequence[Part], drop: Collection[str]) -> dict[str, Any]:
    """Returns the entries of meta/info.json of all parts; raises `DatasetError` for entries that differ."""
    info: dict[str, Any] = {}
    for part in parts:
        for name, value in part.index.info.items():
            if name in _OF_OLD or (name in drop and name not in ENTRIES):
                continue
            if info.setdefault(name, value) != value and name not in ENTRIES:
                raise DatasetError(
                    f"{part.index.folder / lay.INFO}: {name} is {str(value)[:60]!r}, in another one "
                    f"{str(info[name])[:60]!r}, and they cannot be joined. Give all the same, or "
                    f"leave it out: drop={','.join([*drop, name])}"
                )
    features = {
        name: feature if _is_v3(parts[0].index) else {**feature, "names": list(flat_names(feature)) or None}
        for name, feature in joined_features([part.index for part in parts], drop).items()
    }
    total = sum(len(part.episodes) for part in parts)
    return {**info, "features": features, "splits": _splits(parts, total, drop)}


def joined_features(indexes: Sequence[DatasetIndex], drop: Collection[str] = ()) -> dict[str, Any]:
    """Returns the features but `drop`; of the description of videos, the entries that all share.

    Raises:
        DatasetError: other entries of a feature differ.
    """
    features = {name: dict(of) for name, of in indexes[0].features.items() if name not in drop}
    for index in indexes[1:]:
        for name, feature in features.items():
            other = index.features[name]
            if feature.get("info") and other.get("info") is not None:
                feature["info"] = {k: v for k, v in feature["info"].items() if other["info"].get(k) == v}
            for entry in [entry for entry in other if entry not in _FEATURE]:
                if feature.setdefault(entry, other[entry]) != other[entry]:
                    raise DatasetError(
                        f"{index.folder / lay.INFO}: {entry!r} of {name!r} is {str(other[entry])[:60]!r}, in "
                        f"the first {str(feature[entry])[:60]!r}, and they cannot be joined. Give the same."
                    )
    return features


def _splits(parts: Sequence[Part], total: int, drop: Collection[str]) -> dict[str, str]:
    """Returns the named ranges of episodes, where the episodes of one dataset keep their order.

    Raises:
        DatasetError: several ranges, of merged or reordered episodes.
    """
    named = parts[0].index.info.get("splits") or {}
    numbers = parts[0].index.episode[list(parts[0].episodes)]
    several = [part.index.folder for part in parts if len(part.index.info.get("splits") or ()) > 1]
    if not several or "splits" in drop:
        return {"train": f"0:{total}"}
    if len(parts) > 1 or (np.diff(numbers) <= 0).any():
        raise DatasetError(
            f"{several[0] / lay.INFO}: has several splits, which are ranges of episodes: they do not survive "
            f"a merge or another order. Leave them out: drop={','.join([*drop, 'splits'])}"
        )
    splits: dict[str, str] = {}
    for name, text in named.items():
        first, _, end = str(text).partition(":")
        if not (first.isdecimal() and end.isdecimal()):
            raise DatasetError(
                f"{parts[0].index.folder}: meta/info.json: split {name!r} is {text!r}, allowed: two numbers "
                "such as '0:80'. Correct it."
            )
        begin, after = np.searchsorted(numbers, (int(first), int(end))).tolist()
        splits[name] = f"{begin}:{after}"
    return splits


def _picture_stats(parts: Sequence[Part], copy: _Copy, name: str) -> Iterator[list[dict[str, Any]] | None]:
    """Yields the statistics of a camera in every part: of each episode, or of all; None if unknown."""
    begin = 0
    for part, whole in zip(parts, copy.whole_stats, strict=True):
        end = begin + len(part.episodes)
        each = [of[name] for of in copy.stats[begin:end] if name in of]
        is_all = len({*part.episodes}) == len(part.episodes) == part.index.info["total_episodes"]
        if len(each) == len(part.episodes):
            yield each
        elif is_all and all(stat in whole.get(name, ()) for stat in _STATS):
            yield [whole[name]]
        else:
            yield None
        begin = end


def number_stats(rows: dict[str, Any], index: DatasetIndex) -> dict[str, Any]:
    """Returns the statistics of an episode's numbers, in the shape of the feature."""
    stats = of_columns(rows)
    for name, of in stats.items():
        shape = tuple(index.features[name]["shape"])
        if len(shape) > 1:
            stats[name] = {k: v if k == "count" else v.reshape(shape) for k, v in of.items()}
    return stats


def stats_columns(stats: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the columns of meta/episodes with statistics, for every episode; None where it has none."""
    rows = [
        {f"stats/{name}/{key}": value for name, of in to_json(one).items() for key, value in of.items()}
        for one in stats
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def episode_rows(index: DatasetIndex) -> Any:
    """Returns the metadata of every episode as a table."""
    if not _is_v3(index):
        return _table_of(
            read_lines(index.folder, "meta/episodes.jsonl"), index.folder / "meta/episodes.jsonl"
        )
    return pa.concat_tables(episode_tables(index.folder, index.sums), promote_options="permissive")


def _table_of(lines: list[dict[str, Any]], path: Path) -> Any:
    """Returns JSON lines as a table with the entries of all lines; null where a line lacks one."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        try:
            columns[name] = pa.array([line.get(name) for line in lines])
        except (pa.ArrowException, OverflowError) as error:
            raise DatasetError(
                f"{path}: entry {name!r} has values of several types ({first_line(error)}), allowed: one. "
                "Correct them there."
            ) from error
    return pa.table(columns)


def _is_v3(index: DatasetIndex) -> bool:
    return str(index.info["codebase_version"]).startswith("v3")
