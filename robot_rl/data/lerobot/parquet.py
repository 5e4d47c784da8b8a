"""Parquet files, written in few large pieces: pyarrow alone makes two system calls for each column."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_PIECE_BYTES = 1 << 20
_PAGES: Any = {"write_page_checksum": True}
"""Option of every file: a reader finds changed bytes of a page."""


class TableFile:
    """A parquet file that is being written."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._stream: Any = pa.output_stream(str(path), buffer_size=_PIECE_BYTES)
        self._writer = pq.ParquetWriter(self._stream, schema, **_PAGES)

    @property
    def bytes(self) -> int:
        return self._stream.tell()

    def add(self, table: Any) -> None:
        """Appends rows as one row group."""
        self._writer.write_table(table)

    def finish(self) -> None:
        """Writes the footer and closes the file."""
        self._writer.close()
        self._stream.close()

    def abandon(self) -> None:
        for part in (self._writer, self._stream):
            with contextlib.suppress(OSError, MemoryError, ValueError):  # a full disk takes no footer either
                part.close()


def write_table(path: Path, table: Any, **options: Any) -> None:
    """Writes a file of one row group."""
    with pa.output_stream(str(path), buffer_size=_PIECE_BYTES) as stream:
        pq.write_table(table, stream, **_PAGES, **options)


def table_bytes(table: Any) -> bytes:
    """Returns the content of a parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **_PAGES)
    return sink.getvalue().to_pybytes()
