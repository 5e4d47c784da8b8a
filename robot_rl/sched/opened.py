"""Opens a device under its own lease, for evaluation, collection and benchmarks; and stores its stops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager

from robot_rl.core.errors import LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.hal.leased import EnvDevice, LeasedEnv
from robot_rl.sched.leases import LeaseStore

logger = logging.getLogger(__name__)


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
