"""What is connected and could be a station: serial ports, and arms on the ROS 2 graph.

Nothing is moved. A port that a station names, or that a program has open as far as this user may see, is not
asked. To ask is to open a port, upon which boards such as an Arduino begin again, and to write a ping.
"""

from __future__ import annotations

import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robot_rl.core.errors import DeviceError
from robot_rl.real.claim import hardware, keep_others_out, openers
from robot_rl.real.drivers.ros2_manager import controllers_of
from robot_rl.real.ros2.api import SENSOR, Node
from robot_rl.real.ros2.discovery import discovery
from robot_rl.real.ros2.names import names
from robot_rl.real.station import StationConfig

_BY_ID = Path("/dev/serial/by-id")
"""Names that stay with an adapter, whatever it is plugged into."""
_PATTERNS = ("ttyACM*", "ttyUSB*", "cu.usbmodem*", "cu.usbserial*")
"""Of Linux and of macOS."""
_JOINT_STATE = "sensor_msgs/msg/JointState"
_ANSWER_S = 1.0
_TIMES = 3
"""A servo is asked: on a busy machine an answer may come too late."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Something that could be an arm."""

    kind: str
    """`port` or `ros2`."""
    name: str
    """Path of the port, or topic of the joint states."""
    about: str
    """What it says of itself, or who uses it."""
    station: str
    """The entered station that drives it; empty: none does."""
    remedy: str
    """What a station file would have to say; empty where there is a station, or nothing that answers."""


# Serial ports


def ports(
    stations: Sequence[StationConfig], *, asks: bool = False, by_id: Path = _BY_ID, dev: Path = Path("/dev")
) -> list[Found]:
    """Returns the serial ports of USB adapters.

    Args:
        stations: those that were entered.
        asks: whether free ports are asked for Feetech servos, as of an SO-101.
        by_id: folder of the stable names.
        dev: folder of the devices.
    """
    stable = {path.resolve(): path for path in (by_id.iterdir() if by_id.is_dir() else ())}
    plain = {path for pattern in _PATTERNS for path in dev.glob(pattern)} - set(stable)
    known = {device: station.name for station in stations for device in hardware(station)}
    return [
        _port(path, known.get(str(path.resolve()), ""), asks=asks)
        for path in sorted([*stable.values(), *plain])
    ]


def _port(path: Path, station: str, *, asks: bool) -> Found:
    users = ", ".join(f"{command} ({pid})" for pid, command in openers(path.resolve()))
    about, may_be_arm = [f"open in {users}"] if users else [], not station
    if asks and not users and not station:
        count, answer = _servos(path)
        about.append(answer)
        may_be_arm = count > 0
    if path.name != path.resolve().name:
        about.append(str(path.resolve()))
    options = f"{{port: {path}, id: my_arm}}"
    return Found(
        kind="port",
        name=str(path),
        about=", ".join(about),
        station=station,
        remedy=f"driver: lerobot, lerobot: {{type: so101_follower, options: {options}}}"
        if may_be_arm
        else "",
    )


def _servos(port: Path) -> tuple[int, str]:
    """Returns how many Feetech servos answer on a port, and which, in words.

    Raises:
        DeviceError: LeRobot's driver of them is not installed.
    """
    try:
        from lerobot.motors.feetech import FeetechMotorsBus
    except ModuleNotFoundError as error:
        raise DeviceError(f"find=servos: {error}. pip install -e '.[lerobot]'") from error
    bus: Any = FeetechMotorsBus(str(port), {})
    try:
        bus._connect(handshake=False)  # as `FeetechMotorsBus.scan_port`, at the rate of a new servo alone
        keep_others_out(bus.port_handler.ser.fileno())
        bus.set_baudrate(bus.default_baudrate)
        answers = set[int]()
        for _ in range(_TIMES):
            answers |= set(bus.broadcast_ping() or ())
    except BlockingIOError:
        return 0, "open in a program that locks it"
    except (OSError, RuntimeError, termios.error) as error:
        return 0, f"cannot be asked: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
    finally:
        if bus.port_handler.is_open:
            bus.port_handler.closePort()
    if not answers:
        return 0, "no Feetech servo answers"
    return len(answers), f"{len(answers)} Feetech servos: {', '.join(map(str, sorted(answers)))}"


# ROS 2


def on_graph(node: Node, stations: Sequence[StationConfig], *, find_s: float) -> list[Found]:
    """Returns the arms on a ROS 2 graph, which publish joint states, with their controllers.

    Args:
        node: of the graph.
        stations: those that were entered.
        find_s: how long to look for topics, and then to wait for a message on each, in s.
    """
    time.sleep(find_s)
    known = {_joint_states(station): station for station in stations if station.driver == "ros2"}
    return [
        _arm(node, topic, known.get((topic, discovery().domain_id)), find_s)
        for topic in node.topics_of(_JOINT_STATE)
    ]


def _joint_states(station: StationConfig) -> tuple[str, int]:
    """Returns topic and domain of a station's joint states."""
    assert station.ros2 is not None, "its driver is ros2"
    resolved = names("robot_rl_driver", station.ros2.namespace, station.ros2.remap)
    domain = discovery(domain_id=station.ros2.domain_id).domain_id
    return resolved.resolve(station.ros2.joint_states), domain


def _arm(node: Node, topic: str, station: StationConfig | None, wait_s: float) -> Found:
    joints = _joints(node, topic, wait_s)
    namespace = topic.rpartition("/")[0]
    about = [f"of {', '.join(node.publishers_of(topic))}"]
    about.append(f"joints {', '.join(joints)}" if joints else f"no message within {wait_s:g} s")
    about.append(_controllers(node, f"{namespace}/controller_manager"))
    own = f"namespace: {namespace.strip('/') or repr('')}, joint_states: {topic}"
    return Found(
        kind="ros2",
        name=topic,
        about="; ".join(about),
        station="" if station is None else station.name,
        remedy="" if station else f"driver: ros2, joints: [{', '.join(joints)}], ros2: {{{own}}}",
    )


def _joints(node: Node, topic: str, wait_s: float) -> list[str]:
    found, came = list[str](), threading.Event()

    def take(message: Any) -> None:
        if not came.is_set():
            found.extend(message.name)
            came.set()

    subscription = node.create_subscription(_JOINT_STATE, topic, take, SENSOR)
    came.wait(wait_s)
    subscription.close()
    return found


def _controllers(node: Node, manager: str) -> str:
    try:
        listed = controllers_of(node, manager, _ANSWER_S)
    except DeviceError:
        return f"no {manager} answers"
    return f"controllers {', '.join(f'{one.name} ({one.state})' for one in listed) or 'none'}"
