"""What a lease is, in words and in numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from robot_rl.sched.holder import Holder

DEFAULT_TTL_S = 30.0
"""Life of a lease that nobody renews."""


class WallClock:
    """Seconds since 1970: comparable between processes, for lease times and nothing else."""

    def now_s(self) -> float:
        return time.time()


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
    """What the holder calls itself, such as `train pick_cube seed 3`."""
    process: Holder
    """Which process holds it."""
    since_s: float
    """Wall-clock time."""
    expires_s: float
    """Wall-clock time, unless renewed."""
    ttl_s: float = DEFAULT_TTL_S
    """By how much a renewal extends it."""

    @property
    def slots(self) -> int:
        """How many slots it has."""
        return len(self.slot_ids)

    def describe(self) -> str:
        """Returns who holds it, since when and until when, in words."""
        return (
            f"{self.holder!r} ({self.process.describe()}) since {clock_time(self.since_s)}, "
            f"until {clock_time(self.expires_s)} unless renewed"
        )


def clock_time(wall_s: float) -> str:
    """Returns a wall-clock time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s))
