"""The hardware of a station, and the exclusive claim on it: one process of the machine at a time.

The hardware is the serial port, or the joints of a controller_manager; the name of the station file, the
user and ROBOT_RL_STATE do not matter. Each has a file in /var/tmp that the driver host locks for its life,
and in which it writes the newest fencing token: an older one is refused, also after a restart of the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pwd
import re
import stat
import termios
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from robot_rl.core.errors import DeviceError
from robot_rl.core.lock import HeldError, ProcessLock
from robot_rl.hal.device import DeviceSpec, Fence
from robot_rl.real.ros2.discovery import discovery
from robot_rl.real.ros2.names import names
from robot_rl.real.station import LeRobotConfig, Ros2Config, StationConfig

_FOLDER = Path("/var/tmp")
"""On Linux and macOS all users write to it, nobody deletes another's file, and it outlives a restart."""
_PAGE_BYTES = 4096
_SLOTS = (1, 2)
"""Pages of the file that hold the newest token and the one before: a torn write damages one of them."""
_RECORD_BYTES = 128
_PSEUDO_TERMINALS = "/dev/pts/"
"""A simulated arm has the other end of such a port open."""
_REMEDY = (
    "It is shared by all users of this machine. Look at its owner and rights; if it is damaged, delete it "
    "with the arm switched off. ROBOT_RL_CLAIMS names another folder, for everybody who uses the arm."
)


def hardware(station: StationConfig) -> tuple[str, ...]:
    """Returns a name for each piece of hardware of a station; an arm simulated in process has none.

    Raises:
        Ros2Error: a name or ROS_DOMAIN_ID that ROS does not allow.
    """
    if station.driver == "lerobot" and station.lerobot is not None:
        return tuple(sorted(_lerobot(station.lerobot)))
    if station.driver == "ros2" and station.ros2 is not None:
        manager = _manager(station.ros2)
        return tuple(sorted(f"{joint} of {manager}" for joint in station.joints))
    return ()


def device_of(station: StationConfig) -> DeviceSpec:
    """Returns the device to lease: an arm has one slot."""
    return DeviceSpec(
        name=f"arm-{station.name}",
        kind="robot",
        real=station.real,
        labels={
            "robot": station.robot,
            "driver": station.driver,
            **({"cameras": " ".join(station.cameras)} if station.cameras else {}),
            **station.labels,
        },
        last_token=partial(last_token, station),
    )


def last_token(station: StationConfig) -> int:
    """Returns the newest fencing token that a station's hardware has seen on this machine; 0 if none.

    Raises:
        DeviceError: what is written about it cannot be read.
    """
    return max((_read(_path(name)) for name in hardware(station)), default=0)


class Claim:
    """A claim on a station's hardware, until `release` or the end of this process.

    A process that is stopped (SIGSTOP) or hangs keeps its claim: it may still move the arm.
    """

    def __init__(self, station: StationConfig) -> None:
        """Takes the hardware; the arm is not touched.

        Raises:
            DeviceError: another process has it; names the process, its user and its station.
        """
        self._at = f"station {station.name}"
        self._locks: dict[str, ProcessLock] = {}
        note = f"station {station.name}, user {_user()}"
        try:
            for name in hardware(station):
                self._locks[name] = self._take(name, note)
            for name in self._locks:
                _refuse_rivals(self._at, name)
            self.newest = last_token(station)
            """The newest token that the hardware has seen."""
        except BaseException:
            self.release()
            raise

    def fence(self, token: int) -> Fence:
        """Returns the hardware's fence, behind a token that is now its newest.

        Args:
            token: of the arm's lease; 0 for a person who starts the driver by hand: then there is only the
                claim, and the first token that comes is the newest.

        Raises:
            LeaseError: a newer token was seen, maybe before a restart of the machine.
        """
        fence = Fence(self._at, newest=self.newest if token else 0, record=self.record)
        fence.check(token)
        return fence

    def record(self, token: int) -> None:
        """Stores a token so that it outlives a power cut; the stored one never decreases.

        Raises:
            DeviceError: it cannot be written.
        """
        for name, lock in self._locks.items():
            try:
                _write(lock.fileno(), token)
            except OSError as error:
                raise DeviceError(
                    f"{self._at}: token {token} cannot be written to {_path(name)}: {error.strerror}. "
                    "Free some space there: without it, overtaken programs could not be kept out."
                ) from error
        self.newest = max(self.newest, token)

    def release(self) -> None:
        """Ends the claim."""
        while self._locks:
            self._locks.popitem()[1].release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, name: str, note: str) -> ProcessLock:
        path = _path(name)
        try:
            return ProcessLock(path, note=note, public=True)
        except HeldError as holder:
            raise DeviceError(
                f"{self._at}: {holder} drives {name} already, and an arm has one driver. End that one first, "
                "or wait: a driver that nobody uses any more ends by itself, within half a minute."
            ) from holder
        except OSError as error:
            raise DeviceError(f"{self._at}: {path} cannot be locked: {error}. {_REMEDY}") from error


def keep_others_out(port: int) -> None:
    """Makes an open serial port exclusive to this process; does nothing to other files.

    Raises:
        BlockingIOError: a program that locks its ports (pyserial's `exclusive`, picocom) has it.
    """
    if not os.isatty(port):
        return
    fcntl.flock(port, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.ttyname(port).startswith(_PSEUDO_TERMINALS):  # there it would outlive this process
        fcntl.ioctl(port, termios.TIOCEXCL)  # from now on it is busy for others


# Names


def _lerobot(config: LeRobotConfig) -> Iterator[str]:
    ports = list(_ports(config.options))
    if not ports:  # an arm that is not on a serial bus: its other options identify it
        reached = {key: value for key, value in config.options.items() if key not in ("id", "cameras")}
        yield f"{config.type} {json.dumps(reached, sort_keys=True, default=str)}"
    for port in ports:
        # macOS shows each port twice, as /dev/cu.* and /dev/tty.*.
        yield os.path.realpath(port).replace("/dev/cu.", "/dev/tty.")


def _ports(options: Mapping[str, Any]) -> Iterator[str]:
    """Yields the serial ports of LeRobot's options: `port`, `left_arm_port`, and those of arms within."""
    for key, value in options.items():
        if isinstance(value, Mapping) and key != "cameras":
            yield from _ports(value)
        elif isinstance(value, str) and (key == "port" or key.endswith("_port")):
            yield value


def _manager(config: Ros2Config) -> str:
    """Returns the controller_manager as the driver finds it: in its domain, namespace, and remapped."""
    domain = discovery(domain_id=config.domain_id).domain_id
    resolved = names("robot_rl_driver", config.namespace, config.remap)
    switch = resolved.resolve(f"{config.controller_manager}/switch_controller")
    return f"{switch.rpartition('/')[0]} in ROS domain {domain}"


def _path(name: str) -> Path:
    # Another folder is for tests, and for containers that share an arm but not /var/tmp.
    folder = Path(os.environ.get("ROBOT_RL_CLAIMS") or _FOLDER)
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:80]
    return folder / f"robot_rl.{readable}.{hashlib.sha256(name.encode()).hexdigest()[:8]}.claim"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


# Tokens


def _read(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise DeviceError(f"{path} cannot be read: {error.strerror}. {_REMEDY}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DeviceError(f"{path} is no plain file. {_REMEDY}")
        return max(_slots(handle))
    finally:
        os.close(handle)


def _slots(handle: int) -> tuple[int, ...]:
    """Returns the token of each slot; 0 for one that was never written, or torn."""
    found: list[int] = []
    for slot in _SLOTS:
        words = os.pread(handle, _RECORD_BYTES, slot * _PAGE_BYTES).split()
        is_whole = len(words) == 2 and words[1].isdigit() and words[0] == _checksum(words[1])
        found.append(int(words[1]) if is_whole else 0)
    return tuple(found)


def _write(handle: int, token: int) -> None:
    tokens = _slots(handle)
    if token <= max(tokens):
        return
    digits = str(token).encode()
    older = _SLOTS[tokens.index(min(tokens))]
    os.pwrite(handle, (_checksum(digits) + b" " + digits).ljust(_RECORD_BYTES), older * _PAGE_BYTES)
    os.fsync(handle)


def _checksum(digits: bytes) -> bytes:
    return b"%08x" % zlib.crc32(digits)


# Serial ports


def _refuse_rivals(at: str, name: str) -> None:
    """Raises a DeviceError if a program that does not use claims has a serial port open.

    Linux shows users the files of their own processes, and root those of all.
    """
    if not name.startswith("/dev/") or name.startswith(_PSEUDO_TERMINALS):
        return
    rivals = [f"{pid} ({command})" for pid, command in openers(Path(name))]
    if rivals:
        raise DeviceError(
            f"{at}: process {', '.join(rivals)} has {name} open. Two programs on one bus disturb each other: "
            "end that one first."
        )


def openers(path: Path, processes: Path = Path("/proc")) -> list[tuple[int, str]]:
    """Returns id and name of other processes that have a file open, as far as this user may see them."""
    found: list[tuple[int, str]] = []
    for folder in processes.glob("[0-9]*"):
        if int(folder.name) == os.getpid():
            continue
        try:
            if any(os.readlink(link) == str(path) for link in (folder / "fd").iterdir()):
                found.append((int(folder.name), (folder / "comm").read_text().strip()))
        except OSError:  # another user's, or it has ended
            continue
    return found
