"""The flight recorder keeps the last moments before a NaN or a fault.

B envs, N recorded moments. (The idea is the NaN guard of mjlab; ours keeps any named arrays.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


class FlightRecorder:
    """Keeps the last `capacity` moments of named arrays in memory, and writes them when asked to.

    The first `record` allocates the memory. Only `dump` and `snapshot` write.
    """

    def __init__(self, capacity: int, *, max_dumps: int = 16) -> None:
        if capacity < 1:
            raise ValueError(f"flight recorder: capacity is {capacity}, allowed is 1 moment or more")
        self._capacity = capacity
        self._left = max_dumps
        self._rings: dict[str, Array] = {}
        self._count = 0

    def record(self, **arrays: ArrayLike) -> None:
        """Copies one moment; every moment has the same names, shapes and types, e.g. (B, n)."""
        moment = {name: np.asarray(values) for name, values in arrays.items()}
        if not self._rings:
            self._rings = {name: np.empty((self._capacity, *a.shape), a.dtype) for name, a in moment.items()}
        if moment.keys() != self._rings.keys():
            known = sorted(self._rings)
            raise ValueError(f"flight recorder: got {sorted(moment)}, the first moment had {known}")
        for name, values in moment.items():
            self._rings[name][self._count % self._capacity] = values
        self._count += 1

    def dump(self, folder: Path, reason: str, **extra: ArrayLike) -> Path | None:
        """Writes an .npz: every array as (N, ...), oldest moment first, `reason`, and `extra`.

        Args:
            folder: made if it does not exist.
            reason: becomes part of the file's name.
            extra: further arrays, such as seeds.

        Returns:
            The file's path; None once `max_dumps` files were written (a fault that repeats must not
            fill the disk).
        """
        return self.snapshot(folder, reason, **extra)()

    def snapshot(self, folder: Path, reason: str, **extra: ArrayLike) -> Callable[[], Path | None]:
        """Copies the moments and returns a function that writes them as `dump`, on any thread."""
        if self._left == 0:
            return lambda: None
        self._left -= 1
        oldest, size = self._count % self._capacity, min(self._count, self._capacity)
        moments = {
            name: ring[:size].copy()
            if size < self._capacity
            else np.concatenate([ring[oldest:], ring[:oldest]])
            for name, ring in self._rings.items()
        }
        return lambda: _write(folder, reason, {**moments, **extra})


def _write(folder: Path, reason: str, arrays: dict[str, ArrayLike]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = _free_name(folder, reason)
    try:
        with path.with_suffix(".tmp").open("wb") as file:
            np.savez(file, **arrays, reason=np.array(reason))  # pyright: ignore[reportArgumentType]
        os.replace(path.with_suffix(".tmp"), path)
    except OSError:
        path.with_suffix(".tmp").unlink(missing_ok=True)  # half a file takes room where there is none
        raise
    return path


def _free_name(folder: Path, reason: str) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:40] or "dump"
    number = 0
    while (path := folder / f"{slug}-{number:04d}.npz").exists():
        number += 1
    return path
