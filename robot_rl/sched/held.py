"""A lease while its holder lives: it is renewed, and tells when it is lost or wanted by others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from robot_rl.core.errors import LeaseError
from robot_rl.sched.lease import Lease
from robot_rl.sched.lease_file import LeaseFileError
from robot_rl.sched.preemption import PreemptedError, Preemption

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
"""How often a preemptible holder looks whether somebody wants its lease."""
_TRUST_S = 1.0
"""How long `check` believes that a device can still be trusted before it asks again."""


class Renews(Protocol):
    """Where a lease is from: a `LeaseStore`."""

    def renew(self, lease: Lease) -> Lease: ...

    def release(self, lease: Lease) -> None: ...

    def preemption(self, lease: Lease) -> Preemption | None: ...

    def has_expired(self, lease: Lease) -> bool: ...


class HeldLease:
    """A lease that a thread renews; call `check()` before every chunk of commands."""

    def __init__(
        self,
        store: Renews,
        lease: Lease,
        *,
        preemptible: bool = False,
        require_trusted: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to renew.

        Args:
            store: where the lease is from.
            lease: it was just given.
            preemptible: whether to look for `preemption`.
            require_trusted: `DeviceSpec.require_trusted` of the device; asked now and then in `check`.
        """
        self._store, self.lease = store, lease
        self._require_trusted, self._trusted_s = require_trusted, time.monotonic()
        self._is_preemptible = preemptible
        self._wanted: tuple[str, float] | None = None
        self._lost: LeaseError | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease-{lease.device}", daemon=True)
        self._thread.start()

    @property
    def device(self) -> str:
        return self.lease.device

    @property
    def token(self) -> int:
        return self.lease.token

    @property
    def slot_ids(self) -> tuple[int, ...]:
        return self.lease.slot_ids

    @property
    def holder(self) -> str:
        return self.lease.holder

    @property
    def preemption(self) -> Preemption | None:
        """Who wants the lease, as of the last look; finish the chunk, park, and end it in time."""
        if self._wanted is None:
            return None
        by, until_s = self._wanted
        return Preemption(by=by, left_s=until_s - time.monotonic())

    def give_way(self) -> None:
        """Passes unless somebody wants the lease; for moments in which the device can be parked.

        Raises:
            PreemptedError: names who.
        """
        if (wanted := self.preemption) is not None:
            raise PreemptedError(wanted.by)

    def check(self) -> None:
        """Passes while the lease is held, and the device is to be trusted.

        Raises:
            LeaseError: it was overtaken or preempted, or could not be renewed before it expired.
            DeviceError: the device gives no leases now, as a world model that somebody found wanting.
        """
        if self._lost is not None:
            raise self._lost
        if (wanted := self.preemption) is not None and wanted.left_s <= 0:
            raise LeaseError(f"lease of {self.device}: {wanted.by!r} has it now, and goes first.")
        if self._store.has_expired(self.lease):  # the machine slept, or the file was not writable
            self.lease = self._store.renew(self.lease)
        if time.monotonic() - self._trusted_s >= _TRUST_S:
            self._require_trusted()
            self._trusted_s = time.monotonic()

    def end(self) -> None:
        """Stops renewing and gives the slots back."""
        self._done.set()
        self._thread.join()
        self._store.release(self.lease)

    def _renew(self) -> None:
        every_s = self.lease.ttl_s / 3.0  # two renewals may fail before the lease does
        due_s = time.monotonic() + every_s
        look_s = _LOOK_S if self._is_preemptible else every_s
        while not self._done.wait(min(look_s, max(0.0, due_s - time.monotonic()))):
            try:
                if self._is_preemptible:
                    found = self._store.preemption(self.lease)
                    if found is None and self._wanted is not None:  # taken back, or taken: then this says so
                        self.lease, self._wanted = self._store.renew(self.lease), None
                    if found is not None:
                        self._wanted = found.by, time.monotonic() + found.left_s
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + every_s
                    self.lease = self._store.renew(self.lease)
            except LeaseFileError as error:
                if not self._store.has_expired(self.lease):
                    logger.warning("%s Trying again.", error)
                    continue
                self._lost = error
            except LeaseError as error:
                self._lost = error
            if self._lost is not None:
                logger.error("%s", self._lost)
                return
