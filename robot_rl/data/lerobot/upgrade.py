"""Makes a dataset of version 2.1 into one of version 3: files are copied, no video is encoded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import write_synced
from robot_rl.core.refusal import refusing
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.batch import episode_table
from robot_rl.data.lerobot.edit import new_folder
from robot_rl.data.lerobot.index import DatasetIndex, open_index
from robot_rl.data.lerobot.layout import place
from robot_rl.data.lerobot.parquet import write_table
from robot_rl.data.lerobot.stats import of_columns, to_json
from robot_rl.data.lerobot.tables import Tables, flat_names, read_rows, row_problems
from robot_rl.data.lerobot.v21 import joined_stats, read_episode_stats
from robot_rl.data.lerobot.writer import tasks_table

_OF_OLD = ("total_chunks", "total_videos")


@refusing(DatasetError, kept="The original is whole.")
def upgrade(folder: str | Path, out: str | Path) -> Path:
    """Writes a dataset of version 2.1 as version 3, one data and video file for each episode; returns `out`.

    Statistics of numbers are computed again (version 2.1 has no quantiles); those of pictures are kept.

    Raises:
        DatasetError: not version 2.1, `out` exists, or damage.
    """
    index = open_index(Path(folder))
    if index.info["codebase_version"] != "v2.1":
        raise DatasetError(
            f"{folder}: codebase_version {index.info['codebase_version']!r}, allowed: 'v2.1'. "
            "It needs no upgrade."
        )
    with new_folder(Path(out)) as new:
        tables, rows, stats = Tables(index.folder, 1 << 26), list[dict[str, Any]](), list[dict[str, Any]]()
        recorded, first_row = read_episode_stats(index.folder), 0
        for episode in range(len(index)):
            of_episode = _stats(index, tables, episode, recorded)
            rows.append(_copy(index, episode, new, first_row, of_episode))
            stats.append(of_episode)
            first_row += rows[-1]["length"]
        path = new / place(lay.EPISODES, 0)
        path.parent.mkdir(parents=True)
        write_table(path, episode_table(rows), **lay.PARQUET)
        instructions = [index.tasks[number] for number in sorted(index.tasks)]
        sink = pa.BufferOutputStream()
        pq.write_table(tasks_table(instructions), sink, **lay.PARQUET)
        write_synced(new / lay.TASKS, sink.getvalue().to_pybytes())
        write_synced(new / lay.STATS, (json.dumps(to_json(joined_stats(stats)), indent=2) + "\n").encode())
        write_synced(new / lay.INFO, (json.dumps(_info(index, first_row), indent=2) + "\n").encode())
    return Path(out)


def _copy(
    index: DatasetIndex, episode: int, new: Path, first_row: int, stats: dict[str, Any]
) -> dict[str, Any]:
    """Copies an episode's files; returns its row of meta/episodes."""
    length = int(index.lengths[episode])
    chunk, file = divmod(episode, lay.FILES_PER_CHUNK)
    _copy_file(index.folder / index.files[index.file[episode]], new / place(lay.DATA, episode))
    row: dict[str, Any] = {
        "episode_index": episode,
        "tasks": [index.instructions[episode]],
        "length": length,
        "data/chunk_index": chunk,
        "data/file_index": file,
        "dataset_from_index": first_row,
        "dataset_to_index": first_row + length,
    }
    for name, spans in index.videos.items():
        video = index.folder / spans.files[spans.file[episode]]
        _copy_file(video, new / place(lay.VIDEO, episode, video_key=name))
        row |= {f"videos/{name}/chunk_index": chunk, f"videos/{name}/file_index": file}
        row |= {f"videos/{name}/from_timestamp": 0.0, f"videos/{name}/to_timestamp": length / index.fps}
    row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
    return row | {f"stats/{name}/{key}": v for name, of in to_json(stats).items() for key, v in of.items()}


def _stats(
    index: DatasetIndex, tables: Tables, episode: int, recorded: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """Returns the statistics of an episode, whose rows are checked on the way."""
    number = int(index.episode[episode])
    rows = read_rows(tables, index, episode)
    for kind, problem in row_problems(index, episode, rows):
        raise DatasetError(f"{index.folder}: episode {number}: {kind}: {problem}. Repair or remove it first.")
    pictures = recorded.get(number, {})
    named = [name for name in index.named("image", "video") if name in pictures]
    return of_columns(rows) | {name: pictures[name] for name in named}


def _copy_file(source: Path, target: Path) -> None:
    if not source.is_file():
        raise DatasetError(f"{source}: this file is missing. Copy it again before the upgrade.")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _info(index: DatasetIndex, frames: int) -> dict[str, Any]:
    info = {key: value for key, value in index.info.items() if key not in _OF_OLD}
    features = {
        name: {**feature, "names": list(flat_names(feature)) or None}
        for name, feature in index.features.items()
    }
    return info | {
        "codebase_version": "v3.0",
        "total_episodes": len(index),
        "total_frames": frames,
        "chunks_size": lay.FILES_PER_CHUNK,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": lay.DATA,
        "video_path": lay.VIDEO if index.videos else None,
        "features": features,
    }
