"""Joins the many small files of a recording into few of LeRobot's sizes, without encoding anything again.

A complete new folder is built beside the old one and takes its place in one step, so that whoever
opens the dataset, LeRobot included, finds either the old or the new.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from av.error import FFmpegError

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import exchange_folder, link_again, listed, restore_folder, sync_tree
from robot_rl.core.refusal import refusing
from robot_rl.data.lerobot import layout as lay
from robot_rl.data.lerobot.beside import Beside, load_array
from robot_rl.data.lerobot.checksums import MAIN, files_below, is_below, record
from robot_rl.data.lerobot.damage import last_file
from robot_rl.data.lerobot.foreign import episode_files, refuse_unlisted
from robot_rl.data.lerobot.index import DatasetIndex, read_info, read_schema, read_stats, read_table
from robot_rl.data.lerobot.layout import place
from robot_rl.data.lerobot.opening import open_index
from robot_rl.data.lerobot.parquet import TableFile, write_table
from robot_rl.data.lerobot.remux import header, join, whole
from robot_rl.data.lerobot.tables import Tables, file_damage
from robot_rl.data.lerobot.writer import DatasetLock
from robot_rl.data.store.layout import is_store
from robot_rl.data.store.lock import WriterLock

_MB = 1 << 20


@dataclass
class _Group:
    """Old files that become one."""

    number: int
    files: list[int] = field(default_factory=list)
    """Their numbers."""
    size: int = 0


@refusing(DatasetError, kept="The dataset is whole.", also=(FFmpegError,))
def compact(folder: str | Path, *, data_mb: float | None = None, video_mb: float | None = None) -> None:
    """Joins the files of a dataset.

    Nobody writes to the folder meanwhile, to the journal of a store neither; readers that have it open
    must open it again. Files that are not the dataset's (that journal, files of others) are kept.

    Args:
        folder: the dataset.
        data_mb: largest parquet file; None: what meta/info.json says, as LeRobot 100.
        video_mb: largest video file; None: as above, 200.

    Raises:
        DatasetError: no dataset of version 3, another writer has it or its store open, files do not hold
            what meta/ says, or nobody knows which episodes they hold; nothing was changed.
    """
    folder = Path(folder).resolve()
    restore_folder(folder)
    info = read_info(folder)
    if not info["codebase_version"].startswith("v3"):
        raise DatasetError(
            f"{folder}: version {info['codebase_version']}, allowed: v3.0. Only version 3 has files of many "
            f"episodes. Upgrade it first, no video is encoded again: robot-rl replay upgrade {folder} out=NEW"
        )
    with journal_lock(folder), closing(DatasetLock(folder)):
        info = read_info(folder)  # again: nobody adds to it from here on
        if not info["total_episodes"]:
            return
        refuse_linked_meta(folder)
        index = _require_unchanged(folder)
        new = folder.with_name(f".compacting-{folder.name}")
        shutil.rmtree(new, ignore_errors=True)  # of an attempt that was cut short
        kept = _kept(index)
        limits = (data_mb or info["data_files_size_in_mb"], video_mb or info["video_files_size_in_mb"])
        _write(folder, new, info, _committed_rows(folder, info["total_episodes"]), limits)
        for path in kept:  # after the joined files: none of them is written into
            link_again(folder / path, new / path)
        record(new)
        sync_tree(new)
        if _kept(index) != kept:
            raise DatasetError(f"{folder}: somebody is writing to it. Close that writer, then compact again.")
        exchange_folder(new, folder)
    shutil.rmtree(new, ignore_errors=True)


def _write(folder: Path, new: Path, info: dict[str, Any], rows: Any, limits_mb: tuple[float, float]) -> None:
    """Writes the joined files and the metadata that says where everything is now."""
    columns: dict[str, Any] = {name: rows[name] for name in rows.column_names}

    def assign(kind: str, number: Any) -> None:
        columns[f"{kind}/chunk_index"] = pa.array(number // lay.FILES_PER_CHUNK, pa.int64())
        columns[f"{kind}/file_index"] = pa.array(number % lay.FILES_PER_CHUNK, pa.int64())

    old = _numbers(rows, "data")
    groups = _grouped(old, lambda n: folder / place(info["data_path"], n), limits_mb[0] * _MB, schema_of)
    for group in groups:
        _join_tables(folder, new, group, info["data_path"])
    assign("data", _new_numbers(groups, old))
    for name in [n for n, feature in info["features"].items() if feature["dtype"] == "video"]:
        old = _numbers(rows, f"videos/{name}")

        def path(number: int, name: str = name) -> Path:
            return folder / place(info["video_path"], number, video_key=name)

        groups = _grouped(old, path, limits_mb[1] * _MB, header)
        before_s: dict[int, float] = {}
        for group in groups:
            target = new / place(info["video_path"], group.number, video_key=name)
            pieces = [whole(path(number)) for number in group.files]
            join(pieces, target, info["fps"])
            begins = np.cumsum([0, *(piece.frames for piece in pieces[:-1])]) / info["fps"]
            before_s |= dict(zip(group.files, begins.tolist(), strict=True))
        shift = np.array([before_s[number] for number in old.tolist()])
        for edge in ("from", "to"):
            key = f"videos/{name}/{edge}_timestamp"
            columns[key] = pa.array(rows[key].to_numpy() + shift)
        assign(f"videos/{name}", _new_numbers(groups, old))
    assign("meta/episodes", np.zeros(len(rows), np.int64))
    target = new / place(lay.EPISODES, 0)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_table(target, pa.table(columns), **lay.PARQUET)


def _require_unchanged(folder: Path) -> DatasetIndex:
    """Refuses what is not as it was written: the originals will be gone; returns the index.

    Raises:
        DatasetError: a file or a page differs from its checksum, metadata cannot be read, or nobody knows
            which episodes a file holds.
    """
    index = open_index(folder)
    refuse_unlisted(index)
    Beside(index, Tables(folder, 0))
    read_stats(folder, index.sums)
    wrong = next((text for _, text in index.sums.problems(last_file(index))), None)
    for path in listed(folder) if wrong is None else ():
        if path.suffix == ".parquet" and (wrong := file_damage(path)):
            break
    if wrong is not None:
        raise DatasetError(f"{wrong} Nothing was changed.")
    return index


def _committed_rows(folder: Path, total: int) -> Any:
    """Returns meta/episodes, statistics included, of the episodes that meta/info.json counts."""
    paths = listed(folder / "meta/episodes", "*/*.parquet")
    rows = (
        pa.concat_tables([read_table(path) for path in paths], promote_options="permissive")
        if paths
        else pa.table({"episode_index": []})
    )
    rows = rows.sort_by("episode_index").slice(0, total).combine_chunks()
    if rows["episode_index"].to_pylist() != list(range(total)):
        raise DatasetError(
            f"{folder}: meta/episodes does not list the {total} episodes that meta/info.json counts. Restore "
            "meta/ from a copy; nothing was changed."
        )
    return rows


def _numbers(rows: Any, kind: str) -> Any:
    chunk, file = (rows[f"{kind}/{part}_index"].to_numpy() for part in ("chunk", "file"))
    return chunk * lay.FILES_PER_CHUNK + file


def _grouped(
    numbers: Any, path: Callable[[int], Path], limit: float, kind: Callable[[Path], Any] = lambda path: None
) -> list[_Group]:
    """Returns which files are joined: neighbours of one kind, up to a size."""
    groups: list[_Group] = []
    last: Any = None
    for number in dict.fromkeys(numbers.tolist()):
        file = path(number)
        if not file.is_file():
            raise DatasetError(f"{file}: this file is missing. Copy it again; nothing was changed.")
        size, its = file.stat().st_size, kind(file)
        if not groups or groups[-1].size + size > limit or its != last:
            groups.append(_Group(len(groups)))
        groups[-1].files.append(number)
        groups[-1].size += size
        last = its
    return groups


def _new_numbers(groups: list[_Group], old: Any) -> Any:
    moved = {number: group.number for group in groups for number in group.files}
    return np.array([moved[number] for number in old.tolist()], np.int64)


def _join_tables(folder: Path, new: Path, group: _Group, data: str) -> None:
    """Joins data files, and what lies beside them, row group by row group."""
    for template in (data, lay.FINAL):
        sources = [folder / place(template, number) for number in group.files]
        if any(path.is_file() for path in sources):
            _join_parquet(sources, new / place(template, group.number))
    for key in [path.name for path in listed(folder / "arrays", "*") if path.is_dir()]:
        sources = [folder / place(lay.ARRAYS, number, key=key) for number in group.files]
        if not any(path.is_file() for path in sources):
            continue
        parts = [load_array(path) for path in sources]
        path = new / place(lay.ARRAYS, group.number, key=key)
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        whole = np.lib.format.open_memmap(path, "w+", parts[0].dtype, shape)
        np.concatenate(parts, out=whole)
        whole.flush()


def _join_parquet(sources: Iterable[Path], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    joined: TableFile | None = None
    for path in sources:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            joined = joined or TableFile(target, file.schema_arrow, **lay.PARQUET)
            for number in range(file.metadata.num_row_groups):
                joined.add(file.read_row_group(number))
    if joined is not None:
        joined.finish()


def schema_of(path: Path) -> Any:
    """Returns the columns of a parquet file: others cannot be joined to it."""
    return read_schema(path).remove_metadata()


@contextmanager
def journal_lock(folder: Path) -> Generator[None]:
    """Keeps the writer of a store out: it would go on in a journal that another folder has by now."""
    lock = WriterLock(folder) if is_store(folder) else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def refuse_linked_meta(folder: Path) -> None:
    """Refuses metadata in a folder that is only linked to: a copy of the dataset would share it.

    Raises:
        DatasetError: names the link.
    """
    for path in (folder / "meta", *listed(folder / "meta")):
        if path.is_symlink() and path.is_dir():
            raise DatasetError(
                f"{path}: a link to {path.readlink()}, but metadata is replaced in one step together with "
                "the folder that holds it. Put that folder itself here."
            )


def _kept(index: DatasetIndex) -> list[Path]:
    """Returns all files, and links to folders, that stay as they are, relative to the folder.

    Raises:
        DatasetError: some lie behind a link whose place a folder of joined files takes.
    """
    folder = index.folder
    found = files_below(folder)
    joined = {*episode_files(index, found), MAIN}
    stay = [name for name in found if name not in joined and not is_below(name, ("meta/checksums",))]
    links = [path.relative_to(folder) for path in listed(folder) if path.is_symlink() and path.is_dir()]
    kept: dict[Path, None] = {}
    for path in map(Path, stay):
        link = next((link for link in links if path.is_relative_to(link)), None)
        if link is not None and any(is_below(name, (link.as_posix(),)) for name in joined):
            raise DatasetError(
                f"{folder / path}: nobody knows this file, and it lies behind the link {link}, whose place "
                "the joined files take. Move it elsewhere; nothing was changed."
            )
        kept[link or path] = None
    held = (link for link in links if not any(is_below(name, (link.as_posix(),)) for name in joined))
    return sorted({*kept, *held})
