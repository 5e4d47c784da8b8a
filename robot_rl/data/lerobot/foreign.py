"""Files of others in a dataset, which neither LeRobot nor robot_rl writes: annotations, descriptions.

Every file that meta/ does not list is a file of others, hidden files too, wherever it lies. If such a file
names episodes, in its name or by `episode_index` in every line of JSON lines or row of parquet, the numbers
change with those of the episodes; for other texts that contain this word a warning says that they keep the
old numbers. A file that is named like those that hold episodes and that meta/ does not list (a video of a
camera that meta/info.json does not declare) is refused: its episodes are unknown.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.checksums import (
    FETCHED,
    MAIN,
    files_below,
    is_below,
    is_temporary,
    number_of,
    other_folders,
    refuse_dangling,
)
from robot_rl.data.lerobot.damage import last_file
from robot_rl.data.lerobot.index import DatasetIndex, read_table
from robot_rl.data.lerobot.parquet import write_table
from robot_rl.data.lerobot.texts import text_tables

logger = logging.getLogger(__name__)

_COLLECTED = "meta/collected.json"
"""Describes the episodes that were collected together."""
_FILES = (
    MAIN,
    lay.INFO,
    lay.STATS,
    lay.TASKS,
    lay.OWN,
    "meta/store.json",
    _COLLECTED,
    "meta/tasks.jsonl",
    "meta/episodes.jsonl",
    "meta/episodes_stats.jsonl",
)
FORMAT_1 = re.compile(r"final/observations\.parquet|arrays/[^/]*\.(steps|final)\.npy")
"""Of a dataset of ours of format 1: one file for all episodes."""
_EPISODES = re.compile(r"meta/episodes/[^/]+/[^/]+\.parquet")
_NUMBER = "episode_index"
_SAID = 3
"""Names in a warning."""
_TEXTS = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".yaml", ".yml")
_NAMED = re.compile(r"(episode_)(\d+)")


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The new numbers of the episodes of a dataset."""

    index: DatasetIndex
    numbers: Mapping[int, Sequence[int]]
    """Old number of an episode -> its new ones."""
    known: Collection[int]
    """Numbers of all episodes that meta/ lists."""

    @property
    def folder(self) -> Path:
        return self.index.folder


def foreign_files(index: DatasetIndex) -> list[str]:
    """Returns the files of others, below the folder and the folders that it links to."""
    found = files_below(index.folder)
    ours = {*_FILES, *episode_files(index, found)}
    ours |= {
        f"meta/{column.removesuffix('_index')}s.parquet" for column in text_tables(index.folder, index.sums)
    }
    others = other_folders(index.folder)
    return [name for name in found if name not in ours and not is_below(name, others)]


def episode_files(index: DatasetIndex, found: Sequence[str]) -> set[str]:
    """Returns the files that hold the episodes, and incomplete ones that a kill left.

    Args: found: all files of the dataset's folder.
    """
    files = {*index.files, *index.files_left_out, *(f for v in index.videos.values() for f in v.files)}
    last = max({last_file(index), *_numbers(index.files_left_out)})
    files |= {name for name in found if _EPISODES.fullmatch(name)}
    if (index.folder / lay.OWN).is_file():
        own = index.sums.json(lay.OWN)
        arrays = own.get("observations", {})
        for number in _numbers(index.files):
            files.add(lay.place(lay.FINAL, number))
            files |= {lay.place(lay.ARRAYS, number, key=key) for key in arrays}
        held = {*map(lay.camera_folder, files), *(f"arrays/{key}" for key in arrays)}
        files |= {
            name
            for name in found
            if lay.is_among(name, held) and (is_temporary(name) or any(n > last for n in _numbers([name])))
        }
        files |= {name for name in found if own.get("format", 1) == 1 and FORMAT_1.fullmatch(name)}
    return files


def _numbers(names: Iterable[str]) -> set[int]:
    return {number for number in map(number_of, names) if number is not None}


def say_left_out(index: DatasetIndex) -> None:
    """Warns of files that are not copied because they describe the old dataset alone."""
    names = [name for name in (_COLLECTED, *FETCHED) if (index.folder / name).exists()]
    if names:
        logger.warning("%s: of this dataset alone, not copied: %s", index.folder, ", ".join(names))


def to_drop(index: DatasetIndex, names: Sequence[str]) -> list[str]:
    """Returns the names of files for `drop`; for an undeclared camera, the name of its folder."""
    held = {lay.camera_folder(name) for name in episode_files(index, files_below(index.folder))}
    return [
        *dict.fromkeys(
            lay.camera_folder(name) if _is_unlisted(name) and lay.camera_folder(name) not in held else name
            for name in names
        )
    ]


def _is_unlisted(name: str) -> bool:
    """Returns whether a file of others has the name of a file of episodes."""
    return number_of(name) is not None


def refuse_unlisted(index: DatasetIndex, drop: Collection[str] = ()) -> None:
    """Raises `DatasetError` for files with names of episode files that meta/ does not list."""
    unlisted = [name for name in foreign_files(index) if _is_unlisted(name) and not is_below(name, drop)]
    if unlisted:
        names = to_drop(index, unlisted)
        raise DatasetError(
            f"{index.folder}: {', '.join(names)}: meta/ does not list this, so its episodes are "
            f"unknown. Move it out of the dataset, or leave it out where drop= is taken: "
            f"drop={','.join([*drop, *names])}"
        )


def refuse_not_fetched(index: DatasetIndex, drop: Collection[str]) -> None:
    """Raises `DatasetError` for the first file of others that is a link to a missing file."""
    names = [name for name in foreign_files(index) if not is_below(name, drop)]
    refuse_dangling(index.folder, names, "or leave it out: drop={name}")


def copy_foreign(sources: Sequence[Moved], new: Path, drop: Collection[str]) -> None:
    """Copies the files of others, with the episodes' new numbers.

    Raises:
        DatasetError: a file has changed, names an episode that meta/ does not list, or two sources have
            different ones of one name.
    """
    files = [dict.fromkeys(foreign_files(source.index)) for source in sources]
    as_they_are: list[tuple[Moved, str]] = []
    for name in dict.fromkeys(name for names in files for name in names):
        if is_below(name, drop):
            continue
        holders = [source for source, names in zip(sources, files, strict=True) if name in names]
        for source in holders:
            source.index.sums.require(name)
        target = new / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if _NAMED.search(target.name):
            as_they_are += [(source, name) for source in holders if not _copy_named(source, name, new)]
        elif not _copy_numbered(holders, name, target):
            _refuse_different(holders, name)
            shutil.copyfile(holders[0].folder / name, target)
            as_they_are += [(source, name) for source in holders]
    for source in sources:
        _warn_of_numbers(source, [name for of, name in as_they_are if of is source])


def _new_numbers(source: Moved, name: str, number: int) -> Sequence[int]:
    if number not in source.known:
        raise DatasetError(
            f"{source.folder / name}: names episode {number}, which meta/ does not list. Correct the file, "
            f"or leave it out: drop={name}"
        )
    return source.numbers.get(number, ())


def _copy_named(source: Moved, name: str, new: Path) -> bool:
    """Copies the file of one episode to a name with the new number.

    Returns:
        Whether the numbers in its content were changed too; else the content is unchanged.
    """
    path = Path(name)
    found = _NAMED.search(path.name)
    assert found is not None
    old, is_numbered = int(found[2]), True
    for number in _new_numbers(source, name, old):
        renamed = _NAMED.sub(rf"\g<1>{number:0{len(found[2])}d}", path.name, count=1)
        target = new / path.with_name(renamed)
        if not _copy_numbered([replace(source, numbers={**source.numbers, old: [number]})], name, target):
            shutil.copyfile(source.folder / path, target)
            is_numbered = False
    return is_numbered


def _copy_numbered(holders: Sequence[Moved], name: str, target: Path) -> bool:
    """Joins files whose lines or rows name their episodes; returns False if these do not."""
    if name.endswith(".jsonl") and all(_numbered_lines(source.folder / name) for source in holders):
        target.write_text("".join(line for source in holders for line in _lines(source, name)))
        return True
    if name.endswith(".parquet") and all(_is_numbered_table(source.folder / name) for source in holders):
        joined = _rows(holders[0], name)
        for other in holders[1:]:
            try:
                joined = pa.concat_tables([joined, _rows(other, name)], promote_options="permissive")
            except pa.ArrowException as error:
                raise _differ(holders[0], other, name, f" ({error})") from error
        write_table(target, joined)
        return True
    return False


def _warn_of_numbers(source: Moved, names: Sequence[str]) -> None:
    """Warns of texts that keep the old numbers of episodes because they were copied unchanged."""
    is_moved = any(list(source.numbers.get(number, ())) != [number] for number in source.known)
    texts = [name for name in names if name.endswith(_TEXTS)] if is_moved else []
    found = [name for name in texts if _NUMBER.encode() in (source.folder / name).read_bytes()]
    if found:
        logger.warning(
            "%s: %s of %s%s has still the numbers that the episodes had: such a file is copied as it is. "
            "Correct it in the new dataset, or leave it out: drop=NAME",
            source.folder,
            _NUMBER,
            ", ".join(found[:_SAID]),
            f" and {len(found) - _SAID} more files" if len(found) > _SAID else "",
        )


def _refuse_different(holders: Sequence[Moved], name: str) -> None:
    first = (holders[0].folder / name).read_bytes()
    for other in holders[1:]:
        if (other.folder / name).read_bytes() != first:
            raise _differ(holders[0], other, name)


def _differ(one: Moved, other: Moved, name: str, why: str = "") -> DatasetError:
    return DatasetError(
        f"{one.folder / name} and {other.folder / name} differ{why}, and they cannot be joined. "
        f"Bring them to the same content, or leave them out: drop={name}"
    )


def _numbered_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file if every line names its episode, else none."""
    try:
        lines = [json.loads(line) for line in path.read_text().split("\n") if line.strip()]
    except ValueError:
        return []
    return (
        lines if all(isinstance(line, dict) and isinstance(line.get(_NUMBER), int) for line in lines) else []
    )


def _lines(source: Moved, name: str) -> list[str]:
    return [
        json.dumps({**line, _NUMBER: number}) + "\n"
        for line in _numbered_lines(source.folder / name)
        for number in _new_numbers(source, name, line[_NUMBER])
    ]


def _is_numbered_table(path: Path) -> bool:
    try:
        return _NUMBER in pq.read_schema(path).names
    except (pa.ArrowException, OSError):
        return False


def _rows(source: Moved, name: str) -> Any:
    table = read_table(source.folder / name)
    moved = [
        (row, number)
        for row, old in enumerate(table[_NUMBER].to_pylist())
        for number in _new_numbers(source, name, old)
    ]
    field = table.schema.field(_NUMBER)
    taken = table.take(pa.array([row for row, _ in moved], pa.int64()))
    return taken.set_column(
        table.column_names.index(_NUMBER), field, pa.array([number for _, number in moved], field.type)
    )
