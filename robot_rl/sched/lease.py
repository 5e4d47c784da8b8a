"""A lease, and the clock of its times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from robot_rl.sched.holder import Holder

DEFAULT_TTL_S = 30.0
"""Life of a lease that nobody renews."""


class BootClock:
    """Seconds since the machine was started, sleep included: nobody can set it, all processes share it."""

    def now_s(self) -> float:
        return time.clock_gettime(_SINCE_BOOT)


def _since_boot(system: Any = time) -> int:
    """Returns the system's clock: on macOS the raw one, since the plain one follows the wall clock."""
    names = ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC_RAW", "CLOCK_MONOTONIC")
    return next(getattr(system, name) for name in names if hasattr(system, name))


_SINCE_BOOT = _since_boot()


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The right to use slots of a device until it expires."""

    device: str
    token: int
    """Fencing token: larger than that of every earlier lease of the device."""
    slot_ids: tuple[int, ...]
    """Which slots, counted from 0; all of them if exclusive."""
    exclusive: bool
    holder: str
    """The holder's name for itself, such as `train pick_cube seed 3`."""
    process: Holder
    """The process that holds it."""
    since_s: float
    """By the `BootClock` of the process that reads this."""
    expires_s: float
    """By the same clock, unless renewed."""
    ttl_s: float = DEFAULT_TTL_S
    """Its life after a renewal."""

    @property
    def slots(self) -> int:
        return len(self.slot_ids)

    def describe(self) -> str:
        """Returns a text: who holds it, since when and until when."""
        return (
            f"{self.holder!r} ({self.process.describe()}) since {clock_time(self.since_s)}, "
            f"until {clock_time(self.expires_s)} unless renewed"
        )


def wall_s(boot_s: float) -> float:
    """Returns a moment of the `BootClock` in seconds of the wall clock as it is set now: for people only."""
    return time.time() + boot_s - BootClock().now_s()


def clock_time(boot_s: float) -> str:
    """Returns a moment of the `BootClock` as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s(boot_s)))
