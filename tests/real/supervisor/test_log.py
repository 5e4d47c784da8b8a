"""Stop first, log after: a disk that is full or hangs, and whatever fails beside the arm."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import DeviceError
from robot_rl.real.link import Link
from robot_rl.real.messages import ArmState, Control, Message
from robot_rl.real.station import Ros2Config
from robot_rl.real.supervisor.plan import Aim
from robot_rl.real.writer import Writer
from robot_rl.testing.devices import protective_stop
from tests.real.supervisor.conftest import MakeRig
from tests.real.supervisor.rig import Peer, Rig, two_joint_station

TRAJECTORY: dict[str, Any] = {"driver": "ros2", "ros2": Ros2Config(command="trajectory")}


def fill(folder: Path) -> None:
    """Makes every write of a supervisor's log fail."""
    (folder / "events.jsonl").symlink_to("/dev/full")
    (folder / "flight").write_text("no folder")


FAULTS: dict[str, Callable[[Rig, Peer], object]] = {
    "silent": lambda rig, policy: None,
    "stop": lambda rig, policy: policy.control("stop", by="Ada"),
    "estop": lambda rig, policy: policy.control("estop", by="Ada"),
    "protective stop": lambda rig, policy: rig.arm.script.append(protective_stop()),
    "NaN": lambda rig, policy: policy.link.send(rig.plan([np.nan, 0.0])),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("changes", [{}, TRAJECTORY], ids=["position", "trajectory"])
def test_on_a_full_disk_an_arm_is_stopped_all_the_same(
    make_rig: MakeRig, tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    fill(tmp_path)
    rig = make_rig(two_joint_station(**changes))
    policy = rig.started()
    policy.link.send(rig.plan([0.1, 0.0]))
    FAULTS[fault](rig, policy)
    rig.run(3.0)
    assert policy.status.phase == "stopped"
    assert rig.arm.calls[-2:] == ["stop", "hold"]  # of the fake arm's stop
    # begin, start, stop and flight at least.
    assert policy.status.unlogged >= 4
    rig.supervisor.close()
    assert rig.driver.receive() == []
    assert rig.driver.closed


@pytest.mark.parametrize("changes", [{}, TRAJECTORY], ids=["position", "trajectory"])
def test_on_a_full_disk_an_arm_holds_and_goes_on(
    make_rig: MakeRig, tmp_path: Path, changes: dict[str, Any]
) -> None:
    fill(tmp_path)
    rig = make_rig(two_joint_station(**changes))
    policy = rig.started()
    rig.run(0.5)
    assert policy.status.phase == "holding"
    policy.link.send(rig.plan([0.05, 0.0]))
    rig.run(0.1)
    assert policy.status.phase == "running"
    policy.control("pause")
    rig.run(0.1)
    assert policy.answer.done
    policy.control("home")
    rig.run(1.5)
    assert policy.answer.operation == "home"
    assert policy.status.unlogged == 6  # begin, start, hold, running, pause, home


def test_a_disk_that_hangs_stops_no_cycle(make_rig: MakeRig) -> None:
    disk = threading.Event()
    writer = Writer(capacity=5, patience_s=0.01)
    writer.put(disk.wait)
    rig = make_rig(writer=writer)
    policy = rig.started()
    for _ in range(10):
        rig.run(0.5)
        policy.link.send(rig.plan([0.05, 0.0]))
    policy.control("stop", by="Ada")
    rig.run(1.0)
    assert rig.arm.calls[-2:] == ["stop", "hold"]
    assert policy.status.unlogged > 0
    rig.supervisor.close()
    disk.set()


def test_room_again_is_used_again_and_a_torn_line_is_ended(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    policy = rig.started()
    path = tmp_path / "events.jsonl"
    with path.open("ab") as file:
        file.write(b'{"monotonic_s": 1')
    rig.log._is_torn = True  # what a disk leaves that was full in the middle of a line
    policy.control("pause")
    rig.run(0.05)
    *_, torn, last = path.read_text().splitlines()
    assert torn == '{"monotonic_s": 1'
    assert json.loads(last)["event"] == "pause"
    assert policy.status.unlogged == 0


def test_a_second_stop_acts_where_the_first_one_failed(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    policy = rig.started()
    send, failures = Link.send, [MemoryError()]

    def stumble(link: Link, message: Message) -> bool:
        if isinstance(message, Control) and message.operation == "stop" and failures:
            raise failures.pop()
        return send(link, message)

    monkeypatch.setattr(Link, "send", stumble)
    with pytest.raises(MemoryError):
        rig.supervisor.stop("first", can_brake=False)
    assert not rig.supervisor.is_released
    rig.supervisor.stop("second", can_brake=False)
    rig.run(0.05)
    assert rig.arm.calls[-2:] == ["stop", "hold"]
    assert rig.supervisor.is_released
    assert policy.status.reason == "first (by the supervisor)"


def test_without_a_way_to_brake_the_driver_stops_the_arm(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(aim: Aim, *_: object) -> None:
        raise DeviceError("no way")

    rig = make_rig()
    policy = rig.started()
    monkeypatch.setattr(Aim, "brake", fail)
    policy.control("stop", by="Ada")
    rig.run(0.03)
    assert policy.status.reason == "stop by Ada"
    assert rig.arm.calls[-2:] == ["stop", "hold"]


def test_a_supervisor_that_cannot_say_what_it_does_stops_the_arm(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    rig.started()

    def fail(status: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(rig.clients, "send_status", fail)
    rig.run(0.05)
    assert rig.arm.calls[-2:] == ["stop", "hold"]
    assert rig.supervisor.stopped is not None
    assert rig.supervisor.stopped.reason == "the supervisor cannot say what it does: MemoryError()"


def test_a_state_that_cannot_be_recorded_is_counted(make_rig: MakeRig) -> None:
    rig = make_rig()
    policy = rig.started()
    lie = ArmState(stamp_ns=rig.now_ns(), position_rad=np.zeros(3), velocity_rad_s=np.zeros(3))
    rig.driver.send(lie)
    rig.supervisor.cycle()
    policy.listen()
    assert policy.status.phase == "stopped"
    assert policy.status.reason.startswith("the arm measures 3 joints, the station has 2")
    rig.supervisor.cycle()
    policy.listen()
    assert policy.status.unlogged == 1  # the cycle before
