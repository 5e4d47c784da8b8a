"""Starts the two processes between a policy and an arm: the driver host and the supervisor.

The host claims the hardware before it touches the arm, so a second host for the same arm ends at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self, cast

from robot_rl.core.errors import DeviceError
from robot_rl.real.client import ArmClient
from robot_rl.real.drivers.host import DRIVER_SOCKET
from robot_rl.real.station import StationConfig, load_station, station_file
from robot_rl.real.supervisor.main import SUPERVISOR_SOCKET

ABOUT = "about.json"
"""In the folder of the sockets: which station it is, its file, its task, and where its logs are."""
LINGER_S = 10.0
"""How long both live on without a client: the process that started them is gone then."""
_PREFIX = "robot-rl-"
"""Of the folders of the sockets."""
_END_S = 10.0
_POLL_S = 0.02


def socket_folders() -> list[Path]:
    """Returns the socket folders of this user's supervisors on this machine, the newest first."""
    written = list[tuple[float, Path]]()
    for socket in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{SUPERVISOR_SOCKET}"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if socket.parent.stat().st_uid == os.getuid():  # all users may make folders there
                written.append((socket.stat().st_mtime, socket.parent))
    return [folder for _, folder in sorted(written, reverse=True)]


def about(folder: Path) -> dict[str, Any]:
    """Returns what is known of the arm whose sockets are in a folder: nothing if it does not say."""
    try:
        known = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", known) if isinstance(known, dict) else {}


def station_at(folder: Path) -> StationConfig:
    """Returns the station whose sockets are in a folder.

    Raises:
        DeviceError: the folder does not say which one.
        ConfigError: its file is gone, or was changed to one with a mistake.
    """
    file = about(folder).get("file")
    if not isinstance(file, str):
        raise DeviceError(f"{folder / ABOUT}: does not say which station this is.")
    return load_station(file)


class StationProcesses:
    """Driver host and supervisor of a station, in their own sessions; a context manager.

    Neither ends with the policy's terminal: when the policy ends, the supervisor holds the arm, stops it,
    and both end after `linger_s`.
    """

    def __init__(
        self,
        station: str,
        folder: Path,
        *,
        token: int = 0,
        linger_s: float = LINGER_S,
        timeout_s: float = 30.0,
        task: str | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            station: name of a shipped one, or a YAML file.
            folder: gets driver.log, supervisor.log, events.jsonl, flight/ and supervisor.json.
            token: of the arm's lease; 0 without one.
            linger_s: how long both live on without a client.
            timeout_s: longest start of each.
            task: what the arm is to do, for those who look; None where nobody knows.
        """
        self._station, self._folder, self._token = station, folder, token
        self._linger_s, self._timeout_s, self._task = linger_s, timeout_s, task
        self._processes: list[subprocess.Popen[bytes]] = []
        self.sockets = Path()
        """Folder of driver.sock, sensors.sock and supervisor.sock; short, as unix sockets need."""

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sockets = Path(tempfile.mkdtemp(prefix=_PREFIX))
        known = {
            "station": load_station(self._station).name,
            "file": str(station_file(self._station).resolve()),
            "task": self._task,
            "folder": str(self._folder.resolve()),
        }
        (self.sockets / ABOUT).write_text(json.dumps(known))
        given = ["--station", self._station, "--token", str(self._token), "--linger", str(self._linger_s)]
        sockets, folder = str(self.sockets), str(self._folder)
        supervised = [*given, "--sockets", sockets, "--folder", folder]
        try:
            self._start("drivers.host", DRIVER_SOCKET, [*given, "--folder", sockets])
            self._start("supervisor.main", SUPERVISOR_SOCKET, supervised)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def supervisor_pid(self) -> int:
        return self._processes[1].pid

    @property
    def driver_pid(self) -> int:
        return self._processes[0].pid

    def client(self) -> ArmClient:
        """Returns a new connection to the supervisor, under the lease's token."""
        return ArmClient(self.sockets / SUPERVISOR_SOCKET, token=self._token)

    def close(self) -> None:
        """Ends the supervisor, which stops the arm, then the driver."""
        while self._processes:
            process = self._processes.pop()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _start(self, module: str, socket: str, arguments: list[str]) -> None:
        """Starts a process and waits for its socket."""
        name = module.partition(".")[0].removesuffix("s")
        path = self._folder / f"{name}.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"robot_rl.real.{module}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._processes.append(process)
        until_s = time.monotonic() + self._timeout_s
        while not (self.sockets / socket).exists():
            if process.poll() is not None or time.monotonic() > until_s:
                what = "did not start" if process.poll() is None else f"ended ({process.returncode})"
                last = path.read_text(errors="replace").strip().splitlines()[-1:]
                raise DeviceError(
                    f"the {name} of station {self._station} {what}: {' '.join(last)} (see {path})"
                )
            time.sleep(_POLL_S)
