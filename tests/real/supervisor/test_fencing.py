"""An overtaken lease: its holder may stop the arm and no longer move it, at supervisor, gate and host."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from robot_rl.hal.device import Fence
from robot_rl.real.claim import Claim
from robot_rl.real.drivers import host as host_module
from robot_rl.real.drivers.gate import Gate
from robot_rl.real.drivers.host import EXIT_NO_ARM
from robot_rl.real.messages import Command, Control, Operation, Plan
from robot_rl.real.station import LeRobotConfig, StationConfig
from tests.real.drivers.test_host import Bench, wait_for
from tests.real.supervisor.conftest import MakeRig
from tests.real.supervisor.rig import Peer, Rig, two_joint_station

OLD, NEW = 11, 12
REFUSED = "command under fencing token 11 refused, token 12 has been seen since: the lease was overtaken."


def order(peer: Peer, operation: Operation, token: int, by: str = "") -> None:
    peer.link.send(Control(operation=operation, by=by, token=token))


def started(rig: Rig, token: int) -> Peer:
    peer = rig.connect()
    rig.run(0.02)
    order(peer, "start", token)
    rig.run(0.1)
    assert peer.answer.done, peer.answer
    return peer


# The supervisor


def test_plans_of_an_overtaken_lease_are_not_followed(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = started(rig, NEW)
    policy.link.send(rig.plan([0.05, 0.0], token=NEW))
    rig.run(0.05)
    assert policy.status.plan == 1
    for _ in range(3):
        policy.link.send(rig.plan([0.5, 0.0], token=OLD))
        rig.run(0.02)
    assert policy.status.plan == 1
    assert max(command.target_rad[0] for command in rig.arm.sent) == pytest.approx(0.05)
    events = [json.loads(line) for line in (rig.folder / "events.jsonl").read_text().splitlines()]
    refused = [event for event in events if event["event"] == "refused"]
    assert len(refused) == 1  # told once
    assert REFUSED in refused[0]["reason"]
    policy.link.send(rig.plan([0.06, 0.0], token=NEW))
    rig.run(0.02)
    assert policy.status.plan == 5


def test_what_reaches_the_driver_carries_the_newest_token(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = started(rig, OLD)
    assert rig.controls[0] == Control(operation="start", by=rig.controls[0].by, token=OLD)
    policy.link.send(rig.plan([0.05, 0.0], token=NEW))  # the same policy, under its next lease
    rig.run(0.05)
    assert {command.token for command in rig.arm.sent} == {OLD, NEW}
    assert rig.arm.sent[-1].token == NEW


@pytest.mark.parametrize("operation", ["start", "reset", "home", "park"])
def test_orders_of_an_overtaken_lease_are_refused_and_stops_are_not(
    make_rig: MakeRig, operation: Operation
) -> None:
    rig = make_rig(two_joint_station(real=False))
    policy = started(rig, NEW)
    order(policy, "pause", NEW)
    rig.run(0.02)
    old = rig.connect()
    order(old, operation, OLD)
    rig.run(0.02)
    assert not old.answer.done
    assert REFUSED in old.answer.message
    order(policy, "start", NEW)
    rig.run(0.02)
    order(old, "stop", OLD)
    rig.run(0.2)
    assert old.answer.done
    assert policy.status.phase == "stopped"
    order(old, "clear", 0, by="Ada")
    rig.run(0.2)
    assert old.answer.done


def test_a_person_without_a_lease_may_send_home_an_arm_that_nobody_commands(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy, person = started(rig, NEW), rig.connect()
    order(policy, "pause", NEW)
    order(person, "home", 0, by="Ada")
    rig.run(0.02)
    assert "commands this arm" in person.answer.message
    policy.link.close()
    rig.peers.remove(policy)
    rig.run(0.02)
    order(person, "start", 0, by="Ada")
    rig.run(0.02)
    assert "token 0 refused, token 12" in person.answer.message
    order(person, "home", 0, by="Ada")
    rig.run(1.0)
    assert person.answer.done


# The gate and the host


def test_the_gate_refuses_what_the_fence_has_seen_overtaken() -> None:
    gate = Gate(two_joint_station(), Fence("bench", newest=NEW))
    command = Command(number=1, stamp_ns=1, target_rad=np.zeros(2), gripper=0.5, token=OLD)
    plan = Plan(
        number=1, start_ns=1, period_ns=9, targets_rad=np.zeros((1, 2)), gripper=np.zeros(1), token=OLD
    )
    for message in (command, plan):
        assert REFUSED in gate.refuses(message, 1)
        assert gate.refuses(replace(message, token=NEW), 1) == ""
    assert gate.refused == 2


def test_a_host_starts_for_the_newest_token_only_and_is_stopped_by_anyone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("h")
    bench = Bench(folder)
    bench.host.gate = Gate(bench.station, Fence("bench", newest=NEW))
    with bench:

        def asked(operation: Operation, token: int) -> str:
            known = len(bench.answers)
            bench.link.send(Control(operation=operation, by="test", token=token))
            wait_for(lambda: bench.hear() or len(bench.answers) > known)
            return bench.answers[-1].message

        assert REFUSED in asked("start", OLD)
        assert "start" not in bench.arm.calls
        assert asked("start", NEW) == ""
        assert REFUSED in asked("reset", OLD)
        assert asked("hold", 0) == ""
        assert asked("stop", 0) == ""


def serial(name: str, folder: Path) -> tuple[StationConfig, str]:
    """Returns a station of a serial arm, and its file."""
    config = LeRobotConfig(type="so101_follower", options={"port": "/dev/ttyACM99"})
    station = two_joint_station(name=name, driver="lerobot", lerobot=config, sim=None)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(station, default=lambda it: vars(it)))))
    return station, str(path)


@pytest.mark.parametrize("case", ["held", "overtaken"])
def test_a_host_that_may_not_have_the_arm_does_not_touch_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ROBOT_RL_CLAIMS", str(tmp_path))
    station, _ = serial("first", tmp_path)
    _, copy = serial("copy", tmp_path)
    claim = Claim(station)
    claim.fence(NEW)
    if case == "overtaken":
        claim.release()
    opened: list[str] = []
    monkeypatch.setattr(host_module, "open_driver", lambda station: opened.append(station.name))
    with caplog.at_level(logging.ERROR):
        words = [
            "--station",
            copy,
            "--folder",
            str(tmp_path),
            "--token",
            str(NEW + 1 if case == "held" else OLD),
        ]
        assert host_module.main(words) == EXIT_NO_ARM
    assert opened == []
    wanted = "(station first, user " if case == "held" else REFUSED
    assert wanted in caplog.text
    claim.release()
