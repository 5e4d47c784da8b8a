"""What benchmarks share that learn for long, are cut short and go on."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robot_rl.core.errors import ConfigError


def check_plan(at: str, folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with a trial under another plan.

    Raises:
        ConfigError: a value differs; `at` begins the message.
    """
    for name, value in now.items():
        if begun[name] != value:
            raise ConfigError(
                f"{at}: {folder} was begun with {name}={begun[name]!r}, got {value!r}. "
                "Go on with that, or give another folder: out=..."
            )


def processor_s(pid: int) -> float:
    """Returns processor seconds of a process and its threads so far; proc(5), fields 14 and 15."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
