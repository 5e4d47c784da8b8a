"""A source on a device that others want too: it waits in line, collects under a lease, and gives way.

    waits -> begins -> collects ... a larger priority wants the device -> ends, parks, releases -> waits

Waiting and parking are done in a thread: meanwhile this source has nothing, and the run's others go on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from robot_rl.core.errors import LeaseError, RobotRLError
from robot_rl.data.transitions import Segment
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.sources import EpisodeLog, Source
from robot_rl.rollout.weights import Published
from robot_rl.sched.leases import HeldLease, LeaseStore

if TYPE_CHECKING:
    from robot_rl.hal.device import DeviceSpec


class BookedSource:
    """A `Source` on the first of several devices that is free."""

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        begin: Callable[[HeldLease], Source],
        *,
        holder: str,
        priority: int = 0,
        preempt_s: float | None = None,
        wait_s: float = 0.05,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Books nothing yet.

        Args:
            specs: devices that will do, the preferred one first.
            begin: returns the source on the device of a lease.
            holder: of the lease.
            priority: of those who wait the larger goes first, and a holder of a smaller one gives way.
            preempt_s: how long such a holder may take; None: it may finish.
            wait_s: how long `collect` waits while there is no device.
            say: tells a person why nothing is collected.
        """
        self._specs, self._begin, self._say, self._wait_s = list(specs), begin, say, wait_s
        self._how: dict[str, Any] = {
            "holder": holder,
            "priority": priority,
            "preempt_s": preempt_s,
            "preemptible": True,
            "wait_s": math.inf,
        }
        self.episodes = EpisodeLog(0)
        self.waited_s: list[float] = []
        """How long it has waited for a device, each time."""
        self._source: Source | None = None
        self._held: HeldLease | None = None
        self._hold: AbstractContextManager[HeldLease] | None = None
        self._thread: threading.Thread | None = None
        self._error: RobotRLError | None = None
        self._is_closed, self._lock = False, threading.Lock()

    @property
    def is_ahead(self) -> bool:
        return self._source is not None and self._source.is_ahead

    def collect(self, published: Published) -> Segment | None:
        """Returns what the source has collected; None while there is no device.

        Raises:
            ActorError: the source cannot go on, or the device was stopped.
        """
        if self._thread is not None:
            self._thread.join(self._wait_s)
            if self._thread.is_alive():
                return None
            self._thread = None
        if self._error is not None:
            raise ActorError(str(self._error)) from self._error
        if self._held is None:
            self._apart(self._book)
            return None
        if self._source is None:
            self._source = self._begin(self._held)
        if (by := self._wanted_by(self._held)) is not None:
            self._say(f"{self._held.device} is given up: {by}. Waits for it")
            self._apart(self._leave, self._book)
            return None
        try:
            segment = self._source.collect(published)
        except ActorError:
            self._leave()  # for others
            raise
        if segment is not None:
            self.episodes.merge(self._source.episodes.drain())
        return segment

    def _wanted_by(self, held: HeldLease) -> str | None:
        """Returns why the lease is to be given up, or None."""
        if (wanted := held.preemption) is not None:
            return f"{wanted.by!r} has a larger priority"
        try:
            held.check()
        except LeaseError as error:
            return str(error)
        return None

    def _apart(self, *steps: Callable[[], None]) -> None:
        """Takes steps in a thread."""

        def run() -> None:
            try:
                for step in steps:
                    step()
            except RobotRLError as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="booking", daemon=True)
        self._thread.start()

    def _book(self) -> None:
        """Waits for a lease, and ends it at once if the source was closed meanwhile."""
        began_s = time.monotonic()
        hold = LeaseStore().hold(self._specs, **self._how)
        held = hold.__enter__()
        with self._lock:
            if self._is_closed:
                hold.__exit__(None, None, None)
                return
            self.waited_s.append(time.monotonic() - began_s)
            self._hold, self._held = hold, held

    def _leave(self) -> None:
        """Brings the device to rest, and ends the lease."""
        with self._lock:
            source, self._source = self._source, None
            hold, self._hold, self._held = self._hold, None, None
            try:
                if source is not None:
                    source.close()
            finally:
                if hold is not None:
                    hold.__exit__(None, None, None)

    def close(self) -> None:
        """Ends the source, then the lease; a place in line is given up as soon as it would be served."""
        self._is_closed = True
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        """Returns the figures of the episodes; a resumed run books again, and begins new ones."""
        return {"episodes": self.episodes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.episodes.load_state_dict(state["episodes"])
