"""Two drivers of one arm: at most one has it, and the first is not disturbed."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from robot_rl.core.errors import DeviceError
from robot_rl.real.drivers import ros2_presence
from robot_rl.real.drivers.ros2_arm import Ros2Arm
from robot_rl.real.drivers.ros2_presence import Phase, PresenceBeat
from robot_rl.real.launch import StationProcesses
from robot_rl.real.messages import Command
from robot_rl.real.ros2.api import DEFAULT, QoS
from robot_rl.real.station import StationConfig, load_station
from tests.real.arm.conftest import serving
from tests.real.drivers.ros_graph import FakeNode, message
from tests.real.ros2.conftest import own_domain

TOPIC = "controller_manager/robot_rl_driver"
WAIT_S = 20.0


class Air(list[FakeNode]):
    """What one node publishes, all hear that are not deaf."""

    def node(self) -> FakeNode:
        node = FakeNode()
        publish = node.create_publisher

        def create_publisher(kind: str, topic: str, qos: QoS = DEFAULT):
            made = publish(kind, topic, qos)
            send = made.publish

            def to_all(sent) -> None:
                send(sent)
                for other in self:
                    if topic in other.heard:
                        other.hear(topic, sent)

            made.publish = to_all
            return made

        node.create_publisher = create_publisher
        self.append(node)
        return node


@pytest.fixture
def air(monkeypatch) -> Iterator[Callable[..., PresenceBeat]]:
    """Makes drivers that hear each other."""
    monkeypatch.setattr(ros2_presence, "_LISTEN_S", WAIT_S)  # who is refused does not wait so long
    monkeypatch.setattr(ros2_presence, "_EVERY_S", 0.01)
    nodes, made = Air(), list[PresenceBeat]()

    def make(station: str, is_deaf: bool = False, clock_ns=time.monotonic_ns) -> PresenceBeat:
        node = nodes.node()
        if is_deaf:
            nodes.remove(node)
        made.append(PresenceBeat(node, "controller_manager", station, clock_ns))
        return made[-1]

    yield make
    for one in made:
        one.close()


def take_unheard(driver: PresenceBeat, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ros2_presence, "_LISTEN_S", 0.0)
        driver.take()


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_newcomer_is_refused_by_name_and_the_first_is_not_disturbed(air, monkeypatch) -> None:
    first = air("cell_a")
    take_unheard(first, monkeypatch)
    renamed = air("renamed")
    with pytest.raises(DeviceError) as error:
        renamed.take()
    renamed.close()  # as its process does by ending: a beat of it may have been under way
    assert re.fullmatch(
        r"ros2: the driver of station cell_a \(pid \d+ on \S+, connected\) has this arm\. End it first\.",
        str(error.value),
    )
    assert socket.gethostname() in str(error.value)
    first.set_phase(Phase.DRIVING)
    with pytest.raises(DeviceError, match="driving"):
        air("third").take()
    assert first.rival() is None


def test_of_two_that_start_at_once_the_lower_id_stays(air, monkeypatch) -> None:
    monkeypatch.setattr(ros2_presence, "_LISTEN_S", 0.5)
    both, errors = [air("a"), air("b")], list[str]()

    def take(one: PresenceBeat) -> None:
        try:
            one.take()
        except DeviceError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=take, args=(one,)) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = errors
    lower = min(both, key=lambda one: one._own.id)
    assert f"station {lower._own.station} " in error
    assert lower._own.phase == Phase.CONNECTED


def test_one_that_did_not_hear_the_first_gives_way_as_soon_as_it_does(air, monkeypatch) -> None:
    first, deaf = air("first"), air("deaf", is_deaf=True)
    take_unheard(first, monkeypatch)
    take_unheard(deaf, monkeypatch)
    first.set_phase(Phase.DRIVING)
    until(lambda: first._others)
    assert first.rival() is None
    deaf._others.update({first._own.id: (first._own, time.monotonic_ns())})  # its ears open
    assert deaf.rival() == first._own


def test_two_that_drive_at_once_both_stop(air) -> None:
    both = [air("a", is_deaf=True), air("b", is_deaf=True)]
    for one, other in (both, both[::-1]):
        one.set_phase(Phase.DRIVING)
        one._others[other._own.id] = (replace(other._own, phase=Phase.DRIVING), time.monotonic_ns())
    assert all(one.rival() is not None and not one.is_lost for one in both)


def test_a_driver_that_was_frozen_gives_way_to_one_that_took_over(air, monkeypatch) -> None:
    monkeypatch.setattr(ros2_presence, "_EVERY_S", 100.0)  # the test beats
    now_ns = [10**9]
    first = air("first", clock_ns=lambda: now_ns[0])
    first.set_phase(Phase.DRIVING)
    now_ns[0] += 1_100_000_000  # more than the second that others wait
    second = air("second", clock_ns=lambda: now_ns[0])
    second.set_phase(Phase.DRIVING)
    assert second.rival() is None  # silence of more than a second is death
    # The first is awake again. Even before it says a word, it has lost the arm; and it does not disturb.
    assert first.rival() == second._own
    assert first.is_lost
    first._send()
    assert second.rival() is None
    assert first.is_lost
    # Where nobody took over, it drives on.
    now_ns[0] += 900_000_000
    first._send()
    now_ns[0] += 900_000_000
    first._send()
    assert first._phase(now_ns[0]) == Phase.DRIVING
    assert first.rival() is None


def test_what_a_killed_driver_leaves_is_waited_for_and_a_frozen_one_is_refused(air, monkeypatch) -> None:
    monkeypatch.setattr(ros2_presence, "_LISTEN_S", 0.0)
    driver = air("a")
    publishers = driver._node.publishers[TOPIC]
    publishers.append("/robot_rl_driver")
    threading.Timer(0.1, publishers.pop).start()  # the lease of its participant ends
    driver.take()
    assert driver._own.phase == Phase.CONNECTED
    monkeypatch.setattr(ros2_presence, "_REMAINS_S", 0.05)
    publishers.append("/robot_rl_driver")
    with pytest.raises(DeviceError, match=f"on {TOPIC} is another driver of this arm, which says nothing"):
        driver.take()


def test_a_beat_of_another_version_has_the_arm(air) -> None:
    driver = air("a")
    said = json.dumps({"id": "1", "phase": 9})
    driver._node.hear(TOPIC, message("std_msgs/msg/String", data=said))
    with pytest.raises(DeviceError, match=r"station of another version .*phase.* has this arm"):
        driver.take()


def test_the_arm_is_known_by_its_manager_whatever_else_is_renamed(monkeypatch) -> None:
    pytest.importorskip("cyclonedds")
    from robot_rl.real.ros2.node import DdsNode

    own_domain(monkeypatch)
    one = DdsNode("robot_rl_driver", namespace="left")
    other = DdsNode("driver", remap={"cm/list_controllers": "/left/controller_manager/list_controllers"})
    beats = [PresenceBeat(one, "controller_manager", "a"), PresenceBeat(other, "cm", "b")]
    assert {beat.topic for beat in beats} == {"/left/controller_manager/robot_rl_driver"}
    for beat, node in zip(beats, (one, other), strict=True):
        beat.close()
        node.close()


# --- over the wire, before a simulated arm in its own process ------------------------------------------


@pytest.fixture
def station(monkeypatch) -> Iterator[StationConfig]:
    pytest.importorskip("cyclonedds")
    domain_id = own_domain(monkeypatch)
    found = load_station("sim_arm")
    assert found.ros2 is not None
    with serving():
        yield replace(found, ros2=replace(found.ros2, transport="dds", domain_id=domain_id))


def drive(arm: Ros2Arm, number: int) -> None:
    state = arm.read()
    assert state is not None
    target_rad = state.position_rad + 0.01
    arm.send(Command(number=number, stamp_ns=time.monotonic_ns(), target_rad=target_rad, gripper=0.04))
    assert arm.wait(1.0)  # raises if anything is wrong


@pytest.mark.slow  # processes of their own
def test_a_second_driver_on_the_wire_is_refused_and_the_first_keeps_its_controller(station) -> None:
    first, second = Ros2Arm(station), Ros2Arm(replace(station, name="a_renamed_copy"))
    first.connect()
    first.start()
    refused: list[str] = []

    def come() -> None:
        try:
            second.connect()
        except DeviceError as error:
            refused.append(str(error))

    newcomer = threading.Thread(target=come)
    newcomer.start()
    number = 0
    while newcomer.is_alive():
        number += 1
        drive(first, number)
    assert "station sim_arm (pid" in refused[0]
    assert "driving) has this arm" in refused[0]
    second.close()
    for later in range(50):
        drive(first, number + later)
    assert first._switch._state(first._switch._list()) == "active"
    assert first._node.publishers_of(first._stream.topic) == ["/robot_rl_driver"]
    first.stop("the end")
    first.close()
    third = Ros2Arm(station)  # the arm is free again, at once
    begun_s = time.monotonic()
    third.connect()
    assert time.monotonic() - begun_s < 1.0 + 5.0  # it listens for 1 s; the rest is a busy machine
    third.start()
    third.stop("the end")
    third.close()


@pytest.mark.slow  # a process of its own, and its lease
def test_an_arm_whose_driver_was_killed_is_free_when_its_lease_ends(monkeypatch) -> None:
    pytest.importorskip("cyclonedds")
    from robot_rl.real.ros2.node import DdsNode

    own_domain(monkeypatch)
    lease = "<Discovery><LeaseDuration>1s</LeaseDuration></Discovery>"  # 10 s otherwise
    monkeypatch.setenv("CYCLONEDDS_URI", f"<CycloneDDS><Domain>{lease}</Domain></CycloneDDS>")
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"driving\n"
    node = DdsNode("robot_rl_driver")
    beat = PresenceBeat(node, "controller_manager", "second")
    until(beat.rival)
    process.kill()
    process.communicate()
    until(lambda: beat.rival() is None)  # not heard for a second
    beat.take()
    assert node.publishers_of(beat.topic) == ["/robot_rl_driver"]
    beat.close()
    node.close()


KILLED = """
import time
from robot_rl.real.drivers.ros2_presence import Phase, PresenceBeat
from robot_rl.real.ros2.node import DdsNode
beat = PresenceBeat(DdsNode("robot_rl_driver"), "controller_manager", "first")
beat.set_phase(Phase.DRIVING)
print("driving", flush=True)
time.sleep(60)
"""


@pytest.mark.slow  # processes of their own
def test_of_two_drivers_on_the_wire_that_start_at_once_one_gets_through_at_most(station) -> None:
    arms = [Ros2Arm(replace(station, name=name)) for name in ("a", "b")]
    outcomes: list[str] = []

    def connect(arm: Ros2Arm) -> None:
        try:
            arm.connect()
            arm.start()
            outcomes.append("")
        except DeviceError as error:
            arm.close()  # as the driver's host does
            outcomes.append(str(error))

    threads = [threading.Thread(target=connect, args=(arm,)) for arm in arms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("") <= 1
    assert ["has this arm" in outcome for outcome in outcomes if outcome] == [True], outcomes
    for arm in arms:
        if arm._is_active:
            arm.stop("the end")
            arm.close()


@pytest.mark.slow  # processes of their own
def test_a_second_station_under_another_state_folder_is_refused(
    station: StationConfig, tmp_path: Path, monkeypatch
) -> None:
    file = tmp_path / "station.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(station)))))
    monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "one"))
    with StationProcesses(str(file), tmp_path / "first") as first, first.client() as watcher:
        monkeypatch.setenv("ROBOT_RL_STATE", str(tmp_path / "other"))
        monkeypatch.setenv("ROBOT_RL_CLAIMS", str(tmp_path / "other"))  # as on another computer
        with pytest.raises(
            DeviceError, match=rf"\(pid {first.driver_pid} on .*\) has this arm. End it first"
        ):
            StationProcesses(str(file), tmp_path / "second").__enter__()
        status = watcher.wait(newer_than_ns=time.monotonic_ns(), timeout_s=WAIT_S)
        assert (status.phase, status.reason) == ("paused", "")
    with StationProcesses(str(file), tmp_path / "second"):  # it is free
        pass
