"""Writes LeRobotDataset v3 so that a crash at any instant leaves every earlier episode readable.

All files of a commit (one episode, or the episodes of one `write_all`) are written under temporary
names and flushed, then renamed; `meta/info.json`, which counts the episodes, is replaced last. The next
writer removes what an unfinished commit left. Appending reads no earlier episode: `meta/stats.json` holds the
aggregate of the statistics, and the last row of metadata holds the next numbers. T control steps.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from av.error import FFmpegError

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import json_bytes, listed, make_folder, sync_folder, temporary_of
from robot_rl.core.refusal import refusing
from robot_rl.data.episode import Episode, Feature
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.batch import Batch, check_episode
from robot_rl.data.lerobot.checksums import (
    MAIN,
    Checksums,
    ReplacedFiles,
    files_below,
    is_below,
    number_of,
    other_folders,
    record,
    refuse_dangling,
)
from robot_rl.data.lerobot.encode import VideoCodec
from robot_rl.data.lerobot.index import episode_tables, read_info, read_table
from robot_rl.data.lerobot.layout import Layout
from robot_rl.data.lerobot.parquet import table_bytes
from robot_rl.data.lerobot.stats import Stats, aggregate, from_json, to_json
from robot_rl.data.lerobot.texts import tasks_of

logger = logging.getLogger(__name__)

_MB = 1 << 20
_KEPT = "The episodes that `len` counts are whole."


class DatasetWriter:
    """Appends episodes to a dataset, new or begun earlier."""

    @refusing(DatasetError)
    def __init__(
        self,
        folder: str | Path,
        meta: EpisodesMeta,
        features: Mapping[str, Feature],
        *,
        images: Literal["video", "png"] = "video",
        codec: Literal["h264", "av1"] | VideoCodec = "h264",
    ) -> None:
        """Opens a dataset to write.

        Args:
            folder: the dataset; made if it does not exist.
            meta: of every episode; an episode may have its own instruction.
            features: of every observation.
            images: pictures as one video per camera, or without loss in the table.
            codec: of the video.

        Raises:
            DatasetError: the folder holds other data, or another process writes to it.
        """
        if not isinstance(codec, VideoCodec):
            codec = VideoCodec(name=codec)
        self.folder = Path(folder)
        self._layout = Layout(meta, lay.stored(features), images, codec)
        self._info: dict[str, Any] = self._layout.info()
        self._tasks: list[str] = []
        self._stats: Stats = {}
        self._next_file = 0
        self._files = ReplacedFiles(self.folder)
        self.last_store_episode: int | None = None
        """`store_episode` of the last episode."""
        make_folder(self.folder / "meta")
        self._lock = DatasetLock(self.folder)
        try:
            if (self.folder / lay.INFO).exists():
                self._resume()
            else:
                _require_empty(self.folder)
                self._remove_torn()
                self._files.replace(
                    {
                        lay.OWN: json_bytes(self._layout.own()),
                        lay.TASKS: table_bytes(tasks_of(dict(enumerate(self._tasks)))),
                        lay.INFO: json_bytes(self._info),
                    }
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self._info["total_episodes"]

    @refusing(DatasetError, kept=_KEPT, also=(FFmpegError,))
    def write(self, episode: Episode, *, store_episode: int | None = None) -> int:
        """Adds an episode in separate files; returns its number when the disk has it.

        Args:
            episode: its pictures are read one at a time.
            store_episode: its number in a store, kept in meta/episodes.
        """
        batch = self._batch()
        try:
            self._add(batch, episode, store_episode)
            self._seal(batch)
        except BaseException:
            self._give_up(batch)
            raise
        return len(self) - 1

    @refusing(DatasetError, kept=_KEPT, also=(FFmpegError,))
    def write_all(self, episodes: Iterable[Episode]) -> int:
        """Adds many episodes in few files; returns the number of episodes of the dataset.

        A commit comes whenever a file reaches LeRobot's size (100 MB of data, 200 MB of video) and at
        the end: a crash loses the episodes after the last commit.
        """
        limits = [int(self._info[f"{kind}_files_size_in_mb"]) * _MB for kind in ("data", "video")]
        batch: Batch | None = None
        try:
            for episode in episodes:
                batch = batch or self._batch()
                self._add(batch, episode, None)
                if batch.is_full(*limits):
                    self._seal(batch)
                    batch = None
            if batch is not None:
                self._seal(batch)
        except BaseException:
            if batch is not None:
                self._give_up(batch)
            raise
        return len(self)

    def close(self) -> None:
        self._lock.close()

    def _batch(self) -> Batch:
        return Batch(self.folder, self._layout, self._next_file)

    def _add(self, batch: Batch, episode: Episode, store_episode: int | None) -> None:
        index = len(self) + len(batch.rows)
        check_episode(self._layout, episode, f"{self.folder}, episode {index}")
        instruction = episode.meta.instruction
        if instruction not in self._tasks:
            self._tasks.append(instruction)
        batch.add(
            episode,
            index=index,
            first_row=self._info["total_frames"] + batch.steps,
            task=self._tasks.index(instruction),
            store_episode=store_episode,
        )

    def _seal(self, batch: Batch) -> None:
        """Commits: files, instructions, statistics, and last the count of episodes."""
        batch.seal()
        new_tasks = len(self._tasks) != self._info["total_tasks"]
        tasks = {lay.TASKS: table_bytes(tasks_of(dict(enumerate(self._tasks))))} if new_tasks else {}
        stats = aggregate([self._stats, batch.stats]) if self._stats else batch.stats
        total = len(self) + len(batch.rows)
        info = {
            **self._info,
            "total_episodes": total,
            "total_frames": self._info["total_frames"] + batch.steps,
            "total_tasks": len(self._tasks),
            "splits": {"train": f"0:{total}"},
        }
        self._files.replace({**tasks, lay.STATS: json_bytes(to_json(stats)), lay.INFO: json_bytes(info)})
        self._info, self._stats = info, stats
        self._next_file += 1
        self.last_store_episode = batch.rows[-1]["store_episode"]

    def _give_up(self, batch: Batch) -> None:
        """Reads the state from the disk again: it is unknown how much of a failed commit is there."""
        batch.abandon()
        self._resume()

    def _resume(self) -> None:
        """Reads an existing dataset, and removes what an unfinished commit left in it."""
        sums = Checksums(self.folder)
        info = read_info(self.folder, sums)
        written = sums.json(lay.OWN) if (self.folder / lay.OWN).exists() else {}
        _check_same(self.folder, info, self._info, written, self._layout.own())
        self._info = info
        sums.read(lay.TASKS)
        tasks = read_table(self.folder / lay.TASKS).sort_by("task_index")
        self._tasks = tasks["task"].to_pylist()
        last = self._last_row(sums)
        if last is not None:
            numbers = [key.removesuffix("chunk_index") for key in last if key.endswith("chunk_index")]
            places = [(last[f"{at}chunk_index"], last[f"{at}file_index"]) for at in numbers]
            self._next_file = 1 + max(chunk * lay.FILES_PER_CHUNK + file for chunk, file in places)
            self.last_store_episode = last["store_episode"]
        self._files = ReplacedFiles.found(sums, self._next_file)
        self._remove_torn()
        sync_folder(self.folder / "meta")  # a commit may have failed at this sync
        if last is not None:
            self._stats = self._read_stats(sums)
        if not written.get("checksums"):  # of an earlier version
            self._files.replace({lay.OWN: json_bytes({**written, "checksums": True})})

    def _last_row(self, sums: Checksums) -> dict[str, Any] | None:
        """Returns the last committed row of meta/episodes, from the newest file that has one."""
        for path in reversed(listed(self.folder / "meta/episodes", "*/*.parquet")):
            sums.require(str(path.relative_to(self.folder)))
            table = read_table(path, lambda name: not name.startswith("stats/"))
            row = table.slice(len(table) - 1).to_pylist()[0]
            if row["episode_index"] < len(self):
                return row
        return None

    def _remove_torn(self) -> None:
        """Removes files of ours that no committed episode refers to: all numbers from the next one on."""
        kinds = (*lay.NUMBERED, "meta/checksums/*/*")
        held = {f"arrays/{key}" for key in self._layout.arrays}
        if self._layout.images == "video":
            held |= {f"videos/{name}" for name in self._layout.pictures.values()}
        for path in [path for kind in kinds for path in listed(self.folder, kind) if path.is_file()]:
            name = path.relative_to(self.folder).as_posix()
            if not lay.is_among(name, held):  # of a camera that is not declared
                continue
            number = number_of(name)
            if path.name.endswith(lay.TEMPORARY) or (number is not None and number >= self._next_file):
                logger.info("%s: left by a write that was cut short, removed", path)
                path.unlink()
        for name in (lay.INFO, lay.STATS, lay.TASKS, lay.OWN, MAIN):
            temporary_of(self.folder / name).unlink(missing_ok=True)

    def _read_stats(self, sums: Checksums) -> Stats:
        """Returns the aggregate; computed again if an unfinished commit is in it already."""
        path = self.folder / lay.STATS
        if path.exists():
            stats = from_json(sums.json(lay.STATS))
            if stats["index"]["count"][0] == self._info["total_frames"]:
                return stats
        tables = episode_tables(self.folder, sums)
        stats = aggregate([_stats_of_row(row) for table in tables for row in table.to_pylist()])
        self._files.replace({lay.STATS: json_bytes(to_json(stats))})
        return stats


def _stats_of_row(row: Mapping[str, Any]) -> Stats:
    stats: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        if name.startswith("stats/"):
            _, feature, statistic = name.split("/")
            stats.setdefault(feature, {})[statistic] = value
    return from_json(stats)


@refusing(DatasetError)
def record_checksums(folder: str | Path) -> int:
    """Computes the checksums of all files of a dataset again; returns their number.

    Raises:
        DatasetError: no dataset, another writer has it open, or a link in it leads nowhere.
    """
    folder = Path(folder)
    if not (folder / lay.INFO).is_file():
        read_info(folder)  # raises: it is missing
    with closing(DatasetLock(folder)):
        others = other_folders(folder)
        names = [name for name in files_below(folder) if not is_below(name, others)]
        refuse_dangling(folder, names, "or remove the link.")
        return record(folder)


class DatasetLock:
    """The right to write to a dataset, until it is closed or the process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises `DatasetError` if another writer has it."""
        self._handle = os.open(folder / "meta", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(os.fstat(self._handle), (folder / "meta").stat())
        except BlockingIOError:
            is_same = False
        if not is_same:  # another has it, or `compact` exchanged the folder just now
            self.close()
            raise DatasetError(
                f"{folder}: another writer has this dataset open. Close it first; reading needs no lock."
            )

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _require_empty(folder: Path) -> None:
    """Refuses a folder that holds episodes but not the file that counts them."""
    for name in ("data", "videos", "meta/episodes"):
        if (folder / name).exists():
            raise DatasetError(
                f"{folder}: has {name}/ but no {lay.INFO}. Restore that file, or choose another folder."
            )


def _check_same(
    folder: Path, got: dict[str, Any], want: dict[str, Any], own: dict[str, Any], want_own: dict[str, Any]
) -> None:
    at = f"{folder}: cannot append: "
    if own.get("format") != lay.FORMAT:
        raise DatasetError(
            f"{at}{lay.OWN} has format {own.get('format')}, this writer {lay.FORMAT}. Copy the dataset to a "
            "new folder with `robot_rl.data.lerobot.edit.merge`, which writes the present format."
        )
    pairs = [(name, got.get(name), want[name]) for name in ("robot_type", "fps")]
    pairs += [("task", own["task"], want_own["task"])]
    pairs += [
        (f"feature {name!r}", got["features"].get(name), want["features"].get(name))
        for name in [*want["features"], *(got["features"].keys() - want["features"].keys())]
    ]
    pairs += [
        (f"observation {key!r}", own["observations"].get(key), value)
        for key, value in want_own["observations"].items()
    ]
    for name, has, needs in pairs:
        if has != needs:
            raise DatasetError(
                f"{at}{name} is {has} there, {needs} here. "
                "Write to another folder, or open it with what it has."
            )
