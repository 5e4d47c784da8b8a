"""Real processes, killed for real: policy, supervisor, driver."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from robot_rl.core.errors import DeviceError
from robot_rl.real.client import ArmClient
from robot_rl.real.messages import Plan
from robot_rl.real.supervisor.main import EXIT_REFUSED, SUPERVISOR_SOCKET
from tests.real.supervisor.rig import two_joint_station

pytestmark = pytest.mark.slow

WAIT_S = 60.0
POLICY = """
import sys, time
from pathlib import Path
import numpy as np
from robot_rl.real.client import ArmClient
from robot_rl.real.messages import Plan
client = ArmClient(Path(sys.argv[1]))
client.control("start")
number = 0
while True:
    status = client.wait(time.monotonic_ns(), timeout_s=20.0)  # the machine may be busy
    target = status.state.position_rad + np.array([0.05, 0.0])
    number += 1
    client.send(Plan(number=number, start_ns=time.monotonic_ns(), period_ns=50_000_000,
                     targets_rad=target[None], gripper=np.ones(1)))
    time.sleep(0.05)
"""


def until(holds: Callable[[], bool], what: str) -> None:
    """Waits for a condition."""
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.01)


class Cell:
    """A driver host of a fake arm, and its supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # One second to a stop. Nothing here is about old states, and machines that run tests have been
        # seen to stand still for 1.2 s.
        config = {"stop_after_s": 1.0, "max_state_age_s": 10.0}
        station = two_joint_station(name=f"cell{os.getpid()}", supervisor=config, real=False)
        self.name = station.name
        self.station = folder / "cell.yaml"
        self.station.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(station)))))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.clients: list[ArmClient] = []
        self.driver = self.start("tests.real.supervisor.fake_host", str(self.station), str(folder))
        self.supervisor = self.supervise()
        until((folder / SUPERVISOR_SOCKET).exists, "supervisor.sock")

    def start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.run("-m", module, *arguments)

    def run(self, *words: str, log: Path | None = None) -> subprocess.Popen[bytes]:
        with (log or self.folder / "log").open("ab") as file:
            self.processes.append(subprocess.Popen([sys.executable, *words], stdout=file, stderr=file))
        return self.processes[-1]

    def supervise(self, *more: str) -> subprocess.Popen[bytes]:
        where = ["--sockets", str(self.folder), "--folder", str(self.folder / "run")]
        return self.start("robot_rl.real.supervisor.main", "--station", str(self.station), *where, *more)

    def client(self) -> ArmClient:
        self.clients.append(ArmClient(self.folder / SUPERVISOR_SOCKET))
        until(lambda: self.clients[-1].status.phase != "waiting", "the first joint state")
        return self.clients[-1]

    def policy(self) -> subprocess.Popen[bytes]:
        return self.run("-c", POLICY, str(self.folder / SUPERVISOR_SOCKET))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().split("\n")

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    cell = Cell(tmp_path_factory.mktemp("c"))
    yield cell
    cell.close()
    sys.stdout.write(cell.log())  # why, for a test that failed


def plan(number: int, target: float) -> Plan:
    return Plan(
        number=number,
        start_ns=time.monotonic_ns(),
        period_ns=50_000_000,
        targets_rad=np.array([[target, 0.0]]),
        gripper=np.ones(1),
    )


def test_a_killed_policy_is_held_then_stopped(cell: Cell) -> None:
    watcher = cell.client()
    policy = cell.policy()
    until(lambda: watcher.status.plan >= 5, "the policy drives")
    status = watcher.status
    assert status.state is not None
    policy.send_signal(signal.SIGKILL)
    until(lambda: watcher.status.phase == "holding", "holding")
    assert watcher.status.reason == "the policy is gone"
    until(lambda: watcher.status.phase == "stopped", "stopped")
    stopped = watcher.status
    assert stopped.state is not None
    # Steps of 0.05 rad: at most the next one, a plan under way and the rest of a lead.
    assert np.abs(stopped.state.position_rad - status.state.position_rad).max() < 0.2
    until(lambda: "stop" in cell.calls(), "the driver stopped the arm")
    # Another policy does not move it until a person has looked.
    with pytest.raises(DeviceError, match=r"start: refused: stopped: the policy is gone: no plan for 1\.0"):
        watcher.control("start")
    watcher.control("clear", by="Ada")
    watcher.control("start")
    assert watcher.status.phase == "running"


def test_a_full_disk_takes_no_part_in_a_stop(cell: Cell) -> None:
    cell.supervisor.send_signal(signal.SIGTERM)
    assert cell.supervisor.wait(WAIT_S) == 0
    full = cell.folder / "full"
    full.mkdir()
    for name in ("events.jsonl", "supervisor.log", "supervisor.tmp"):
        (full / name).symlink_to("/dev/full")
    (full / "flight").write_text("no folder")
    where = ["--sockets", str(cell.folder), "--folder", str(full)]
    words = ["-m", "robot_rl.real.supervisor.main", "--station", str(cell.station), *where]
    supervisor = cell.run(*words, log=full / "supervisor.log")
    until((cell.folder / SUPERVISOR_SOCKET).exists, "supervisor.sock")
    client, before = cell.client(), cell.calls().count("stop")
    client.control("start")
    client.send(plan(1, 0.1))
    until(lambda: client.status.plan == 1, "the plan is followed")
    supervisor.send_signal(signal.SIGUSR1)
    client.control("stop", by="Ada")
    until(lambda: cell.calls().count("stop") == before + 1, "the driver stopped the arm")
    assert client.status.phase == "stopped"
    until(lambda: client.status.unlogged >= 6, "begin, start, stop, flight, report and a line of the log")
    client.control("clear", by="Ada")
    assert client.status.phase == "paused"
    client.control("start")
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(WAIT_S) == 0
    until(lambda: cell.calls().count("stop") >= before + 2, "the driver stopped the arm")


def test_a_killed_driver_stops_for_good(cell: Cell) -> None:
    client = cell.client()
    client.control("start")
    client.send(plan(1, 0.1))
    cell.driver.send_signal(signal.SIGKILL)
    until(lambda: client.status.phase == "stopped", "stopped")
    assert client.status.reason == "the driver is gone (by the driver watchdog)"
    with pytest.raises(
        DeviceError, match=r"clear: refused: the driver is gone\. Start driver and supervisor"
    ):
        client.control("clear", by="Ada")
    assert list((cell.folder / "run" / "flight").glob("the-driver-is-gone-*.npz"))
    cell.supervisor.send_signal(signal.SIGTERM)
    assert cell.supervisor.wait(WAIT_S) == 0


def test_a_killed_supervisor_leaves_a_stopped_arm(cell: Cell) -> None:
    client = cell.client()
    client.control("start")
    client.send(plan(1, 0.1))
    until(lambda: client.status.plan == 1, "the plan is followed")
    cell.supervisor.send_signal(signal.SIGKILL)
    cell.supervisor.wait(WAIT_S)
    with pytest.raises(DeviceError, match=r"the supervisor at .* is gone\. Look at its supervisor\.log"):
        client.wait(time.monotonic_ns())
    until(lambda: "stop" in cell.calls(), "the host stopped the arm by itself")
    assert "stopping: the supervisor is gone" in cell.log()
    # The next one finds the arm at rest, stopped until a person has looked, and the lock free.
    cell.supervise("--linger", "1.0")
    until(lambda: cell.log().count("INFO supervisor of") == 2, "the next one")
    client = cell.client()
    until(lambda: client.status.phase == "stopped", "the fault is seen")
    assert f"driver of {cell.name}: the supervisor is gone" in client.status.reason
    with pytest.raises(DeviceError, match=r"start: refused: stopped: .*the supervisor is gone"):
        client.control("start")
    client.control("clear", by="Ada")
    status = client.status
    assert status.phase == "paused"
    assert status.state is not None
    assert np.abs(status.state.position_rad).max() <= 0.1 + 1e-6
    assert np.abs(status.state.velocity_rad_s).max() < 0.05
    # Nobody stays: it ends by itself, and says why.
    cell.clients.pop().close()
    assert cell.processes[-1].wait(WAIT_S) == 0
    assert "nobody is connected any more" in (cell.folder / "run" / "events.jsonl").read_text()


def test_a_station_has_one_supervisor_and_it_leaves_numbers(cell: Cell) -> None:
    second = cell.supervise()
    assert second.wait(WAIT_S) == EXIT_REFUSED
    assert f"process {cell.supervisor.pid} on " in cell.log()
    assert "supervises it already, and an arm has one supervisor" in cell.log()
    maps = Path(f"/proc/{cell.supervisor.pid}/maps").read_text()
    assert "numpy" in maps
    assert not [name for name in ("torch", "mujoco") if name in maps]
    client = cell.client()
    client.control("start")
    cell.supervisor.send_signal(signal.SIGUSR1)
    report = cell.folder / "run" / "supervisor.json"
    until(report.exists, "statistics on request")
    report.unlink()
    cell.supervisor.send_signal(signal.SIGTERM)
    assert cell.supervisor.wait(WAIT_S) == 0
    found = json.loads(report.read_text())
    assert found["command_hz"] == 100.0
    assert found["cycles"] > 0
    assert set(found["jitter_us"]) == {"p50", "p99", "p99_9", "max"}
    assert found["missed"] >= 0
    assert "stop" in cell.calls()
    events = [json.loads(line) for line in (cell.folder / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["begin", "start", "stop", "flight", "end"]
    assert events[2]["reason"] == "asked to end"
