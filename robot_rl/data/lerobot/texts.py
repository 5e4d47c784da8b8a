"""Tables of texts that rows refer to by number, such as `task_index` of meta/tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import listed
from robot_rl.data.lerobot.checksums import Checksums
from robot_rl.data.lerobot.index import read_table

Array = NDArray[Any]

_NO_NAME = "__index_level_0__"


def text_tables(folder: Path, sums: Checksums) -> dict[str, Any]:
    """Returns the tables of texts of a dataset of version 3: `subtask_index` -> its parquet table.

    Raises:
        DatasetError: a table is damaged.
    """
    tables: dict[str, Any] = {}
    for path in listed(folder / "meta", "*.parquet"):
        column = f"{path.stem.removesuffix('s')}_index"
        sums.require(f"meta/{path.name}")
        table = read_table(path)
        if column in table.column_names and column != "episode_index":
            tables[column] = table
    return tables


def tasks_of(tasks: Mapping[int, str]) -> Any:
    """Returns the table of tasks as in LeRobot: the text is the index of a pandas table."""
    numbers, texts = pa.array(list(tasks), pa.int64()), pa.array(list(tasks.values()), pa.string())
    return _indexed_by(pa.table({"task_index": numbers, "task": texts}), "task")


class JoinedTexts:
    """The table of a new dataset, with the texts of several others."""

    def __init__(self, column: str, tables: Sequence[Any | None], *, keep_all: bool) -> None:
        """Prepares to number texts from the start.

        Args:
            column: `task_index`.
            tables: of every source; None where one has none.
            keep_all: also keeps texts that no row refers to, and the numbers if there is one source.
        """
        self._column = column
        self._keeps_numbers = keep_all and len(tables) == 1
        self._tables = [None if table is None else _named(table, column) for table in tables]
        self._keys = [{} if table is None else _keys(table, column) for table in self._tables]
        self._new: dict[Any, int] = {}
        self._rows: list[Any] = []
        for source, keys in enumerate(self._keys if keep_all else ()):
            for number in keys:
                self.number(source, number)

    def renumbered(self, source: int, values: Array, at: str) -> Array:
        """Returns a column with the numbers of the new dataset; below 0 there is no text.

        Raises:
            DatasetError: a number that the source's table does not list.
        """
        if self._tables[source] is None:
            return values
        out = values.copy()
        for number in np.unique(values[values >= 0]).tolist():
            if number not in self._keys[source]:
                raise DatasetError(
                    f"{at}: {self._column} is {number}, allowed: {sorted(self._keys[source])}, which have a "
                    "text in meta/. Add the text there, or leave the episode out."
                )
            out[values == number] = self.number(source, number)
        return out

    def number(self, source: int, number: int) -> int:
        """Returns the new number of a text; adds the text to the new table."""
        row, key = self._keys[source][number]
        if key not in self._new:
            self._new[key] = number if self._keeps_numbers else len(self._new)
            table = self._tables[source]
            assert table is not None
            self._rows.append(table.slice(row, 1))
        return self._new[key]

    def table(self) -> Any:
        """Returns the new table; None where no source has one."""
        first = next((table for table in self._tables if table is not None), None)
        if first is None:
            return None
        table = pa.concat_tables(self._rows or [first.slice(0, 0)], promote_options="permissive")
        place = table.column_names.index(self._column)
        table = table.set_column(place, self._column, pa.array(list(self._new.values()), pa.int64()))
        return table.replace_schema_metadata(first.schema.metadata)


def _named(table: Any, column: str) -> Any:
    """Gives the column of texts its name: pandas leaves it out where its index has none."""
    if _NO_NAME not in table.column_names:
        return table
    name = column.removesuffix("_index")
    names = [name if old == _NO_NAME else old for old in table.column_names]
    return _indexed_by(table.rename_columns(names), name)


def _indexed_by(table: Any, name: str) -> Any:
    """Returns a table that pandas reads with this column as its index."""
    columns = [
        {"name": column, "field_name": column, "metadata": None}
        | (
            {"pandas_type": "unicode", "numpy_type": "object"}
            if column == name
            else {"pandas_type": str(table[column].type), "numpy_type": str(table[column].type)}
        )
        for column in table.column_names
    ]
    pandas = {
        "index_columns": [name],
        "column_indexes": [],
        "columns": columns,
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def _keys(table: Any, column: str) -> dict[int, tuple[int, Any]]:
    """Returns number -> row of the table, and the rest of that row: equal texts become one."""
    rows = table.to_pylist()
    return {
        row[column]: (
            place,
            json.dumps({k: v for k, v in row.items() if k != column}, sort_keys=True, default=str),
        )
        for place, row in sorted(enumerate(rows), key=lambda found: found[1][column])
    }
