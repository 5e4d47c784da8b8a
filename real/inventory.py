"""Arms of this machine: the station files that were entered with `robot-rl devices add=<station>`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from robot_rl.core.errors import ConfigError, DeviceError, RobotRLError
from robot_rl.hal.device import DeviceSpec
from robot_rl.real.claim import device_of
from robot_rl.real.station import StationConfig, load_station, station_file
from robot_rl.sched.entered import Entered

_ENTERED = Entered("stations.json", "files")


def enter(name_or_path: str) -> DeviceSpec:
    """Adds a station to the inventory.

    Raises:
        ConfigError: no such station, a mistake in its file, or another one has its name.
    """
    station, file = load_station(name_or_path), str(station_file(name_or_path).resolve())
    for other, known in stations():
        if known.name == station.name and other != file:
            raise ConfigError(
                f"add: {other} has the name {station.name!r} already, allowed: another name in {file}, or "
                f"remove={station.name} first."
            )
    _ENTERED.enter(file)
    return device_of(station)


def leave(name: str) -> None:
    """Takes a station out of the inventory, by its name or its file.

    Raises:
        ConfigError: it is not there.
    """
    files = dict[str, str]()
    for file in _ENTERED.paths():
        files[file] = file
        with contextlib.suppress(RobotRLError):  # a broken one leaves by its file
            files[load_station(file).name] = file
    if name not in files and str(Path(name).resolve()) not in files:
        raise ConfigError(f"remove={name}: not there. Known stations: {', '.join(files) or 'none'}.")
    _ENTERED.remove(files.get(name, name))


def stations() -> list[tuple[str, StationConfig]]:
    """Returns file and content of every station that is still there.

    Raises:
        DeviceError: a file has a mistake.
    """
    found = list[tuple[str, StationConfig]]()
    for file in _ENTERED.paths():
        try:
            found.append((file, load_station(file)))
        except ConfigError as error:
            if not station_file(file).exists():
                continue
            raise DeviceError(
                f"station {file}: {error} Correct it, or take it out: robot-rl devices remove={file}"
            ) from error
    return found


def specs() -> list[DeviceSpec]:
    """Returns the arms of these stations."""
    return [device_of(station) for _, station in stations()]
