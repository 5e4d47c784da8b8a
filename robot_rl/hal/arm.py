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
