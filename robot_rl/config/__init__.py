"""Configuration (layer L0): Hydra composes and sweeps, frozen dataclasses hold and check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robot_rl.config.build import build, plain
from robot_rl.config.groups import CONFIGS, options
from robot_rl.config.words import shell, words

if TYPE_CHECKING:
    from robot_rl.config.compose import dump, load, read, sweep

__all__ = ["CONFIGS", "build", "dump", "load", "options", "plain", "read", "shell", "sweep", "words"]


def __getattr__(name: str) -> Any:
    """Loads Hydra only when a configuration is composed or read."""
    if name in __all__:
        from robot_rl.config import compose

        return getattr(compose, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
