"""Orders to a driver that may take seconds, one after another on a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from robot_rl.core.errors import DeviceError
from robot_rl.real.messages import Control, Operation

logger = logging.getLogger(__name__)

HUNG_S = 5.0
"""An order that takes longer is given up if a stop waits behind it."""


@dataclass(eq=False, kw_only=True)
class Order:
    """One call of the driver."""

    operation: Operation
    control: Control | None
    """The message to answer; None if the host itself gave the order."""
    work: Callable[[], None]
    begun_s: float | None = None
    is_done: bool = False
    error: BaseException | None = None
    is_given_up: bool = False
    is_late: bool = False
    """It returned after it was given up: its effects came after the orders behind it."""


class Orders:
    """Does orders in turn; a stop does not wait for ever behind a hanging order."""

    def __init__(self, on_done: Callable[[], None], *, hung_s: float = HUNG_S) -> None:
        """Starts the thread, which calls `on_done` after each order; `hung_s` as `HUNG_S`."""
        self._on_done, self._hung_s = on_done, hung_s
        self._news = threading.Condition()
        self._orders: deque[Order] = deque()  # given and not fetched
        self._late: list[Order] = []
        self._turn = 0  # a thread of an earlier turn hangs, and gets no more orders
        self._begin()

    def add(self, operation: Operation, control: Control | None, work: Callable[[], None]) -> None:
        """Gives an order."""
        with self._news:
            self._orders.append(Order(operation=operation, control=control, work=work))
            self._news.notify_all()

    def has(self, operation: Operation) -> bool:
        """Returns whether such an order was given and not fetched."""
        with self._news:
            return any(order.operation == operation for order in self._orders)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do or to fetch."""
        with self._news:
            return not self._orders and not self._late

    def fetch(self) -> Order | None:
        """Returns the oldest order if it is done, each once; gives up one that hangs before a stop.

        One at a time: the reader of a start that is done must see a stop behind it.
        """
        with self._news:
            self._give_up()
            if self._late:
                return self._late.pop(0)
            return self._orders.popleft() if self._orders and self._orders[0].is_done else None

    def close(self) -> None:
        """Lets the thread end; a hanging one ends with the process."""
        with self._news:
            self._turn += 1
            self._news.notify_all()

    def _give_up(self) -> None:
        first = self._orders[0] if self._orders else None
        if first is None or first.begun_s is None or first.is_done:
            return
        silent_s = time.monotonic() - first.begun_s
        stops = any(order.operation == "stop" for order in list(self._orders)[1:])
        if stops and silent_s > self._hung_s:
            first.error = DeviceError(f"not done after {silent_s:.1f} s, given up")
            first.is_done = first.is_given_up = True
            self._turn += 1
            self._begin()

    def _begin(self) -> None:
        threading.Thread(target=self._run, args=(self._turn,), name="orders", daemon=True).start()

    def _run(self, turn: int) -> None:
        while (order := self._next(turn)) is not None:
            error: BaseException | None = None
            try:
                order.work()
            except BaseException as raised:  # any kind: the caller has to know
                error = raised
            with self._news:
                if turn == self._turn:
                    order.error, order.is_done = error, True
                elif order.is_given_up:
                    order.error, order.is_late = error, True
                    self._late.append(order)
            self._on_done()

    def _next(self, turn: int) -> Order | None:
        """Waits for an order, and takes it; None if this thread is to end."""
        with self._news:
            while turn == self._turn:
                for order in self._orders:
                    if order.begun_s is None:
                        order.begun_s = time.monotonic()
                        return order
                self._news.wait()
            return None
