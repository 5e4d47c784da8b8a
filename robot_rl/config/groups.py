"""The groups of configs, and what is in them."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
"""The folder of root configs and of the groups below them."""


def options(group: str, folder: Path = CONFIGS) -> list[str]:
    """Returns the names that `<group>=<name>` may select."""
    return sorted(path.stem for path in (folder / group).glob("*.yaml"))
