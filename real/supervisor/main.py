"""The supervisor's process: `python -m robot_rl.real.supervisor.main --station X --sockets D --folder F`.

D/supervisor.sock appears when it is ready. It ends at SIGTERM, or after a while without clients; it stops
the arm first. It writes F/supervisor.json at SIGUSR1 and at the end.
"""

from __future__ import annotations

import argparse
import logging
import math
import signal
import sys
import time
from pathlib import Path

from robot_rl.core.errors import DeviceError, RobotRLError
from robot_rl.core.lock import HeldError, ProcessLock
from robot_rl.real.drivers.host import DRIVER_SOCKET
from robot_rl.real.link import Link, LinkError, Listener, connect
from robot_rl.real.station import StationConfig, load_station
from robot_rl.real.supervisor.clients import Clients
from robot_rl.real.supervisor.log import Log
from robot_rl.real.supervisor.pace import Pace, raise_priority
from robot_rl.real.supervisor.supervisor import Supervisor
from robot_rl.real.writer import Writer, process_log

logger = logging.getLogger(__name__)

SUPERVISOR_SOCKET = "supervisor.sock"
EXIT_REFUSED = 3
_CONNECT_S = 30.0
_VISIT_S = 1.0
"""A shorter visit, as of a page that looks once a second, does not count: the arm's user may be gone."""
_END_S = 3.0
"""Longest time from the request to end until the driver has stopped the arm."""


class SupervisorRequests:
    """The requests of signals: to stop the arm and end, and to write the statistics."""

    def __init__(self) -> None:
        """Handles the signals of this process."""
        self.end = self.report = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "end", True))
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "report", True))


class Process:
    """The loop around `Supervisor.cycle`."""

    def __init__(
        self,
        station: StationConfig,
        sockets: Path,
        folder: Path,
        requests: SupervisorRequests,
        *,
        linger_s: float,
        token: int = 0,
        writer: Writer | None = None,
    ) -> None:
        """Connects to the station's driver.

        Raises:
            DeviceError: another supervisor has the driver, or there is no driver.
        """
        self._station, self._requests, self._linger_s = station, requests, linger_s
        self._lock = lock_driver(sockets, station.name)
        driver = _connect_driver(sockets / DRIVER_SOCKET)
        self._log = Log(folder, station, writer)
        self._clients = Clients(Listener(sockets / SUPERVISOR_SOCKET))
        self._supervisor = Supervisor(station, driver, self._clients, self._log, token=token)

    def run(self) -> None:
        """Runs the cycles until the end."""
        self._scheduling = raise_priority()
        pace = Pace(self._station.supervisor.command_hz)
        logger.info("supervisor of %s: %g Hz, %s", self._station.name, pace.rate_hz, self._scheduling)
        try:
            self._watch(pace)
        except Exception as error:
            self._supervisor.stop(f"the supervisor failed: {error!r}", can_brake=False)
            raise
        finally:
            self._report(pace)
            self._supervisor.close()
            self._lock.release()

    def _watch(self, pace: Pace) -> None:
        supervisor, requests, alone_s, until_s = self._supervisor, self._requests, 0.0, math.inf
        while not (until_s < math.inf and supervisor.is_released) and time.monotonic() < until_s:
            supervisor.cycle()
            alone_s = 0.0 if self._clients.have_stayed(_VISIT_S) else alone_s + 1.0 / pace.rate_hz
            if (requests.end or alone_s > self._linger_s) and until_s == math.inf:
                supervisor.stop("asked to end" if requests.end else "nobody is connected any more")
                until_s = time.monotonic() + _END_S
            if requests.report:
                requests.report = False
                self._report(pace)
            pace.wait()

    def _report(self, pace: Pace) -> None:
        content = {"station": self._station.name, "scheduling": self._scheduling, **pace.statistics()}
        self._log.report("supervisor.json", {**content, "unlogged": self._log.lost})


def lock_driver(sockets: Path, station: str) -> ProcessLock:
    """Returns the lock of the only supervisor of the driver host at these sockets.

    Raises:
        DeviceError: another process has it.
    """
    try:
        return ProcessLock(sockets / "supervisor.lock", note=f"station {station}")
    except HeldError as holder:
        raise DeviceError(
            f"station {station}: {holder} supervises it already, and an arm has one supervisor. "
            "End that deployment first, or connect to it as a watcher."
        ) from holder


def _connect_driver(path: Path) -> Link:
    """Waits for a driver to listen."""
    until_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return connect(path)
        except LinkError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)


def main(argv: list[str] | None = None) -> int:
    """Runs a supervisor until SIGTERM, SIGINT, or until it had no client for a while."""
    parser = argparse.ArgumentParser(prog="python -m robot_rl.real.supervisor.main", description=__doc__)
    parser.add_argument("--station", required=True, help="name of a shipped station, or a YAML file")
    parser.add_argument("--sockets", required=True, type=Path, help="where driver.sock is")
    parser.add_argument("--folder", required=True, type=Path, help="where events and flights are written")
    parser.add_argument("--linger", type=float, default=math.inf, help="seconds to live without a client")
    parser.add_argument("--token", type=int, default=0, help="fencing token of the lease; 0 by hand")
    given = parser.parse_args(argv)
    with process_log() as writer:
        try:
            requests = SupervisorRequests()
            station = load_station(given.station)
            where = (given.sockets, given.folder)
            Process(station, *where, requests, linger_s=given.linger, token=given.token, writer=writer).run()
        except RobotRLError as error:
            logger.error("%s", error)
            return EXIT_REFUSED
        return 0


if __name__ == "__main__":
    sys.exit(main())
