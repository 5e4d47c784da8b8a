"""Names as rcl and rmw have them."""

import pytest

from robot_rl.real.ros2 import names as wire
from robot_rl.real.ros2.api import Ros2Error
from robot_rl.real.ros2.names import names


@pytest.mark.parametrize(
    ("said", "full"),
    [
        ("joint_states", "/left/arm/joint_states"),
        ("/joint_states", "/joint_states"),
        ("~/state", "/left/arm/driver/state"),
        ("~", "/left/arm/driver"),
        ("{node}/x", "/left/arm/driver/x"),
        ("{ns}/y", "/left/arm/y"),
        ("a/b/c", "/left/arm/a/b/c"),
    ],
)
def test_names_resolve_as_in_rcl(said: str, full: str):
    assert names("driver", "left/arm").resolve(said) == full


def test_without_a_namespace_names_stand_at_the_root():
    assert names("driver").full_name == "/driver"
    assert names("driver").resolve("joint_states") == "/joint_states"
    assert names("driver", "/").resolve("~/x") == "/driver/x"


def test_remapping_compares_absolute_names_and_may_be_for_one_node():
    mine = names("driver", "left", {"joint_states": "/all/joint_states", "other:a": "b", "driver:c": "~/d"})
    assert mine.resolve("/left/joint_states") == "/all/joint_states"
    assert mine.resolve("joint_states") == "/all/joint_states"
    assert mine.resolve("a") == "/left/a"
    assert mine.resolve("c") == "/left/driver/d"


def test_a_node_and_its_namespace_can_be_remapped():
    assert names("driver", "left", {"__node": "other", "__ns": "/right"}).full_name == "/right/other"
    assert names("driver", remap={"__name": "other"}).full_name == "/other"


@pytest.mark.parametrize("name", ["", "a//b", "a/", "1a", "a-b", "a b", "~a", "a/~", "/", "x" * 250])
def test_names_that_ros_does_not_allow(name: str):
    with pytest.raises(Ros2Error, match="allowed: words of letters, digits and _"):
        names("driver").resolve(name)


def test_node_names_and_namespaces_that_ros_does_not_allow():
    with pytest.raises(Ros2Error, match=r"node name 'left/driver'.* namespace="):
        names("left/driver")
    with pytest.raises(Ros2Error, match="namespace name 'a//b'"):
        names("driver", "a//b")
    with pytest.raises(Ros2Error, match="'1b'"):
        names("driver", remap={"a": "1b"})


def test_names_on_the_wire():
    assert wire.topic_on_wire("/a/b") == "rt/a/b"
    assert wire.request_on_wire("/a/b") == "rq/a/bRequest"
    assert wire.reply_on_wire("/a/b") == "rr/a/bReply"
    assert wire.dds_type("sensor_msgs/msg/JointState") == "sensor_msgs::msg::dds_::JointState_"
    with pytest.raises(Ros2Error, match="sensor_msgs/msg/JointState"):
        wire.check_kind("sensor_msgs/JointState")
