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
