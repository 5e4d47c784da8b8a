"""Joins the many small files of a recording into few of LeRobot's sizes, without encoding anything again.

A complete new folder is built next to the old one and takes its place in one step: a process that opens the
dataset, LeRobot included, finds either the old files or the new ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from av.error import FFmpegError

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import exchange_folder, link_again, listed, restore_folder, sync_tree
from robot_rl.core.refusal import refusing
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.checksums import MAIN, files_below, is_below, record
from robot_rl.data.lerobot.copying import DataFiles, Source, copy_videos
from robot_rl.data.lerobot.damage import last_file
from robot_rl.data.lerobot.foreign import FORMAT_1, episode_files, refuse_unlisted
from robot_rl.data.lerobot.index import DatasetIndex, read_info, read_stats
from robot_rl.data.lerobot.opening import open_index
from robot_rl.data.lerobot.parquet import write_table
from robot_rl.data.lerobot.tables import file_damage
from robot_rl.data.lerobot.writer import DatasetLock
from robot_rl.data.store.layout import is_store
from robot_rl.data.store.lock import WriterLock

_MB = 1 << 20


@refusing(DatasetError, kept="The dataset is whole.", also=(FFmpegError,))
def compact(folder: str | Path, *, data_mb: float | None = None, video_mb: float | None = None) -> None:
    """Joins the files of a dataset.

    Nobody may write to the folder meanwhile, or to the journal of its store; readers that have it open
    must open it again. The journal and files of others are kept.

    Args:
        data_mb: size at which the next parquet file begins; None: what meta/info.json says, as LeRobot 100.
        video_mb: largest video file; None: as above, 200.

    Raises:
        DatasetError: no dataset of version 3, another process writes to it or to its store, files do not
            hold what meta/ lists, or the episodes of a file are unknown; nothing was changed.
    """
    folder = Path(folder).resolve()
    restore_folder(folder)
    info = read_info(folder)
    if not info["codebase_version"].startswith("v3"):
        raise DatasetError(
            f"{folder}: version {info['codebase_version']}, allowed: v3.0. Only version 3 has files of many "
            f"episodes. Upgrade it first, no video is encoded again: robot-rl replay upgrade {folder} out=NEW"
        )
    if not info["total_episodes"]:
        return
    with rebuilt(folder, "compacting") as new:
        index = _require_unchanged(folder)
        kept = _kept(index)
        limits = (data_mb or info["data_files_size_in_mb"], video_mb or info["video_files_size_in_mb"])
        _write(index, new, limits)
        for path in kept:  # after the joined files: none of them is written into
            link_again(folder / path, new / path)
        record(new)
        sync_tree(new)
        if _kept(index) != kept:
            raise DatasetError(f"{folder}: another process writes to it. Close that writer, then try again.")


def _write(index: DatasetIndex, new: Path, limits_mb: tuple[float, float]) -> None:
    """Writes the joined files, and the rows of meta/episodes that name their places."""
    source, files = Source(index), DataFiles(new, limits_mb[0] * _MB)
    places: list[dict[str, Any]] = []
    try:
        for episode in range(len(index)):
            number = files.add(source.table(episode), source, episode, episode)
            places.append({**lay.placed("data", number), **lay.placed("meta/episodes", 0)})
        files.finish()
    except BaseException:
        files.abandon()
        raise
    whole = [(index, episode) for episode in range(len(index))]
    for name in index.videos:
        copy_videos(name, whole, new, places, limit=limits_mb[1] * _MB)
    rows = source.rows.take([source.row_of[number] for number in index.episode.tolist()])
    changed = {name: pa.array([place[name] for place in places]) for name in places[0]}
    target = new / lay.place(lay.EPISODES, 0)
    target.parent.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {name: rows[name] for name in rows.column_names}
    write_table(target, pa.table(columns | changed))


def _require_unchanged(folder: Path) -> DatasetIndex:
    """Returns the index; refuses a file that differs from its checksum: the originals are removed.

    Raises:
        DatasetError: a file or a page has changed, metadata cannot be read, or the episodes of a file are
            unknown.
    """
    index = open_index(folder)
    refuse_unlisted(index)
    read_stats(folder, index.sums)
    wrong = next((text for _, text in index.sums.problems(last_file(index))), None)
    for path in listed(folder) if wrong is None else ():
        if path.suffix == ".parquet" and (wrong := file_damage(path)):
            break
    if wrong is not None:
        raise DatasetError(f"{wrong} Nothing was changed.")
    return index


@contextmanager
def rebuilt(folder: Path, action: str) -> Generator[Path]:
    """Gives the path of a new folder, which becomes the dataset in one step if the block succeeds.

    The block flushes what it writes there. `action` is in the name of the new folder.

    Raises:
        DatasetError: another process writes to the dataset or to its store, or metadata is linked to.
    """
    with ExitStack() as locks:
        if is_store(folder):  # else its writer would go on in the journal of a folder that is removed
            locks.callback(WriterLock(folder).release)
        locks.enter_context(closing(DatasetLock(folder)))
        for path in (folder / "meta", *listed(folder / "meta")):
            if path.is_symlink() and path.is_dir():
                raise DatasetError(
                    f"{path}: a link to {path.readlink()}, but metadata is replaced in one step together "
                    "with the folder that holds it. Put that folder itself here."
                )
        new = folder.with_name(f".{action}-{folder.name}")
        shutil.rmtree(new, ignore_errors=True)  # of an attempt that was cut short
        try:
            yield new
            exchange_folder(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _kept(index: DatasetIndex) -> list[Path]:
    """Returns all files, and links to folders, that stay as they are, relative to the folder.

    Raises:
        DatasetError: some lie behind a link whose place a folder of joined files takes.
    """
    folder = index.folder
    found = files_below(folder)
    # What format 1 keeps in one file for all episodes is found by their numbers, which stay.
    joined = {name for name in episode_files(index, found) if not FORMAT_1.fullmatch(name)} | {MAIN}
    stay = [name for name in found if name not in joined and not is_below(name, ("meta/checksums",))]
    links = [path.relative_to(folder) for path in listed(folder) if path.is_symlink() and path.is_dir()]
    kept: dict[Path, None] = {}
    for path in map(Path, stay):
        link = next((link for link in links if path.is_relative_to(link)), None)
        if link is not None and any(is_below(name, (link.as_posix(),)) for name in joined):
            raise DatasetError(
                f"{folder / path}: this file is unknown, and it lies behind the link {link}, whose place "
                "the joined files take. Move it elsewhere; nothing was changed."
            )
        kept[link or path] = None
    held = (link for link in links if not any(is_below(name, (link.as_posix(),)) for name in joined))
    return sorted({*kept, *held})
