"""Errors for users, one class for each kind; a message says where, got, allowed and remedy."""

import difflib
from collections.abc import Iterable


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


def require(holds: bool, key: str, got: object, allowed: str) -> None:
    """Raises the one form of message for a setting out of range."""
    if not holds:
        raise ConfigError(f"{key}: got {got!r}, allowed: {allowed}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?`, or the known names if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."
