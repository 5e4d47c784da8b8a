"""Pictures and poses from a driver to its listeners, on a separate thread: no picture delays the arm."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from robot_rl.real.link import Link, Listener
from robot_rl.real.messages import Frame, MessageError

_PERIOD_S = 0.005
"""How often the driver is asked for something new."""
_IDLE_S = 0.1
_END_S = 1.0
"""Longest wait for a camera at the end: its library may hang."""


class SensorFeed:
    """Sends each listener the newest frame of every name, and never an older one after it."""

    def __init__(
        self, frames: Callable[[], Sequence[Frame]], path: Path, on_error: Callable[[str], None]
    ) -> None:
        """Listens at socket `path`; calls `frames` while there are listeners, `on_error` when that fails."""
        self._frames, self._on_error = frames, on_error
        self._listener = Listener(path)
        self._peers: list[_Peer] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensor feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_END_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._cycle()
        except Exception as error:  # a camera's library may raise anything: the arm is stopped
            self._on_error(f"frames: {error}")
        for peer in self._peers:
            peer.link.close()

    def _cycle(self) -> None:
        full = [peer.link for peer in self._peers if not peer.link.is_idle()]  # they have to drain first
        ends = [self._listener, *(peer.link for peer in self._peers)]
        select.select(ends, full, [], _PERIOD_S if self._peers else _IDLE_S)
        link = self._listener.accept()
        if link is not None:
            self._peers.append(_Peer(link))
        if self._peers:
            frames = self._frames()
            for peer in self._peers:
                peer.offer(frames)
            self._peers = [peer for peer in self._peers if not peer.link.closed]


class _Peer:
    """A listener and the frames that it has not got yet."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._waiting: dict[str, Frame] = {}
        self._sent: dict[str, int] = {}
        """When each name was last sent, as the number of frames until then."""

    def offer(self, frames: Sequence[Frame]) -> None:
        """Sends what fits, first what was sent longest ago; a newer frame replaces one of its name."""
        for frame in frames:
            self._waiting[frame.name] = frame
        with contextlib.suppress(MessageError):
            self.link.receive()  # there are no messages: this only notices a closed link
        while self._waiting and self.link.is_idle() and not self.link.closed:
            name = min(self._waiting, key=lambda name: self._sent.get(name, 0))
            self._sent[name] = max(self._sent.values(), default=0) + 1
            self.link.send(self._waiting.pop(name))
