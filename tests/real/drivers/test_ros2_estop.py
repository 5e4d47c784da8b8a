"""The e-stop button over a wire: best effort, reliable or latched, on both transports."""

import time
from collections.abc import Callable, Iterator

import pytest

from robot_rl.real.drivers.ros2_estop import EstopButton
from robot_rl.real.ros2.api import DEFAULT, LATCHED, SENSOR, Node, QoS
from robot_rl.real.ros2.node import open_node
from tests.real.ros2 import fake_rclpy
from tests.real.ros2.conftest import own_domain

BOOL = "std_msgs/msg/Bool"


@pytest.fixture(params=["dds", "rclpy"])
def two_nodes(request, monkeypatch) -> Iterator[tuple[Node, Node]]:
    """The driver's and the button's; rclpy's are a stand-in that matches as ROS does."""
    if request.param == "dds":
        pytest.importorskip("cyclonedds")
        own_domain(monkeypatch)
    else:
        fake_rclpy.World().install(monkeypatch)
    driver, button = (open_node(name, transport=request.param) for name in ("driver", "button"))
    yield driver, button
    driver.close()
    button.close()


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("offered", [SENSOR, DEFAULT, LATCHED], ids=["best effort", "reliable", "latched"])
def test_a_button_of_every_quality_of_service_presses(two_nodes, offered: QoS, caplog) -> None:
    driver, button = two_nodes
    pressed: list[str] = []
    estop = EstopButton(driver, 10.0, pressed.append, time.monotonic_ns)
    assert estop.left_s() == 0
    publisher = button.create_publisher(BOOL, "/driver/estop", offered)

    def is_heard(pressing: bool) -> bool:
        publisher.publish(button.message(BOOL, data=pressing))
        return bool(pressed) if pressing else estop.left_s() > 0

    until(lambda: is_heard(False))
    assert (estop.silence(), pressed) == ("", [])
    until(lambda: is_heard(True))
    assert set(pressed) == {"e-stop: true on ~/estop"}
    assert caplog.messages == []  # no warning of the subscription that does not match: another does


def test_a_latched_button_that_was_pressed_before_is_not_missed(monkeypatch) -> None:
    pytest.importorskip("cyclonedds")
    own_domain(monkeypatch)
    driver, button = (open_node(name, transport="dds") for name in ("driver", "button"))
    button.create_publisher(BOOL, "/driver/estop", LATCHED).publish(button.message(BOOL, data=True))
    pressed: list[str] = []
    EstopButton(driver, None, pressed.append, time.monotonic_ns)
    until(lambda: pressed)
    driver.close()
    button.close()
