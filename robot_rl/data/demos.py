"""Demonstrations: episodes on the disk as a LeRobotDataset v3, and windows of them for cloning.

Layout: `data/` (parquet, one row group per episode, LeRobot's column names; RGB as PNG columns) and
`meta/` (info, tasks, episodes, stats) are what LeRobot reads. Beside them stand what its format
has no place for: `meta/robot_rl.json` (task), `final/` (what each episode's last step led to) and
`arrays/` (depth in metres).
B windows, H chunk length, T control steps, E episodes.
"""

from __future__ import annotations

import json
import os
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from robot_rl.core.errors import DatasetError, nearest
from robot_rl.core.policy import DemoBatch
from robot_rl.data.episodes import Array, Episodes, EpisodesMeta

__all__ = ["ChunkSampler", "Episodes", "EpisodesMeta", "load_episodes", "save_episodes"]

_DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_FLAGS = {"next.terminated": "terminated", "next.truncated": "truncated", "next.success": "success"}
_REQUIRED = ("observation.state", "action", "episode_index", "next.reward", *_FLAGS)


class ChunkSampler:
    """Draws windows of H actions with the observation they begin at."""

    def __init__(self, episodes: Episodes, horizon: int) -> None:
        if horizon < 1:
            raise ValueError(f"chunk sampler: got horizon {horizon}, allowed: 1 or more")
        self._episodes = episodes
        self._offsets = np.arange(horizon)
        self._last = episodes.bounds()[1][episodes.episode_index] - 1

    def __len__(self) -> int:
        """Returns the number of windows: one begins at every step."""
        return len(self._last)

    def sample(self, batch: int, rng: np.random.Generator) -> DemoBatch:
        """Returns B windows; beyond the end of an episode its last action repeats, not valid."""
        start = rng.integers(0, len(self._last), batch)
        last = self._last[start]
        rows = start[:, None] + self._offsets
        return DemoBatch(
            obs={key: torch.from_numpy(value[start]) for key, value in self._episodes.obs.items()},
            actions=torch.from_numpy(self._episodes.action[np.minimum(rows, last[:, None])]),
            valid=torch.from_numpy(rows <= last[:, None]),
        )


def save_episodes(folder: str | Path, episodes: Episodes) -> Path:
    """Writes the dataset under a temporary name, then renames it; returns the folder.

    Raises:
        DatasetError: the folder exists, or the episodes do not pass their checks.
    """
    folder = Path(folder)
    if folder.exists():
        raise DatasetError(f"{folder}: exists already. Choose another folder, or remove it first.")
    episodes.check(str(folder))
    temporary = folder.with_name(f".writing-{os.getpid()}-{folder.name}")
    try:
        for sub in ("data/chunk-000", "meta/episodes/chunk-000", "final", "arrays"):
            (temporary / sub).mkdir(parents=True)
        _write_steps(temporary, episodes)
        _write_final(temporary, episodes)
        _write_meta(temporary, episodes)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load_episodes(folder: str | Path, *, expect: EpisodesMeta | None = None) -> Episodes:
    """Reads a dataset and verifies it.

    Args:
        folder: what `save_episodes` wrote.
        expect: robot, task, rate and names of elements that the episodes must have.

    Raises:
        DatasetError: no dataset, a missing or misnamed feature, another robot or task, other
            shapes, NaN. The message names the feature, the row and the remedy.
    """
    folder = Path(folder)
    info, own = _read_json(folder, "meta/info.json"), _read_json(folder, "meta/robot_rl.json")
    features: dict[str, Any] = info["features"]
    steps = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("data/*/*.parquet"))])
    for name in _REQUIRED:
        if name not in features or name not in steps.column_names:
            known = sorted(set(features) & set(steps.column_names))
            raise DatasetError(
                f"{folder}: feature {name!r} is missing.{nearest(name, known)} Rename the column and its "
                "entry in meta/info.json, or collect the dataset again with `robot-rl collect`."
            )
    meta = EpisodesMeta(
        task=own["task"],
        robot=info["robot_type"],
        control_hz=float(info["fps"]),
        instruction=own["instruction"],
        state_names=tuple(features["observation.state"]["names"]),
        action_names=tuple(features["action"]["names"]),
    )
    if expect is not None:
        _check_meta(folder, meta, expect)
    final = pq.read_table(folder / "final" / "observations.parquet")
    keys = {own["features"][name]: name for name in features if name in own["features"]}
    episodes = Episodes(
        meta=meta,
        obs={key: _read_column(folder, steps, name, features[name]) for key, name in keys.items()}
        | _read_arrays(folder, "steps"),
        action=_read_column(folder, steps, "action", features["action"]),
        reward=_read_column(folder, steps, "next.reward", features["next.reward"]),
        episode_index=_read_column(folder, steps, "episode_index", features["episode_index"]),
        final_obs={key: _read_column(folder, final, name, features[name]) for key, name in keys.items()}
        | _read_arrays(folder, "final"),
        **{field: _read_column(folder, steps, name, features[name]) for name, field in _FLAGS.items()},
    )
    episodes.check(str(folder))
    return episodes


def _check_meta(folder: Path, got: EpisodesMeta, expect: EpisodesMeta) -> None:
    """Refuses data of another robot, task, rate, or with other elements."""
    for field, remedy in (
        ("robot", "Collect demonstrations with this robot, or set env.robot to the dataset's."),
        ("task", "Collect demonstrations of this task, or set env.task to the dataset's."),
        ("control_hz", "Collect demonstrations at this rate: actions are per control step."),
    ):
        if getattr(got, field) != getattr(expect, field):
            raise DatasetError(
                f"{folder}: recorded with {field} {getattr(got, field)!r}, this run has "
                f"{getattr(expect, field)!r}. {remedy}"
            )
    for feature, names, wanted in (
        ("observation.state", got.state_names, expect.state_names),
        ("action", got.action_names, expect.action_names),
    ):
        if len(names) != len(wanted):
            raise DatasetError(
                f"{folder}: feature {feature!r} has shape ({len(names)},), this run has ({len(wanted)},). "
                "Collect the dataset again with this task and controller."
            )
        for index, (name, want) in enumerate(zip(names, wanted, strict=True)):
            if name != want:
                raise DatasetError(
                    f"{folder}: feature {feature!r}, element {index} is named {name!r}, "
                    f"this run has {want!r}. Put the elements in this run's order, or collect again."
                )


def _feature_name(key: str) -> str:
    """Returns LeRobot's name of an observation: `front.rgb` becomes `observation.images.front`."""
    return f"observation.images.{key.removesuffix('.rgb')}" if key.endswith(".rgb") else f"observation.{key}"


def _tabled(obs: dict[str, Array]) -> dict[str, Array]:
    """Returns the observations that parquet holds; float images (depth) go to .npy files."""
    return {key: value for key, value in obs.items() if value.dtype == np.uint8 or value.ndim == 2}


def _write_steps(folder: Path, episodes: Episodes) -> None:
    starts, ends = episodes.bounds()
    frame = np.arange(len(episodes.action)) - starts[episodes.episode_index]
    columns = {_feature_name(key): value for key, value in _tabled(episodes.obs).items()} | {
        "action": episodes.action.astype(np.float32),
        "next.reward": episodes.reward.astype(np.float32),
        "next.done": episodes.terminated | episodes.truncated,
        **{name: getattr(episodes, field) for name, field in _FLAGS.items()},
        "timestamp": (frame / episodes.meta.control_hz).astype(np.float32),
        "frame_index": frame,
        "episode_index": episodes.episode_index.astype(np.int64),
        "index": np.arange(len(frame)),
        "task_index": np.zeros(len(frame), np.int64),
    }
    writer = None
    for start, end in zip(starts, ends, strict=True):
        table = pa.table({name: _to_arrow(value[start:end]) for name, value in columns.items()})
        writer = writer or pq.ParquetWriter(folder / _DATA.format(chunk_index=0, file_index=0), table.schema)
        writer.write_table(table)
    if writer:
        writer.close()
    features = {name: _feature(episodes, name, value) for name, value in columns.items()}
    _write_json(folder / "meta/info.json", _info(episodes, features))
    stats = {name: _stats(value) for name, value in columns.items()}
    _write_json(folder / "meta/stats.json", stats)
    for key in episodes.obs.keys() - _tabled(episodes.obs).keys():
        np.save(folder / "arrays" / f"{key}.steps.npy", episodes.obs[key])


def _write_final(folder: Path, episodes: Episodes) -> None:
    tabled = _tabled(episodes.final_obs)
    table = pa.table({_feature_name(key): _to_arrow(value) for key, value in tabled.items()})
    pq.write_table(table, folder / "final" / "observations.parquet")
    for key in episodes.final_obs.keys() - tabled.keys():
        np.save(folder / "arrays" / f"{key}.final.npy", episodes.final_obs[key])


def _write_meta(folder: Path, episodes: Episodes) -> None:
    meta = episodes.meta
    own = {
        "format": 1,
        "task": meta.task,
        "instruction": meta.instruction,
        "features": {_feature_name(key): key for key in _tabled(episodes.obs)},
    }
    _write_json(folder / "meta/robot_rl.json", own)
    # LeRobot reads the instruction as the index of a pandas table, hence the schema's metadata.
    index = {"field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    column = {"field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64", "metadata": None}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [{"name": "task_index", **column}, {"name": "task", **index}],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0",
    }
    tasks = pa.table({"task_index": [0], "task": [meta.instruction]})
    tasks = tasks.replace_schema_metadata({"pandas": json.dumps(pandas)})
    pq.write_table(tasks, folder / "meta/tasks.parquet")
    starts, ends = episodes.bounds()
    zeros = [0] * len(starts)
    table = {
        "episode_index": np.arange(len(starts)),
        "tasks": [[meta.instruction]] * len(starts),
        "length": ends - starts,
        "data/chunk_index": zeros,
        "data/file_index": zeros,
        "dataset_from_index": starts,
        "dataset_to_index": ends,
        "meta/episodes/chunk_index": zeros,
        "meta/episodes/file_index": zeros,
    }
    pq.write_table(pa.table(table), folder / "meta/episodes/chunk-000/file-000.parquet")


def _info(episodes: Episodes, features: dict[str, Any]) -> dict[str, Any]:
    rate_hz = episodes.meta.control_hz
    return {
        "codebase_version": "v3.0",
        "robot_type": episodes.meta.robot,
        "total_episodes": episodes.num_episodes,
        "total_frames": len(episodes.action),
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": int(rate_hz) if float(rate_hz).is_integer() else rate_hz,
        "splits": {"train": f"0:{episodes.num_episodes}"},
        "data_path": _DATA,
        "video_path": None,
        "features": features,
    }


def _feature(episodes: Episodes, name: str, values: Array) -> dict[str, Any]:
    names: list[str] | None = None
    if name == "observation.state":
        names = list(episodes.meta.state_names)
    elif name == "action":
        names = list(episodes.meta.action_names)
    elif values.ndim == 2:
        names = [f"{name.split('.')[-1]}_{i}" for i in range(values.shape[1])]
    elif values.ndim == 4:
        names = ["height", "width", "channels"]
    dtype = "image" if values.ndim == 4 else str(values.dtype)
    return {"dtype": dtype, "shape": list(values.shape[1:]) or [1], "names": names}


def _stats(values: Array) -> dict[str, Any]:
    """Returns LeRobot's statistics: per element, per channel in [0, 1] for images."""
    flat = values[:, ::4, ::4].reshape(-1, 3) / 255.0 if values.ndim == 4 else values.reshape(len(values), -1)
    flat = flat.astype(np.float64)
    stats = {"min": flat.min(0), "max": flat.max(0), "mean": flat.mean(0), "std": flat.std(0)}
    for percent in (1, 10, 50, 90, 99):
        stats[f"q{percent:02d}"] = np.percentile(flat, percent, axis=0)
    shape = (3, 1, 1) if values.ndim == 4 else (-1,)
    return {name: value.reshape(shape).tolist() for name, value in stats.items()} | {"count": [len(values)]}


def _to_arrow(values: Array) -> Any:
    if values.ndim == 4:
        return pa.array([{"bytes": png, "path": None} for png in _to_png(values)], _IMAGE)
    if values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.array(values)


_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _to_png(images: Array) -> list[bytes]:
    codec = av.CodecContext.create("png", "w")
    assert isinstance(codec, av.VideoCodecContext)
    codec.height, codec.width = images.shape[1:3]
    codec.pix_fmt, codec.time_base = "rgb24", Fraction(1, 1)
    frames = (av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24") for image in images)
    return [bytes(packet) for frame in frames for packet in codec.encode(frame)]


def _from_png(encoded: list[bytes], shape: tuple[int, ...]) -> Array:
    codec = av.CodecContext.create("png", "r")
    assert isinstance(codec, av.VideoCodecContext)
    images = np.empty((len(encoded), *shape), np.uint8)
    for image, png in zip(images, encoded, strict=True):
        packet = av.Packet(png)
        packet.is_keyframe = True  # else the decoder adds the picture to the one before
        image[:] = codec.decode(packet)[0].to_ndarray(format="rgb24")
    return images


def _read_column(folder: Path, table: Any, name: str, feature: dict[str, Any]) -> Array:
    """Returns a column as an array, and refuses one of another shape than meta/info.json says."""
    column, shape = table[name].combine_chunks(), tuple(feature["shape"])
    if feature["dtype"] == "image":
        return _from_png(column.field("bytes").to_pylist(), shape)
    if not pa.types.is_list(column.type) and not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy(zero_copy_only=False).copy()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if len(flat) != len(column) * shape[0]:
        raise DatasetError(
            f"{folder}: feature {name!r} holds {len(flat) / max(1, len(column)):g} numbers a row, "
            f"meta/info.json says {shape}. Collect the dataset again, or correct the entry."
        )
    return flat.reshape(len(column), *shape).copy()


def _read_arrays(folder: Path, part: str) -> dict[str, Array]:
    suffix = f".{part}.npy"
    paths = sorted((folder / "arrays").glob(f"*{suffix}"))
    return {path.name.removesuffix(suffix): np.load(path) for path in paths}


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        raise DatasetError(
            f"{folder}: no {name} in it, so it is no dataset of robot-rl. "
            f"Make one with `robot-rl collect out={folder}`."
        )
    return json.loads((folder / name).read_text())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
