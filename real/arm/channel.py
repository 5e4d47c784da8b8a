"""A line that delays, jitters and loses what is sent over it."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from robot_rl.core.errors import require

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ChannelConfig:
    """How bad a line is, one way."""

    delay_ms: float = 0.0
    """Delay of every message."""
    jitter_ms: float = 0.0
    """Additional delay, uniform from 0 to this; messages stay in order, as on a DDS topic."""
    loss: float = 0.0
    """Probability that a message is lost."""

    def __post_init__(self) -> None:
        require(self.delay_ms >= 0, "delay_ms", self.delay_ms, "0 or more")
        require(self.jitter_ms >= 0, "jitter_ms", self.jitter_ms, "0 or more")
        require(0 <= self.loss < 1, "loss", self.loss, "0 to below 1")


class Channel(Generic[T]):
    """Takes messages on any thread and returns them when they are due."""

    def __init__(self, config: ChannelConfig, rng: np.random.Generator) -> None:
        self._config, self._rng = config, rng
        self._queue: deque[tuple[int, T]] = deque()
        self._lock = threading.Lock()
        self.sent = 0
        self.lost = 0

    def send(self, message: T, now_ns: int) -> None:
        config = self._config
        with self._lock:
            self.sent += 1
            if config.loss and self._rng.random() < config.loss:
                self.lost += 1
                return
            wait_ms = config.delay_ms + (config.jitter_ms * self._rng.random() if config.jitter_ms else 0.0)
            due_ns = now_ns + round(1e6 * wait_ms)
            if self._queue:
                due_ns = max(due_ns, self._queue[-1][0])
            self._queue.append((due_ns, message))

    def receive(self, now_ns: int) -> list[T]:
        """Returns the messages that are due, in the order of sending."""
        due: list[T] = []
        with self._lock:
            while self._queue and self._queue[0][0] <= now_ns:
                due.append(self._queue.popleft()[1])
        return due

    def wait_s(self, now_ns: int, most_s: float) -> float:
        """Returns how long until the next message is due, at most `most_s`."""
        with self._lock:
            due_s = 1e-9 * (self._queue[0][0] - now_ns) if self._queue else most_s
        return min(max(due_s, 0.0), most_s)

    def clear(self) -> None:
        """Drops the messages on the way."""
        with self._lock:
            self._queue.clear()
