"""Errors for users, one class for each kind; a message says where, got, allowed and remedy."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

RANGES: dict[str, Callable[[Any], bool]] = {
    "1 or more": lambda value: value >= 1,
    "2 or more": lambda value: value >= 2,
    "0 or more": lambda value: value >= 0,
    "above 0": lambda value: value > 0,
    "0 to 1": lambda value: 0 <= value <= 1,
    "0 to below 1": lambda value: 0 <= value < 1,
    "above 0, below 1": lambda value: 0 < value < 1,
    "above 0, at most 1": lambda value: 0 < value <= 1,
    "1 or more, or null": lambda value: value is None or value >= 1,
    "0 or more, or null": lambda value: value is None or value >= 0,
    "above 0, or null for none": lambda value: value is None or value > 0,
}
"""The usual ranges of a setting, by their words in messages."""


class RobotRLError(ValueError):
    """An error that the user can repair; the command line prints it without a traceback."""


class UnknownComponentError(RobotRLError):
    """A name that is in no table of components."""


class ConfigError(RobotRLError):
    """A configuration key or value that does not fit its schema."""


class DatasetError(RobotRLError):
    """A dataset that is damaged, incomplete, or of another robot or task."""


class StorageError(RobotRLError):
    """A file that the disk or the memory refuses to write or read."""


class CheckpointError(RobotRLError):
    """A checkpoint that cannot be read, or belongs to another task or policy."""


class ModelError(RobotRLError):
    """A robot or scene model that lacks a named joint, actuator, site or sensor."""


class RenderError(RobotRLError):
    """No way to draw: the message names the Debian package that brings one."""


class LeaseError(RobotRLError):
    """A device that another process holds, or a lease that expired or was overtaken."""


class DeviceError(RobotRLError):
    """A device that is disconnected, quarantined, or refused a command."""


class StaleObservationError(DeviceError):
    """An observation older than the safety envelope allows."""


class SafetyStopError(DeviceError):
    """A command after a latched stop; only an explicit clear lifts it."""


class DriverGoneError(SafetyStopError):
    """The stop of an arm whose driver is gone: a simulated one can be begun again with another."""


def require(holds: bool, key: str, got: object, allowed: str) -> None:
    """Raises the one form of message for a setting out of range."""
    if not holds:
        raise ConfigError(f"{key}: got {got!r}, allowed: {allowed}")


def require_fields(config: object, at: str, allowed: str, *names: str) -> None:
    """Refuses fields of a configuration out of range.

    Args:
        config: has the fields.
        at: begins the key in the message.
        allowed: a name in `RANGES`, or the allowed words with ", " between them.
        names: the fields.
    """
    holds = RANGES.get(allowed) or allowed.split(", ").__contains__
    for name in names:
        value = getattr(config, name)
        require(holds(value), at + name, value, allowed)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?`, or the known names if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."
