"""The ROS 2 arm over a graph in this process: real message types, hand-computed commands."""

import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.real.drivers.ros2_arm import Ros2Arm
from robot_rl.real.messages import Command, Plan
from robot_rl.real.ros2.api import DEFAULT, LATCHED, SENSOR
from robot_rl.real.station import Ros2Config
from tests.real.drivers.ros_graph import FakeNode, manager, message
from tests.real.supervisor.rig import two_joint_station

JTC, FORWARD = "joint_trajectory_controller", "forward_position_controller"
CLAIMS = ["a/position", "b/position"]
PRESENCE = "controller_manager/robot_rl_driver"
LIST = "controller_manager/list_controllers"
CONFIG = Ros2Config(finger_joints=("finger",), gripper_command="position", safety_status="safety")


class Graph:
    """An arm with its controllers, and the driver before it, on a clock that the test turns."""

    def __init__(
        self, config: Ros2Config = CONFIG, offset_rad=None, **controllers: tuple[str, list[str]]
    ) -> None:
        self.controllers = {
            JTC: ("active", CLAIMS),
            FORWARD: ("inactive", CLAIMS),
            "forward_velocity_controller": ("inactive", ["a/velocity", "b/velocity"]),
            "gripper_controller": ("active", ["finger/position"]),
            **controllers,
        }
        self.node = FakeNode(manager(self.controllers))
        self.now_ns = 1_000_000_000
        station = two_joint_station(driver="ros2", ros2=config, joint_offset_rad=offset_rad)
        self.arm = Ros2Arm(station, lambda: self.node, clock_ns=lambda: self.now_ns)
        self.node.on_subscribe = self._first_state

    def _first_state(self, topic):
        if topic == "joint_states":
            self.joints([0.1, 0.0, 0.2])

    def joints(self, position, stamp_ns=1, names=("b", "finger", "a"), **fields):
        """Joint states of b, the finger and a, in this order, 10 ms later."""
        self.now_ns += 10_000_000
        stamp = message("builtin_interfaces/msg/Time", sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
        header = message("std_msgs/msg/Header", stamp=stamp)
        self.node.hear(
            "joint_states",
            message(
                "sensor_msgs/msg/JointState", header=header, name=list(names), position=position, **fields
            ),
        )

    def command(self, *target_rad, gripper=0.5):
        self.arm.send(
            Command(number=1, stamp_ns=self.now_ns, target_rad=np.array(target_rad), gripper=gripper)
        )

    def plan(self, targets, start_ns=None, gripper=None):
        targets = np.array(targets, float)
        self.arm.send_plan(
            Plan(
                number=1,
                start_ns=self.now_ns if start_ns is None else start_ns,
                period_ns=100_000_000,
                targets_rad=targets,
                gripper=np.zeros(len(targets)) if gripper is None else np.array(gripper),
            )
        )


@pytest.fixture
def graph(make):
    made = make()
    made.arm.connect()
    return made


def until(condition):
    until_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.002)


# --- states ------------------------------------------------------------------------------------------


def test_joints_are_found_by_name_among_others_in_any_order(graph):
    graph.joints([1.0, 0.03, 2.0], stamp_ns=2, velocity=[10.0, 0.0, 20.0], effort=[5.0, 0.0, 6.0])
    state = graph.arm.read()
    assert state.position_rad.tolist() == [2.0, 1.0]
    assert state.velocity_rad_s.tolist() == [20.0, 10.0]
    assert state.effort_n_m.tolist() == [6.0, 5.0]
    assert state.gripper == 0.03
    graph.joints([3.0, 4.0], stamp_ns=3, names=("a", "b"))
    assert graph.arm.read().position_rad.tolist() == [3.0, 4.0]


def test_velocity_that_is_missing_or_nan_is_the_difference_and_effort_is_none(graph):
    graph.joints([0.0, 0.0, 1.0], stamp_ns=2)
    # a goes from 0.2 to 1.0 in 10 ms.
    assert graph.arm.read().velocity_rad_s == pytest.approx([80.0, -10.0])
    nan = float("nan")
    graph.joints([0.0, 0.0, 1.0], stamp_ns=3, velocity=[nan] * 3, effort=[nan] * 3)
    # The window is 20 ms: 0.8 rad in it.
    assert graph.arm.read().velocity_rad_s == pytest.approx([40.0, -5.0])
    assert graph.arm.read().effort_n_m is None


def test_a_stamp_that_stands_still_is_no_new_state_and_one_that_jumps_back_is(graph):
    graph.joints([0.0, 0.0, 1.0], stamp_ns=50)
    before = graph.arm.read()
    graph.joints([0.0, 0.0, 2.0], stamp_ns=50)
    assert graph.arm.read() is before  # it grows stale
    graph.joints([0.0, 0.0, 3.0], stamp_ns=20)  # the wall clock was set
    assert graph.arm.read().position_rad[0] == 3.0
    assert graph.arm.read().stamp_ns == graph.now_ns


def test_what_is_missing_at_the_start_is_named(make, monkeypatch):
    monkeypatch.setattr("robot_rl.real.drivers.ros2_arm._FIRST_STATE_S", 0.01)
    silent = make()
    silent.joints = lambda *_: None
    with pytest.raises(DeviceError) as error:
        silent.arm.connect()
    assert str(error.value) == (
        "ros2: no joint states on 'joint_states' for 0.01 s; nobody publishes there. Start the arm's "
        "bring-up (or `robot-rl serve-sim-arm`), and compare namespace and ROS_DOMAIN_ID. Nodes seen: "
        "/robot_rl_driver, /other."
    )
    other = make()
    joints = other.joints
    other.joints = lambda position: joints(position, names=("b", "finger", "c"))
    with pytest.raises(
        DeviceError, match=r"joint_states has no joint a; it has b, finger, c. Correct `joints`"
    ):
        other.arm.connect()


# --- controllers -------------------------------------------------------------------------------------


def test_the_controller_is_switched_to_and_away(graph):
    graph.arm.hold()
    assert {topic for topic, _ in graph.node.published} == {PRESENCE}  # no command before start
    graph.arm.start()
    assert graph.controllers[FORWARD][0] == "active"
    assert graph.controllers[JTC][0] == "inactive"
    graph.arm.stop("test")
    assert graph.controllers[FORWARD][0] == "inactive"
    assert graph.node.on(f"{FORWARD}/commands")[-1].data.tolist() == [0.2, 0.1]  # held, then let go


def test_a_controller_that_is_not_loaded_is_named(make):
    graph = make(replace(CONFIG, position_controller="forward_positon_controller"))
    with pytest.raises(
        DeviceError, match=r"no controller 'forward_positon_controller'. Did you mean 'forward_po"
    ):
        graph.arm.connect()


def test_a_rival_controller_of_the_same_joints_is_refused_by_name(make):
    graph = make(impedance=("active", ["b/effort"]))
    graph.arm.connect()
    with pytest.raises(
        DeviceError, match=r"ros2: impedance commands joints of this arm already. Deactivate it"
    ):
        graph.arm.start()


def test_another_publisher_of_commands_is_refused_by_name(graph):
    topic = f"{FORWARD}/commands"
    graph.node.publishers[topic].append("/teleop")
    with pytest.raises(DeviceError, match=f"ros2: /teleop commands this arm too, on '{topic}'. End it first"):
        graph.arm.start()
    graph.node.publishers[topic][:] = ["/robot_rl_driver"]
    graph.arm.start()
    graph.arm.wait(0.0)
    graph.node.publishers[topic].append("/robot_rl_driver")
    graph.now_ns += 1_000_000_000
    with pytest.raises(DeviceError, match="a second /robot_rl_driver commands this arm too"):
        graph.arm.wait(0.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {FORWARD: ("inactive", CLAIMS)},
            "ros2: forward_position_controller is inactive: somebody switched it off, or it failed. Look at "
            "the log of controller_manager.",
        ),
        (
            {"impedance": ("active", ["b/effort"])},
            "ros2: impedance commands joints of this arm too. Deactivate it with `ros2 control "
            "switch_controllers --deactivate impedance`, and end what started it.",
        ),
        (
            {FORWARD: ("inactive", CLAIMS), JTC: ("active", CLAIMS)},
            "ros2: joint_trajectory_controller commands joints of this arm too, and "
            "forward_position_controller is inactive. Deactivate it with `ros2 control switch_controllers "
            "--deactivate joint_trajectory_controller`, and end what started it.",
        ),
    ],
)
def test_joints_that_others_take_in_mid_run_are_noticed_and_given_back_by_a_new_start(
    make, monkeypatch, change, reason
):
    monkeypatch.setattr("robot_rl.real.drivers.ros2_manager._LOOK_S", 0.01)
    graph = make(impedance=("inactive", ["b/effort"]))
    graph.arm.connect()
    graph.arm.start()
    looks = graph.node.called.count(LIST)
    until(lambda: graph.node.called.count(LIST) > looks + 2)
    graph.arm.wait(0.0)  # all is well

    graph.controllers.update(change)
    with pytest.raises(DeviceError, match=f"^{re.escape(reason)}$"):
        until(lambda: graph.arm.wait(0.0))
    graph.arm.stop(reason)
    looks = graph.node.called.count(LIST)
    time.sleep(0.05)
    assert graph.node.called.count(LIST) == looks  # nobody asks while the arm is not ours
    graph.controllers["impedance"] = ("inactive", ["b/effort"])
    graph.arm.start()
    assert graph.controllers[FORWARD][0] == "active"
    until(lambda: graph.node.called.count(LIST) > looks + 2)
    graph.arm.wait(0.0)


def test_an_arm_that_another_driver_took_while_this_one_was_frozen_is_left_alone(graph):
    graph.arm.start()
    before = graph.node.on(f"{FORWARD}/commands")
    graph.now_ns += 1_100_000_000  # nothing was said for more than a second
    other = {"id": "f", "host": "gpu", "pid": 7, "station": "cell", "phase": 2}
    graph.node.hear(PRESENCE, message("std_msgs/msg/String", data=json.dumps(other)))
    with pytest.raises(
        DeviceError,
        match=r"ros2: the driver of station cell \(pid 7 on gpu, driving\) has this arm, too. End it",
    ):
        graph.arm.wait(0.0)
    graph.arm.hold()
    graph.arm.stop("the driver failed")
    assert graph.controllers[FORWARD][0] == "active"  # it is the other's
    assert graph.node.on(f"{FORWARD}/commands") == before


# --- commands ----------------------------------------------------------------------------------------


def test_positions_go_out_as_they_come_with_the_gripper(graph):
    graph.arm.start()
    graph.command(1.0, -1.0, gripper=0.7)
    assert graph.node.on(f"{FORWARD}/commands")[0].data.tolist() == [1.0, -1.0]
    until(lambda: graph.node.on("gripper_controller/commands"))
    assert graph.node.on("gripper_controller/commands")[0].data.tolist() == [0.7]
    with pytest.raises(DeviceError, match=r"command 1: got target \[nan, 0.0\], allowed: 2 finite numbers"):
        graph.command(np.nan, 0.0)
    with pytest.raises(DeviceError, match=r"`ros2.command: position` takes targets one by one"):
        graph.plan([[0.0, 0.0]])


def test_speeds_close_the_lead_within_limits_and_are_zero_on_hold(make):
    graph = make(replace(CONFIG, command="velocity", command_timeout_s=0.25))
    graph.arm.connect()
    graph.arm.start()
    # Leads of 0.1 and -1 rad over 0.1 s are 1 and -10 rad/s; 10 rad/s^2 for 100 ms, the longest step that
    # counts, allow 1 rad/s.
    graph.now_ns += 300_000_000
    graph.command(0.3, -0.9)
    graph.now_ns += 100_000_000
    graph.command(0.3, -0.9)  # another 1 rad/s reaches the limit of 2
    graph.now_ns += 100_000_000
    graph.command(0.3, -0.9)
    graph.arm.hold()
    sent = [list(each.data) for each in graph.node.on("forward_velocity_controller/commands")]
    assert np.array(sent) == pytest.approx(np.array([[1.0, -1.0], [1.0, -2.0], [1.0, -2.0], [0.0, 0.0]]))


def test_a_plan_goes_out_as_one_trajectory_that_rests_at_its_end(make):
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    graph.plan([[0.3, 0.1], [0.5, 0.1], [0.6, 0.1]])
    (sent,) = graph.node.on(f"{JTC}/joint_trajectory")
    assert (sent.header.stamp.sec, sent.header.stamp.nanosec) == (0, 0)  # from now on
    assert list(sent.joint_names) == ["a", "b"]
    times_s = [point.time_from_start.sec + 1e-9 * point.time_from_start.nanosec for point in sent.points]
    assert times_s == pytest.approx([0.1, 0.2, 0.3])
    # From 0.2 rad: (0.5 - 0.2) / 0.2 s, (0.6 - 0.3) / 0.2 s, rest.
    speeds = [list(point.velocities) for point in sent.points]
    assert np.array(speeds) == pytest.approx(np.array([[1.5, 0.0], [1.5, 0.0], [0.0, 0.0]]))


def test_an_arm_that_lags_is_not_told_to_catch_up_beyond_its_limits(make):
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    # From 0.2 rad: (0.8 - 0.2) / 0.2 s is 3 rad/s, and 2 are allowed; (0.9 - 0.6) / 0.2 s is 1.5.
    graph.plan([[0.6, 0.1], [0.8, 0.1], [0.9, 0.1]])
    (sent,) = graph.node.on(f"{JTC}/joint_trajectory")
    assert [point.velocities[0] for point in sent.points] == pytest.approx([2.0, 1.5, 0.0])


def test_an_arm_that_is_not_seen_any_more_is_not_called_back_to_where_it_was(graph):
    graph.arm.start()
    graph.command(0.5, 0.1)
    before = len(graph.node.on(f"{FORWARD}/commands"))
    graph.now_ns += 200_000_000
    graph.arm.hold()
    assert len(graph.node.on(f"{FORWARD}/commands")) == before  # it comes to rest at 0.5, its last target
    graph.joints([0.1, 0.0, 0.4], stamp_ns=2)
    graph.arm.hold()
    assert graph.node.on(f"{FORWARD}/commands")[-1].data.tolist() == [0.5, 0.1]
    graph.joints([0.1, 0.0, 0.2], stamp_ns=3)  # 0.3 rad away: more than a lead
    graph.arm.hold()
    assert graph.node.on(f"{FORWARD}/commands")[-1].data.tolist() == [0.2, 0.1]


def test_targets_whose_time_has_passed_are_left_out(make):
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    graph.plan([[0.3, 0.1], [0.5, 0.1]], start_ns=graph.now_ns - 150_000_000)
    (sent,) = graph.node.on(f"{JTC}/joint_trajectory")
    assert [point.time_from_start.nanosec for point in sent.points] == [50_000_000]
    assert sent.points[0].positions.tolist() == [0.5, 0.1]


def test_a_moving_arm_is_held_by_braking(make):
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    graph.joints([0.0, 0.0, 1.0], stamp_ns=2, velocity=[0.0, 0.0, 2.0])
    graph.arm.hold()
    point = graph.node.on(f"{JTC}/joint_trajectory")[0].points[-1]
    assert point.positions.tolist() == pytest.approx([1.1, 0.0])  # 2 rad/s to rest in 0.1 s: 0.1 rad
    assert point.time_from_start.nanosec == 100_000_000
    graph.now_ns += 50_000_000  # not seen for 50 ms, in which it went 0.1 rad
    graph.arm.hold()
    point = graph.node.on(f"{JTC}/joint_trajectory")[1].points[-1]
    assert point.positions.tolist() == pytest.approx([1.2, 0.0])
    graph.now_ns += 1_000_000  # too old to predict from: it already has a target
    graph.arm.hold()
    assert len(graph.node.on(f"{JTC}/joint_trajectory")) == 2
    graph.joints([0.0, 0.0, 1.95], stamp_ns=3, velocity=[0.0, 0.0, 2.0])
    graph.now_ns += 100_000_000
    graph.joints([0.0, 0.0, 1.95], stamp_ns=4, velocity=[0.0, 0.0, 2.0])
    graph.arm.hold()
    point = graph.node.on(f"{JTC}/joint_trajectory")[2].points[-1]
    assert point.positions.tolist() == pytest.approx([2.0, 0.0])  # its limit


def test_an_arm_that_was_not_seen_for_a_while_is_where_it_was_sent(make):
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    graph.joints([0.0, 0.0, 1.0], stamp_ns=2, velocity=[0.0, 0.0, 2.0])
    graph.plan([[0.9, 0.0], [0.8, 0.0], [0.7, 0.0]], start_ns=graph.now_ns)  # it turns round
    graph.now_ns += 150_000_000
    graph.plan([[0.8, 0.0], [0.8, 0.0]], start_ns=graph.now_ns)
    point = graph.node.on(f"{JTC}/joint_trajectory")[1].points[0]
    assert point.velocities.tolist() == pytest.approx([-0.25, 0.0])  # 0.85 to 0.8 rad in two periods of 0.1 s
    graph.now_ns += 50_000_000
    graph.arm.hold()  # at 0.825 rad and -0.5 rad/s, to rest in 0.1 s
    point = graph.node.on(f"{JTC}/joint_trajectory")[2].points[-1]
    assert point.positions.tolist() == pytest.approx([0.8, 0.0])


@pytest.mark.parametrize("command", ["position", "trajectory"])
def test_a_driver_that_wakes_up_calls_no_arm_back_to_where_it_was(make, command):
    """States that waited in a queue meanwhile come first: the arm went on to its target at 0.5 rad."""
    graph = make(replace(CONFIG, command=command))
    graph.arm.connect()
    graph.arm.start()
    if command == "trajectory":
        graph.plan([[0.4, 0.1], [0.5, 0.1]])
    else:
        graph.command(0.5, 0.1)
    graph.now_ns += 1_000_000_000
    graph.joints([0.1, 0.0, 0.2], stamp_ns=2, velocity=[0.0, 0.0, 2.0])
    graph.arm.hold()
    if command == "trajectory":
        told = graph.node.on(f"{JTC}/joint_trajectory")[-1].points[-1].positions.tolist()
    else:
        told = graph.node.on(f"{FORWARD}/commands")[-1].data.tolist()
    assert told == pytest.approx([0.5, 0.1])


def test_grippers_follow_a_plan_in_time_by_goals_and_hold_forgets_the_rest(make):
    config = replace(CONFIG, command="trajectory", gripper_command="action")
    graph = make(config)
    graph.arm.connect()
    graph.arm.start()
    graph.plan([[0.2, 0.1]] * 3, gripper=[1.0, 0.0, 1.0])
    until(lambda: len(graph.node.goals) == 1)
    graph.now_ns += 100_000_000
    until(lambda: len(graph.node.goals) == 2)
    graph.arm.hold()
    graph.now_ns += 200_000_000
    assert [goal.command.position for _, goal in graph.node.goals] == [1.0, 0.0]
    assert graph.node.goals[0][0] == "gripper_controller/gripper_cmd"
    graph.node.is_accepting = False
    graph.plan([[0.2, 0.1]], gripper=[0.5])
    until(lambda: len(graph.node.goals) == 3)
    until(lambda: graph.arm._gripper.error)
    with pytest.raises(DeviceError, match=r"ros2: gripper_controller refused opening 0.5"):
        graph.plan([[0.2, 0.1]], gripper=[0.5])


class Slide:
    """A tool that is moved along x by joint a and along y by joint b."""

    def tool_pose(self, position_rad):
        return np.array([*position_rad, 0.0, 1.0, 0.0, 0.0, 0.0])

    def jacobian(self, position_rad):
        return np.eye(6, 2)


@pytest.mark.parametrize("command", ["twist", "pose"])
def test_servo_gets_stamped_cartesian_commands(make, monkeypatch, command):
    monkeypatch.setattr("robot_rl.real.drivers.ros2_arm.resolve", lambda *_, **__: lambda robot: Slide())
    monkeypatch.setattr("robot_rl.real.drivers.ros2_commands._SERVO_S", 0.0)
    graph = make(replace(CONFIG, command=command))
    types = []

    def typed(request):
        types.append(request.command_type)
        return message("moveit_msgs/srv/ServoCommandType_Response", success=True)

    graph.node.services["servo_node/switch_command_type"] = typed
    graph.arm.connect()
    graph.arm.start()
    graph.command(0.22, 0.5)
    topic = {"twist": "servo_node/delta_twist_cmds", "pose": "servo_node/pose_target_cmds"}[command]
    (sent,) = graph.node.on(topic)
    assert (sent.header.stamp.sec, sent.header.stamp.nanosec, sent.header.frame_id) == (5, 123, "base_link")
    if command == "twist":
        # 0.02 and 0.4 rad over 3 x 0.1 s are 1/15 and 4/3 m/s: 1/6 and 10/3 of the scale 0.4; at most 1,
        # same way. 0.01 and 0.03 rad are 1/12 and 1/4 of it.
        assert types == [1]
        assert [sent.twist.linear.x, sent.twist.linear.y] == pytest.approx([0.05, 1.0])
        graph.command(0.21, 0.13)
        sent = graph.node.on(topic)[1].twist.linear
        assert [sent.x, sent.y] == pytest.approx([1 / 12, 1 / 4])
    else:
        assert types == [2]
        assert [sent.pose.position.x, sent.pose.position.y, sent.pose.orientation.w] == [0.22, 0.5, 1.0]


# --- stops -------------------------------------------------------------------------------------------


def test_stop_reasons_come_at_once_and_stay_until_a_person_clears(graph):
    graph.arm.wait(0.0)
    graph.node.hear("safety", message("std_msgs/msg/String", data="collision at joint 3"))
    assert graph.arm.wait(1.0)
    assert graph.arm.read().stop_reason == "collision at joint 3"
    with pytest.raises(
        DeviceError, match=r"the arm has stopped itself: collision at joint 3. Lift that at the arm"
    ):
        graph.arm.clear("Ada")
    graph.node.hear("safety", message("std_msgs/msg/String", data=""))
    assert graph.arm.read().stop_reason == ""


def test_the_clear_service_is_called_on_the_word_of_a_person_only(make):
    graph = make(replace(CONFIG, clear_service="clear"))
    answers = [(False, "the brake is on"), (True, "")]

    def clear(_):
        done, text = answers.pop(0)
        return message("std_srvs/srv/Trigger_Response", success=done, message=text)

    graph.node.services["clear"] = clear
    graph.arm.connect()
    graph.node.hear("safety", message("std_msgs/msg/String", data="collision"))
    graph.arm.start()
    graph.arm.stop("collision")
    assert "clear" not in graph.node.called
    with pytest.raises(DeviceError, match="ros2: clear: the brake is on"):
        graph.arm.clear("Ada")
    graph.arm.clear("Ada")
    assert graph.arm.read().stop_reason == ""


def test_e_stops_come_by_service_and_by_topic(graph):
    answer = graph.node.served["~/estop"](message("std_srvs/srv/Trigger_Request"))
    assert answer.success
    assert graph.arm.read().stop_reason == "e-stop: ~/estop was called"
    graph.arm.clear("Ada")
    assert graph.arm.read().stop_reason == ""
    graph.node.hear("~/estop", message("std_msgs/msg/Bool", data=True))
    graph.node.hear("~/estop", message("std_msgs/msg/Bool", data=False))  # let go: it stays latched
    assert graph.arm.read().stop_reason == "e-stop: true on ~/estop"


@pytest.mark.parametrize("offered", [SENSOR, DEFAULT, LATCHED], ids=["best effort", "reliable", "latched"])
def test_every_kind_of_button_is_heard(graph, offered):
    graph.node.hear("~/estop", message("std_msgs/msg/Bool", data=False), offered)
    assert graph.arm.read().stop_reason == ""
    graph.node.hear("~/estop", message("std_msgs/msg/Bool", data=True), offered)
    assert graph.arm.read().stop_reason == "e-stop: true on ~/estop"
    with pytest.raises(DeviceError, match="ros2: e-stop: true on ~/estop"):
        graph.arm.start()


def test_a_button_that_has_to_be_heard_is_silent(make):
    graph = make(replace(CONFIG, estop_max_age_s=0.5))
    graph.arm.connect()
    graph.arm.wait(0.0)
    with pytest.raises(DeviceError) as error:
        graph.arm.start()
    assert str(error.value) == (
        "ros2: the e-stop button is silent: nothing has come on ~/estop yet, allowed: 0.5 s "
        "(ros2.estop_max_age_s). Is the button on, and what publishes it?"
    )
    let_go = message("std_msgs/msg/Bool", data=False)
    graph.node.hear("~/estop", let_go, SENSOR)
    graph.arm.start()
    graph.now_ns += 500_000_000
    graph.arm.wait(0.0)
    assert graph.arm.read().stop_reason == ""  # 0.5 s are allowed
    graph.node.hear("~/estop", let_go, SENSOR)
    graph.now_ns += 510_000_000
    begun_s = time.monotonic()
    assert graph.arm.wait(5.0)  # at once: there is news
    assert time.monotonic() - begun_s < 2.5
    assert graph.arm.read().stop_reason == (
        "e-stop: the e-stop button is silent: nothing has come on ~/estop for 0.51 s, allowed: 0.5 s "
        "(ros2.estop_max_age_s). Is the button on, and what publishes it?"
    )
    graph.node.hear("~/estop", let_go, SENSOR)  # it lives again: the stop stays until a person clears it
    assert graph.arm.read().stop_reason.startswith("e-stop: the e-stop button is silent")
    graph.arm.stop("e-stop")
    graph.arm.clear("Ada")
    graph.arm.start()
    assert graph.arm.read().stop_reason == ""


def test_an_arm_that_is_not_live_waits_for_no_button(make):
    graph = make(replace(CONFIG, estop_max_age_s=0.5))
    graph.arm.connect()
    graph.now_ns += 10_000_000_000
    graph.arm.wait(0.0)
    assert graph.arm.read().stop_reason == ""
    with pytest.raises(ConfigError, match=r"ros2.estop_max_age_s: got 0.0, allowed: above 0, or null"):
        replace(CONFIG, estop_max_age_s=0.0)


def test_a_reset_sets_the_seed_and_triggers(make):
    graph = make(replace(CONFIG, reset_service="sim_arm/reset", scene_node="sim_arm"))
    seeds = []

    def set_parameters(request):
        seeds.append((request.parameters[0].name, request.parameters[0].value.integer_value))
        result = message("rcl_interfaces/msg/SetParametersResult", successful=True)
        return message("rcl_interfaces/srv/SetParametersAtomically_Response", result=result)

    graph.node.services["sim_arm/set_parameters_atomically"] = set_parameters
    graph.node.services["sim_arm/reset"] = lambda _: message("std_srvs/srv/Trigger_Response", success=True)
    graph.arm.connect()
    graph.arm.reset(42)
    assert seeds == [("episode_seed", 42)]
    assert graph.node.called[-2:] == ["sim_arm/set_parameters_atomically", "sim_arm/reset"]
    assert graph.node.clients == 0


def test_without_a_reset_service_a_person_resets(graph):
    with pytest.raises(DeviceError, match="a person puts the scene back"):
        graph.arm.reset(1)
