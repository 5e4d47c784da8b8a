"""A wall clock that processes started with `environment` see, and that the tests step."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


class WallClock:
    """Begins as the machine's; other processes' time is what `environment` preloads."""

    def __init__(self, folder: Path) -> None:
        """Builds the library into a folder."""
        self._shift, library = folder / "clock", folder / "wall_clock.so"
        command = ["cc", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
        self.set(0)
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(self._shift)}

    def set(self, shift_s: int) -> None:
        """Steps the wall clock to so far from the real one."""
        set_clock(self._shift, shift_s)


def set_clock(path: Path, shift_s: int) -> None:
    """Steps the clock of the file that WALL_CLOCK names."""
    with path.open("r+b" if path.exists() else "wb") as file:  # it is mapped: same file
        file.write(struct.pack("=q", shift_s * 1_000_000_000))
