"""What joints were sent and what they did, as it was measured: the input of a system identification.

T targets, S measurements, n arm joints.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from robot_rl.core.errors import DatasetError
from robot_rl.core.files import replace_file

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class JointLog:
    """One recording of an arm that moved freely, from rest. Times are on one clock, in seconds."""

    robot: str
    """Name or file, as the station has it."""
    joints: tuple[str, ...]
    target_s: Array
    """When each target was sent (T,)."""
    target_rad: Array
    """(T, n); each holds until the next."""
    measured_s: Array
    """When each position was measured (S,)."""
    position_rad: Array
    """(S, n)"""
    velocity_rad_s: Array
    """(S, n)"""
    gripper: float = 0.0
    """Command of the gripper all the time."""

    def __post_init__(self) -> None:
        targets, samples, joints = len(self.target_s), len(self.measured_s), len(self.joints)
        need = {
            "target_rad": (targets, joints),
            "position_rad": (samples, joints),
            "velocity_rad_s": (samples, joints),
        }
        for name, shape in need.items():
            array = getattr(self, name)
            if array.shape != shape:
                raise DatasetError(f"joint log: {name} has shape {array.shape}, need {shape}.")
        for name in ("target_s", "measured_s"):
            if not (np.diff(getattr(self, name)) > 0).all():
                raise DatasetError(f"joint log: {name} does not grow.")
        finite = all(np.isfinite(getattr(self, name)).all() for name in (*need, "target_s", "measured_s"))
        if not finite:
            raise DatasetError("joint log: a number is not finite.")
        if targets < 2 or samples < 2 or self.seconds <= 0:
            raise DatasetError(
                f"joint log: {targets} targets and {samples} measurements do not overlap. Record again."
            )

    @property
    def begin_s(self) -> float:
        """The first moment with a target and a measurement."""
        return float(max(self.target_s[0], self.measured_s[0]))

    @property
    def seconds(self) -> float:
        """How long there are both."""
        return float(min(self.target_s[-1], self.measured_s[-1])) - self.begin_s

    def save(self, path: Path) -> None:
        """Writes an .npz file, as a whole or not at all."""
        content = io.BytesIO()
        np.savez_compressed(content, **{each.name: getattr(self, each.name) for each in fields(self)})
        replace_file(path, content.getvalue())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the file of `save`.

        Raises:
            DatasetError: it is missing, or no recording.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {each.name: file[each.name] for each in fields(cls)}
        except (OSError, ValueError, KeyError) as error:
            raise DatasetError(
                f"recording: {path} cannot be read ({error}). `robot-rl sysid record` writes one."
            ) from error
        found["robot"] = str(found["robot"])
        found["joints"] = tuple(found["joints"].tolist())
        found["gripper"] = float(found["gripper"])
        return cls(**found)
