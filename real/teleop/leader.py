"""A leader arm that LeRobot reads: the follower copies its motion.

A leader has no buttons: the person takes over and judges episodes with a keyboard.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from robot_rl.core.errors import ConfigError, DeviceError, nearest
from robot_rl.real.station import StationConfig
from robot_rl.real.teleop.intent import Array, Intent, Teleop


class Leader:
    """A `Teleop` of a leader arm and something with keys."""

    def __init__(self, station: StationConfig, keys: Teleop, device: Any) -> None:
        """Connects.

        Args:
            station: of the follower, with `lerobot`: leader and follower have the same joints and units.
            keys: the device with which the person takes over.
            device: a `lerobot.teleoperators.Teleoperator`, see `open_leader`.

        Raises:
            ConfigError: leader and follower differ.
            DeviceError: the leader cannot be reached.
        """
        if station.lerobot is None:
            raise ConfigError(
                f"human.input: a leader arm needs a station that LeRobot drives, {station.name!r} is driven "
                f"by {station.driver!r}. Use keyboard or gamepad."
            )
        self._keys, self._device, self._joints = keys, device, station.joints
        needed = [f"{joint}.pos" for joint in (*station.joints, "gripper")]
        missing = [name for name in needed if name not in device.action_features]
        if missing:
            raise ConfigError(
                f"human.leader: {device.name} does not give {', '.join(missing)}; it gives "
                f"{', '.join(device.action_features)}. Choose the leader that belongs to the follower."
            )
        self._rad_per_unit = np.asarray(station.lerobot.rad_per_unit or [np.pi / 180] * len(station.joints))
        self._gripper_units = station.lerobot.gripper_units
        try:
            device.connect(calibrate=False)
        except Exception as error:
            raise DeviceError(
                f"human.leader: LeRobot cannot connect {device.name}: {error}. Look at the power, the cable "
                "and human.leader_options.port (`lerobot-find-port` finds it)."
            ) from error

    def begin(self) -> None:
        self._keys.begin()

    def read(self, wanted: Array) -> Intent:
        """Returns the leader's joints while the person drives; otherwise it does not use the bus."""
        intent = self._keys.read(wanted)
        if not intent.takes_over:
            return intent
        try:
            found: Mapping[str, float] = self._device.get_action()
        except Exception as error:
            raise DeviceError(f"human.leader: {self._device.name} does not answer: {error}") from error
        units = np.array([found[f"{joint}.pos"] for joint in self._joints])
        closed, opened = self._gripper_units
        share = (found["gripper.pos"] - closed) / (opened - closed)
        gripper = float(np.clip(2.0 * share - 1.0, -1.0, 1.0))
        return replace(intent, action=None, joints_rad=units * self._rad_per_unit, gripper=gripper)

    def ask(self, question: str) -> None:
        self._keys.ask(question)

    def close(self) -> None:
        self._keys.close()
        with contextlib.suppress(Exception):  # the cable may be out
            self._device.disconnect()


def open_leader(kind: str, options: Mapping[str, Any]) -> Any:
    """Returns a LeRobot teleoperator by LeRobot's name of it, not yet connected.

    Raises:
        DeviceError: LeRobot is missing.
        ConfigError: no such teleoperator or option.
    """
    try:
        import draccus
        import lerobot.teleoperators as package
    except ImportError as error:
        raise DeviceError("human.leader: LeRobot is missing. pip install -e '.[lerobot]'") from error
    # Configs register at import; devices without their libraries are left out.
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    known = package.TeleoperatorConfig.get_known_choices()
    if kind not in known:
        raise ConfigError(f"human.leader: LeRobot has no teleoperator named {kind!r}.{nearest(kind, known)}")
    try:
        config = draccus.decode(package.TeleoperatorConfig, {"type": kind, **options})
        return package.make_teleoperator_from_config(config)
    except (draccus.utils.DecodingError, ValueError, TypeError, ImportError) as error:
        raise ConfigError(
            f"human.leader_options: {error}. They are the fields of LeRobot's {kind}."
        ) from error
