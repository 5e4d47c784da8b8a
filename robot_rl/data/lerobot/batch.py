"""The files of one commit, with temporary names until the disk has all of them.

T control steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import make_folder, sync_folder
from robot_rl.data.episode import Episode
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.checksums import of_files
from robot_rl.data.lerobot.encode import ArrayFile, PngEncoder, VideoFile
from robot_rl.data.lerobot.layout import Layout, place, placed
from robot_rl.data.lerobot.parquet import TableFile, write_table
from robot_rl.data.lerobot.stats import PictureStats, Stats, aggregate, of_columns, sampled_steps, to_json

Array = NDArray[Any]

_ONE_ROW: Any = {
    "use_dictionary": False,
    "write_statistics": False,
    "store_schema": False,
    "compression": "none",
}
"""Of meta/episodes: over 200 columns of one row each, 104 kB with pyarrow's defaults, 43 kB with these."""
_ROW_GROUP_BYTES = 64 << 20
"""Compressed pictures held in memory before they are written."""


class Batch:
    """Episodes that become visible together, in one file of each kind."""

    def __init__(self, folder: Path, layout: Layout, number: int) -> None:
        self.stats: Stats = {}
        """Of all episodes so far."""
        self.rows: list[dict[str, Any]] = []
        """Of meta/episodes."""
        self.steps = 0
        self._folder = folder
        self._layout = layout
        self._number = number
        self._files: list[Path] = []
        self._data = TableFile(self._part(lay.DATA), layout.schema)
        self._videos: dict[str, VideoFile] = {}
        self._final: list[dict[str, Any]] = []
        self._arrays: dict[str, ArrayFile] = {}

    def add(
        self, episode: Episode, *, index: int, first_row: int, task: int, store_episode: int | None
    ) -> None:
        """Writes data and pictures of an episode.

        Args:
            episode: its pictures are read one at a time.
            index: number of the episode.
            first_row: rows of the dataset before it.
            task: index of its instruction.
            store_episode: see `DatasetWriter.write`.
        """
        columns = self._layout.rows(episode, index=index, first_row=first_row, task=task)
        stats = of_columns(columns)
        begin_s, videos = self.steps / self._layout.fps, dict[str, Any]()
        if self._layout.images == "video":
            for key, name in self._layout.pictures.items():
                stats[name] = self._add_video(key, episode.obs[key])
                videos |= placed(f"videos/{name}", self._number)
                videos[f"videos/{name}/from_timestamp"] = begin_s
            self._data.add(pa.table([lay.to_arrow(v) for v in columns.values()], schema=self._layout.schema))
        else:
            stats |= self._add_rows_and_pictures(columns, episode)
        for key in self._layout.arrays:
            self._array(key).add(episode.obs[key])
        self._final.append(_final_row(self._layout, episode, index))
        self.steps += len(episode)
        end_s, names = self.steps / self._layout.fps, self._layout.pictures.values() if videos else ()
        self.rows.append(
            {
                "episode_index": index,
                "tasks": [episode.meta.instruction],
                "length": len(episode),
                **placed("data", self._number),
                "dataset_from_index": first_row,
                "dataset_to_index": first_row + len(episode),
                **videos,
                **{f"videos/{name}/to_timestamp": end_s for name in names},
                **placed("meta/episodes", self._number),
                "device": episode.device,
                "store_episode": store_episode,
                **{f"stats/{n}/{key}": v for n, of in to_json(stats).items() for key, v in of.items()},
            }
        )
        self.stats = aggregate([self.stats, stats]) if self.stats else stats

    def is_full(self, data_bytes: int, video_bytes: int) -> bool:
        is_long = any(video.bytes >= video_bytes for video in self._videos.values())
        return is_long or self._data.bytes >= data_bytes

    def seal(self) -> None:
        """Completes all files and gives them their names; they count when meta/info.json counts them."""
        for file in (self._data, *self._videos.values(), *self._arrays.values()):
            file.finish()
        final = pa.Table.from_pylist(self._final, _final_schema(self._layout))
        write_table(self._part(lay.FINAL), final)
        write_table(self._part(lay.EPISODES), episode_table(self.rows), **_ONE_ROW)
        parts = list(self._files)
        names = [str(path.relative_to(self._folder)).removesuffix(lay.TEMPORARY) for path in parts]
        sums = self._part(lay.CHECKSUMS)
        sums.write_bytes(of_files(zip(names, parts, strict=True)))
        publish([sums])  # first: a file without its checksum is refused
        publish(parts)

    def abandon(self) -> None:
        for file in (self._data, *self._videos.values(), *self._arrays.values()):
            file.abandon()
        for path in self._files:
            path.unlink(missing_ok=True)

    def _part(self, template: str, **names: str) -> Path:
        path = self._folder / (place(template, self._number, **names) + lay.TEMPORARY)
        make_folder(path.parent)
        self._files.append(path)
        return path

    def _array(self, key: str) -> ArrayFile:
        if key not in self._arrays:
            feature = self._layout.observations[key]
            self._arrays[key] = ArrayFile(self._part(lay.ARRAYS, key=key), feature.dtype, feature.shape)
        return self._arrays[key]

    def _add_video(self, key: str, frames: Any) -> dict[str, Array]:
        feature, name = self._layout.observations[key], self._layout.pictures[key]
        video = self._videos.get(name)
        if video is None:
            path = self._part(lay.VIDEO, video_key=name)
            video = self._videos[name] = VideoFile(path, feature.shape, self._layout.fps, self._layout.codec)
        gathered, sampled = PictureStats(), set(sampled_steps(len(frames)).tolist())
        for step in range(len(frames)):
            picture = frames[step]
            video.add(picture)
            if step in sampled:
                gathered.add(picture)
        return gathered.result()

    def _add_rows_and_pictures(self, columns: Mapping[str, Array], episode: Episode) -> Stats:
        """Writes numbers and PNGs in row groups small enough for the memory."""
        pictures = self._layout.pictures
        steps = len(episode)
        encoders = {key: PngEncoder(self._layout.observations[key].shape) for key in pictures}
        gathered = {name: PictureStats() for name in pictures.values()}
        sampled = set(sampled_steps(steps).tolist())
        held: dict[str, list[dict[str, Any]]] = {name: [] for name in pictures.values()}
        start = size = 0
        for step in range(steps):
            for key, name in pictures.items():
                picture = episode.obs[key][step]
                png = encoders[key](picture)
                held[name].append({"bytes": png, "path": None})
                size += len(png)
                if step in sampled:
                    gathered[name].add(picture)
            if size >= _ROW_GROUP_BYTES or step == steps - 1:
                numbers = [lay.to_arrow(values[start : step + 1]) for values in columns.values()]
                images = [pa.array(held[name], lay.PNG) for name in pictures.values()]
                self._data.add(pa.table([*numbers, *images], schema=self._layout.schema))
                held = {name: [] for name in held}
                start, size = step + 1, 0
        return {name: of.result() for name, of in gathered.items()}


def publish(parts: list[Path]) -> None:
    """Flushes files to the disk, then gives them their names."""
    for path in parts:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in parts:
        path.replace(path.with_name(path.name.removesuffix(lay.TEMPORARY)))
    for folder in {path.parent for path in parts}:
        sync_folder(folder)


def episode_table(rows: list[dict[str, Any]]) -> Any:
    """Returns a table of meta/episodes."""
    types = {"store_episode": pa.int64(), "tasks": pa.list_(pa.string())}
    return pa.table({name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]})


def check_episode(layout: Layout, episode: Episode, at: str) -> None:
    """Refuses an episode with other observations, or with columns of different lengths."""
    steps = len(episode)
    if steps == 0:
        raise DatasetError(f"{at}: the episode has no steps. Leave it out.")
    missing = sorted(layout.observations.keys() ^ episode.obs.keys())
    if missing:
        raise DatasetError(
            f"{at}: observation {missing[0]!r} is in the episode or in the dataset, not in both."
        )
    for key, feature in layout.observations.items():
        values = episode.obs[key]
        shape = values.shape[1:] if isinstance(values, np.ndarray) else feature.shape
        if len(values) != steps or shape != feature.shape:
            raise DatasetError(
                f"{at}: observation {key!r} has {len(values)} rows of shape {tuple(shape)}, "
                f"needs {steps} of {feature.shape}."
            )


def _final_schema(layout: Layout) -> Any:
    fields: list[Any] = [("episode_index", pa.int64())]
    for key, feature in layout.observations.items():
        numbers = pa.list_(pa.from_numpy_dtype(np.dtype(feature.dtype)))
        fields.append((lay.feature_name(key, feature), lay.PNG if feature.is_picture else numbers))
    return pa.schema(fields)


def _final_row(layout: Layout, episode: Episode, index: int) -> dict[str, Any]:
    """Returns the observation after the last step, flat; null where it is unknown."""
    row: dict[str, Any] = {"episode_index": index}
    for key, feature in layout.observations.items():
        value: Any = episode.final_obs.get(key)
        if value is not None and feature.is_picture:
            value = {"bytes": PngEncoder(feature.shape)(value), "path": None}
        elif value is not None:
            value = np.ascontiguousarray(value, feature.dtype).reshape(-1)
        row[lay.feature_name(key, feature)] = value
    return row
