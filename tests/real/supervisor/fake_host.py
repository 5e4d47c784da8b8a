"""A driver host of a fake arm; `calls` in its folder lists what the arm was asked.

python -m tests.real.supervisor.fake_host <station.yaml> <folder of sockets>
"""

import logging
import signal
import sys
from pathlib import Path

from robot_rl.real.drivers.host import Host
from robot_rl.real.station import load_station
from robot_rl.testing.arm import FakeArm


class Calls(list[str]):
    """Survives a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def append(self, call: str) -> None:
        self._file.write(call + "\n")
        self._file.flush()


def main(station_file: str, folder: Path) -> None:
    logging.basicConfig(level=logging.INFO)
    station = load_station(station_file)
    arm = FakeArm(station)
    arm.calls = Calls(folder / "calls")
    host = Host(arm, station, folder)
    signal.signal(signal.SIGTERM, lambda *_: host.close())
    host.run()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
