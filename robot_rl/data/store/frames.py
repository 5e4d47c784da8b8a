"""Pictures of an episode in the journal, decoded when they are indexed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.data.episode import Array
from robot_rl.data.store.index import JournalIndex
from robot_rl.data.store.journal import Record
from robot_rl.data.store.layout import decode_picture


class JournalFrames:
    """T pictures of one camera: the one that each step saw."""

    def __init__(
        self, index: JournalIndex, records: list[Record], rows: NDArray[np.int64], shape: tuple[int, ...]
    ) -> None:
        """Args: records: pictures of the camera; rows: (T,) which of them each step saw; shape: (h, w, 3)."""
        self._index = index
        self._records = records
        self._rows = rows
        self.shape = (len(rows), *shape)
        self.dtype = np.dtype(np.uint8)
        self._last: tuple[int, Array] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, step: Any) -> Array:
        """Returns (h, w, 3) for an int, (n, h, w, 3) for a slice or an integer array."""
        rows = self._rows[step]
        if np.ndim(rows) == 0:
            return self._decode_cached(int(rows))
        out = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for row in np.unique(rows):  # steps share pictures: each is decoded once
            out[rows == row] = self._decode(int(row))
        return out

    def _decode_cached(self, row: int) -> Array:
        """Decodes once for successive steps that saw the same picture."""
        last = self._last
        if last is None or last[0] != row:
            self._last = last = (row, self._decode(row))
        return last[1].copy()

    def _decode(self, row: int) -> Array:
        if not self._records:
            raise DatasetError(
                "A camera has no picture left in this episode. `robot-rl replay verify` names the damage; "
                "the numbers of the episode can be read."
            )
        record = self._records[row]
        picture = decode_picture(self._index.payload(record))
        if picture.shape != self.shape[1:]:
            raise DatasetError(
                f"journal/{record.segment:06d}.log, byte {record.offset}: picture {record.b} of episode "
                f"{record.a} is {picture.shape}, the store holds {self.shape[1:]}."
            )
        return picture


def rows_of(wanted: NDArray[np.int64], records: list[Record]) -> NDArray[np.int64]:
    """Returns the record that each step refers to: its own picture, else the last one before it.

    Steps whose picture is gone (dropped by a writer that was behind, or damaged) see the one before it.
    Steps at the beginning, which have none before, see the first.
    """
    there = np.array([record.b for record in records], np.int64)
    return np.maximum(np.searchsorted(there, wanted, side="right") - 1, 0)
