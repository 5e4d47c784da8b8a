"""The newest weights, in memory that the learner and the actors of one machine see.

    learner: SharedWeights.publish -> the slot that is not the newest -> header: version, checksum, slot
    actor:   Inbox.newest          <- its own copy of the newest slot, whole

The learner writes once, however many actors there are. An actor that was half-way through a slot when the
learner wrote into it again sees that by header and checksum, goes on with what it has, and looks again. The
inbox of an arm copies in a thread, so that no control step waits for large weights; that of simulations which
act when they are asked copies then, so that they act with what is the newest then.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import Tensor

from robot_rl.rollout.weights import Published, Snapshot, checksum, newest_of

_HEAD = struct.Struct("<qIq")
"""Version, checksum, number of the slot."""
_ALIGNED = 64
"""Where the first slot begins; tensors begin at multiples of it."""
_LOOK_S = 0.005
_NICE = 5
"""The copying thread gives way to the one that controls."""


@dataclass(frozen=True)
class _Place:
    """Where in a slot a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class Address:
    """What an actor needs to find the weights; it is pickled."""

    name: str
    """Of the memory."""
    places: Mapping[str, _Place]
    slot: int
    """Bytes of one."""


class SharedWeights:
    """The learner's end; `opened` returns one for all actors of a publisher."""

    def __init__(self, published: Published) -> None:
        """Makes the memory, with what is the newest now.

        Raises:
            WeightsError: nothing was published.
        """
        places, end = dict[str, _Place](), 0
        for name, value in newest_of(published).weights.items():  # shapes never change
            places[name] = _Place(value.dtype, tuple(value.shape), end)
            end += -(-value.nbytes // _ALIGNED) * _ALIGNED
        self._memory = SharedMemory(create=True, size=_ALIGNED + 2 * end)
        self.address = Address(self._memory.name, places, end)
        self._slots = [_tensors(self._memory, self.address, slot) for slot in (0, 1)]
        self._published, self._users = published, 1
        self._slot = 0
        self._sent: Snapshot | None = None
        self.publish()

    def publish(self) -> None:
        """Writes the newest weights, if they are not there yet."""
        newest = self._published.newest
        if newest is None or newest is self._sent:
            return
        slot = 1 - self._slot
        for name, value in newest.weights.items():
            self._slots[slot][name].copy_(value)
        _HEAD.pack_into(_view(self._memory), 0, newest.version, newest.checksum, slot)
        self._slot, self._sent = slot, newest

    def join(self) -> SharedWeights:
        """Counts one more actor."""
        self._users += 1
        return self

    def close(self) -> None:
        """Frees the memory, if no other actor uses it."""
        with _OPENING:
            self._users -= 1
            if self._users:
                return
            _SHARED.pop(id(self._published), None)
        self._slots = []  # views of the memory
        self._memory.close()
        self._memory.unlink()


_OPENING = threading.Lock()
_SHARED: dict[int, SharedWeights] = {}
"""What the actors of this process have, by the id of its publisher."""


def opened(published: Published) -> SharedWeights:
    """Returns the memory of a publisher's weights, for one more actor, whose end is to close it."""
    with _OPENING:
        shared = _SHARED.get(id(published))
        if shared is not None:
            return shared.join()
        return _SHARED.setdefault(id(published), SharedWeights(published))


class Inbox:
    """The actor's end: `Published` there."""

    def __init__(self, address: Address, *, in_thread: bool) -> None:
        """Opens the memory.

        Args:
            address: where it is.
            in_thread: whether new weights are copied in the background; else when they are asked for.
        """
        self._memory, self._address = SharedMemory(name=address.name), address
        self._newest: Snapshot | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if in_thread:
            self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
            self._thread.start()

    @property
    def newest(self) -> Snapshot | None:
        """The newest weights that arrived whole: those before, while new ones are being written."""
        if self._thread is None:
            self._look()
        return self._newest

    def close(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._memory.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._is_over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        """Copies the newest slot, if it is another one than what is here."""
        version, crc, slot = _HEAD.unpack_from(_view(self._memory), 0)
        known = self._newest
        if known is not None and (version, crc) == (known.version, known.checksum):
            return
        found = _tensors(self._memory, self._address, slot)
        weights = {name: value.clone() for name, value in found.items()}
        if checksum(weights) == crc:
            self._newest = Snapshot(version, crc, weights, is_own=True)


def _view(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "open until it is closed here"
    return memory.buf


def _tensors(memory: SharedMemory, address: Address, slot: int) -> dict[str, Tensor]:
    """Returns views of a slot."""
    begin = _ALIGNED + slot * address.slot

    def view(place: _Place) -> Tensor:
        count = math.prod(place.shape)
        if not count:
            return torch.zeros(place.shape, dtype=place.dtype)
        where = begin + place.begin
        found = torch.frombuffer(_view(memory), dtype=place.dtype, count=count, offset=where)
        return found.view(place.shape)

    return {name: view(place) for name, place in address.places.items()}
