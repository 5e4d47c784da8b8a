"""Changes the metadata of a dataset in place: new statistics, other texts of instructions.

A copy made of hard links is changed and replaces the folder in one step; rows and videos stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import (
    link_again,
    listed,
    replace_file,
    restore_folder,
    sync_tree,
    write_json,
)
from robot_rl.core.refusal import refusing
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.lerobot.compact import rebuilt
from robot_rl.data.lerobot.copying import Source, number_stats, stats_columns
from robot_rl.data.lerobot.index import DatasetIndex, read_info, read_stats, read_table
from robot_rl.data.lerobot.opening import open_index
from robot_rl.data.lerobot.parquet import table_bytes
from robot_rl.data.lerobot.reader import Dataset
from robot_rl.data.lerobot.stats import PictureStats, aggregate, sampled_steps, to_json
from robot_rl.data.lerobot.v21 import read_lines


@refusing(DatasetError, kept="The dataset is whole.")
def recompute_stats(folder: str | Path, on_episode: Callable[[int, int], None] | None = None) -> int:
    """Computes all statistics again, those of pictures over the frames that LeRobot samples.

    Args: on_episode: called with the number of episodes that are done, and of all.

    Returns:
        The number of episodes.

    Raises:
        DatasetError: damage, or another process writes to the dataset; nothing was changed.
    """
    with amended(Path(folder)) as new:
        dataset = Dataset(folder)
        stats = _computed_stats(dataset, on_episode)
        if (new / "meta/episodes.jsonl").is_file():
            lines = [{"episode_index": number, "stats": to_json(of)} for number, of in stats.items()]
            _replace_lines(new / "meta/episodes_stats.jsonl", lines)
        else:
            for path in listed(new / "meta/episodes", "*/*.parquet"):
                _replace_table(path, lambda table: _with_stats(table, stats))
            found = _other_stats(dataset) | to_json(aggregate(list(stats.values())))
            in_order = {name: found[name] for name in dataset.index.features if name in found}
            write_json(new / lay.STATS, in_order)
    return len(stats)


def _computed_stats(
    dataset: Dataset, on_episode: Callable[[int, int], None] | None
) -> dict[int, dict[str, Any]]:
    """Returns the statistics of every episode, by its number; for depth as video, the recorded ones."""
    index = dataset.index
    recorded = Source(index) if set(index.named("image", "video")) - set(dataset.names.values()) else None
    stats: dict[int, dict[str, Any]] = {}
    for place, number in enumerate(index.episode.tolist()):
        kept = {} if recorded is None else recorded.picture_stats(place)
        stats[number] = kept | number_stats(dataset.rows(place), index)
        for key in dataset.cameras:
            sampled = PictureStats()
            for picture in dataset.frames(key, place, sampled_steps(int(dataset.lengths()[place]))):
                sampled.add(picture)
            stats[number][dataset.names[key]] = sampled.result()
        if on_episode is not None:
            on_episode(place + 1, len(dataset))
    return stats


def _other_stats(dataset: Dataset) -> dict[str, Any]:
    """Returns the content of meta/stats.json; nothing where it is damaged."""
    try:
        return dict(read_stats(dataset.folder, dataset.index.sums))
    except DatasetError:  # it is written again
        return {}


def tasks_of_rows(dataset: Dataset) -> dict[int, tuple[str, int, int]]:
    """Returns number -> instruction, and the numbers of its episodes and steps."""
    episodes = dict.fromkeys(sorted(dataset.index.tasks), 0)
    steps = dict(episodes)
    for place in range(len(dataset)):
        column = dataset.rows(place).get("task_index", np.zeros(0, np.int64))
        for number, count in zip(
            *(part.tolist() for part in np.unique(column, return_counts=True)), strict=True
        ):
            episodes[number] = episodes.get(number, 0) + 1
            steps[number] = steps.get(number, 0) + count
    texts = dataset.index.tasks
    return {number: (texts.get(number, ""), episodes[number], steps[number]) for number in episodes}


@refusing(DatasetError, kept="The dataset is whole.")
def rename_tasks(folder: str | Path, texts: Mapping[int, str]) -> None:
    """Gives instructions, by number, another text in all of the dataset; all or none.

    Raises:
        DatasetError: no such instruction, or two would have one text.
    """
    with amended(Path(folder)) as new:
        index = open_index(Path(folder))  # its columns may have any names
        tasks = index.tasks
        for number in texts:
            if number not in tasks:
                allowed = ", ".join(map(str, sorted(tasks)))
                raise DatasetError(f"{folder}: there is no task {number}, allowed: {allowed}.")
        after = {**tasks, **texts}
        for number, text in texts.items():
            if text in (other for n, other in after.items() if n != number):
                raise DatasetError(
                    f"{folder}: another task is {text!r} already, and two cannot have one text. "
                    "Choose another text."
                )
        _rename_tasks(new, index, texts)


def _rename_tasks(new: Path, index: DatasetIndex, texts: Mapping[int, str]) -> None:
    """Writes the new texts; `index` is of the old dataset, in which two tasks may have the same text."""
    before, after = index.tasks, {**index.tasks, **texts}
    found: dict[str, set[str]] = {}
    for number, text in before.items():
        found.setdefault(text, set()).add(after[number])
    by_text = {text: next(iter(new_ones)) for text, new_ones in found.items() if len(new_ones) == 1}
    shared = found.keys() - by_text
    places = {number: place for place, number in enumerate(index.episode.tolist())}

    def renamed(listed_of: list[str] | None, episode: int) -> list[str] | None:
        if listed_of is None or (not shared.isdisjoint(listed_of) and episode not in places):
            return listed_of  # of an unfinished commit
        if shared.isdisjoint(listed_of):
            return [by_text.get(text, text) for text in listed_of]
        return [after[number] for number in _tasks_of_rows(index, places[episode])]

    if (new / "meta/episodes.jsonl").is_file():
        lines = read_lines(new, "meta/tasks.jsonl")
        lines = [{**line, "task": texts.get(line["task_index"], line["task"])} for line in lines]
        _replace_lines(new / "meta/tasks.jsonl", lines)
        episodes = read_lines(new, "meta/episodes.jsonl")
        episodes = [{**e, "tasks": renamed(e.get("tasks"), e["episode_index"])} for e in episodes]
        _replace_lines(new / "meta/episodes.jsonl", episodes)
        return
    _replace_table(new / lay.TASKS, lambda table: _with_texts(table, before, texts))
    for path in listed(new / "meta/episodes", "*/*.parquet"):
        _replace_table(path, lambda table: _with_tasks(table, renamed))
    own = new / lay.OWN
    if own.is_file():
        content = json.loads(own.read_text())
        instruction = content.get("instruction")
        if by_text.get(instruction, instruction) != instruction:
            write_json(own, {**content, "instruction": by_text[instruction]})


def _tasks_of_rows(index: DatasetIndex, place: int) -> list[int]:
    """Returns the tasks of an episode, in the order in which its rows first name them."""
    table = read_table(index.folder / index.files[int(index.file[place])], "task_index".__eq__)
    rows = table["task_index"].slice(int(index.first[place]), int(index.lengths[place]))
    return rows.unique().to_pylist()


@contextmanager
def amended(folder: Path) -> Generator[Path]:
    """Gives a copy made of hard links, which becomes the dataset if the block succeeds.

    The block replaces files and never writes into them: they are also files of the old dataset.

    Raises:
        DatasetError: no dataset, or another process writes to it.
    """
    folder = folder.resolve()
    restore_folder(folder)
    read_info(folder)
    with rebuilt(folder, "amending") as new:
        for path in listed(folder):
            target = new / path.relative_to(folder)
            if not path.is_dir() or path.is_symlink():
                link_again(path, target)
            else:
                target.mkdir(parents=True, exist_ok=True)
        yield new
        Checksums(folder).renew(new)
        sync_tree(new)


def _with_stats(table: Any, stats: dict[int, dict[str, Any]]) -> Any:
    """Returns the rows of meta/episodes of committed episodes, with these statistics."""
    numbers = table["episode_index"].to_pylist()
    if not stats.keys() & set(numbers):  # of an unfinished commit: it is not read
        return table
    table = table.take([row for row, number in enumerate(numbers) if number in stats])
    names: list[str] = table.column_names
    table = table.drop_columns([name for name in names if name.startswith("stats/")])
    rows = stats_columns([stats[number] for number in table["episode_index"].to_pylist()])
    for name in rows[0] if rows else ():
        table = table.append_column(name, pa.array([row[name] for row in rows]))
    return table


def _with_texts(table: Any, before: Mapping[int, str], texts: Mapping[int, str]) -> Any:
    numbers = table["task_index"].to_pylist()
    for name in table.column_names:
        values = table[name].to_pylist()
        edited = [
            texts[number] if number in texts and value == before[number] else value
            for number, value in zip(numbers, values, strict=True)
        ]
        table = table if edited == values else _with_column(table, name, edited)
    return table


def _with_tasks(table: Any, renamed: Callable[[list[str] | None, int], list[str] | None]) -> Any:
    """Returns rows of meta/episodes with other instructions, where they list some."""
    if "tasks" not in table.column_names:
        return table
    pairs = zip(table["tasks"].to_pylist(), table["episode_index"].to_pylist(), strict=True)
    return _with_column(table, "tasks", [renamed(texts, episode) for texts, episode in pairs])


def _with_column(table: Any, name: str, values: list[Any]) -> Any:
    place = table.column_names.index(name)
    return table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def _replace_table(path: Path, edit: Callable[[Any], Any]) -> None:
    table = read_table(path)
    edited = edit(table)
    if edited is not table:
        replace_file(path, table_bytes(edited))


def _replace_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines))
