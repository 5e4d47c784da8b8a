"""A source on a device that others want too: it waits in line, collects under a lease, and gives way.

    waits -> begins -> collects ... another wants the device -> ends, parks, releases -> waits

Waiting, watching and parking are done in a thread: meanwhile the run's other sources go on, and the device is
given up in time whatever the learner does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from robot_rl.core.errors import DeviceError, LeaseError, RobotRLError
from robot_rl.data.transitions import Segment
from robot_rl.rollout.revival import ActorError
from robot_rl.rollout.sources import Elsewhere, Source
from robot_rl.rollout.weights import Published
from robot_rl.sched.lease_file import LeaseFileError
from robot_rl.sched.leases import GivenUpError, HeldLease, LeaseStore

if TYPE_CHECKING:
    from robot_rl.hal.device import DeviceSpec


logger = logging.getLogger(__name__)

_LOOK_S = 0.1
"""How often it is seen whether somebody wants the device."""
_PARKS_S = 30.0
"""How long the end of a run waits for a device that is being parked, or for the lease file."""


class BookedSource(Elsewhere):
    """A `Source` on the first of several devices that is free."""

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        begin: Callable[[HeldLease], Source],
        *,
        holder: str,
        priority: int = 0,
        preempt_s: float | None = None,
        turn_s: float | None = None,
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
            turn_s: after so long it gives way to an equal priority; None: never.
            wait_s: how long `collect` waits while there is no device.
            say: tells a person why nothing is collected.
        """
        super().__init__()
        self._is_over = threading.Event()
        self._specs, self._begin, self._say, self._wait_s = list(specs), begin, say, wait_s
        self._how: dict[str, Any] = {
            "holder": holder,
            "priority": priority,
            "preempt_s": preempt_s,
            "turn_s": turn_s,
            "preemptible": True,
            "wait_s": math.inf,
            "given_up": self._is_over.is_set,
        }
        self.waited_s: list[float] = []
        """How long it has waited for a device, each time."""
        self._source: Source | None = None
        self._held: HeldLease | None = None
        self._lock = threading.Lock()
        """Of the two above: `collect` has it, or the thread that ends the source."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_ahead(self) -> bool:
        source = self._source
        return source is not None and source.is_ahead

    def collect(self, published: Published) -> Segment | None:
        """Returns what the source has collected; None while there is no device.

        Raises:
            ActorError: the source cannot go on, or the device was stopped.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="booking", daemon=True)
            self._thread.start()
        if self._error is not None:
            raise ActorError(str(self._error)) from self._error
        if not self._lock.acquire(timeout=self._wait_s):
            return None
        try:
            return None if self._held is None else self._collected(self._held, published)
        except ActorError:
            self._is_over.set()  # the device is for others
            raise
        finally:
            self._lock.release()
            if self._held is None:
                time.sleep(self._wait_s)

    def _collected(self, held: HeldLease, published: Published) -> Segment | None:
        if self._source is None:
            try:
                self._source = self._begin(held)
            except RobotRLError as error:
                raise ActorError(str(error)) from error
        segment = self._source.collect(published)
        if segment is not None:
            self.episodes.merge(self._source.episodes.drain())
        return segment

    def _run(self) -> None:
        """Books a device again and again, each time until it is wanted by others."""
        try:
            while not self._is_over.is_set():
                began_s = time.monotonic()
                self._say_who_has_them()
                try:
                    with LeaseStore().hold(self._specs, **self._how) as held:
                        self.waited_s.append(time.monotonic() - began_s)
                        self._has(held)
                except GivenUpError:
                    return
                except LeaseFileError as error:  # busy, or on a full disk
                    logger.warning("%s Trying again.", error)
                    self._is_over.wait(1.0)
        except Exception as error:  # of the thread: `collect` raises it
            self._error = error

    def _say_who_has_them(self) -> None:
        """Says why nothing is collected, if all devices are taken."""
        held = {lease.device: lease.holder for lease in LeaseStore().active()}
        if all(spec.name in held for spec in self._specs):
            self._say(
                "waits for " + ", ".join(f"{spec.name}, held by {held[spec.name]!r}" for spec in self._specs)
            )

    def _has(self, held: HeldLease) -> None:
        """Lets the source collect until the device is to be given up; then it is at rest."""
        with self._lock:
            self._held = held
        try:
            self._watch(held)
        finally:
            self._leave()

    def _watch(self, held: HeldLease) -> None:
        """Returns when the device is to be given up."""
        while not self._is_over.wait(_LOOK_S):
            if (why := _wanted(held)) is not None:
                self._say(f"{held.device} is given up: {why}. Waits for it")
                return

    def _leave(self) -> None:
        """Brings the device to rest; its lease ends then."""
        with self._lock:
            source, self._source, self._held = self._source, None, None
            if source is not None:
                source.close()

    def close(self) -> None:
        """Ends the source, then the lease; or gives its place in line up."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_PARKS_S)


def _wanted(held: HeldLease) -> str | None:
    """Returns why a lease is to be given up; None if it is not."""
    if (wanted := held.preemption) is not None:
        return f"{wanted.by!r} goes first"
    try:
        held.check()
    except (LeaseError, DeviceError) as error:
        return str(error).rstrip(".")
    return None
