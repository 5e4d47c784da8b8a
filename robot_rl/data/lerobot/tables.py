"""Reads the rows of one episode from parquet files, and checks them. T rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.names import APART
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.lerobot.index import STATE, DatasetIndex, cut_short

Array = NDArray[Any]


class Tables:
    """Reads row groups; the last ones stay in memory, up to a number of bytes."""

    def __init__(
        self,
        folder: Path,
        cached_bytes: int,
        sums: Checksums | None = None,
        *,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Args: sums: refuse files that differ from them; renamed: name of a column -> that in the files."""
        self._renamed = dict(renamed or {})
        self._read_as = {old: new for new, old in self._renamed.items()}
        self._folder = folder
        self._sums = sums
        self._budget = cached_bytes
        self._groups: OrderedDict[tuple[str, int, tuple[str, ...] | None], Any] = OrderedDict()
        self._held_bytes = 0
        self._footer: tuple[str, Any] = ("", None)  # of the file read last: it grows with its row groups
        self._ends: dict[str, Array] = {}
        self._lock = threading.Lock()

    def rows(self, file: str, first: int, count: int, names: Sequence[str] | None) -> Any:
        """Returns `count` rows from `first` on as a table, with the `names` that exist; None: all columns.

        Raises:
            DatasetError: the file is missing, cut short, or has fewer rows.
        """
        with self._lock:
            ends = self._row_group_ends(file)
            total = int(ends[-1]) if len(ends) else 0
            if first + count > total:
                raise DatasetError(
                    f"{self._folder / file}: has {total} rows, meta/ says that an episode lies in rows "
                    f"{first} to {first + count - 1}. Restore the file, or "
                    "drop the episode (on_damage=skip)."
                )
            begin, end = np.searchsorted(ends, (first, first + count - 1), side="right").tolist()
            wanted = None if names is None else tuple(names)
            parts = [self._group(file, number, wanted) for number in range(begin, end + 1)]
        offset = first - (int(ends[begin - 1]) if begin else 0)
        return pa.concat_tables(parts).slice(offset, count)

    def close(self) -> None:
        """Forgets everything: the files may have changed."""
        with self._lock:
            self._groups.clear()
            self._held_bytes = 0
            self._footer = ("", None)
            self._ends.clear()

    def _row_group_ends(self, file: str) -> Array:
        if file not in self._ends:
            metadata = self._open(file).metadata
            counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            self._ends[file] = np.cumsum(counts, dtype=np.int64)
        return self._ends[file]

    def _group(self, file: str, number: int, names: tuple[str, ...] | None) -> Any:
        key = (file, number, names)
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key]
        opened = self._open(file)
        known = set(opened.schema_arrow.names)
        # Our own files may have LeRobot's name already.
        wanted = names and [old if (old := self._renamed.get(n, n)) in known else n for n in names]
        there = None if wanted is None else [name for name in wanted if name in known]
        try:
            table = opened.read_row_group(number, columns=there)
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(cut_short(self._folder / file, error)) from error
        if self._read_as:
            table = table.rename_columns([self._read_as.get(name, name) for name in table.column_names])
        self._groups[key] = table
        self._held_bytes += table.nbytes
        while len(self._groups) > 1 and self._held_bytes > self._budget:
            self._held_bytes -= self._groups.popitem(last=False)[1].nbytes
        return table

    def _open(self, file: str) -> Any:
        path = self._folder / file
        if not path.is_file():
            raise DatasetError(
                f"{path}: this parquet file is missing. Copy it again (a partial download?), or drop its "
                "episodes (on_damage=skip)."
            )
        try:
            is_whole = self._sums is not None and self._sums.require(file)
            footer = self._footer[1] if self._footer[0] == file else None
            opened = pq.ParquetFile(path, metadata=footer, page_checksum_verification=not is_whole)
            self._footer = (file, opened.metadata)
            return opened
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(cut_short(path, error)) from error


def file_damage(path: Path) -> str | None:
    """Reads a whole parquet file, compares the checksums of its pages, and returns the damage, or None."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for number in range(file.num_row_groups):
                file.read_row_group(number)
    except (pa.ArrowException, OSError, ValueError) as error:
        return cut_short(path, error)
    return None


def read_rows(tables: Tables, index: DatasetIndex, episode: int) -> dict[str, Array]:
    """Returns the numbers of an episode, LeRobot's name -> (T, ...), unchecked; floats as float32.

    Raises:
        DatasetError: a file or a required feature is missing.
    """
    at, steps = index.files[index.file[episode]], int(index.lengths[episode])
    return rows_of(tables.rows(at, int(index.first[episode]), steps, index.numeric), index, at)


def rows_of(table: Any, index: DatasetIndex, at: str) -> dict[str, Array]:
    """Returns the numbers of a table, as `read_rows`; `at` is its file."""
    if "action" not in table.column_names:
        close = get_close_matches("action", table.column_names, n=1) or ["<column>"]
        raise DatasetError(
            f"{index.folder / at}: feature 'action' is missing. Name its column: "
            f"rename={close[0]}:action, or `robot-rl replay rename {index.folder} {close[0]}=action "
            f"out=<new folder>`. It has: {', '.join(table.column_names)}."
        )
    rows: dict[str, Array] = {}
    for name in [name for name in index.numeric if name in table.column_names]:
        feature = index.features[name]
        values = numbers(table[name], feature["shape"])
        if name in ("action", *APART) or name.startswith("observation."):
            values = values.astype(memory_dtype(name, feature["dtype"]), copy=False)
            values = values.reshape(len(values), -1) if values.ndim == 1 else values
        rows[name] = values
    return rows


def memory_dtype(name: str, dtype: str) -> str:
    """Returns the type in memory: float32 for states, actions and other float observations."""
    return "float32" if dtype.startswith("float") or name in ("action", STATE) else dtype


def numbers(column: Any, shape: Sequence[int]) -> Array:
    """Returns a column as an array: (T,) for single numbers, else (T, *shape)."""
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks else pa.array([], column.type)
    count = len(values)
    nested = False
    while pa.types.is_list(values.type) or pa.types.is_fixed_size_list(values.type):
        values, nested = values.flatten(), True
    if values.null_count:
        values = values.fill_null(float("nan") if pa.types.is_floating(values.type) else 0)
    is_bool = pa.types.is_boolean(values.type)
    # Not to_numpy: that imports pandas where it is installed.
    flat = np.from_dlpack(values.cast(pa.uint8()) if is_bool else values).copy()
    flat = flat.astype(bool) if is_bool else flat
    if not nested:
        return flat
    return (
        flat.reshape(count, *shape) if flat.size == count * int(np.prod(shape)) else flat.reshape(count, -1)
    )


def row_problems(index: DatasetIndex, episode: int, rows: Mapping[str, Array]) -> Iterator[tuple[str, str]]:
    """Yields kind and description of every problem of the numbers of an episode."""
    number = int(index.episode[episode])
    for name, want in (("episode_index", np.full(len(rows["action"]), number)), ("frame_index", None)):
        got = rows.get(name)
        want = np.arange(len(rows["action"])) if want is None else want
        if got is not None and (got != want).any():
            row = int(np.flatnonzero(got != want)[0])
            yield (
                "duplicate-index" if name == "frame_index" else "unequal-lengths",
                f"row {row} has {name} {got[row]}, allowed {want[row]}: rows are repeated, missing, or "
                "belong to another episode",
            )
    index_column = rows.get("index")
    if index_column is not None and (np.diff(index_column) != 1).any():
        row = int(np.flatnonzero(np.diff(index_column) != 1)[0]) + 1
        yield (
            "duplicate-index",
            f"row {row} has index {index_column[row]} after {index_column[row - 1]}, allowed "
            f"{index_column[row - 1] + 1}: rows are repeated or missing",
        )
    for name, values in rows.items():
        feature = index.features[name]
        shape = tuple(feature["shape"])
        if shape != (1,) and values.shape[1:] != shape:
            yield "wrong-shape", f"feature {name!r} has shape {values.shape[1:]}, meta/info.json says {shape}"
        if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            bad = np.argwhere(~np.isfinite(values.reshape(len(values), -1)))[0]
            yield (
                "not-finite",
                f"feature {name!r} is NaN or infinite in row {int(bad[0])}, {element(feature, int(bad[1]))}",
            )
    stamps = rows.get("timestamp")
    if stamps is not None and np.isfinite(stamps).all():
        late = np.abs(stamps - stamps[:1] - np.arange(len(stamps)) / index.fps)
        if len(stamps) and late.max() > 0.5 / index.fps:
            row = int(late.argmax())
            yield (
                "wrong-fps",
                f"row {row} has timestamp {stamps[row]:.3f} s, at {index.fps:g} fps it should be "
                f"{row / index.fps:.3f} s: meta/info.json and the data were recorded at different rates",
            )


def element(feature: Mapping[str, Any], number: int) -> str:
    """Returns a description of one element of a feature, with its name if it has one."""
    names = flat_names(feature)
    return f"element {number}" + (f" ({names[number]})" if number < len(names) else "")


def flat_names(feature: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a feature's elements; older writers nest them in lists or dicts."""

    def leaves(names: Any) -> Iterator[str]:
        if isinstance(names, dict):
            names = list(names.values()) if any(isinstance(v, list) for v in names.values()) else list(names)
        if isinstance(names, (list, tuple)):
            for name in names:
                yield from leaves(name)
        elif names is not None:
            yield str(names)

    return tuple(leaves(feature.get("names")))
