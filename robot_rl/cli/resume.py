"""The word `resume=<folder>` of the commands whose runs go on after a crash."""

from __future__ import annotations

from pathlib import Path

from robot_rl.core.errors import ConfigError
from robot_rl.core.files import at_home


def resumed(words: list[str]) -> Path | None:
    """Returns the folder of `resume=<folder>`, or None without it.

    Raises:
        ConfigError: it does not stand alone.
    """
    found = [word.split("=", 1)[1] for word in words if word.startswith("resume=")]
    if not found:
        return None
    if len(words) > 1:
        others = " ".join(word for word in words if not word.startswith("resume="))
        raise ConfigError(
            f"resume: got other settings beside it ({others}), allowed: none. A resumed run keeps its "
            "config.yaml; start a new run to change settings."
        )
    return Path(at_home(found[0]))
