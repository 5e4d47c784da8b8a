"""The devices command: a table for people, one JSON object for machines, leases in both."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from robot_rl.cli import devices
from robot_rl.cli.main import main
from robot_rl.core.errors import ConfigError, DeviceError, LeaseError
from robot_rl.hal.device import DeviceSpec
from robot_rl.real.found import Found
from robot_rl.sched.leases import LeaseStore

CPU = DeviceSpec(name="cpu", kind="cpu", slots=4, node="lab1", labels={"cores": "4"})
ARM = DeviceSpec(
    name="arm1", kind="robot", real=True, caps=frozenset({"render"}), control_hz=20.0, node="lab1"
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeaseStore:
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(devices, "discover", lambda: [CPU, ARM])
    return LeaseStore()


def test_shows_devices_and_holders(store: LeaseStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.acquire(CPU, holder="train pick_cube seed 3", slots=3)
    assert devices.run([]) == 0
    text = capsys.readouterr().out
    rows = {row.split()[1]: row for row in text.splitlines() if "lab1" in row and row.startswith("\u2502")}
    # 3 of 4 slots of the CPU are taken, the arm is free: 1 + 1 of 4 + 1.
    assert "1/4" in rows["cpu"]
    assert "train pick_cube seed 3" in rows["cpu"]
    for word in ("real robot", "1/1", "render", "20 Hz", "nobody"):
        assert word in rows["arm1"]
    assert "cpu: held by 'train pick_cube seed 3' (pid " in text
    assert "2 devices, 2 of 5 slots free; leases in " in text


def test_who_takes_a_device_is_shown(
    store: LeaseStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "robot_rl.sched.preemption.forgive", lambda rows, process, device: None
    )  # it waits on
    store.acquire(ARM, holder="deploy reach", preemptible=True)
    with pytest.raises(LeaseError):
        store.acquire(ARM, holder="deploy push", priority=1, wait_s=9e-9, preempt_s=9e-9)
    assert devices.run([]) == 0
    assert "arm1: 'deploy push' takes it in 0 s" in capsys.readouterr().out


def test_the_last_line_is_one_json_object(store: LeaseStore, capsys: pytest.CaptureFixture[str]) -> None:
    lease = store.acquire(ARM, holder="deploy")
    assert devices.run(["--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [device["name"] for device in answer["devices"]] == ["cpu", "arm1"]
    assert answer["devices"][1] == ARM.to_json()
    assert answer["state"] == str(store.path)
    (found,) = answer["leases"]
    since_s, expires_s = found.pop("since_s"), found.pop("expires_s")
    assert abs(since_s - time.time()) < 10.0  # of the wall clock, for whoever reads it
    assert expires_s - since_s == pytest.approx(30.0, abs=0.1)
    assert found == (
        {
            "device": "arm1",
            "token": 1,
            "slots": [0],
            "exclusive": True,
            "holder": "deploy",
            "pid": lease.process.pid,
            "host": lease.process.host,
            "command": lease.process.command,
        }
    )


def test_a_leased_device_that_is_gone_is_still_shown(
    store: LeaseStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.acquire(DeviceSpec(name="arm9", kind="robot"), holder="forgotten")
    assert devices.run([]) == 0
    text = capsys.readouterr().out
    [row] = [row for row in text.splitlines() if "arm9" in row and "not found" in row]
    assert "forgotten" in row
    assert "2 devices, 5 of 5 slots free" in text


@pytest.mark.usefixtures("store")
def test_an_unknown_word_is_refused_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        devices.run(["--jason"])
    assert caught.value.code == 2
    assert "robot-rl devices" in capsys.readouterr().err


def test_a_stop_is_shown_and_cleared(store: LeaseStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.stop("arm1", "The supervisor was gone.", "deploy reach")
    assert devices.run(["--json"]) == 0
    text = capsys.readouterr().out
    assert "lease of arm1: it stopped at 20" in text
    assert "held by 'deploy reach': The supervisor was gone. Look at it; then" in text
    (stop,) = json.loads(text.splitlines()[-1])["stopped"]
    assert (stop["device"], stop["reason"]) == ("arm1", "The supervisor was gone.")
    assert main(["devices", "clear=arm1"]) == 2
    assert "clear=arm1: who looked at it? Say by=<your name>." in capsys.readouterr().err
    assert main(["devices", "clean=arm1"]) == 2
    assert (
        "devices: got 'clean', allowed: clear=<device> by=<your name>, add=<station>"
        in capsys.readouterr().err
    )
    assert devices.run(["clear=arm1", "by=ann"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("arm1: cleared by ann, after: The supervisor was gone.\n")
    assert "it stopped" not in text


def test_what_could_be_a_station_is_shown_with_what_its_file_would_say(
    store: LeaseStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = Found(kind="port", name="/dev/ttyACM0", about="6 Feetech servos", station="", remedy="lerobot: {}")
    taken = replace(port, name="/dev/ttyACM1", station="so101", remedy="")
    odd = replace(port, name="/dev/\x1b[2J", about="no Feetech servo answers", remedy="")
    monkeypatch.setattr(devices, "ports", lambda known, asks: [port, taken, odd] if asks else [])
    assert devices.run(["find=servos", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "port /dev/ttyACM0: 6 Feetech servos; no station. Its file would say: lerobot: {}" in lines
    assert "port /dev/ttyACM1: 6 Feetech servos; station so101" in lines
    assert "port /dev/?[2J: no Feetech servo answers; no station" in lines
    assert json.loads(lines[-1])["found"] == [vars(port), vars(taken), vars(odd)]
    assert devices.run(["find=ports"]) == 0
    assert "find=ports: nothing" in capsys.readouterr().out


def test_a_graph_that_cannot_be_looked_at_ends_nothing_unless_it_was_asked_for(
    store: LeaseStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise DeviceError("pip install -e '.[ros2]'")

    monkeypatch.setattr(devices, "open_node", refuse)
    monkeypatch.setattr(devices, "ports", lambda known, asks: [])
    assert devices.run(["find=all"]) == 0
    assert "ros2: not looked at: pip install" in capsys.readouterr().out
    with pytest.raises(DeviceError, match="pip install"):
        devices.run(["find=ros2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["find=usb"], "find: got 'usb', allowed: all, ports, servos, ros2"),
        (["find=all", "find_s=soon"], "find_s: got 'soon', allowed: seconds, above 0"),
        (["find_s=3"], "find_s: got '3', allowed: with find= alone"),
        (["find=all", "find_s=-1"], "find_s: got '-1', allowed: seconds, above 0"),
    ],
)
def test_a_wrong_search_is_refused(store: LeaseStore, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        devices.run(words)
