"""Opens a device under a lease of its own: for evaluation, collection and benchmarks; and keeps its stops."""

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
    """Leases one slot, opens the device, and lets go of both at the end.

    Args:
        device: what to act on.
        holder: who acts; others read it in their errors and in `robot-rl devices`.
        wait_s: how long to wait for a free slot.

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
    """Returns what keeps the stops of an `EnvDevice`, so that nobody leases it until a person has cleared it.

    Those of a real arm: a simulated one is as good as new when its process is, and has None.

    Args:
        spec: of the device.
        holder: who has it, for the refusal of those who ask later.
    """
    if not spec.real:
        return None

    def stopped(reason: str) -> None:
        try:
            LeaseStore().stop(spec.name, reason, holder)
        except LeaseError as error:  # the stop itself is what is to be heard of
            logger.error("%s: that it stopped could not be noted: %s", spec.name, error)

    return stopped
