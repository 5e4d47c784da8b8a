"""Pictures of a pool: decoded when somebody looks, and kept while there is room.

R rows of the pool, K slots of a tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_rl.data.episode import Episode
from robot_rl.data.pool_memory import Memory

Array = NDArray[Any]

_OPEN_EPISODES = 256
"""Episodes whose compressed pictures stay at hand."""


class PictureReader:
    """Decodes pictures of single steps; keeps the episodes open that were asked for last."""

    def __init__(self, keys: Collection[str], read: Callable[[int], Episode]) -> None:
        """Args: read: number in the pool -> episode."""
        self._keys, self._read = tuple(keys), read
        self._open: OrderedDict[int, tuple[Mapping[str, Any], Mapping[str, Any]]] = OrderedDict()

    def close(self) -> None:
        """Forgets what is open: a writer may have sealed and moved it."""
        self._open.clear()

    def read(self, number: int, key: str, steps: Array, length: int) -> Array:
        """Returns pictures (n, h, w, 3) of an episode of `length` steps; step `length` is where it ended."""
        obs, final = self._opened(number)
        if key not in final or steps.max() < length:
            return np.asarray(obs[key][np.minimum(steps, length - 1)])
        at_end = steps == length
        pictures = np.empty((len(steps), *final[key].shape), np.uint8)
        pictures[at_end] = final[key]
        if not at_end.all():
            pictures[~at_end] = obs[key][steps[~at_end]]
        return pictures

    def _opened(self, number: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns the pictures of an episode's steps and of its end, not decoded yet."""
        if number not in self._open:
            episode = self._read(number)
            final = {key: episode.final_obs[key] for key in self._keys if key in episode.final_obs}
            self._open[number] = ({key: episode.obs[key] for key in self._keys}, final)
            if len(self._open) > _OPEN_EPISODES:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]


class _Tier:
    """K decoded pictures of one camera; the one that was not asked for recently makes room (CLOCK)."""

    def __init__(self, rows: int, slots: Array) -> None:
        self._slots = slots
        self._slot_of = np.full(rows, -1, np.int32)
        self._row_of = np.full(len(slots), -1, np.int32)
        self._recent = np.zeros(len(slots), bool)
        self._hand = 0
        self.evictions = 0

    def find(self, rows: Array) -> Array:
        """Returns the slots of rows, -1 where there is none, and remembers who was asked for."""
        slots = self._slot_of.take(rows)
        self._recent[slots[slots >= 0]] = True
        return slots

    def read(self, slots: Array) -> Array:
        return self._slots[slots]

    def insert(self, rows: Array, pictures: Array) -> None:
        """Keeps pictures of rows that are not here; of too many, the last."""
        rows, pictures = rows[-len(self._slots) :], pictures[-len(self._slots) :]
        if not len(self._slots) or not len(rows):
            return
        slots = self._free(len(rows))
        old = self._row_of[slots]
        self.evictions += int((old >= 0).sum())
        self._slot_of[old[old >= 0]] = -1
        self._slots[slots], self._row_of[slots] = pictures, rows
        self._slot_of[rows], self._recent[slots] = slots, True

    def forget(self, start: int, stop: int) -> None:
        slots = self._slot_of[start:stop]
        slots = slots[slots >= 0]
        self._row_of[slots], self._recent[slots] = -1, False
        self._slot_of[start:stop] = -1

    def _free(self, count: int) -> Array:
        """Returns slots to write: the hand passes over those asked for since it was last there."""
        found: list[Array] = []
        while count:
            window = (self._hand + np.arange(min(len(self._slots), 4 * count))) % len(self._slots)
            idle = np.flatnonzero(~self._recent[window])[:count]
            passed = window[: idle[-1] + 1] if len(idle) == count else window
            chosen = window[idle]
            self._recent[passed] = False
            self._recent[chosen] = True  # not twice within one insert
            self._hand = int(passed[-1] + 1) % len(self._slots)
            found.append(chosen)
            count -= len(chosen)
        return np.concatenate(found)


class FrameCache:
    """Decoded pictures of a pool's rows: in memory, then on disk, then decoded again."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        rows: int,
        memory: Memory,
        decode: Callable[[str, Array], Array],
    ) -> None:
        """Takes what is left of the budget, as many slots for each camera.

        Args:
            shapes: (h, w, 3) by key.
            rows: R of the pool.
            memory: what the pool's numbers left over.
            decode: key and distinct rows (n,) -> pictures (n, h, w, 3).
        """
        self._decode = decode
        self._tiers: dict[str, list[_Tier]] = {}
        sizes = {key: int(np.prod(shape)) for key, shape in shapes.items()}
        table = 4 * rows * len(shapes)
        each = sum(sizes.values()) + 5 * len(shapes)
        if shapes:
            memory.take(table, "the index of decoded pictures")
        on_disk = min(rows, memory.disk_left // each) if shapes else 0
        if on_disk:
            memory.take(table + 5 * on_disk * len(shapes), "the index of pictures on disk")
        in_ram = min(rows, memory.ram_left // each) if shapes else 0
        for key, shape in shapes.items():
            memory.take(in_ram * (sizes[key] + 5), "decoded pictures")
            self._tiers[key] = [_Tier(rows, np.zeros((in_ram, *shape), np.uint8))]
            if on_disk:
                self._tiers[key].append(_Tier(rows, memory.file((on_disk, *shape), np.uint8)))
        self._hits = [0, 0, 0]  # memory, disk, decoded

    def take(self, key: str, rows: Array) -> Array:
        """Returns the pictures (n, h, w, 3) of rows (n,)."""
        ram = self._tiers[key][0]
        slots = ram.find(rows)
        here = slots >= 0
        self._hits[0] += int(here.sum())
        if here.all():
            return ram.read(slots)
        missing, inverse = np.unique(rows[~here], return_inverse=True)
        found = self._fetch(key, missing)
        pictures = np.empty((len(rows), *found.shape[1:]), np.uint8)
        pictures[here] = ram.read(slots[here])
        pictures[~here] = found[inverse]
        ram.insert(missing, found)
        return pictures

    def forget(self, start: int, stop: int) -> None:
        """Drops the pictures of rows that are to hold something else."""
        for tiers in self._tiers.values():
            for tier in tiers:
                tier.forget(start, stop)

    def metrics(self) -> dict[str, float]:
        """Returns where pictures were found since the beginning, as shares, and what had to go."""
        asked = max(1, sum(self._hits))
        evictions = [
            sum(tier.evictions for tier in tiers) for tiers in zip(*self._tiers.values(), strict=True)
        ]
        return {
            "hit_rate": self._hits[0] / asked,
            "disk_hit_rate": self._hits[1] / asked,
            "decoded": float(self._hits[2]),
            "evictions": float(sum(evictions[:1])),
            "disk_evictions": float(sum(evictions[1:])),
        }

    def _fetch(self, key: str, rows: Array) -> Array:
        """Returns the pictures of distinct rows that are not in memory."""
        if len(self._tiers[key]) == 1:
            self._hits[2] += len(rows)
            return self._decode(key, rows)
        disk = self._tiers[key][1]
        slots = disk.find(rows)
        here = slots >= 0
        self._hits[1] += int(here.sum())
        self._hits[2] += int((~here).sum())
        if here.all():
            return disk.read(slots)
        decoded = self._decode(key, rows[~here])
        pictures = np.empty((len(rows), *decoded.shape[1:]), np.uint8)
        pictures[here], pictures[~here] = disk.read(slots[here]), decoded
        disk.insert(rows[~here], decoded)
        return pictures
