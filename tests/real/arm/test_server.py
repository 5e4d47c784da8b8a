"""The arm in another process, as a ROS program sees it."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cyclonedds")

from robot_rl.real.ros2.api import LATCHED, Node, nanoseconds
from robot_rl.real.ros2.node import open_node
from robot_rl.real.ros2.parameters import get_remote
from robot_rl.sim.plant import MujocoPlant
from tests.real.arm.conftest import WAIT_S, serving
from tests.real.ros2.conftest import own_domain

JTC, POSITION = "joint_trajectory_controller", "forward_position_controller"
HOME = [0.0, -0.1432, 0.0, -2.3651, 0.0, 2.2220, 0.7854]
JOINTS = [f"joint{i}" for i in range(1, 8)]
FOLLOW = "control_msgs/action/FollowJointTrajectory"


class Seen:
    """The newest message of some topics."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.newest: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def watch(self, kind: str, topic: str, **qos: Any) -> None:
        def on_message(message: Any) -> None:
            self.newest[topic] = message
            self.counts[topic] = self.counts.get(topic, 0) + 1

        self.node.create_subscription(kind, topic, on_message, **qos)

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            if found := holds():
                return found
            time.sleep(0.01)
        pytest.fail(f"{what}: not within {WAIT_S} s; seen: {self.newest}")

    def position(self) -> Any:
        """Returns the arm's joints (7,), by name."""
        message = self.until(lambda: self.newest.get("joint_states"), "joint states")
        return np.array([message.position[message.name.index(joint)] for joint in JOINTS])

    def reaches(self, target: Any, within: float = 0.02) -> None:
        self.until(lambda: np.abs(self.position() - target).max() < within, f"joints at {target}")

    def call(self, kind: str, name: str, **fields: Any) -> Any:
        client = self.node.create_client(kind, name)
        assert client.wait(WAIT_S), f"{name} is not there"
        return client.call(self.node.message(f"{kind}_Request", **fields), WAIT_S)

    def trigger(self, name: str) -> tuple[bool, str]:
        response = self.call("std_srvs/srv/Trigger", f"sim_arm/{name}")
        return response.success, response.message

    def switch(self, activate: list[str], deactivate: list[str], strictness: int = 2) -> tuple[bool, str]:
        response = self.call(
            "controller_manager_msgs/srv/SwitchController",
            "controller_manager/switch_controller",
            activate_controllers=activate,
            deactivate_controllers=deactivate,
            strictness=strictness,
        )
        return response.ok, response.message

    def set_seed(self, seed: int) -> None:
        value = self.node.message("rcl_interfaces/msg/ParameterValue", type=2, integer_value=seed)
        parameter = self.node.message("rcl_interfaces/msg/Parameter", name="episode_seed", value=value)
        response = self.call(
            "rcl_interfaces/srv/SetParameters", "sim_arm/set_parameters", parameters=[parameter]
        )
        assert response.results[0].successful, response.results[0].reason

    def goal(self, *rows: tuple[float, list[float]], joints: list[str] | None = None) -> Any:
        points = []
        for time_s, positions in rows:
            nanoseconds = round(1e9 * time_s)
            at = self.node.message(
                "builtin_interfaces/msg/Duration", sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9
            )
            points.append(
                self.node.message(
                    "trajectory_msgs/msg/JointTrajectoryPoint",
                    positions=np.array(positions),
                    time_from_start=at,
                )
            )
        message = self.node.message(
            "trajectory_msgs/msg/JointTrajectory", joint_names=joints or JOINTS, points=points
        )
        return self.node.message(f"{FOLLOW}_Goal", trajectory=message)


@pytest.fixture(scope="module", name="arm")
def serve() -> Generator[Seen]:
    """One arm for the tests of this module; each begins at home with the controllers of the start."""
    with pytest.MonkeyPatch.context() as patch:
        own_domain(patch)
        with serving() as facts:
            node = open_node("test")
            seen = Seen(node)
            seen.watch("sensor_msgs/msg/JointState", "joint_states")
            seen.watch("std_msgs/msg/String", "sim_arm/safety_status", qos=LATCHED)
            seen.watch("geometry_msgs/msg/PoseStamped", "objects/cube/pose")
            try:
                yield seen
            finally:
                node.close()
        assert facts[0]["cycles"] > 10
        assert facts[0]["command_hz"] == 200.0


def home(*changes: tuple[int, float]) -> list[float]:
    target = list(HOME)
    for joint, change in changes:
        target[joint] += change
    return target


def test_it_looks_like_ros2_control(arm: Seen) -> None:
    state = arm.until(lambda: arm.newest.get("joint_states"), "joint states")
    assert state.name == [*JOINTS, "finger_joint1", "finger_joint2"]
    assert state.header.frame_id == "base_link"
    assert np.isnan(state.effort[7:]).all()  # nobody measures the fingers'
    assert abs(state.header.stamp.sec - time.time()) < 5
    assert arm.position() == pytest.approx(HOME, abs=0.03)
    assert arm.until(lambda: "/sim_arm" in arm.node.node_names(), "the node")
    listed = arm.call(
        "controller_manager_msgs/srv/ListControllers", "controller_manager/list_controllers"
    ).controller
    assert {one.name: one.state for one in listed} == {
        "joint_state_broadcaster": "active",
        JTC: "active",
        POSITION: "inactive",
        "forward_velocity_controller": "inactive",
        "gripper_controller": "active",
    }
    (jtc,) = (one for one in listed if one.name == JTC)
    assert jtc.type == "joint_trajectory_controller/JointTrajectoryController"
    assert jtc.claimed_interfaces == [f"{joint}/position" for joint in JOINTS]
    hardware = arm.call(
        "controller_manager_msgs/srv/ListHardwareInterfaces", "controller_manager/list_hardware_interfaces"
    )
    claimed = [one.name for one in hardware.command_interfaces if one.is_claimed]
    assert claimed == [f"{name}/position" for name in (*JOINTS, "finger_joint1", "finger_joint2")]
    assert len(hardware.state_interfaces) == 21
    components = arm.call(
        "controller_manager_msgs/srv/ListHardwareComponents", "controller_manager/list_hardware_components"
    ).component
    assert [(one.name, one.state.label) for one in components] == [("sim_arm", "active")]
    kinds = arm.call(
        "controller_manager_msgs/srv/ListControllerTypes", "controller_manager/list_controller_types"
    ).types
    assert "joint_trajectory_controller/JointTrajectoryController" in kinds


def test_robot_description_names_the_limits(arm: Seen) -> None:
    arm.watch("std_msgs/msg/String", "robot_description", qos=LATCHED)
    text = arm.until(lambda: arm.newest.get("robot_description"), "robot_description").data
    assert '<joint name="joint4" type="revolute">' in text
    assert '<limit lower="-3.0718" upper="-0.0698" velocity="2.175" effort="87"/>' in text


def test_a_goal_is_followed_with_feedback(arm: Seen) -> None:
    client = arm.node.create_action_client(FOLLOW, f"{JTC}/follow_joint_trajectory")
    assert client.wait(WAIT_S)
    feedback: list[Any] = []
    target = home((0, 0.2), (3, 0.1))
    goal = client.send(arm.goal((0.5, target)), WAIT_S, feedback.append)
    assert goal.accepted
    status, result = goal.result(WAIT_S)
    assert (status, result.error_code, result.error_string) == (4, 0, "Goal successfully reached!")
    arm.reaches(target, within=0.05)
    assert feedback
    assert feedback[-1].joint_names == JOINTS
    error = feedback[-1].desired.positions - feedback[-1].actual.positions
    assert feedback[-1].error.positions == pytest.approx(error)


def test_bad_goals_are_rejected(arm: Seen) -> None:
    client = arm.node.create_action_client(FOLLOW, f"{JTC}/follow_joint_trajectory")
    assert client.wait(WAIT_S)
    assert not client.send(arm.goal((0.5, HOME), joints=["elbow", *JOINTS[1:]]), WAIT_S).accepted
    assert not client.send(arm.goal((0.5, HOME), (0.5, HOME)), WAIT_S).accepted
    assert not client.send(arm.goal(), WAIT_S).accepted


def test_a_trajectory_of_the_topic_is_followed(arm: Seen) -> None:
    publisher = arm.node.create_publisher("trajectory_msgs/msg/JointTrajectory", f"{JTC}/joint_trajectory")
    arm.until(lambda: publisher.num_subscriptions, "the controller")
    target = home((6, 0.3))
    swapped = [*JOINTS[1:], JOINTS[0]]
    publisher.publish(arm.goal((0.3, [*target[1:], target[0]]), joints=swapped).trajectory)
    arm.reaches(target)


def test_a_cancelled_goal_holds_and_a_new_one_aborts_the_old(arm: Seen) -> None:
    client = arm.node.create_action_client(FOLLOW, f"{JTC}/follow_joint_trajectory")
    assert client.wait(WAIT_S)
    far = home((0, 1.0))
    first = client.send(arm.goal((20.0, far)), WAIT_S)
    second = client.send(arm.goal((20.0, far)), WAIT_S)
    status, result = first.result(WAIT_S)
    assert (status, result.error_code) == (6, -1)
    assert result.error_string == "Current goal cancelled due to new incoming action."
    assert second.cancel(WAIT_S)
    status, result = second.result(WAIT_S)
    assert (status, result.error_code) == (5, 0)
    assert arm.position()[0] < 0.9


def test_forward_positions_after_a_switch(arm: Seen) -> None:
    done, text = arm.switch([POSITION], [])
    assert not done
    assert "'joint1/position' is already claimed by 'joint_trajectory_controller'" in text
    commands = arm.node.create_publisher("std_msgs/msg/Float64MultiArray", f"{POSITION}/commands")
    arm.until(lambda: commands.num_subscriptions, "the controller")
    assert arm.switch([POSITION], [JTC]) == (True, "")
    target = home((0, -0.2), (5, 0.1))
    commands.publish(arm.node.message("std_msgs/msg/Float64MultiArray", data=np.zeros(3)))  # ignored
    commands.publish(arm.node.message("std_msgs/msg/Float64MultiArray", data=np.array(target)))
    arm.reaches(target)
    assert arm.switch([JTC], [POSITION]) == (True, "")


def test_the_gripper_closes(arm: Seen) -> None:
    kind = "control_msgs/action/GripperCommand"
    client = arm.node.create_action_client(kind, "gripper_controller/gripper_cmd")
    assert client.wait(WAIT_S)
    command = arm.node.message("control_msgs/msg/GripperCommand", position=0.01)
    status, result = client.send(arm.node.message(f"{kind}_Goal", command=command), WAIT_S).result(WAIT_S)
    assert (status, result.reached_goal, result.stalled) == (4, True, False)
    assert result.position == pytest.approx(0.01, abs=0.003)


def test_a_protective_stop_lasts_until_it_is_cleared(arm: Seen) -> None:
    client = arm.node.create_action_client(FOLLOW, f"{JTC}/follow_joint_trajectory")
    assert client.wait(WAIT_S)
    goal = client.send(arm.goal((20.0, home((0, 1.0)))), WAIT_S)
    assert arm.trigger("protective_stop") == (True, "stopped: asked for by ~/protective_stop")
    status, result = goal.result(WAIT_S)
    assert (status, result.error_string) == (6, "Aborted: asked for by ~/protective_stop")
    arm.until(
        lambda: arm.newest["sim_arm/safety_status"].data == "asked for by ~/protective_stop", "the status"
    )
    assert not client.send(arm.goal((0.5, HOME)), WAIT_S).accepted
    arm.until(lambda: arm.trigger("clear_protective_stop")[0], "the arm at rest")
    arm.until(lambda: arm.newest["sim_arm/safety_status"].data == "", "the status")
    assert client.send(arm.goal((0.5, HOME)), WAIT_S).accepted


def test_a_reset_begins_the_episode_of_the_parameter(arm: Seen) -> None:
    from robot_rl.sim.plant import MujocoPlant

    plant = MujocoPlant("pick_cube")
    for seed in (3, 4):
        plant.reset(seed)
        arm.set_seed(seed)
        assert arm.trigger("reset") == (True, f"episode {seed}")
        cube = plant.objects()["cube"]

        def is_there(cube: Any = cube) -> bool:
            pose = arm.newest["objects/cube/pose"].pose
            at = [pose.position.x, pose.position.y, pose.position.z]
            return bool(np.abs(np.array(at) - cube[:3]).max() < 1e-3)

        arm.until(is_there, f"the cube of episode {seed}")
        arm.reaches(plant.measure().position_rad, within=1e-3)


def test_twists_move_the_tool(arm: Seen) -> None:
    twists = arm.node.create_publisher("geometry_msgs/msg/TwistStamped", "servo_node/delta_twist_cmds")
    arm.until(lambda: twists.num_subscriptions, "the servo")
    start = arm.position()

    def moves() -> bool:
        message = arm.node.message("geometry_msgs/msg/TwistStamped")
        message.twist.linear.z = 0.5
        message.header.stamp.sec, message.header.stamp.nanosec = divmod(arm.node.now_ns(), 10**9)
        twists.publish(message)
        return bool(np.abs(arm.position() - start).max() > 0.05)

    arm.until(moves, "motion")


@pytest.mark.slow
def test_a_goal_ends_with_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    own_domain(monkeypatch)
    with serving("rate_hz=100") as facts:
        node = open_node("test")
        seen = Seen(node)
        client = node.create_action_client(FOLLOW, f"{JTC}/follow_joint_trajectory")
        assert client.wait(WAIT_S)
        feedback: list[Any] = []
        goal = client.send(seen.goal((20.0, home((0, 1.0)))), WAIT_S, feedback.append)
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(goal.result(WAIT_S)))
        waiting.start()
        seen.until(lambda: feedback, "feedback")
    waiting.join()
    node.close()
    status, result = results[0]
    assert (status, result.error_string) == (6, "The arm was shut down.")
    assert facts[0]["command_hz"] == 100.0


@pytest.mark.slow
def test_cameras_and_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    own_domain(monkeypatch)
    with serving("cameras=[front]", "image_size=[48,64]", "use_sim_time=true", "camera_hz=10") as facts:
        node = open_node("test")
        seen = Seen(node)
        seen.watch("rosgraph_msgs/msg/Clock", "/clock")
        seen.watch("sensor_msgs/msg/JointState", "joint_states")
        seen.watch("sensor_msgs/msg/Image", "front/image_raw")
        seen.watch("sensor_msgs/msg/CompressedImage", "front/image_raw/compressed")
        raw = seen.until(lambda: seen.newest.get("front/image_raw"), "a picture")
        assert (raw.height, raw.width, raw.encoding, raw.step) == (48, 64, "rgb8", 192)
        assert raw.data.reshape(48, 64, 3).std() > 10
        jpeg = seen.until(lambda: seen.newest.get("front/image_raw/compressed"), "a compressed picture")
        assert bytes(jpeg.data[:3]) == b"\xff\xd8\xff"
        seen.until(lambda: seen.counts.get("front/image_raw", 0) > 3, "more pictures")
        clock = seen.until(lambda: seen.newest.get("/clock"), "/clock").clock
        # Since the arm's start, not since 1970.
        assert max(clock.sec, raw.header.stamp.sec, seen.newest["joint_states"].header.stamp.sec) < 600
        assert get_remote(node, "/sim_arm", ["use_sim_time"]) == {"use_sim_time": True}
        node.close()
    assert facts[0]["cycles"] > 10


@pytest.mark.slow
def test_pictures_have_the_rate_that_was_asked_for_and_come_over_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In simulated time, which counts periods: the rate does not depend on how busy this machine is."""
    own_domain(monkeypatch)
    pictures: list[tuple[int, Any]] = []
    ages_ms: list[float] = []
    words = (
        "cameras=[left,wrist]",
        "image_size=[32,32]",
        "camera_hz=30",
        "delay_ms=150",
        "use_sim_time=true",
    )
    with serving(*words) as facts:
        node = open_node("test")
        seen = Seen(node)
        seen.watch("rosgraph_msgs/msg/Clock", "/clock")

        def on_picture(message: Any) -> None:
            stamp_ns = nanoseconds(message.header.stamp)
            if "/clock" in seen.newest:
                ages_ms.append(1e-6 * (nanoseconds(seen.newest["/clock"].clock) - stamp_ns))
            pictures.append((stamp_ns, message.data.reshape(32, 32, 3)))

        node.create_subscription("sensor_msgs/msg/Image", "left/image_raw", on_picture)
        seen.until(lambda: len(pictures) > 20, "pictures")
        seen.set_seed(3)
        assert seen.trigger("reset") == (True, "episode 3")
        first_ns = nanoseconds(seen.newest["/clock"].clock)
        num = len(pictures)
        _, after = seen.until(lambda: pictures[num:], "a picture after the reset")[0]
        node.close()
    steps_ms = 1e-6 * np.diff([stamp for stamp, _ in pictures])
    # 30 Hz in periods of 5 ms is 30 or 35 ms, less after a late one. With 35 ms each it would be 28.6 Hz.
    assert steps_ms.min() < 34
    # Above 150 ms less the two periods by which the newest clock may be late.
    assert np.median(ages_ms) > 140
    assert min(stamp for stamp, _ in pictures[num:]) < first_ns  # it was on its way for a while
    with closing(MujocoPlant("pick_cube", image_size=(32, 32))) as plant:
        plant.reset(3)
        ours = plant.picture("left").astype(int)
        plant.reset(0)
        others = plant.picture("left").astype(int)
    # Of the new scene as soon as the reset is answered, and raw: the arm sinks by a fraction of a pixel.
    assert np.abs(after - ours).mean() < 0.5 < np.abs(after - others).mean()
    assert facts[0]["pictures"] == pytest.approx(len(pictures), abs=30)
    assert 0 < facts[0]["pictures_hz"] < 35  # only one of the cameras was wanted
    assert 0 < facts[0]["cameras_cpu_share"] < 1


@pytest.mark.slow
def test_an_unknown_camera_ends_it_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    own_domain(monkeypatch)
    code = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve-sim-arm", "cameras=[frnt]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "error: cameras=['frnt']:" in done.stderr
    assert "Did you mean 'front'?" in done.stderr
