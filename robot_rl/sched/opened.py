"""Opens a device under a lease of its own: for evaluation, collection and benchmarks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager

from robot_rl.hal.leased import EnvDevice, LeasedEnv
from robot_rl.sched.leases import LeaseStore


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
