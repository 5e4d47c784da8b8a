"""Files of a dataset that neither LeRobot nor robot_rl knows: annotations, descriptions, licences.

They are known by what meta/ lists, not by where they lie: whatever else is in a dataset, hidden files too, is
a file of others. Where such a file names episodes, by an entry `episode_index` or in its own name, the
numbers are changed with those of the episodes. Where a file is named as those that hold episodes and meta/
does not list it (a video of a camera that meta/info.json does not declare), nobody knows which episodes are
in it: it is refused.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    folders_beside,
    is_below,
    is_temporary,
    number_of,
    refuse_dangling,
)
from robot_rl.data.lerobot.damage import last_file
from robot_rl.data.lerobot.index import DatasetIndex, read_table
from robot_rl.data.lerobot.parquet import write_table
from robot_rl.data.lerobot.words import word_tables

logger = logging.getLogger(__name__)

_COLLECTED = "meta/collected.json"
"""Of the episodes as they were collected together."""
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
_FORMAT_1 = re.compile(r"final/observations\.parquet|arrays/[^/]*\.(steps|final)\.npy")
_EPISODES = re.compile(r"meta/episodes/[^/]+/[^/]+\.parquet")
_NUMBER = "episode_index"
_NAMED = re.compile(r"(episode_)(\d+)")


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Where the episodes of a dataset are in the new one."""

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
        f"meta/{column.removesuffix('_index')}s.parquet" for column in word_tables(index.folder, index.sums)
    }
    beside = folders_beside(index.folder)
    return [name for name in found if name not in ours and not is_below(name, beside)]


def episode_files(index: DatasetIndex, found: Sequence[str]) -> set[str]:
    """Returns the files that hold the episodes, and what a kill left of such that were being written.

    Args:
        index: of the dataset.
        found: all files of its folder.
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
        files |= {name for name in found if own.get("format", 1) == 1 and _FORMAT_1.fullmatch(name)}
    return files


def _numbers(names: Iterable[str]) -> set[int]:
    return {number for number in map(number_of, names) if number is not None}


def say_left_out(index: DatasetIndex) -> None:
    """Says which files no copy of some episodes has: they are of the dataset as it was."""
    names = [name for name in (_COLLECTED, *FETCHED) if (index.folder / name).exists()]
    if names:
        logger.warning("%s: of this dataset alone, not copied: %s", index.folder, ", ".join(names))


def to_drop(index: DatasetIndex, names: Sequence[str]) -> list[str]:
    """Returns what `drop` may name of files: of a camera that the dataset does not have, its folder."""
    held = {lay.camera_folder(name) for name in episode_files(index, files_below(index.folder))}
    return [
        *dict.fromkeys(
            lay.camera_folder(name) if _is_unlisted(name) and lay.camera_folder(name) not in held else name
            for name in names
        )
    ]


def _is_unlisted(name: str) -> bool:
    """Returns whether a file of others has a name that episodes could have."""
    return number_of(name) is not None


def refuse_unlisted(index: DatasetIndex, drop: Collection[str] = ()) -> None:
    """Refuses files with names of episode files that meta/ does not list.

    Raises:
        DatasetError: names them.
    """
    unlisted = [name for name in foreign_files(index) if _is_unlisted(name) and not is_below(name, drop)]
    if unlisted:
        names = to_drop(index, unlisted)
        raise DatasetError(
            f"{index.folder}: {', '.join(names)}: meta/ does not list this, so nobody knows which episodes "
            f"are in it. Move it out of the dataset, or leave it out where drop= is taken: "
            f"drop={','.join([*drop, *names])}"
        )


def copy_foreign(sources: Sequence[Moved], new: Path, drop: Collection[str]) -> None:
    """Copies the files of others, with the episodes' new numbers.

    Raises:
        DatasetError: a file has changed, is a link to nothing or names an episode that meta/ does not list,
            or two sources have different ones of one name.
    """
    files = [dict.fromkeys(foreign_files(source.index)) for source in sources]
    for name in dict.fromkeys(name for names in files for name in names):
        if is_below(name, drop):
            continue
        holders = [source for source, names in zip(sources, files, strict=True) if name in names]
        for source in holders:
            refuse_dangling(source.folder, [name], "or leave it out: drop={name}")
            source.index.sums.require(name)
        target = new / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if _NAMED.search(target.name):
            for source in holders:
                _copy_named(source, name, new)
        elif name.endswith(".jsonl") and all(_numbered_lines(s.folder / name) for s in holders):
            target.write_text("".join(line for source in holders for line in _lines(source, name)))
        elif name.endswith(".parquet") and all(_is_numbered_table(s.folder / name) for s in holders):
            tables = [_rows(source, name) for source in holders]
            write_table(target, pa.concat_tables(tables, promote_options="permissive"), **lay.PARQUET)
        else:
            _refuse_different(holders, name)
            shutil.copyfile(holders[0].folder / name, target)


def _new_numbers(source: Moved, name: str, number: int) -> Sequence[int]:
    """Returns the new numbers of an episode that a file names."""
    if number not in source.known:
        raise DatasetError(
            f"{source.folder / name}: names episode {number}, which meta/ does not list. Correct the file, "
            f"or leave it out: drop={name}"
        )
    return source.numbers.get(number, ())


def _copy_named(source: Moved, name: str, new: Path) -> None:
    """Copies the file of one episode to the name that its new number gives it."""
    path = Path(name)
    found = _NAMED.search(path.name)
    assert found is not None
    for number in _new_numbers(source, name, int(found[2])):
        renamed = _NAMED.sub(rf"\g<1>{number:0{len(found[2])}d}", path.name, count=1)
        shutil.copyfile(source.folder / path, new / path.with_name(renamed))


def _refuse_different(holders: Sequence[Moved], name: str) -> None:
    first = (holders[0].folder / name).read_bytes()
    for other in holders[1:]:
        if (other.folder / name).read_bytes() != first:
            raise DatasetError(
                f"{holders[0].folder / name} and {other.folder / name} differ, and nobody knows how to join "
                f"them. Bring them to the same content, or leave them out: drop={name}"
            )


def _numbered_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file if every one of them names its episode."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except ValueError:
        return []
    return (
        lines if all(isinstance(line, dict) and isinstance(line.get(_NUMBER), int) for line in lines) else []
    )


def _lines(source: Moved, name: str) -> list[str]:
    return [
        json.dumps({**line, _NUMBER: number}, ensure_ascii=False) + "\n"
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
