"""Where a pool keeps its arrays: in memory first, in memory-mapped files beyond a byte budget."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, DatasetError, require

Array = NDArray[Any]

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PoolBudget:
    """How many bytes a pool may take. Numbers come first; decoded pictures get what is left."""

    ram_bytes: int = 4 * GIB
    """Arrays in memory, indexes included."""
    disk_bytes: int = 0
    """Memory-mapped scratch files in `folder`; they disappear with the process, however it ends."""
    folder: str | None = None
    """Where the scratch files are made; a fast local disk."""

    def __post_init__(self) -> None:
        for name in ("ram_bytes", "disk_bytes"):
            require(getattr(self, name) >= 0, f"pool.{name}", getattr(self, name), "0 or more")
        if self.disk_bytes and (self.folder is None or not Path(self.folder).is_dir()):
            raise ConfigError(f"pool.folder: no folder {self.folder!r}. Make it, or set disk_bytes to 0.")


class Memory:
    """Hands out zeroed arrays within a budget and keeps the account."""

    def __init__(self, budget: PoolBudget) -> None:
        self._budget = budget
        self.ram_bytes = self.disk_bytes = 0

    @property
    def ram_left(self) -> int:
        return self._budget.ram_bytes - self.ram_bytes

    @property
    def disk_left(self) -> int:
        return self._budget.disk_bytes - self.disk_bytes

    def take(self, nbytes: int, what: str) -> None:
        """Books bytes of memory that somebody else allocates.

        Raises:
            DatasetError: the budget does not hold them.
        """
        if nbytes > self.ram_left:
            raise DatasetError(
                f"pool: {what} needs {_size(nbytes)}, {_size(max(0, self.ram_left))} of "
                f"{_size(self._budget.ram_bytes)} are left. Lower the capacity, or raise ram_bytes."
            )
        self.ram_bytes += nbytes

    def array(self, shape: tuple[int, ...], dtype: Any, what: str) -> Array:
        """Returns zeros, in memory if they fit and in a file if not.

        Raises:
            DatasetError: neither memory nor disk holds them.
        """
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if nbytes <= self.ram_left:
            self.ram_bytes += nbytes
            return np.zeros(shape, dtype)
        if nbytes <= self.disk_left:
            return self.file(shape, dtype)
        raise DatasetError(
            f"pool: {what} needs {_size(nbytes)}; left are {_size(max(0, self.ram_left))} of memory "
            f"and {_size(max(0, self.disk_left))} of disk. Lower the capacity, or raise one of them."
        )

    def file(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Returns zeros in an unnamed file that the system removes with the process."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.disk_bytes += nbytes
        with tempfile.TemporaryFile(dir=self._budget.folder) as file:
            try:
                # Reserved now: a full disk under a sparse map would kill the process (SIGBUS) later.
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise DatasetError(
                    f"pool: cannot reserve {_size(nbytes)} in {self._budget.folder}: {error.strerror}. "
                    "Free some space, choose another pool.folder, or lower disk_bytes."
                ) from error
            return np.memmap(file, dtype=dtype, mode="r+", shape=shape)


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 100 else f"{nbytes:,} bytes"
