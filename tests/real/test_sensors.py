"""Pictures and poses: bytes to pixels by hand, frozen cameras, and what comes through a driver."""

import io
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from robot_rl.real.drivers.feed import SensorFeed
from robot_rl.real.drivers.host import SENSORS_SOCKET
from robot_rl.real.messages import Frame
from robot_rl.real.ros2.node import open_node
from robot_rl.real.ros2.parameters import get_remote, set_remote
from robot_rl.real.sensors import (
    PictureError,
    Ros2Sensors,
    cropped,
    decode_compressed,
    decode_image,
    frame_name,
    open_sensors,
    open_station_node,
)
from robot_rl.real.station import CameraConfig, ObjectConfig, Ros2Config
from tests.real.drivers.ros_graph import FakeNode, message
from tests.real.ros2.conftest import own_domain
from tests.real.supervisor.rig import two_joint_station


def image(encoding, array, step=None, is_bigendian=0):
    height, width = array.shape[:2]
    octets = array.tobytes()
    return message(
        "sensor_msgs/msg/Image",
        encoding=encoding,
        height=height,
        width=width,
        step=step or len(octets) // height,
        is_bigendian=is_bigendian,
        data=np.frombuffer(octets, np.uint8),
    )


def stamped(sent, stamp_ns):
    sent.header.stamp.sec, sent.header.stamp.nanosec = divmod(stamp_ns, 10**9)
    return sent


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


RED = np.tile(np.array([255, 0, 9], np.uint8), (2, 3, 1))


@pytest.mark.parametrize(
    ("encoding", "array", "expected"),
    [
        ("rgb8", RED, [255, 0, 9]),
        ("bgr8", RED, [9, 0, 255]),
        ("rgba8", np.concatenate([RED, RED[..., :1]], 2), [255, 0, 9]),
        ("bgra8", np.concatenate([RED, RED[..., :1]], 2), [9, 0, 255]),
        ("mono8", np.full((2, 3, 1), 7, np.uint8), [7, 7, 7]),
    ],
)
def test_colours_come_as_rgb(encoding, array, expected):
    got = decode_image(image(encoding, array))
    assert (got.shape, got.dtype) == ((2, 3, 3), np.uint8)
    assert got[1, 2].tolist() == expected


def test_depth_comes_in_metres_of_any_byte_order():
    millimetres = np.array([[1500, 0], [1, 65535]], "<u2")
    expected = pytest.approx(np.array([[1.5, 0.0], [0.001, 65.535]]))
    assert decode_image(image("16UC1", millimetres)) == expected
    assert decode_image(image("16UC1", millimetres.astype(">u2"), is_bigendian=1)) == expected
    metres = decode_image(image("32FC1", np.array([[1.5, np.nan]], "<f4")))
    assert (metres.dtype, metres[0, 0]) == (np.float32, 1.5)


def test_rows_may_be_padded():
    padded = np.concatenate([RED.reshape(2, 9), np.full((2, 7), 99, np.uint8)], 1)
    sent = image("rgb8", RED)
    sent.data, sent.step = padded.reshape(-1), 16
    assert (decode_image(sent) == RED).all()


def test_pictures_that_cannot_be_read_say_why():
    with pytest.raises(PictureError, match=r"encoding 'yuv422', allowed: 16UC1, .*rgba8"):
        decode_image(image("yuv422", RED))
    short = image("rgb8", RED)
    short.data = short.data[:-1]
    with pytest.raises(PictureError, match=r"17 bytes in rows of 9, need 2 rows of 9 for rgb8"):
        decode_image(short)
    with pytest.raises(PictureError, match=r"3 bytes of 'jpeg' are no picture"):
        decode_compressed(message("sensor_msgs/msg/CompressedImage", format="jpeg", data=[1, 2, 3]))


def test_compressed_colour_and_depth():
    colour = message(
        "sensor_msgs/msg/CompressedImage",
        format="rgb8; png compressed",
        data=np.frombuffer(png(RED), np.uint8),
    )
    assert (decode_compressed(colour) == RED).all()
    octets = b"\0" * 12 + png(np.array([[1500]], np.uint16))
    depth = message(
        "sensor_msgs/msg/CompressedImage",
        format="16UC1; compressedDepth png",
        data=np.frombuffer(octets, np.uint8),
    )
    assert decode_compressed(depth) == pytest.approx(np.array([[1.5]]))


def test_crops_are_rows_first():
    picture = np.arange(20).reshape(4, 5)
    assert cropped(picture, (1, 2, 2, 3)).tolist() == [[7, 8, 9], [12, 13, 14]]
    with pytest.raises(PictureError, match=r"crop \(3, 0, 2, 2\) of a picture of 4 x 5 pixels"):
        cropped(picture, (3, 0, 2, 2))


@pytest.fixture
def ros():
    station = replace(
        two_joint_station(),
        cameras={
            "front": CameraConfig(topic="cam", compressed=False, crop=(0, 0, 1, 2)),
            "front.depth": CameraConfig(topic="depth", compressed=False),
            "own": CameraConfig(),
        },
        objects={"cube": ObjectConfig(topic="cube")},
    )
    made = SimpleNamespace(node=FakeNode(), now_ns=100)
    made.sensors = Ros2Sensors(station, made.node, clock_ns=lambda: made.now_ns)
    yield made
    made.sensors.close()
    assert made.node.is_closed


def test_frames_of_the_graph_have_names_crops_and_times_of_arrival(ros):
    assert ros.sensors.read() == {}
    assert sorted(ros.node.heard) == ["cam", "cube", "depth"]  # not the driver's own
    ros.node.hear("cam", stamped(image("rgb8", RED), 7))
    ros.node.hear("depth", image("16UC1", np.array([[2000]], "<u2")))
    pose = message("geometry_msgs/msg/PoseStamped")
    pose.pose.position.x, pose.pose.orientation.w, pose.pose.orientation.z = 0.5, 0.0, 1.0
    ros.node.hear("cube", pose)
    frames = ros.sensors.read()
    assert frames["front.rgb"].array.shape == (1, 2, 3)
    assert frames["front.rgb"].stamp_ns == 100
    assert frames["front.depth"].array[0, 0] == 2.0
    assert frames["cube"].array.tolist() == [0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]  # w comes first


def test_a_camera_that_repeats_itself_grows_stale(ros):
    ros.node.hear("cam", stamped(image("rgb8", RED), 7))
    ros.now_ns = 200
    ros.node.hear("cam", stamped(image("rgb8", RED), 7))
    assert ros.sensors.read()["front.rgb"].stamp_ns == 100
    ros.node.hear("cam", stamped(image("rgb8", RED), 6))  # the wall clock was set back: new all the same
    assert ros.sensors.read()["front.rgb"].stamp_ns == 200
    ros.now_ns = 300
    ros.node.hear("cam", image("rgb8", RED))  # a publisher that stamps nothing
    ros.node.hear("cam", image("rgb8", RED))
    assert ros.sensors.read()["front.rgb"].stamp_ns == 300


def test_a_picture_that_cannot_be_read_is_told_and_the_old_one_grows_stale(ros):
    ros.node.hear("cam", stamped(image("rgb8", RED), 7))
    ros.now_ns = 200
    ros.node.hear("cam", stamped(image("yuv422", RED), 8))
    assert ros.sensors.read()["front.rgb"].stamp_ns == 100
    assert ros.sensors.mistakes["front.rgb"].startswith("cam: encoding 'yuv422'")


def test_frames_come_through_the_driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    station = replace(
        two_joint_station(),
        cameras={"front": CameraConfig(crop=(0, 1, 2, 1)), "big": CameraConfig(crop=(0, 0, 9, 9))},
    )
    frames = [Frame(name=name, stamp_ns=5, array=RED) for name in ("front.rgb", "big.rgb", "cube")]
    feed = SensorFeed(lambda: frames, folder / SENSORS_SOCKET, pytest.fail)
    sensors = open_sensors(station, folder)
    until_s = time.monotonic() + 10.0
    while (len(sensors.read()) < 2 or not sensors.mistakes) and time.monotonic() < until_s:
        time.sleep(0.002)
    read = sensors.read()
    feed.close()
    sensors.close()
    assert sorted(read) == ["cube", "front.rgb"]
    assert (read["front.rgb"].array.shape, read["front.rgb"].stamp_ns) == ((2, 1, 3), 5)
    assert sensors.mistakes == {"big.rgb": "crop (0, 0, 9, 9) of a picture of 2 x 3 pixels."}


def test_names_of_cameras():
    assert (frame_name("front"), frame_name("front.depth")) == ("front.rgb", "front.depth")


def test_a_node_of_a_station_has_use_sim_time_as_every_node_of_ros(monkeypatch):
    pytest.importorskip("cyclonedds")
    own_domain(monkeypatch)
    config = Ros2Config(namespace="left", transport="dds", use_sim_time=True)
    node = open_station_node(two_joint_station(driver="ros2", ros2=config), "driver")
    other = open_node("asker", transport="dds")
    assert get_remote(other, "/left/robot_rl_driver", ["use_sim_time"]) == {"use_sim_time": True}
    assert node.now_ns() == 0  # no /clock yet
    set_remote(other, "/left/robot_rl_driver", {"use_sim_time": False})
    assert abs(node.now_ns() - time.time_ns()) < 60e9
    node.close()
    other.close()
