"""Messages, their bytes on the wire and their type hashes."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("rosbags")

from robot_rl.real.ros2.api import Ros2Error
from robot_rl.real.ros2.tables import DEFINITIONS
from robot_rl.real.ros2.types import SampleError, Types, types_of

JOINT_STATE = "sensor_msgs/msg/JointState"
JAZZY = types_of("jazzy")

# Found in code that rosidl generated (ROS 2 Iron and Jazzy) and in what `ros2 topic info -v` printed.
HASHES = {
    JOINT_STATE: "a13ee3a330e346c9d87b5aa18d24e11690752bd33a0350f11c5882bc9179260e",
    "std_msgs/msg/String": "df668c740482bbd48fb39d76a70dfd4bd59db1288021743503259e948f6b1a18",
    "action_msgs/msg/GoalStatusArray": "6c1684b00f177d37438febe6e709fc4e2b0d4248dca4854946f9ed8b30cda83e",
    "action_msgs/srv/CancelGoal": "573d8b0a534451d7bc2ac8c5ffde8ac14b8593b7001175d0cd6516dcbeb8689a",
    "std_srvs/srv/SetBool": "abe9e4bb6b41b40e6789712c00ec8871923e089af3f667a79992a428cff2da0a",
    "std_srvs/srv/SetBool_Event": "3c4c20015afb4303eafd347b1d6a786f171a89c814726961a9593ef10df878cf",
    "std_srvs/srv/Trigger": "eeff2cd6fa5ad9d27cdf4dec64818317839b62f212a91e6b5304b634b2062c5f",
    "std_srvs/srv/Trigger_Request": "d010825374ce8918e72bfd826c82603e60f45419e932ea976f807b74a863a199",
    # The first 8 octets are as good as all: what is compared is whether a field differs.
    "rcl_interfaces/srv/DescribeParameters": "845b484d71eb0673",
    "rcl_interfaces/srv/GetParameters": "bf9803d5c74cf989",
    "rcl_interfaces/srv/GetParameterTypes": "da199c878688b3e5",
    "rcl_interfaces/srv/ListParameters": "3e6062bfbb27bfb8",
    "rcl_interfaces/srv/SetParameters": "56eed9a67e169f9c",
    "rcl_interfaces/srv/SetParametersAtomically": "0e192ef259c07fc3",
    "lifecycle_msgs/srv/ChangeState": "356fe34f0475a43a",
    "lifecycle_msgs/srv/GetState": "800a0a5aae599782",
    "lifecycle_msgs/srv/GetAvailableStates": "00a07d79d2207d71",
    "lifecycle_msgs/srv/GetAvailableTransitions": "59b7ecefce0982a8",
    "control_msgs/action/FollowJointTrajectory_Goal": "8a9060704b269608",
    "control_msgs/action/FollowJointTrajectory_Result": "8002e99ed2c14c6f",
    "control_msgs/action/FollowJointTrajectory_Feedback": "3fd0aaecf7172512",
    "control_msgs/action/FollowJointTrajectory_SendGoal": "b13789dddc325a7a",
    "control_msgs/action/GripperCommand_Goal": "607d9f41eb241e19",
    "controller_manager_msgs/msg/ControllerState": "9a8780ab9814b603",
    "controller_manager_msgs/srv/ListControllerTypes": "873e8d2bb81b8b59",
    "controller_manager_msgs/srv/LoadController": "e37f7596c50c88cf",
    "controller_manager_msgs/srv/ConfigureController": "b5de498113f4eabc",
    "controller_manager_msgs/srv/UnloadController": "4055728e84c04134",
    "controller_manager_msgs/srv/SetHardwareComponentState": "940b15846ed3e1fb",
    "controller_manager_msgs/srv/SwitchController_Request": "d258d35c1ce6d746",
    "moveit_msgs/srv/ServoCommandType": "2065f4daf2712493",
}


@pytest.mark.parametrize(("kind", "expected"), HASHES.items())
def test_definitions_hash_to_what_ros_generates(kind: str, expected: str):
    assert JAZZY.type_hash(kind).startswith(f"RIHS01_{expected}")


# Not found in generated code: these are the sums of our own tables, whose fields are those that docs.ros.org
# has for Jazzy (control_msgs 5.3, controller_manager_msgs 4.2x and later).
OWN_SUMS = {
    "control_msgs/msg/JointTrajectoryControllerState": "51d8dd89cc624cbe",
    "controller_manager_msgs/msg/HardwareComponentState": "8723f76b60e3ea54",
    "controller_manager_msgs/srv/ListHardwareComponents": "2ff105e609928671",
}


@pytest.mark.parametrize(("kind", "expected"), OWN_SUMS.items())
def test_definitions_of_jazzy_that_no_generated_code_was_found_for(kind: str, expected: str):
    assert JAZZY.type_hash(kind).startswith(f"RIHS01_{expected}")


def test_jazzys_class_type_stands_where_generated_code_has_it():
    # Jazzy's generated code was found of the time before `data_type` came into HardwareInterface.
    before = Types("jazzy")
    before.add(
        "controller_manager_msgs/msg/HardwareInterface", "string name; bool is_available; bool is_claimed"
    )
    found = before.type_hash("controller_manager_msgs/msg/HardwareComponentState")
    assert found.startswith("RIHS01_0ed49e3b2669d3a5")


def test_a_field_that_came_or_went_with_a_distribution():
    state, component = (
        "control_msgs/msg/JointTrajectoryControllerState",
        "controller_manager_msgs/msg/HardwareComponentState",
    )
    has = {
        distro: [
            field in types.codec(kind).cls.__slots__
            for kind, field in ((state, "speed_scaling_factor"), (component, "class_type"))
        ]
        for distro, types in (
            (name, Types(name)) for name in ("humble", "iron", "jazzy", "kilted", "lyrical")
        )
    }
    assert has == {
        "humble": [False, True],
        "iron": [False, True],
        "jazzy": [True, True],
        "kilted": [True, False],
        "lyrical": [True, False],
    }


def test_distributions_differ():
    iron, humble, manager = Types("iron"), Types("humble"), "controller_manager_msgs"
    # Found in generated code, as HASHES are; before, the first and the last two were taken for Jazzy's.
    assert iron.type_hash("control_msgs/msg/JointTrajectoryControllerState").startswith(
        "RIHS01_6cb9ac0858fc11b5"
    )
    assert iron.type_hash(f"{manager}/msg/HardwareComponentState").startswith("RIHS01_4213311bad880109")
    kilted = Types("kilted")
    assert kilted.type_hash(f"{manager}/msg/HardwareComponentState").startswith("RIHS01_42dd5e6ce0490055")
    assert kilted.type_hash(f"{manager}/srv/ListHardwareComponents").startswith("RIHS01_da29c2bbff9ec4f2")
    assert iron.type_hash(f"{manager}/srv/SwitchController").startswith("RIHS01_86024c2b173a21e5")
    assert iron.type_hash(f"{manager}/msg/ControllerState").startswith("RIHS01_38fe2e791900d2bb")
    assert len(humble.codec("rmw_dds_common/msg/Gid").cls().data) == 24
    assert len(JAZZY.codec("rmw_dds_common/msg/Gid").cls().data) == 16
    assert hasattr(humble.codec("controller_manager_msgs/srv/SwitchController_Request").cls(), "start_asap")


def test_a_joint_state_has_the_bytes_that_cdr_prescribes():
    message = JAZZY.message(JOINT_STATE, {"name": ["ab", "c"], "position": [1.0]})
    message.header.stamp.sec, message.header.stamp.nanosec = 1, 2
    expected = bytes.fromhex(
        "00010000"  # CDR, little endian
        "01000000 02000000"  # stamp
        "01000000 00 000000"  # frame_id: length 1 with its zero; padding to 4
        "02000000 03000000 616200 00 02000000 6300 0000"  # two names, each with its zero, padded
        "01000000 000000000000f03f"  # one position; its double starts at octet 40: no padding
        "00000000"  # no velocity
        "00000000"  # no effort
    )
    assert bytes(JAZZY.codec(JOINT_STATE).encode(message)) == expected


def test_doubles_are_aligned_to_eight_after_the_header():
    message = JAZZY.message("control_msgs/msg/JointTolerance", {"name": "abc", "position": -2.0})
    expected = "00010000 04000000 61626300 00000000000000c0" + " 0000000000000000" * 2
    assert bytes(JAZZY.codec("control_msgs/msg/JointTolerance").encode(message)) == bytes.fromhex(expected)
    message.name = "abcd"  # one octet more: seven of padding
    expected = "00010000 05000000 6162636400 000000 00000000 00000000000000c0" + " 0000000000000000" * 2
    encoded = bytes(JAZZY.codec("control_msgs/msg/JointTolerance").encode(message))
    assert encoded == bytes.fromhex(expected)


def test_an_empty_message_is_one_octet_padded():
    codec = JAZZY.codec("std_srvs/srv/Trigger_Request")
    assert bytes(codec.encode(codec.cls())) == bytes.fromhex("00010000 00 000000")


def test_big_endian_and_every_type_of_the_tables_come_back():
    codec = JAZZY.codec("std_msgs/msg/Int32")
    assert codec.decode(bytes.fromhex("00000000 00000102")).data == 258
    parts = {
        "msg": ("",),
        "srv": ("_Request", "_Response"),
        "action": ("_Goal", "_Result", "_FeedbackMessage"),
    }
    for name in DEFINITIONS:
        for part in parts[name.split("/")[1]]:
            codec = JAZZY.codec(f"{name}{part}")
            assert isinstance(codec.decode(bytes(codec.encode(codec.cls()))), codec.cls)


def test_fields_left_out_are_what_ros_makes_them():
    pose = JAZZY.message("geometry_msgs/msg/PoseStamped", {})
    assert (pose.pose.orientation.w, pose.pose.orientation.x, pose.header.frame_id) == (1.0, 0.0, "")
    uuid = JAZZY.message("unique_identifier_msgs/msg/UUID", {})
    assert uuid.uuid.dtype == np.uint8
    assert uuid.uuid.shape == (16,)
    goal = JAZZY.message("control_msgs/action/FollowJointTrajectory_Goal", {})
    assert (goal.path_tolerance, goal.trajectory.joint_names) == ([], [])
    assert JAZZY.codec("control_msgs/action/FollowJointTrajectory_Result").cls.GOAL_TOLERANCE_VIOLATED == -5
    assert pose.header is not JAZZY.message("geometry_msgs/msg/PoseStamped", {}).header


def test_fields_that_do_not_exist_cannot_be_set():
    with pytest.raises(Ros2Error, match=r"JointState has no field 'postion'.* Did you mean 'position'"):
        JAZZY.message(JOINT_STATE, {"postion": [1.0]})
    message = JAZZY.message(JOINT_STATE, {})
    with pytest.raises(AttributeError):
        message.postion = [1.0]
    with pytest.raises(Ros2Error, match=r"no definition of 'sensor_msgs/msg/JointStat'.* Did you mean"):
        JAZZY.message("sensor_msgs/msg/JointStat", {})


def test_arrays_of_another_type_are_converted_and_of_another_shape_refused():
    codec = JAZZY.codec(JOINT_STATE)
    message = codec.cls()
    message.position = np.arange(6, dtype=np.float32)[::2]  # neither the type nor contiguous
    assert list(codec.decode(bytes(codec.encode(message))).position) == [0.0, 2.0, 4.0]
    message.position = np.zeros((2, 2))
    with pytest.raises(Ros2Error, match=r"position has shape \(2, 2\), allowed: one dimension"):
        codec.encode(message)
    with pytest.raises(Ros2Error, match=r"uuid has shape \(3,\), allowed: one dimension of 16"):
        JAZZY.message("unique_identifier_msgs/msg/UUID", {"uuid": [1, 2, 3]})
    picture = JAZZY.message("sensor_msgs/msg/CompressedImage", {"data": b"\xff\xd8"})
    assert list(picture.data) == [255, 216]
    # In nested messages too.
    point = JAZZY.message("trajectory_msgs/msg/JointTrajectoryPoint", {})
    point.positions = [1, 2]
    trajectory = JAZZY.message("trajectory_msgs/msg/JointTrajectory", {"points": [point]})
    decoded = JAZZY.codec("trajectory_msgs/msg/JointTrajectory").decode(
        bytes(JAZZY.codec("trajectory_msgs/msg/JointTrajectory").encode(trajectory))
    )
    assert list(decoded.points[0].positions) == [1.0, 2.0]


def test_what_cannot_be_sent_says_why():
    with pytest.raises(Ros2Error, match=r"a Time where sensor_msgs/msg/JointState is sent"):
        JAZZY.codec(JOINT_STATE).encode(JAZZY.message("builtin_interfaces/msg/Time", {}))
    time = JAZZY.message("builtin_interfaces/msg/Time", {"sec": "now"})
    with pytest.raises(Ros2Error, match="builtin_interfaces/msg/Time cannot be sent"):
        JAZZY.codec("builtin_interfaces/msg/Time").encode(time)


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"\0\1\0",
        b"\0\7\0\0" + bytes(40),  # XCDR2: no ROS 2 sends it
        b"\0\1\0\0" + b"\xff" * 40,
        b"\0\1\0\0" + bytes(12) + b"\xff\xff\xff\x7f",
        b"\0\1\0\0" + bytes(400),  # longer than the message
        b"\0\1\0\0" + bytes(10),
    ],
)
def test_foreign_bytes_raise_one_error(octets: bytes):
    with pytest.raises(SampleError, match="sensor_msgs/msg/JointState"):
        JAZZY.codec(JOINT_STATE).decode(octets)


def test_any_cut_or_flipped_octet_gives_a_message_or_the_one_error():
    codec = JAZZY.codec("control_msgs/action/FollowJointTrajectory_Goal")
    message = codec.cls()
    message.trajectory.joint_names = ["a", "b"]
    point = JAZZY.message("trajectory_msgs/msg/JointTrajectoryPoint", {"positions": [1, 2]})
    message.trajectory.points = [point]
    whole = bytes(codec.encode(message))
    refused = 0
    for index in range(len(whole)):
        for octets in (whole[:index], whole[:index] + bytes([whole[index] ^ 0xFF]) + whole[index + 1 :]):
            try:
                codec.decode(octets)
            except SampleError:
                refused += 1
    assert refused > len(whole)


def test_definitions_of_ones_own():
    types = Types("jazzy")
    text = "float32[2] pair \t# a comment\nstring<=5[<=3] words\nint8 MOST=-3\nOther[] others"
    types.add("my_msgs/msg/Two", text)
    types.add("my_msgs/msg/Other", "std_msgs/Header header")
    other = types.message("my_msgs/msg/Other", {})
    two = types.message("my_msgs/msg/Two", {"pair": [1, 2], "others": [other]})
    back = types.codec("my_msgs/msg/Two").decode(bytes(types.codec("my_msgs/msg/Two").encode(two)))
    assert (list(back.pair), back.words, back.MOST, len(back.others)) == ([1.0, 2.0], [], -3, 1)
    assert [field.name for field in dataclasses.fields(two)] == ["pair", "words", "others"]
    with pytest.raises(Ros2Error, match="my_msgs/msg/Two is in use already"):
        types.add("my_msgs/msg/Two", "int8 x")
    with pytest.raises(Ros2Error, match="line 'float64', allowed"):
        types.add("my_msgs/msg/Bad", "float64")
