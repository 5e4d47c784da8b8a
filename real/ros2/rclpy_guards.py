"""Imports rclpy, which may be missing, and translates its errors."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Generator
from typing import Any

from robot_rl.real.ros2.api import Ros2Error

logger = logging.getLogger(__name__)


def guarded(callback: Callable[[Any], None], what: str) -> Callable[[Any], None]:
    """Returns a callback whose failure does not end the executor."""

    def call(message: Any) -> None:
        try:
            callback(message)
        except Exception:
            logger.exception("ros2: the callback of %s failed", what)

    return call


@contextlib.contextmanager
def translated(what: str) -> Generator[None]:
    """Turns errors of rclpy (RCLError, InvalidHandle, InvalidNodeNameException, ...) into a Ros2Error."""
    try:
        yield
    except Ros2Error:
        raise
    except (RuntimeError, ValueError) as error:  # the bases of all of them
        why, kind = " ".join(str(error).split()), type(error).__name__
        closed = " Is the node closed?" if kind == "InvalidHandle" else ""
        raise Ros2Error(f"ros2: {what}: {kind}: {why.rstrip('.')}.{closed}") from error


def rclpy_module(name: str = "") -> Any:
    """Returns rclpy or a module of it.

    Raises:
        Ros2Error: it cannot be imported.
    """
    try:
        return importlib.import_module(f"rclpy.{name}" if name else "rclpy")
    except ImportError as error:
        raise Ros2Error(
            f"ros2: rclpy cannot be imported ({error}). Source your ROS 2, whose Python must be this one, or "
            "use transport=dds: pip install -e '.[ros2]'."
        ) from error
