"""Opens a device under its own lease, for evaluation, collection and benchmarks; and stores its stops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager

from robot_rl.core.errors import DeviceError, LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.hal.leased import EnvDevice, LeasedEnv
from robot_rl.sched.leases import HeldLease, LeaseStore

logger = logging.getLogger(__name__)

_LETS_GO_S = 20.0
"""How long the processes of a holder that lost an arm at the deadline may need to end."""


@contextmanager
def opened(device: EnvDevice, *, holder: str, wait_s: float = 0.0) -> Generator[LeasedEnv]:
    """Leases one slot, opens the device, and closes both at the end.

    `holder` is the caller's name in the errors of others and in `robot-rl devices`; a free slot is awaited
    for `wait_s`.

    Raises:
        LeaseError: others have all slots.
        DeviceError: the device is quarantined.
    """
    with (
        LeaseStore().hold(device.spec, holder=holder, slots=1, wait_s=wait_s) as lease,
        closing(device.open(lease)) as env,
    ):
        yield env


def open_taken(device: EnvDevice, lease: HeldLease, preempt_s: float | None) -> LeasedEnv:
    """Opens an arm; one that others were asked for as soon as their processes have let it go.

    `preempt_s` is how long they had; None: nobody was asked.

    Raises:
        DeviceError: it cannot be opened.
        LeaseError: the lease was lost meanwhile.
    """
    until_s = time.monotonic() + (0.0 if preempt_s is None else _LETS_GO_S)
    while True:
        try:
            return device.open(lease)
        except DeviceError:
            if time.monotonic() > until_s:
                raise
            lease.check()


def keeping_stops(spec: DeviceSpec, holder: str) -> Callable[[str], None] | None:
    """Returns a function that stores a stop of an `EnvDevice`: nobody leases it before a person clears it.

    Simulated devices get None: they are as new in a new process. `holder` is named in later refusals.
    """
    if not spec.real:
        return None

    def stopped(reason: str) -> None:
        try:
            LeaseStore().stop(spec.name, reason, holder)
        except LeaseError as error:  # the stop itself is the news
            logger.error("%s: that it stopped could not be noted: %s", spec.name, error)

    return stopped
