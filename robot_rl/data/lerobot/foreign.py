"""Files of a dataset that neither LeRobot nor robot_rl knows: annotations, descriptions, licences.

Where such a file names episodes, by an entry `episode_index` or in its own name, the numbers are changed with
those of the episodes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import listed
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.lerobot.index import read_table
from robot_rl.data.lerobot.parquet import write_table
from robot_rl.data.lerobot.words import word_tables

_FOLDERS = ("data", "videos", "final", "arrays", "journal", "meta/episodes")
_FILES = (
    lay.INFO,
    lay.STATS,
    lay.TASKS,
    lay.OWN,
    "meta/store.json",
    "meta/collected.json",  # of the episodes as they were collected together
    "meta/tasks.jsonl",
    "meta/episodes.jsonl",
    "meta/episodes_stats.jsonl",
)
_CHECKSUMS = "meta/checksums"
"""Whatever begins so is of the files as they were."""
_NUMBER = "episode_index"
_NAMED = re.compile(r"(episode_)(\d+)")


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Where the episodes of a dataset are in the new one."""

    sums: Checksums
    """Of the dataset's files."""
    numbers: Mapping[int, Sequence[int]]
    """Old number of an episode -> its new ones."""

    @property
    def folder(self) -> Path:
        return self.sums.folder


def foreign_files(folder: Path, sums: Checksums) -> list[str]:
    """Returns the files of others, below the folder and the folders that it links to; not hidden ones."""
    words = {f"meta/{column.removesuffix('_index')}s.parquet" for column in word_tables(folder, sums)}
    found: list[str] = []
    links = [path for path in listed(folder) if path.is_symlink() and path.is_dir()]
    for path in [*listed(folder), *(path for link in links for path in listed(link))]:
        name = path.relative_to(folder)
        text = name.as_posix()
        is_ours = text in _FILES or text in words or text.startswith(_CHECKSUMS)
        is_below = any(name.is_relative_to(ours) for ours in _FOLDERS)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and not (is_ours or is_below or is_hidden):
            found.append(text)
    return found


def copy_foreign(sources: Sequence[Moved], new: Path, drop: Collection[str]) -> None:
    """Copies the files of others, with the episodes' new numbers.

    Raises:
        DatasetError: a file has changed, or two sources have different ones of one name.
    """
    files = {source.folder: foreign_files(source.folder, source.sums) for source in sources}
    for name in dict.fromkeys(name for names in files.values() for name in names):
        if name in drop:
            continue
        holders = [source for source in sources if name in files[source.folder]]
        for source in holders:
            source.sums.require(name)
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


def _copy_named(source: Moved, name: str, new: Path) -> None:
    """Copies the file of one episode to the name that its new number gives it."""
    path = Path(name)
    found = _NAMED.search(path.name)
    assert found is not None
    for number in source.numbers.get(int(found[2]), ()):
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
        for number in source.numbers.get(line[_NUMBER], ())
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
        for number in source.numbers.get(old, ())
    ]
    field = table.schema.field(_NUMBER)
    taken = table.take(pa.array([row for row, _ in moved], pa.int64()))
    return taken.set_column(
        table.column_names.index(_NUMBER), field, pa.array([number for _, number in moved], field.type)
    )
