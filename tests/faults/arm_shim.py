"""What is bad around the chain's processes: their disk, their clock, their cable, and that they hang."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal

from arm_process import HANG_ALL, HANG_LOOP
from wall_clock import set_clock

WAIT_S = 60.0
"""Of a busy machine."""
_HERE = Path(__file__).parent
_WISH = struct.Struct("=iiii1008s")
_DISKS = {"well": 0, "full": 1, "blocked": 2}
_LO = "ip link set lo up; "
_SHARED = ("/run", "/dev/shm", "/var/tmp", "/var/lib")
_OURS, _THEIRS = "192.0.2.1/24", "192.0.2.2/24"  # of documentation's addresses (RFC 5737)


def until(holds: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """Waits for a condition and returns what it says."""
    until_s = time.monotonic() + wait_s
    while True:
        if found := holds():
            return found
        assert time.monotonic() < until_s, f"{what}: not within {wait_s:g} s"
        time.sleep(0.02)


def missing(*programs: str) -> str:
    """Returns which programs are not installed, or an empty text."""
    lacking = [name for name in programs if shutil.which(name) is None]
    return f"needs {', '.join(lacking)}" if lacking else ""


def run(*command: str) -> None:
    """Runs a program that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"


def build(name: str, folder: Path) -> Path:
    """Returns the library that a C file of this folder makes."""
    library = folder / f"{name}.so"
    run("cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(_HERE / f"{name}.c"))
    return library


class Shim:
    """Two preloaded libraries, `bad_process.c` and `wall_clock.c`, and what they are told."""

    def __init__(self, folder: Path, *, shifts_clock: bool) -> None:
        self._clock_file, page = folder / "clock", folder / "wish"
        page.write_bytes(bytes(mmap.PAGESIZE))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        libraries = [build("bad_process", folder)]
        self._environment = {"BAD_PROCESS": str(page)}
        self.clock: dict[str, str] = {}
        """Environment of a process that sees the clock of `set_clock` and nothing else bad."""
        if shifts_clock:
            set_clock(self._clock_file, 0)
            libraries.append(build("wall_clock", folder))
            self._environment["WALL_CLOCK"] = str(self._clock_file)
            self.clock = {"LD_PRELOAD": str(libraries[-1]), "WALL_CLOCK": str(self._clock_file)}
        self._environment["LD_PRELOAD"] = ":".join(map(str, libraries))
        self._python = folder / "python"
        self._python.write_text(f'#!/bin/sh\nexec {sys.executable} {_HERE / "arm_process.py"} "$@"\n')
        self._python.chmod(0o755)

    @contextlib.contextmanager
    def around(self) -> Generator[None]:
        """Makes every process that is started with `sys.executable` one that can go bad."""
        before, python = dict(os.environ), sys.executable
        os.environ.update(self._environment)
        sys.executable = str(self._python)
        try:
            yield
        finally:
            sys.executable = python
            os.environ.clear()
            os.environ.update(before)

    def set_disk(self, state: Literal["well", "full", "blocked"], folder: str = "", pid: int = 0) -> None:
        """Makes the disk under paths that begin with `folder` good or bad, for one process or for all."""
        _, _, hang, _, _ = _WISH.unpack_from(self._page)
        _WISH.pack_into(self._page, 0, 0, pid, hang, 0, folder.encode())
        struct.pack_into("=i", self._page, 0, _DISKS[state])  # at last, when the rest is there

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """Lets one campaign of this machine hang something at a time: what spins takes a core."""
        with (Path(tempfile.gettempdir()) / "robot-rl-faults.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def hang(self, pid: int, *, is_whole: bool) -> None:
        """Makes a process spin until `unhang`; its other Python threads run if not `is_whole`."""
        struct.pack_into("=i", self._page, 8, 1)
        os.kill(pid, HANG_ALL if is_whole else HANG_LOOP)

    def unhang(self) -> None:
        struct.pack_into("=i", self._page, 8, 0)

    def heal(self) -> None:
        """Makes everything well again."""
        self.unhang()
        self.set_disk("well")

    def set_clock(self, shift_s: int) -> None:
        """Steps the wall clock to so far from the real one."""
        set_clock(self._clock_file, shift_s)


class Far:
    """Another host: a process in a network namespace of its own, at the end of a cable that can be cut."""

    def __init__(self, pid: int) -> None:
        """Lays the cable; the process has to be in its namespace, or about to be."""
        self._pid = str(pid)
        ours = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{pid}/ns/net") != ours, "the network namespace")
        run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self._pid)
        up = "ip addr add {} dev cable; ip link set cable up"
        run("sh", "-euc", up.format(_OURS))
        run("nsenter", "-t", self._pid, "-n", "sh", "-euc", _LO + up.format(_THEIRS))

    def set_cable(self, *, plugged: bool) -> None:
        """Cuts the cable or joins it."""
        up = "up" if plugged else "down"
        run("nsenter", "-t", self._pid, "-n", "ip", "link", "set", "cable", up)

    def hide_files(self, folder: Path) -> None:
        """Gives the process files of its own where programs meet: its /tmp is `folder`."""
        cache = os.environ.get("PYTHONPYCACHEPREFIX", "")
        (folder / "cache").mkdir(parents=True)
        lines = [f"mount --bind {cache} {folder}/cache"] if cache else []
        lines += [f"mount --rbind {folder} /tmp"]
        lines += [f"mount -t tmpfs none {place}" for place in _SHARED if Path(place).is_dir()]
        run("nsenter", "-t", self._pid, "-m", "sh", "-euc", "; ".join(lines))


def wire_up() -> None:
    """Makes this network namespace one in which processes hear each other."""
    run("sh", "-euc", _LO)
