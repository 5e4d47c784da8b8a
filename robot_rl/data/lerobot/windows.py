"""Delta timestamps: rows before and after a step, within its episode.

B rows, n offsets of one key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError, nearest
from robot_rl.data.lerobot.reader import Dataset

Array = NDArray[Any]

ReadPictures = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Camera -> rows (n,), to camera -> pictures (n, h, w, 3); such as `PictureReader.read`."""
_TOLERANCE_S = 1e-4
"""Largest distance of a delta in seconds from a control step, as in LeRobot."""


class Windows:
    """Reads columns and pictures around rows, as LeRobot's `delta_timestamps` do."""

    def __init__(
        self,
        dataset: Dataset,
        deltas: Mapping[str, Sequence[float]],
        *,
        unit: Literal["steps", "seconds"] = "steps",
        keys: Sequence[str] | None = None,
    ) -> None:
        """Prepares to read.

        Args:
            dataset: to read from.
            deltas: our key -> offsets from the row; a key without offsets reads the row itself.
            unit: of the offsets.
            keys: what to read; None: every column and camera. Only their pictures are decoded, and of keys
                with deltas only those at the offsets.

        Raises:
            DatasetError: an unknown key, or a delta that lies between two steps.
        """
        self._dataset = dataset
        known = (*dataset.columns, *dataset.cameras)
        for key in (*deltas, *(keys or ())):
            if key not in known:
                raise DatasetError(f"{dataset.folder}: no column or camera {key!r}.{nearest(key, known)}")
        rate_hz = dataset.index.fps if unit == "seconds" else 1.0
        self.offsets = {key: _steps(key, values, rate_hz) for key, values in deltas.items()}
        """Key -> offsets in steps, (n,)."""
        self.keys = tuple(known if keys is None else dict.fromkeys((*keys, *deltas)))
        self._starts, self._ends = dataset.episode_starts, dataset.episode_ends

    def rows(self, rows: Array, key: str) -> tuple[Array, Array]:
        """Returns the rows (B, n) that a key reads, clipped to the episode, and which are padding (B, n)."""
        episode = np.searchsorted(self._ends, rows, side="right")
        first, last = self._starts[episode][:, None], self._ends[episode][:, None] - 1
        wanted = rows[:, None] + self.offsets[key]
        return np.clip(wanted, first, last), (wanted < first) | (wanted > last)

    def read(self, rows: Array, pictures: ReadPictures | None = None) -> dict[str, Array]:
        """Returns key -> (B, ...), or (B, n, ...) and `<key>_is_pad` (B, n) for keys with deltas.

        Args: rows: of `Dataset.columns`; pictures: reads the cameras, None leaves them out.
        """
        found: dict[str, Array] = {}
        for key in self.keys:
            at = rows
            if key in self.offsets:
                at, found[f"{key}_is_pad"] = self.rows(rows, key)
            if key not in self._dataset.cameras:
                found[key] = self._dataset.columns[key][at]

        if pictures is not None:
            for key, values in pictures(self.picture_rows(rows)).items():
                n = self.offsets[key].shape if key in self.offsets else ()
                found[key] = values.reshape(*rows.shape, *n, *values.shape[1:])
        return found

    def picture_rows(self, rows: Array) -> dict[str, Array]:
        """Returns camera -> rows (B,) or (B n,) of the pictures that `read` reads."""
        cameras = [key for key in self.keys if key in self._dataset.cameras]
        return {key: self.rows(rows, key)[0].reshape(-1) if key in self.offsets else rows for key in cameras}


def _steps(key: str, deltas: Sequence[float], rate_hz: float) -> Array:
    exact = np.asarray(deltas, np.float64) * rate_hz
    steps = np.rint(exact).astype(np.int64)
    far = np.abs(exact - steps) > _TOLERANCE_S * rate_hz
    if far.any():
        at = int(np.flatnonzero(far)[0])
        raise DatasetError(
            f"deltas of {key!r}: {deltas[at]} lies between two steps; allowed: whole steps, or multiples of "
            f"{1 / rate_hz:g} s within {_TOLERANCE_S:g} s."
        )
    return steps
