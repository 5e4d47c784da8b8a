"""`robot-rl devices hub.address=`: the devices of all machines that a hub knows."""

import json
from typing import Any

import pytest

from robot_rl.cli.main import main
from robot_rl.hal.device import DeviceSpec
from tests.fleet.test_choice import arm, machine, shown
from tests.fleet.test_nodes import Served, hub

__all__ = ["hub"]
CPU = DeviceSpec(name="cpu", kind="cpu", slots=4, node="office")


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("robot_rl.fleet.state.discover", lambda: [CPU])
    for name in ("station_specs", "world_specs"):
        monkeypatch.setattr(f"robot_rl.fleet.state.{name}", list)


def words(at: Served) -> list[str]:
    return ["devices", *(f"hub.{key}={value}" for key, value in at.config.items())]


def nodes() -> list[dict[str, Any]]:
    """Two machines: an arm is held, one is stopped, one is leased and not found."""
    since = {"host": "lab-1", "since_s": 0.0, "wanted_by": "deploy of bob"}
    held = arm("arm-1", holder="train of ann")
    held["held"][0] |= since
    gone = {"name": "arm-3", "kind": "?", "free": 0, "slots": 0, "labels": {}, "held": held["held"]}
    stopped = {**arm("arm-2"), "stopped": {"reason": "a protective stop", "holder": "deploy"}}
    fine = {"stopped": None, "refusal": ""}
    lab = machine("lab", {**fine, **held}, {**fine, **stopped}, {**fine, **gone}, problems=["a broken file"])
    return [lab, machine("den", {**fine, **arm()}, {**fine, **CPU.to_json(), "held": []})]


def rows(text: str) -> dict[str, list[str]]:
    """Returns the other cells of the table by device and machine."""
    cells = ([cell.strip() for cell in line.split("\u2502")[1:-1]] for line in text.splitlines())
    return {f"{found[0]} {found[5]}": found[1:] for found in cells if found}


def test_devices_of_all_machines_are_listed(hub: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with shown(hub.joined, *nodes()):
        assert main([*words(hub), "--json"]) == 0
    text = capsys.readouterr().out
    found = rows(text)
    assert list(found) == ["arm-west den", "cpu den", "arm-1 lab", "arm-2 lab", "cpu office", "arm-3@lab -"]
    assert found["arm-1 lab"] == ["real robot", "0/1", "-", "20 Hz", "lab", "cell west", "train of ann"]
    assert found["cpu office"] == ["cpu", "4/4", "-", "-", "office", "", "nobody"], "the hub's own"
    assert found["arm-3@lab -"][-2:] == ["not found", "train of ann"]
    assert "arm-1@lab: held by 'train of ann' (pid 1 on lab-1) since 1970" in text
    assert "arm-1@lab: 'deploy of bob' takes it soon" in text
    assert "arm-2@lab: stopped: a protective stop, under 'deploy'" in text
    assert "lab: a broken file" in text
    assert "5 devices of 3 machines, 10 of 11 slots free" in text
    answer = json.loads(text.splitlines()[-1])
    assert [one["name"] for one in answer["machines"]] == ["den", "lab", "office"]


def test_the_hub_is_listed_once(hub: Served, capsys: pytest.CaptureFixture[str]) -> None:
    from robot_rl.rollout.hub_connection import fleet_state

    place = fleet_state(hub.joined)["place"]
    mine = {**CPU.to_json(), "held": [], "stopped": None, "refusal": ""}
    with shown(hub.joined, machine("desk", mine, place=place)):
        assert main(words(hub)) == 0
    assert list(rows(capsys.readouterr().out)) == ["cpu desk"], "by the name that runs need it by"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["clear=arm-1", "by=ann"], "devices: got 'clear' with a hub, allowed: hub.address, hub.token_file"),
        (["hub.ca=none.pem"], "hub.ca: none.pem: "),
        (["hub.token_file=none"], "hub.token_file: none: No such file or directory. Copy fleet.token of"),
        (["hub.address=http://127.0.0.1:1"], "hub http://127.0.0.1:1: Cannot connect to host"),
        (["hub.address=http://10.0.0.7:1"], "the token would travel in the open"),
    ],
)
def test_mistakes(hub: Served, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    given = [word for word in words(hub) if word.split("=")[0] not in {one.split("=")[0] for one in more}]
    assert main([*given, *more]) == 2
    assert message in capsys.readouterr().err


def test_a_token_without_a_hub_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "hub.token_file=token"]) == 2
    assert "hub.address: got None, allowed: https://<host>:8642" in capsys.readouterr().err
