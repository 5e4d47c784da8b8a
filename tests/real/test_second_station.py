"""Two deployments of one arm, in real processes over ROS 2: the second is refused, the first drives on."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from robot_rl.core.errors import DeviceError
from robot_rl.real.client import ArmClient
from robot_rl.real.launch import StationProcesses
from robot_rl.real.messages import Plan, Status
from robot_rl.real.station import load_station

pytest.importorskip("cyclonedds")
pytestmark = pytest.mark.slow

WAIT_S = 100.0
"""Of a busy machine."""
SERVE = "import sys; from robot_rl.cli.main import main; sys.exit(main())"


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns a ROS domain of this test's own."""
    domain = os.getpid() % 100 + 101
    monkeypatch.setenv("ROS_DOMAIN_ID", str(domain))
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    return domain


@pytest.fixture
def arm(domain: int, tmp_path: Path) -> Iterator[None]:
    """Serves a simulated arm."""
    log = tmp_path / "arm.log"
    with log.open("wb") as out:
        words = [sys.executable, "-c", SERVE, "serve-sim-arm", f"domain_id={domain}", "rate_hz=100"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    until_s = time.monotonic() + WAIT_S
    while "ready" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.05)
    yield
    process.kill()
    process.wait()


def station_file(folder: Path, name: str) -> str:
    station = replace(load_station("sim_arm"), name=name, objects={})
    patient = replace(station.supervisor, max_state_age_s=2.0, stop_after_s=10.0)  # the machine is busy
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(replace(station, supervisor=patient))))))
    return str(path)


class Driving(threading.Thread):
    """A policy that moves one joint to and fro, until `end` is set."""

    def __init__(self, client: ArmClient) -> None:
        super().__init__()
        self._client, self.end = client, threading.Event()
        self.seen: list[Status] = []

    def run(self) -> None:
        self._client.control("start", timeout_s=WAIT_S)
        number = 0
        while not self.end.is_set():
            status = self._client.wait(timeout_s=WAIT_S)
            self.seen.append(status)
            if status.state is None:
                continue
            number += 1
            target = status.state.position_rad + np.eye(7)[0] * 0.02 * np.sign(np.sin(number / 5))
            plan = Plan(
                number=number,
                start_ns=time.monotonic_ns(),
                period_ns=50_000_000,
                targets_rad=np.tile(target, (40, 1)),  # 2 s: the machine is busy
                gripper=np.full(40, 0.04),
            )
            self._client.send(plan)
            time.sleep(0.05)


@pytest.mark.usefixtures("arm")
def test_a_second_deployment_is_refused_whoever_starts_it_and_the_first_drives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As issue 5 found it: another ROBOT_RL_STATE, and a renamed copy of the station file, three times.
    first = StationProcesses(station_file(tmp_path, "first"), tmp_path / "first", token=1, timeout_s=WAIT_S)
    with first, first.client() as client:
        policy = Driving(client)
        policy.start()
        try:
            for number in range(3):
                monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / f"state-{number}"))
                copy, folder = station_file(tmp_path, f"copy{number}"), tmp_path / f"second-{number}"
                second = StationProcesses(copy, folder, token=2 + number, timeout_s=WAIT_S)
                began = len(policy.seen)
                with pytest.raises(
                    DeviceError, match=r"the driver of station .*copy\d.* ended \(3\)"
                ) as caught:
                    second.__enter__()
                assert f"process {first.driver_pid} on " in str(caught.value)
                assert "(station first, user " in str(caught.value)
                assert "joint1 of /controller_manager in ROS domain" in str(caught.value)
                until_s = time.monotonic() + WAIT_S
                while len(policy.seen) <= began + 3:  # a refusal may be faster than four cycles
                    assert time.monotonic() < until_s, "the first does not drive on"
                    time.sleep(0.05)
        finally:
            policy.end.set()
            policy.join()
        assert {status.phase for status in policy.seen} == {"running"}
        assert policy.seen[-1].plan > policy.seen[0].plan
    # Once the first has ended, a copy gets the arm.
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "state-9"))
    copy = station_file(tmp_path, "copy9")
    second = StationProcesses(copy, tmp_path / "third", token=9, timeout_s=WAIT_S)
    with second, second.client() as client:
        assert client.control("start", timeout_s=WAIT_S).done
    # And the first's token, of before, does not any more: also by its own, old station file.
    with pytest.raises(DeviceError, match="fencing token 1 refused, token 9 has been seen since"):
        StationProcesses(station_file(tmp_path, "first"), tmp_path / "late", token=1).__enter__()
