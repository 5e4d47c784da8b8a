"""How the ROS 2 arm is held, and what stops it where nobody holds it: over a graph in this process."""

import re
from dataclasses import replace

import pytest

from robot_rl.core.errors import DeviceError
from tests.real.drivers.ros_graph import message
from tests.real.drivers.test_ros2_arm import CONFIG, FORWARD, JTC, Slide


@pytest.mark.parametrize("command", ["position", "trajectory", "pose"])
def test_a_loaded_arm_does_not_sink_with_a_hundred_holds(make, monkeypatch, command):
    """Joint a hangs 0.05 rad below whatever it is told."""
    monkeypatch.setattr("robot_rl.real.drivers.ros2_arm.resolve", lambda *_, **__: lambda robot: Slide())
    monkeypatch.setattr("robot_rl.real.drivers.ros2_commands._SERVO_S", 0.0)
    graph = make(replace(CONFIG, command=command))
    graph.arm.connect()
    graph.arm.start()

    def told():
        match command:
            case "position":
                return graph.node.on(f"{FORWARD}/commands")[-1].data[0]
            case "trajectory":
                return graph.node.on(f"{JTC}/joint_trajectory")[-1].points[-1].positions[0]
            case _:
                return graph.node.on("servo_node/pose_target_cmds")[-1].pose.position.x

    if command == "trajectory":
        graph.plan([[0.3, 0.1], [0.4, 0.1]])
    else:
        graph.command(0.4, 0.1)
    graph.now_ns += 200_000_000
    for number in range(100):
        graph.joints([0.1, 0.0, told() - 0.05], stamp_ns=2 + number, velocity=[0.0, 0.0, 0.0])
        graph.arm.hold()
        assert told() == 0.4
    graph.joints([0.1, 0.0, 0.1], stamp_ns=200, velocity=[0.0, 0.0, 0.0])  # more than a lead away
    graph.arm.hold()
    assert told() == 0.1
    graph.arm.stop("test")
    graph.joints([0.1, 0.0, 0.0], stamp_ns=201, velocity=[0.0, 0.0, 0.0])  # others moved it meanwhile
    graph.arm.start()
    graph.arm.hold()
    assert told() == 0.0


@pytest.mark.parametrize("action", ["plan", "hold"])
def test_a_driver_that_is_stopped_while_it_sends_does_not_send_late(make, monkeypatch, action):
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    graph.joints([0.0, 0.0, 1.0], stamp_ns=2, velocity=[0.0, 0.0, 0.5])
    build = graph.node.message

    def slowly(kind, **fields):
        graph.now_ns += 1_500_000_000 if kind.endswith("/JointTrajectory") else 0
        return build(kind, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(graph.node, "message", slowly)
        if action == "plan":
            graph.plan([[1.1, 0.0], [1.2, 0.0]], start_ns=graph.now_ns)
        else:
            graph.arm.hold()
    assert graph.node.on(f"{JTC}/joint_trajectory") == []
    for number in range(12):  # the first states may have waited in a queue
        graph.joints([0.0, 0.0, 1.0], stamp_ns=3 + number, velocity=[0.0, 0.0, 0.0])
    graph.arm.hold()  # nothing was sent that it could go on with
    assert graph.node.on(f"{JTC}/joint_trajectory")[-1].points[-1].positions[0] == 1.0


def test_speeds_count_how_far_the_arm_went_since_it_was_measured(make):
    graph = make(replace(CONFIG, command="velocity", command_timeout_s=0.25))
    graph.arm.connect()
    graph.arm.start()
    graph.joints([0.1, 0.0, 0.2], stamp_ns=2, velocity=[0.0, 0.0, 1.0])
    graph.now_ns += 20_000_000  # 0.02 rad farther
    graph.command(0.23, 0.1)
    graph.now_ns += 480_000_000  # nobody knows: 50 ms count
    graph.command(0.23, 0.1)
    sent = [each.data[0] for each in graph.node.on("forward_velocity_controller/commands")]
    assert sent == pytest.approx([0.1, -0.2])  # 0.01 and -0.02 rad, over 0.1 s


def test_a_pose_arm_that_servo_has_stopped_is_not_moved_by_a_hold(make, monkeypatch):
    """A driver that woke up found the arm 0.03 rad short of its last target, and finished the way."""
    monkeypatch.setattr("robot_rl.real.drivers.ros2_arm.resolve", lambda *_, **__: lambda robot: Slide())
    monkeypatch.setattr("robot_rl.real.drivers.ros2_commands._SERVO_S", 0.0)
    graph = make(replace(CONFIG, command="pose"))
    graph.arm.connect()
    graph.arm.start()
    graph.command(0.4, 0.1)
    graph.now_ns += 260_000_000
    graph.joints([0.1, 0.0, 0.37], stamp_ns=2, velocity=[0.0, 0.0, 0.0])
    graph.arm.hold()
    assert len(graph.node.on("servo_node/pose_target_cmds")) == 1


def test_a_braking_arm_that_is_held_again_goes_to_the_same_place(make):
    """From 2 rad/s to rest in 0.1 s are 0.1 rad; the arm lags a little, and overshoots by 2 mrad."""
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    for number, (position, speed) in enumerate([(1.0, 2.0), (1.07, 0.8), (1.102, 0.1), (1.1, -0.05)]):
        graph.joints([0.0, 0.0, position], stamp_ns=2 + number, velocity=[0.0, 0.0, speed])
        graph.arm.hold()
        point = graph.node.on(f"{JTC}/joint_trajectory")[-1].points[-1]
        assert point.positions.tolist() == pytest.approx([1.1, 0.0]), number


@pytest.mark.parametrize("offset", [0.5, -0.5])
def test_limits_of_a_hold_are_those_of_the_model(make, offset):
    """The model's limits of 2 rad are at 1.5 and 2.5 rad of the arm."""
    graph = make(replace(CONFIG, command="trajectory"), offset_rad=(offset, 0.0))
    graph.arm.connect()
    graph.arm.start()
    graph.joints([0.0, 0.0, 3.0], stamp_ns=2, velocity=[0.0, 0.0, 1.0])
    graph.arm.hold()
    point = graph.node.on(f"{JTC}/joint_trajectory")[0].points[-1]
    assert point.positions.tolist() == pytest.approx([2.0 - offset, 0.0])


def test_a_controller_is_switched_off_although_the_hold_fails(make, monkeypatch):
    graph = make()
    graph.arm.connect()
    graph.arm.start()
    monkeypatch.setattr(graph.arm._stream, "hold", lambda _: (_ for _ in ()).throw(DeviceError("no line")))
    with pytest.raises(DeviceError, match="no line"):
        graph.arm.stop("test")
    assert graph.controllers[FORWARD][0] == "inactive"


def test_cartesian_commands_are_of_the_models_joints(make, monkeypatch):
    """A joint that is at 0.2 rad by its encoder is at 0.7 rad of the model."""
    monkeypatch.setattr("robot_rl.real.drivers.ros2_arm.resolve", lambda *_, **__: lambda robot: Slide())
    monkeypatch.setattr("robot_rl.real.drivers.ros2_commands._SERVO_S", 0.0)
    graph = make(replace(CONFIG, command="pose"), offset_rad=(0.5, 0.0))
    graph.arm.connect()
    graph.arm.start()
    graph.command(0.2, 0.1)
    (sent,) = graph.node.on("servo_node/pose_target_cmds")
    assert [sent.pose.position.x, sent.pose.position.y] == [0.7, 0.1]


@pytest.mark.parametrize(
    ("config", "parameter", "value", "refusal"),
    [
        ({"command": "velocity"}, "command_timeout", 0.2, ""),
        ({"command": "velocity"}, "of_another_kind", 5.0, ""),
        ({"command": "velocity"}, "cmd_timeout", 0.5, "forward_velocity_controller has cmd_timeout = 0.5"),
        ({"command": "velocity"}, "command_timeout", 0.0, "command_timeout = 0, the station file says"),
        (
            {"command": "twist", "command_timeout_s": None},
            "moveit_servo.incoming_command_timeout",
            0.3,
            "servo_node has moveit_servo.incoming_command_timeout = 0.3, the station file says that it stops "
            "0.1 s after the last command",
        ),
    ],
)
def test_a_controller_that_does_not_stop_by_itself_is_refused(
    make, monkeypatch, config, parameter, value, refusal
):
    monkeypatch.setattr("robot_rl.real.drivers.ros2_arm.resolve", lambda *_, **__: lambda robot: Slide())
    graph = make(replace(CONFIG, **{"command_timeout_s": 0.25, **config}))

    def parameters(request):
        (name,) = request.names
        kind = {"type": 3, "double_value": value} if name == parameter else {"type": 0}
        values = [message("rcl_interfaces/msg/ParameterValue", **kind)]
        return message("rcl_interfaces/srv/GetParameters_Response", values=values)

    for node in ("forward_velocity_controller", "servo_node"):
        graph.node.services[f"{node}/get_parameters"] = parameters
    if refusal:
        with pytest.raises(DeviceError, match=re.escape(refusal)):
            graph.arm.connect()
    else:
        graph.arm.connect()
    assert graph.node.clients == 0


def test_an_arm_that_is_held_twice_at_once_goes_on_with_its_ramp(make):
    """A stop holds, and holds again when the controller is taken away: the first one is still on its way.

    Found in a flight of the fault campaign: a joint at 2.6 rad/s that was at 2.3 rad/s when the second hold
    came was told to be at the end of its ramp in 20 ms, which is 6 rad/s.
    """
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    graph.joints([0.0, 0.0, 1.0], stamp_ns=2, velocity=[0.0, 0.0, 2.0])
    graph.arm.hold()
    graph.joints([0.0, 0.0, 1.02], stamp_ns=3, velocity=[0.0, 0.0, 1.7])
    graph.arm.hold()
    soon, rest = graph.node.on(f"{JTC}/joint_trajectory")[-1].points
    # Of the ramp from 1 rad, 40 of 100 ms are over in 30 ms: 1 + 0.1 (1 - 0.6^2) rad, at 1.2 rad/s.
    assert (soon.positions[0], soon.velocities[0]) == pytest.approx((1.064, 1.2))
    assert (rest.positions[0], rest.velocities[0]) == pytest.approx((1.1, 0.0))


def test_a_ramp_that_came_late_is_not_cut_short(make):
    """By the clock it is over; the joint has half of its speed, so half of its time is left."""
    graph = make(replace(CONFIG, command="trajectory"))
    graph.arm.connect()
    graph.arm.start()
    graph.joints([0.0, 0.0, 1.0], stamp_ns=2, velocity=[0.0, 0.0, 2.0])
    graph.arm.hold()
    graph.now_ns += 90_000_000
    graph.joints([0.0, 0.0, 1.15], stamp_ns=3, velocity=[0.0, 0.0, 1.0])
    graph.arm.hold()
    soon, rest = graph.node.on(f"{JTC}/joint_trajectory")[-1].points
    assert (soon.positions[0], soon.velocities[0]) == pytest.approx((1.1 - 0.1 * 0.2**2, 0.4))
    assert rest.positions[0] == pytest.approx(1.1)
