"""What an arm measures, simulated or real."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class ArmState:
    """What an arm measured at one moment; n arm joints."""

    stamp_ns: int
    """When it was measured, as far as the driver can tell: monotonic."""
    device_stamp_ns: int = 0
    """The arm's own clock; the same twice means that nothing new was measured."""
    position_rad: Array
    """(n,)"""
    velocity_rad_s: Array
    """(n,)"""
    effort_n_m: Array | None = None
    """(n,), of arms that measure it."""
    gripper: float = 0.0
    """Opening, in the unit of the station's gripper."""
    stop_reason: str = ""
    """Why the arm has stopped itself (protective stop, fault); empty while it runs."""

    def position_at(self, now_ns: int) -> Array:
        """Returns where the arm is at a time near `stamp_ns` (n,), if it keeps its speed."""
        return self.position_rad + 1e-9 * (now_ns - self.stamp_ns) * self.velocity_rad_s
