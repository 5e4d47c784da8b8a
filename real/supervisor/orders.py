"""Orders to the driver: one at a time, and a hold that is repeated until the arm rests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from robot_rl.real.link import Link
from robot_rl.real.messages import Answer, ArmState, Array, Control, Operation
from robot_rl.real.supervisor.clients import Client

_ORDER_NS = 15_000_000_000
"""Longest time a driver may take for an order."""
_SETTLE_NS = 50_000_000
"""After a reset or a clear, states younger than this may be from before it."""
_AGAIN_NS = 100_000_000
"""Time between two tries of a hold or a stop."""
_REST_NS = 2_000_000_000
"""Longest time from a hold until the arm rests; then it is stopped."""


@dataclass(kw_only=True)
class Order:
    """An order to the driver."""

    control: Control
    client: Client | None
    """The client that waits for the answer; None if the supervisor itself gave the order."""
    then: Operation | None = None
    """The client's order, if the driver has to start first."""
    until_ns: int
    sent: bool = False
    answered_ns: int | None = None
    refusal: str = ""
    """Why it was not done, once it is over."""
    is_unanswered: bool = False
    """Over, because the driver did not answer."""

    @property
    def asked(self) -> Operation:
        """The client's order."""
        return self.then or self.control.operation


@dataclass(kw_only=True)
class _Hold:
    since_ns: int
    sent_ns: int | None = None
    done_ns: int | None = None
    """Time of the driver's last answer that it holds."""
    refusal: str = ""


class DriverOrders:
    """Sends orders and takes the answers; repeats a stop and a hold until the arm rests."""

    def __init__(self, driver: Link, still_rad_s: Array) -> None:
        """Takes the link, and the speeds (n,) below which a joint is at rest."""
        self._driver, self._still_rad_s = driver, still_rad_s
        self.pending: Order | None = None
        """The order under way."""
        self.refusal = ""
        """Why the driver does not stop the arm; empty if it does."""
        self._again_ns = 0
        self._hold: _Hold | None = None

    def give(
        self, control: Control, client: Client | None, now_ns: int, then: Operation | None = None
    ) -> None:
        """Sends an order; the one before gets no answer any more, see `take`."""
        self._hold, self.refusal, self._again_ns = None, "", now_ns
        self.pending = Order(control=control, client=client, then=then, until_ns=now_ns + _ORDER_NS)
        self._send(self.pending, now_ns)

    def take(self) -> Order | None:
        """Forgets the order under way, and returns it."""
        order, self.pending = self.pending, None
        return order

    def take_answer(self, answer: Answer, now_ns: int) -> Order | None:
        """Takes an answer of the driver; returns the order that it ends."""
        refusal = "" if answer.done else answer.message or "refused"
        if answer.operation == "hold" and self._hold is not None:
            self._hold.done_ns, self._hold.refusal = now_ns if answer.done else None, refusal
        order = self.pending
        if order is None or order.control.operation != answer.operation or order.answered_ns is not None:
            return None  # to an order that a stop overtook, or to a hold
        if answer.operation == "stop" and refusal:
            self.refusal, order.sent, self._again_ns = refusal, False, now_ns + _AGAIN_NS
        elif answer.operation == "stop" or refusal:
            self.refusal = ""
            return self._over(order, refusal)
        else:
            order.answered_ns = now_ns
        return None

    def attend(self, state: ArmState | None, now_ns: int) -> Order | None:
        """Sends a waiting order; returns an order that is over: done and measured since, refused, or lost."""
        order = self.pending
        if order is None:
            return None
        self._send(order, now_ns)
        if order.answered_ns is not None:
            is_measured = state is not None and state.stamp_ns > order.answered_ns + _SETTLE_NS
            return self._over(order, "") if is_measured else None
        is_stop, is_late = order.control.operation == "stop", now_ns > order.until_ns
        if self._driver.closed or (is_late and not is_stop):
            order.is_unanswered = True
            return self._over(order, f"the driver did not answer to {order.control.operation!r}")
        if is_late:
            self.refusal = f"it did not answer for {1e-9 * _ORDER_NS:g} s"
            order.sent, order.until_ns = False, now_ns + _ORDER_NS
        if is_stop and self.refusal and self._is_at_rest(state):
            return self._over(order, self.refusal)
        return None

    def hold(self, now_ns: int) -> None:
        """Orders the driver to hold the arm, until it is seen at rest."""
        self._hold = _Hold(since_ns=now_ns)
        self._send_hold(self._hold, now_ns)

    @property
    def is_holding(self) -> bool:
        """Whether the arm is held and not yet seen at rest."""
        return self._hold is not None

    def let_go(self) -> None:
        """Ends a hold: the arm moves on."""
        self._hold = None

    def attend_hold(self, state: ArmState, now_ns: int) -> str:
        """Repeats a hold; returns a reason to stop the arm instead."""
        hold = self._hold
        if hold is None:
            return ""
        if hold.done_ns is not None and state.stamp_ns > hold.done_ns and self._is_at_rest(state):
            self._hold = None
        elif now_ns - hold.since_ns > _REST_NS:
            why = f"the driver refused: {hold.refusal}" if hold.refusal else "the driver did not answer"
            speed = float(np.abs(state.velocity_rad_s).max())
            return (
                f"the arm did not come to rest within {1e-9 * _REST_NS:g} s of a hold: it moves at "
                f"{speed:.2f} rad/s{'' if hold.done_ns is not None else f', {why}'}"
            )
        elif hold.sent_ns is None or now_ns - hold.sent_ns >= _AGAIN_NS:
            self._send_hold(hold, now_ns)
        return ""

    def _send(self, order: Order, now_ns: int) -> None:
        if not order.sent and now_ns >= self._again_ns:
            order.sent = self._driver.send(order.control)

    def _send_hold(self, hold: _Hold, now_ns: int) -> None:
        if self._driver.send(Control(operation="hold", by="supervisor")):
            hold.sent_ns = now_ns

    def _over(self, order: Order, refusal: str) -> Order:
        self.pending, order.refusal = None, refusal
        return order

    def _is_at_rest(self, state: ArmState | None) -> bool:
        if state is None or state.velocity_rad_s.shape != self._still_rad_s.shape:
            return False
        return bool((np.abs(state.velocity_rad_s) < self._still_rad_s).all())
