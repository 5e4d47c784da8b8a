"""Reads LeRobotDataset v2.1.

Version 2.1 has one parquet file and one video file for each episode, and its metadata in JSON lines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.lerobot.index import DatasetIndex, VideoSpans, check_listed, first_instructions

Array = NDArray[Any]

_EPISODES_STATS = "meta/episodes_stats.jsonl"


def read_v21(folder: Path, info: dict[str, Any], sums: Checksums) -> DatasetIndex:
    """Returns the index of a dataset of version 2.1.

    Raises:
        DatasetError: missing or damaged metadata, or an episode that is listed twice or not at all.
    """
    for name in ("meta/episodes.jsonl", "meta/tasks.jsonl"):
        sums.require(name)
    episodes = sorted(read_lines(folder, "meta/episodes.jsonl"), key=lambda e: e["episode_index"])
    number = np.asarray([e["episode_index"] for e in episodes], np.int64)
    check_listed(f"{folder}: meta/episodes.jsonl", number, info["total_episodes"])
    each, zeros = np.arange(len(number)), np.zeros(len(number), np.int64)
    tasks = {t["task_index"]: t["task"] for t in read_lines(folder, "meta/tasks.jsonl")}
    files = [_path(info, "data_path", int(n)) for n in number]
    return DatasetIndex(
        folder=folder,
        info=info,
        tasks=tasks,
        episode=number,
        lengths=np.asarray([e["length"] for e in episodes], np.int64),
        files=files,
        file=each,
        first=zeros,
        videos={
            name: VideoSpans(
                files=[_path(info, "video_path", int(n), video_key=name) for n in number],
                file=each,
                first=zeros,
            )
            for name, feature in info["features"].items()
            if feature["dtype"] == "video"
        },
        instructions=first_instructions(
            folder, [e.get("tasks") for e in episodes], tasks, files, each, zeros, sums
        ),
        sums=sums,
    )


def read_episode_stats(folder: Path, sums: Checksums) -> dict[int, dict[str, Any]]:
    """Returns LeRobot's statistics of every episode, by its number; empty if there are none."""
    if not (folder / _EPISODES_STATS).is_file():
        return {}
    sums.require(_EPISODES_STATS)
    return {line["episode_index"]: line["stats"] for line in read_lines(folder, _EPISODES_STATS)}


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Returns the lines of a file; raises `DatasetError` if it is missing, or a line is no JSON."""
    path = folder / name
    if not path.is_file():
        raise DatasetError(
            f"{folder}: no {name}, which a dataset of version 2.1 must have. Restore the file."
        )
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: no UTF-8 ({error}). Restore the file.") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise DatasetError(f"{path}: line {number} is no JSON ({error}). Restore the file.") from error
    return lines


def _path(info: dict[str, Any], which: str, episode: int, **words: str) -> str:
    chunk = episode // int(info["chunks_size"])
    return info[which].format(episode_chunk=chunk, episode_index=episode, **words)
