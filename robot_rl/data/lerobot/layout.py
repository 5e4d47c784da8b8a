"""The files of a dataset: those of LeRobotDataset v3, and ours for what its format has no place for.

    meta/info.json                features, totals; replaced last, so it is the commit point
    meta/stats.json               statistics of all episodes, also the running aggregate of the writer
    meta/tasks.parquet            instructions
    meta/episodes/CHUNK/FILE.parquet   a row per episode: files, rows, statistics; ours: device, store_episode
    data/CHUNK/FILE.parquet       numbers, a row per control step; pictures as PNG, if asked for
    videos/<name>/CHUNK/FILE.mp4  pictures
    meta/robot_rl.json            ours: task, instruction, type and shape of every observation
    meta/checksums.json, meta/checksums/CHUNK/FILE.json   ours: of every file; see `checksums`
    final/CHUNK/FILE.parquet      ours: a row per episode, the observation after its last step (null: unknown)
    arrays/<key>/CHUNK/FILE.npy   ours: depth and the like, the same rows as the data file of that number

CHUNK is chunk-000 and FILE file-000. T control steps, A action dim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.names import APART, EXECUTED_ACTION
from robot_rl.data.episode import Episode, Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot.encode import VideoCodec

Array = NDArray[Any]

FORMAT = 2
"""Of `meta/robot_rl.json`; format 1 had all episodes in one file and one array per key."""
FILES_PER_CHUNK = 1000
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA = f"data/{_FILE}.parquet"
VIDEO = f"videos/{{video_key}}/{_FILE}.mp4"
EPISODES = f"meta/episodes/{_FILE}.parquet"
FINAL = f"final/{_FILE}.parquet"
ARRAYS = f"arrays/{{key}}/{_FILE}.npy"
CHECKSUMS = f"meta/checksums/{_FILE}.json"
NUMBERED = ("data/*/*", "videos/*/*/*", "meta/episodes/*/*", "final/*/*", "arrays/*/*/*")
"""Patterns of the files with numbers."""
TEMPORARY = ".part"
"""Ends the names of incomplete files; LeRobot reads *.parquet only."""
INFO, STATS, TASKS, OWN = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/robot_rl.json"

PNG = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""Arrow type of a picture in a table, as in LeRobot (datasets.Image)."""
CLOCK = ("timestamp", "frame_index", "episode_index", "index", "task_index")
OWN_COLUMNS = ("action", "base_action", "source", "policy_version", "stamp_ns")
ENDS = ("reward", "terminated", "truncated", "success")
"""Columns of an episode; in the files `next.` begins their names."""
CAMERA_STAMP = "camera_stamp_ns."
"""Begins the name of the column with the time of the pictures of a camera."""


def place(template: str, number: int, **names: str) -> str:
    """Returns the path of a file below the dataset; `number` counts through all chunks."""
    chunk, index = divmod(number, FILES_PER_CHUNK)
    return template.format(chunk_index=chunk, file_index=index, **names)


def placed(at: str, number: int) -> dict[str, int]:
    """Returns the entries of meta/episodes that name a file, such as `data/chunk_index`."""
    chunk, file = divmod(number, FILES_PER_CHUNK)
    return {f"{at}/chunk_index": chunk, f"{at}/file_index": file}


def feature_name(key: str, feature: Feature) -> str:
    """Returns LeRobot's name of an observation: `front.rgb` becomes `observation.images.front`."""
    if key in APART:
        return key
    return f"observation.images.{camera(key)}" if feature.is_picture else f"observation.{key}"


def camera(key: str) -> str:
    """Returns the camera of a picture's key."""
    return key.removesuffix(".rgb")


@dataclass(frozen=True)
class Layout:
    """The form in which the episodes of one dataset are stored."""

    meta: EpisodesMeta
    observations: Mapping[str, Feature]
    images: Literal["video", "png"]
    codec: VideoCodec

    def __post_init__(self) -> None:
        for key, feature in self.observations.items():
            if "/" in key:
                raise DatasetError(f"observation {key!r}: LeRobot allows no '/' in a name. Rename it.")
            height, width = feature.shape[:2] if feature.is_picture else (0, 0)
            if self.images == "video" and (height % 2 or width % 2):
                raise DatasetError(
                    f"observation {key!r} is {width}x{height}: video halves the colours' resolution and "
                    "needs even sizes. Use images=png, or another size."
                )

    @cached_property
    def pictures(self) -> dict[str, str]:
        """Key -> LeRobot's name of every RGB camera."""
        return {k: feature_name(k, f) for k, f in self.observations.items() if f.is_picture}

    @cached_property
    def columns(self) -> dict[str, str]:
        """Key -> LeRobot's name of every observation that is a number or a vector."""
        return {k: feature_name(k, f) for k, f in self.observations.items() if len(f.shape) < 2}

    @cached_property
    def arrays(self) -> list[str]:
        """Keys of the others, such as depth: they lie in arrays/."""
        return [key for key in self.observations if key not in self.pictures and key not in self.columns]

    @cached_property
    def numbers(self) -> dict[str, Feature]:
        """Every column of numbers by LeRobot's name, in the order of the table."""
        flag, count, one = Feature("bool", ()), Feature("int64", ()), Feature("float32", ())
        action = Feature("float32", (len(self.meta.action_names),))
        named = {name: self.observations[key] for key, name in self.columns.items()}
        flags = ("next.done", "next.terminated", "next.truncated", "next.success")
        stamps = [f"{CAMERA_STAMP}{camera(key)}" for key in self.pictures]
        return (
            {**named, "action": action, "base_action": action, "next.reward": one}
            | dict.fromkeys(flags, flag)
            | dict.fromkeys((*OWN_COLUMNS[2:], *stamps), count)
            | {"timestamp": one, **dict.fromkeys(CLOCK[1:], count)}
        )

    @cached_property
    def schema(self) -> Any:
        fields = [(name, _arrow_type(feature)) for name, feature in self.numbers.items()]
        if self.images == "png":
            fields += [(name, PNG) for name in self.pictures.values()]
        return pa.schema(fields)

    def features(self) -> dict[str, Any]:
        """Returns the features of meta/info.json."""
        entries: dict[str, Any] = {}
        for name, feature in self.numbers.items():
            shape = list(feature.shape) or [1]
            entries[name] = {"dtype": feature.dtype, "shape": shape, "names": self._names(name, shape[0])}
        for key, name in self.pictures.items():
            shape = self.observations[key].shape
            entry = {"dtype": "image", "shape": list(shape), "names": ["height", "width", "channels"]}
            if self.images == "video":
                entry |= {"dtype": "video", "info": self.codec.info(shape, self.fps)}
            entries[name] = entry
        return entries

    @property
    def fps(self) -> int | float:
        """Control rate; a whole number as an int, as in LeRobot's datasets."""
        rate_hz = self.meta.control_hz
        return int(rate_hz) if float(rate_hz).is_integer() else rate_hz

    def info(self) -> dict[str, Any]:
        """Returns meta/info.json of an empty dataset."""
        return {
            "codebase_version": "v3.0",
            "robot_type": self.meta.robot,
            "total_episodes": 0,
            "total_frames": 0,
            "total_tasks": 0,
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.fps,
            "splits": {"train": "0:0"},
            "data_path": DATA,
            "video_path": VIDEO if self.images == "video" and self.pictures else None,
            "features": self.features(),
        }

    def own(self) -> dict[str, Any]:
        """Returns meta/robot_rl.json."""
        return {
            "format": FORMAT,
            "checksums": True,
            "task": self.meta.task,
            "instruction": self.meta.instruction,
            "features": {name: key for key, name in {**self.columns, **self.pictures}.items()},
            "observations": {
                key: {"dtype": feature.dtype, "shape": list(feature.shape)}
                for key, feature in self.observations.items()
            },
        }

    def rows(self, episode: Episode, *, index: int, first_row: int, task: int) -> dict[str, Array]:
        """Returns the number columns of an episode, by LeRobot's names."""
        steps = len(episode)
        frame = np.arange(steps)
        values: dict[str, Array] = {name: episode.obs[key] for key, name in self.columns.items()}
        values |= {name: getattr(episode, name) for name in OWN_COLUMNS}
        values |= {f"next.{name}": getattr(episode, name) for name in ENDS}
        values["next.done"] = episode.terminated | episode.truncated
        for key in self.pictures:
            values[f"{CAMERA_STAMP}{camera(key)}"] = episode.picture_stamp_ns.get(key, episode.stamp_ns)
        values |= {
            "timestamp": frame / self.meta.control_hz,
            "frame_index": frame,
            "episode_index": np.full(steps, index),
            "index": first_row + frame,
            "task_index": np.full(steps, task),
        }
        return {
            name: np.ascontiguousarray(values[name], dtype=feature.dtype)
            for name, feature in self.numbers.items()
        }

    def _names(self, name: str, size: int) -> list[str] | None:
        if name == "observation.state":
            return list(self.meta.state_names)
        if name in ("action", "base_action", EXECUTED_ACTION):
            return list(self.meta.action_names)
        return [f"{name.split('.')[-1]}_{i}" for i in range(size)] if size > 1 else None


def to_arrow(values: Array) -> Any:
    """Returns an Arrow column: (T,) or (T, 1) flat, as in LeRobot, (T, n) as lists of n."""
    if values.ndim == 1 or values.shape[1] == 1:
        return pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def file_number(path: Path) -> int:
    """Returns the number of a file through all chunks: the inverse of `place`."""
    chunk, index = path.parent.name.removeprefix("chunk-"), path.name.split(".")[0].removeprefix("file-")
    return int(chunk) * FILES_PER_CHUNK + int(index)


def camera_folder(name: str) -> str:
    """Returns videos/NAME or arrays/KEY for a file below it; for another file, its name."""
    first, *rest = name.split("/")
    return f"{first}/{rest[0]}" if first in ("videos", "arrays") and len(rest) > 1 else name


def is_among(name: str, held: Collection[str]) -> bool:
    """Returns whether a numbered file can belong to episodes whose videos and arrays lie in these folders."""
    return not name.startswith(("videos/", "arrays/")) or camera_folder(name) in held


def stored(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """Returns the features as they are stored: all floats are float32, as LeRobot's policies expect."""
    return {
        key: Feature("float32", feature.shape) if feature.dtype.startswith("float") else feature
        for key, feature in features.items()
    }


def _arrow_type(feature: Feature) -> Any:
    value = pa.from_numpy_dtype(np.dtype(feature.dtype))
    return value if feature.shape in ((), (1,)) else pa.list_(value, feature.shape[0])
