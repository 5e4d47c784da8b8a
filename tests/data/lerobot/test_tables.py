"""Row groups out of one file: what is held stays within its bytes, and the footer is read once."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from robot_rl.data.lerobot import tables
from robot_rl.data.lerobot.tables import Tables

GROUPS, ROWS = 6, 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of six row groups with ten int64 each, 80 bytes."""
    values = pa.table({"x": np.arange(GROUPS * ROWS)})
    pq.write_table(values, tmp_path / "a.parquet", row_group_size=ROWS)
    return tmp_path


def read(reader: Tables, group: int) -> list[int]:
    return reader.rows("a.parquet", group * ROWS, ROWS, ["x", "unknown"])["x"].to_pylist()


def test_the_footer_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    footers: list[Any] = []

    def opened(path: Path, *, metadata: Any, **how: Any) -> Any:
        footers.append(metadata)
        return pq.ParquetFile(path, metadata=metadata, **how)

    monkeypatch.setattr(tables, "pq", type("Counting", (), {"ParquetFile": staticmethod(opened)}))
    reader = Tables(folder, cached_bytes=1 << 20)
    for group in range(GROUPS):
        assert read(reader, group) == list(range(group * ROWS, (group + 1) * ROWS))
    assert [footer is None for footer in footers] == [True] + [False] * GROUPS
    reader.close()  # the file may be another now
    read(reader, 0)
    assert footers[-2] is None


def test_no_more_is_held_than_allowed(folder: Path) -> None:
    reader = Tables(folder, cached_bytes=200)
    for group in (0, 1, 2, 1, 3):  # two fit, with the bits of what is null; of 1 and 2, 1 was asked for last
        assert read(reader, group)[0] == group * ROWS
    assert [key[1] for key in reader._groups] == [1, 3]
    assert reader._held_bytes == sum(table.nbytes for table in reader._groups.values()) <= 200
    reader.close()
    assert (len(reader._groups), reader._held_bytes) == (0, 0)
