"""What could be a station: ports with servos on them, and arms on a ROS 2 graph."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from robot_rl.real import found
from robot_rl.real.ros2.node import DdsNode, open_node
from robot_rl.real.station import StationConfig, load_station
from robot_rl.testing.feetech import FakeFeetechBus, FakeServo

LIST = "controller_manager_msgs/srv/ListControllers"
STATE = "sensor_msgs/msg/JointState"


def station(folder: Path, name: str, **changes: tuple[str, str]) -> StationConfig:
    """Returns a shipped station with other words in its file."""
    text = (Path(__file__).parents[3] / "configs" / "stations" / f"{name}.yaml").read_text()
    for before, after in changes.values():
        assert before in text
        text = text.replace(before, after)
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return load_station(str(file))


# --- ports


@pytest.fixture
def bus() -> Iterator[FakeFeetechBus]:
    pytest.importorskip("lerobot.motors.feetech")
    with FakeFeetechBus([FakeServo(number) for number in range(1, 7)]) as bus:
        yield bus


def by_id(folder: Path, port: str) -> Path:
    """Returns a folder that names the port as udev does."""
    (folder / "by-id").mkdir()
    (folder / "by-id" / "usb-Bus_Servo_Adapter").symlink_to(port)
    return folder / "by-id"


def test_a_free_port_is_asked_for_servos_and_has_its_lasting_name(
    bus: FakeFeetechBus, tmp_path: Path
) -> None:
    folders: dict[str, Any] = {"by_id": by_id(tmp_path, bus.port), "dev": tmp_path}
    (one,) = found.ports([], asks=True, **folders)
    lasting = str(tmp_path / "by-id" / "usb-Bus_Servo_Adapter")
    assert (one.kind, one.name, one.station) == ("port", lasting, "")
    assert one.about == f"6 Feetech servos: 1, 2, 3, 4, 5, 6, {bus.port}"
    assert f"port: {lasting}" in one.remedy
    (unasked,) = found.ports([], **folders)
    assert unasked.about == bus.port


def test_a_bus_on_which_nobody_answers_is_no_error(tmp_path: Path) -> None:
    pytest.importorskip("lerobot.motors.feetech")
    with FakeFeetechBus([]) as bus:
        (one,) = found.ports([], asks=True, by_id=by_id(tmp_path, bus.port), dev=tmp_path)
    assert (one.about, one.remedy) == (f"no Feetech servo answers, {bus.port}", "")


def test_a_port_that_a_program_has_locked_is_left_alone(bus: FakeFeetechBus, tmp_path: Path) -> None:
    with open(bus.port) as port:
        fcntl.flock(port, fcntl.LOCK_EX)
        (one,) = found.ports([], asks=True, by_id=by_id(tmp_path, bus.port), dev=tmp_path)
    assert (one.about, one.remedy) == (f"open in a program that locks it, {bus.port}", "")


def test_the_port_of_a_station_is_not_asked(
    bus: FakeFeetechBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = station(tmp_path, "so101", port=("/dev/ttyACM0", bus.port))
    monkeypatch.setattr(found, "_servos", lambda port: pytest.fail("asked"))
    (one,) = found.ports([known], asks=True, by_id=by_id(tmp_path, bus.port), dev=tmp_path)
    assert (one.station, one.remedy) == ("so101", "")


def test_a_port_that_another_program_has_open_is_not_asked(
    bus: FakeFeetechBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found, "openers", lambda path: [(7, "picocom")])
    monkeypatch.setattr(found, "_servos", lambda port: pytest.fail("asked"))
    (one,) = found.ports([], asks=True, by_id=by_id(tmp_path, bus.port), dev=tmp_path)
    assert one.about == f"open in picocom (7), {bus.port}"


def test_ports_without_a_lasting_name_are_listed_by_their_own(tmp_path: Path) -> None:
    for name in ("ttyACM1", "ttyUSB0", "tty0", "null"):
        (tmp_path / name).touch()
    assert [Path(one.name).name for one in found.ports([], by_id=tmp_path / "none", dev=tmp_path)] == [
        "ttyACM1",
        "ttyUSB0",
    ]


# --- ROS 2


@pytest.fixture
def arm(ros_domain: int) -> Iterator[DdsNode]:
    """A node in `left` that publishes joint states and lists controllers."""
    node = DdsNode("controller_manager", namespace="left")
    states, over = node.create_publisher(STATE, "joint_states"), Event()

    def listed(_: Any) -> Any:
        row = node.message("controller_manager_msgs/msg/ControllerState", name="forward", state="inactive")
        return node.message(f"{LIST}_Response", controller=[row])

    node.create_service(LIST, "controller_manager/list_controllers", listed)

    def publish() -> None:
        while not over.wait(0.05):
            states.publish(node.message(STATE, name=["joint1", "joint2"], position=[0.0, 1.0]))

    thread = Thread(target=publish)
    thread.start()
    yield node
    over.set()
    thread.join()
    node.close()


def test_an_arm_on_the_graph_has_its_joints_and_controllers(arm: DdsNode) -> None:
    node = open_node("finds", transport="dds")
    (one,) = found.on_graph(node, [], find_s=2.0)
    node.close()
    assert (one.kind, one.name, one.station) == ("ros2", "/left/joint_states", "")
    assert one.about == ("of /left/controller_manager; joints joint1, joint2; controllers forward (inactive)")
    assert (
        one.remedy
        == "driver: ros2, joints: [joint1, joint2], ros2: {namespace: left, joint_states: /left/joint_states}"
    )


def test_the_arm_of_a_station_is_known_by_its_topic(arm: DdsNode, tmp_path: Path) -> None:
    known = station(tmp_path, "panda_ros2", namespace=('namespace: ""', "namespace: left"))
    other = station(tmp_path, "panda_ros2", namespace=('namespace: ""', "namespace: right"))
    node = open_node("finds", transport="dds")
    (one,), (another,) = (found.on_graph(node, [it], find_s=2.0) for it in (known, other))
    node.close()
    assert (one.station, one.remedy) == ("panda_ros2", "")
    assert another.station == ""
