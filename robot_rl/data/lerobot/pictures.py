"""Reads pictures of any steps of a dataset, resized: from memory, a file of decoded pictures, or a decoder.

Requests are grouped by file, so that each file is decoded in one pass. n pictures, h x w pixels; a row counts
through all episodes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.data.lerobot.reader import Dataset

Array = NDArray[Any]
Size = tuple[int, int]
"""Height and width."""

_BLOCK = 64
"""Pictures decoded at once while a file of decoded pictures is made."""


@dataclass(frozen=True, kw_only=True)
class PictureCache:
    """Keeps decoded pictures, so that they are decoded once."""

    folder: str = ""
    """Files of decoded pictures, mapped into memory; made at first use. Empty: none."""
    ram_bytes: int = 0
    """Memory for pictures that no such file holds, all cameras together; it keeps the first that are read."""


class PictureReader:
    """Reads pictures of a dataset by row."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        resize: Size | None = None,
        cache: PictureCache | None = None,
        threads: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Prepares to read; with `cache.folder` this decodes every picture once.

        Args:
            dataset: to read from.
            resize: height and width; None: unchanged.
            cache: of decoded pictures.
            threads: decoders that run at the same time; 0: one for each core, at most 4.
            progress: called with the number of decoded pictures, and of all, while a file is made.
        """
        cache = cache or PictureCache()
        self.counts = {"memory": 0, "disk": 0, "decoded": 0}
        """Pictures read so far, by their source."""
        self._dataset = dataset
        self._resize = resize
        threads = threads or min(4, os.cpu_count() or 1)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._ends = dataset.episode_ends
        self._starts = dataset.episode_starts
        self.shapes = {key: self._shape(key) for key in dataset.cameras}
        """Camera -> (h, w, 3) after resizing."""
        self._kept = {
            key: _Kept(int(dataset.lengths().sum()), shape, cache.ram_bytes // len(self.shapes))
            for key, shape in self.shapes.items()
            if cache.ram_bytes and not cache.folder
        }
        self._files = (
            {key: self._decoded_file(Path(cache.folder), key, progress) for key in self.shapes}
            if cache.folder
            else {}
        )

    def read(self, wanted: Mapping[str, Array]) -> dict[str, Array]:
        """Returns camera -> (n, h, w, 3) uint8 for camera -> rows (n,), in that order."""
        out = {key: np.empty((len(rows), *self.shapes[key]), np.uint8) for key, rows in wanted.items()}
        self.read_into(wanted, out)
        return out

    def read_into(self, wanted: Mapping[str, Array], out: Mapping[str, Array]) -> None:
        """Writes the pictures of `read` to arrays of the caller."""
        jobs: list[Callable[[], None]] = []
        for key, rows in wanted.items():
            if key in self._files:
                out[key][:] = self._files[key][rows]
                self.counts["disk"] += len(rows)
                continue
            missing = np.arange(len(rows))
            if key in self._kept:
                missing = self._kept[key].get(rows, out[key])
            self.counts["memory"] += len(rows) - len(missing)
            self.counts["decoded"] += len(missing)
            jobs += self._jobs(key, rows[missing], missing, out[key])
        if self._pool is None or len(jobs) < 2:
            _run(jobs)
        else:
            list(self._pool.map(_run, [jobs[i :: self._threads] for i in range(self._threads)]))
        for key, kept in self._kept.items():
            if key in wanted:
                kept.put(wanted[key], out[key])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _jobs(self, camera: str, rows: Array, places: Array, out: Array) -> Iterator[Callable[[], None]]:
        """Yields a job for each file: it reads `rows` and writes them to `places` of `out`."""
        episode = np.searchsorted(self._ends, rows, side="right")
        group = self._dataset.spans(camera).file[episode]
        order = np.argsort(group, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
            if len(part):
                steps = rows[part] - self._starts[episode[part]]
                yield self._job(camera, episode[part], steps, places[part], out)

    def _job(
        self, camera: str, episodes: Array, steps: Array, places: Array, out: Array
    ) -> Callable[[], None]:
        def read() -> None:
            if self._resize is None and (np.diff(places) == 1).all():
                self._dataset.frames_of(camera, episodes, steps, out[places[0] : places[-1] + 1])
            else:
                out[places] = resize_pictures(self._dataset.frames_of(camera, episodes, steps), self._resize)

        return read

    def _shape(self, camera: str) -> tuple[int, int, int]:
        height, width = self._resize or self._dataset.features[camera].shape[:2]
        return height, width, 3

    def _decoded_file(self, folder: Path, camera: str, progress: Callable[[int, int], None] | None) -> Array:
        """Maps the file of decoded pictures; makes it if it does not exist.

        It is written under another name and renamed when the disk has it: a crash leaves no file that looks
        complete. A second process waits for the lock and then finds the file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        shape = (int(self._dataset.lengths().sum()), *self.shapes[camera])
        path = folder / f"{fingerprint(self._dataset, camera, self._resize)}.rgb"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                self._make_decoded_file(path, camera, shape, progress)
        return np.memmap(path, np.uint8, "r", shape=shape)

    def _make_decoded_file(
        self, path: Path, camera: str, shape: tuple[int, ...], progress: Callable[[int, int], None] | None
    ) -> None:
        needed, free = int(np.prod(shape)), shutil.disk_usage(path.parent).free
        if needed > free:
            raise DatasetError(
                f"{path.parent}: decoded pictures of {camera!r} need {needed / 1e9:.1f} GB, "
                f"{free / 1e9:.1f} GB are free. Choose another folder, smaller pictures (resize), "
                "or no decoded pictures."
            )
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            for begin in range(0, shape[0], _BLOCK):
                rows = np.arange(begin, min(begin + _BLOCK, shape[0]))
                pictures = np.empty((len(rows), *shape[1:]), np.uint8)
                _run(list(self._jobs(camera, rows, np.arange(len(rows)), pictures)))
                pictures.tofile(file)
                if progress:
                    progress(int(rows[-1]) + 1, shape[0])
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


class _Kept:
    """The first pictures that were read, as many as fit.

    None is replaced: an epoch reads every picture once, so a replaced one would be gone before it is read
    again.
    """

    def __init__(self, rows: int, shape: tuple[int, ...], nbytes: int) -> None:
        self._pictures = np.empty((min(rows, nbytes // int(np.prod(shape))), *shape), np.uint8)
        self._slot_of = np.full(rows, -1, np.int64)
        self._used = 0

    def get(self, rows: Array, out: Array) -> Array:
        """Writes the kept pictures to `out`, and returns the places of the others."""
        slots = self._slot_of[rows]
        found = np.flatnonzero(slots >= 0)
        out[found] = self._pictures[slots[found]]
        return np.flatnonzero(slots < 0)

    def put(self, rows: Array, pictures: Array) -> None:
        if self._used == len(self._pictures):
            return
        rows, first = np.unique(rows, return_index=True)
        new = np.flatnonzero(self._slot_of[rows] < 0)[: len(self._pictures) - self._used]
        slots = self._used + np.arange(len(new))
        self._pictures[slots], self._slot_of[rows[new]] = pictures[first[new]], slots
        self._used += len(new)


def resize_pictures(pictures: Array, size: Size | None) -> Array:
    """Returns pictures (n, h, w, 3) uint8 of another size, antialiased.

    torch's bilinear filter, widened by the scale as in Pillow: every pixel counts, and uint8 is
    filtered as it is, nine times as fast as torch's `area` on floats (480x640 to 96x96).
    """
    if size is None or pictures.shape[1:3] == tuple(size):
        return pictures
    import torch

    tensor = torch.from_numpy(pictures).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(tensor, tuple(size), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1).numpy()


def fingerprint(dataset: Dataset, camera: str, size: Size | None) -> str:
    """Returns a name that changes with files, their sizes and times, episodes, camera or picture size."""
    index, spans = dataset.index, dataset.spans(camera)
    stats = [(name, (index.folder / name).stat()) for name in spans.files]
    content = {
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "file": spans.file.tolist(),
        "first": spans.first.tolist(),
        "lengths": index.lengths.tolist(),
        "camera": camera,
        "size": size,
        "format": 1,
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _run(jobs: list[Callable[[], None]]) -> None:
    for job in jobs:
        job()
