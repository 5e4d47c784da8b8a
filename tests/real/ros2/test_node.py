"""Opening nodes: which transport, what is missing, and what DDS refuses."""

import importlib
import sys
from typing import Any

import pytest

from robot_rl.real.ros2 import types
from robot_rl.real.ros2.api import Ros2Error
from robot_rl.real.ros2.node import DdsNode, open_node

STRING = "std_msgs/msg/String"


def test_an_unknown_transport_is_refused():
    misspelt: Any = "rclp"
    with pytest.raises(Ros2Error, match=r"transport 'rclp'. Did you mean 'rclpy'"):
        open_node("a", transport=misspelt)


def test_without_rosbags_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rosbags.typesys", None)
    with pytest.raises(Ros2Error, match=r"rosbags is not installed.* pip install 'robot-rl\[ros2\]'"):
        types.Types("jazzy")


def test_without_rclpy_and_cyclonedds_both_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cyclonedds", None)
    monkeypatch.delitem(sys.modules, "robot_rl.real.ros2.dds", raising=False)
    with pytest.raises(Ros2Error, match=r"neither rclpy nor cyclonedds.* pip install 'robot-rl\[ros2\]'"):
        importlib.import_module("robot_rl.real.ros2.dds")


def test_what_a_closed_node_is_asked(ros_domain: int):
    node = DdsNode("a")
    publisher, client = node.create_publisher(STRING, "x"), node.create_client("std_srvs/srv/Trigger", "y")
    node.close()
    assert publisher.num_subscriptions == 0
    assert not client.wait(0.0)
    with pytest.raises(Ros2Error, match="Is the node closed"):
        node.create_publisher(STRING, "z")


def test_a_peer_that_comes_while_peers_are_counted_is_no_error(
    ros_domain: int, monkeypatch: pytest.MonkeyPatch
):
    # cyclonedds-python asks for the number first and for so many handles then: one more is an IndexError.
    node = DdsNode("a")
    publisher = node.create_publisher(STRING, "x")
    answers: list[Any] = [IndexError("invalid index"), [1, 2]]

    def look_up(_: Any) -> list[int]:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("cyclonedds.pub.DataWriter.get_matched_subscriptions", look_up)
    assert publisher.num_subscriptions == 2
    node.close()
