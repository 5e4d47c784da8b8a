"""A lease, the clock of its times, and its holder: a process, and whether it still lives."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import socket
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

DEFAULT_TTL_S = 30.0
"""Life of a lease that nobody renews."""
_COMMAND_LETTERS = 120


class BootClock:
    """Seconds since the machine was started, sleep included: nobody can set it, all processes share it."""

    def now_s(self) -> float:
        return time.clock_gettime(_SINCE_BOOT)


def _since_boot(system: Any = time) -> int:
    """Returns the system's clock: on macOS the raw one, since the plain one follows the wall clock."""
    names = ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC_RAW", "CLOCK_MONOTONIC")
    return next(getattr(system, name) for name in names if hasattr(system, name))


_SINCE_BOOT = _since_boot()


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process; unequal to a later one with the same id."""

    pid: int
    host: str
    command: str
    """Shortened command line."""
    started: str
    """Start time in ticks since boot; empty where the system does not show it."""
    world: str
    """Host, boot and process namespace: process ids are valid within one of them only."""
    boot: str = ""
    """Id of this start of the machine; empty where the system does not show it."""
    time_space: str = ""
    """Its time namespace: another one counts other seconds since the boot."""

    def describe(self) -> str:
        return f"pid {self.pid} on {self.host}, `{self.command}`"

    def is_alive(self, seen_from: Holder) -> bool | None:
        """Returns whether the process lives, or None if that is not visible from here."""
        if self.host == seen_from.host and self.boot and seen_from.boot and self.boot != seen_from.boot:
            return False  # the machine has restarted since
        if self.world != seen_from.world:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it lives, and is another user's
            pass
        started = _start_time(self.pid)
        return started is None or self.started in ("", started)

    def shares_clock(self, other: Holder) -> bool:
        """Returns whether both count the same seconds since the machine was started."""
        return bool(self.boot) and (self.boot, self.time_space) == (other.boot, other.time_space)

    def to_text(self) -> str:
        """Returns one line that `from_text` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    @lru_cache(maxsize=1024)  # a thousand leases are those of a few processes
    def from_text(text: str) -> Holder:
        return Holder(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The right to use slots of a device until it expires."""

    device: str
    token: int
    """Fencing token: larger than that of every earlier lease of the device."""
    slot_ids: tuple[int, ...]
    """Which slots, counted from 0; all of them if exclusive."""
    exclusive: bool
    holder: str
    """The holder's name for itself, such as `train pick_cube seed 3`."""
    process: Holder
    """The process that holds it."""
    since_s: float
    """By the `BootClock` of the process that reads this; with another clock, when it was first seen."""
    expires_s: float
    """By the same clock, unless renewed."""
    ttl_s: float = DEFAULT_TTL_S
    """Its life after a renewal."""

    @property
    def slots(self) -> int:
        return len(self.slot_ids)

    def describe(self) -> str:
        """Returns a text: who holds it, since when and until when."""
        return (
            f"{self.holder!r} ({self.process.describe()}) since {clock_time(self.since_s)}, "
            f"until {clock_time(self.expires_s)} unless renewed"
        )


def wall_s(boot_s: float) -> float:
    """Returns a moment of the `BootClock` in seconds of the wall clock as it is set now: for people only."""
    return time.time() + boot_s - BootClock().now_s()


def clock_time(boot_s: float) -> str:
    """Returns a moment of the `BootClock` as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_s(boot_s)))


def this_process() -> Holder:
    """Returns the calling process; a forked child is another one."""
    pid = os.getpid()
    return Holder(
        pid=pid,
        host=socket.gethostname(),
        command=_command(),
        started=_start_time(pid) or "",
        world=_world(),
        boot=_boot(),
        time_space=_namespace("time"),
    )


def _command() -> str:
    program = Path(sys.argv[0]).name if sys.argv else ""
    words = [program, *sys.argv[1:]] if program not in ("", "-c") else ["python", *sys.argv]
    line = shlex.join(words)
    return line if len(line) <= _COMMAND_LETTERS else line[: _COMMAND_LETTERS - 3] + "..."


@cache
def _world() -> str:
    return f"{socket.gethostname()} {_boot()} {_namespace('pid')}".strip()


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _macos_boot()


def _macos_boot() -> str:
    """Returns kern.bootsessionuuid, which is new at every start of macOS; empty elsewhere."""
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if read is None:
        return ""
    found, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    failed = read(b"kern.bootsessionuuid", found, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else found.value.decode()


def _namespace(kind: str) -> str:
    # Not cached: a forked child may have another one.
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Returns the start time in ticks since boot, "" for a dead process, None where /proc hides it.

    proc(5): the fields of /proc/<pid>/stat after the command name, which may hold blanks and
    brackets, are the state (Z and X are dead, waiting to be reaped) and 18 more before the start.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]
