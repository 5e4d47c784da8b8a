"""Cartesian commands: scale, time-out, limits."""

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.real.arm.servo import PoseTarget, Servo, ServoConfig, Twist
from robot_rl.real.drivers.ros2_commands import ServoStream
from robot_rl.real.station import Ros2Config
from tests.real.drivers.ros_graph import FakeNode
from tests.real.supervisor.rig import two_joint_station


class Sink:
    """Stands between servo and body, as a position controller does."""

    def __init__(self, servo: Servo) -> None:
        self.servo = servo

    def update(self, cycle, body) -> None:
        target = self.servo.update(cycle, body)
        if target is not None:
            body.target_rad = target


class Slide:
    """Joint a moves the tool along x, joint b along y."""

    def tool_pose(self, position_rad):
        return np.array([*position_rad, 0.0, 1.0, 0.0, 0.0, 0.0])

    def jacobian(self, position_rad):
        return np.eye(6, 2)


def twist(x: float, stamp_ns: int, *, in_tool_frame: bool = False) -> Twist:
    return Twist(stamp_ns, np.array([x, 0, 0, 0, 0, 0]), in_tool_frame)


def test_a_unitless_twist_is_a_share_of_the_scale(make_loop) -> None:
    """Half of 0.4 m/s for half a second is 0.1 m, of which damping takes 1 / (1 + 0.05^2)."""
    loop, servo = make_loop(), Servo()
    for _ in range(50):
        servo.take(twist(0.5, loop.now_ns))
        loop.cycle(Sink(servo))
    assert loop.plant.position == pytest.approx([0.1 / 1.0025, 0.0], abs=1e-4)


def test_speed_units(make_loop) -> None:
    loop, servo = make_loop(), Servo(ServoConfig(command_in_type="speed_units"))
    for _ in range(50):
        servo.take(twist(0.5, loop.now_ns))
        loop.cycle(Sink(servo))
    assert loop.plant.position[0] == pytest.approx(0.25 / 1.0025, abs=1e-4)


def test_the_drivers_twists_bring_a_soft_arm_to_its_target_over_a_slow_line(make_loop) -> None:
    """Servos of 0.1 s and a line of 50 ms: closed in 0.3 s it overshoots by 4 %, in 0.1 s by 25 %."""
    loop, servo, node = make_loop(lag_s=0.1), Servo(), FakeNode()
    config = Ros2Config(command="twist")
    stream = ServoStream(node, config, Slide(), two_joint_station())  # a lookahead of 0.1 s
    target, way = np.array([0.1, -0.05]), []
    for _ in range(300):
        stream.send(target, loop.plant.measure())
        sent = node.on(stream.topic)[max(0, len(node.published) - 6)].twist.linear
        servo.take(Twist(loop.now_ns, np.array([sent.x, sent.y, 0, 0, 0, 0])))
        loop.cycle(Sink(servo))
        way.append(loop.plant.position / target)
    assert np.max(way) < 1.06
    assert np.array(way[150:]) == pytest.approx(1.0, abs=0.02)


def test_silence_and_old_stamps_halt(make_loop) -> None:
    """One command at time 0 counts for 0.1 s: 11 cycles of 4 mm."""
    loop, servo = make_loop(), Servo()
    servo.take(twist(1.0, 0))
    loop.run(1.0, Sink(servo))
    assert loop.plant.position[0] == pytest.approx(11 * 0.004 / 1.0025, abs=1e-4)
    assert servo.num_stale == 0
    servo.take(twist(1.0, loop.now_ns - 10**9))
    loop.run(0.1, Sink(servo))
    assert loop.plant.position[0] == pytest.approx(11 * 0.004 / 1.0025, abs=1e-4)
    assert servo.num_stale == 1


def test_no_joint_goes_on_near_its_limit(make_loop) -> None:
    loop, servo = make_loop(), Servo()
    loop.plant.position = loop.plant.target = np.array([0.95, 0.0])  # 0.1 rad of margin to 1
    for x, moves in ((1.0, False), (-1.0, True)):
        start = loop.plant.position[0]
        servo.take(twist(x, loop.now_ns))
        loop.run(0.05, Sink(servo))
        assert (loop.plant.position[0] != start) == moves


def test_all_joints_slow_down_together(make_loop) -> None:
    """4 and 1 m/s are over joint a's 1 rad/s: both at a quarter."""
    loop, servo = make_loop(), Servo(ServoConfig(command_in_type="speed_units"))
    servo.take(Twist(0, np.array([4.0, 1.0, 0, 0, 0, 0])))
    loop.run(0.1, Sink(servo))
    assert loop.plant.position == pytest.approx([0.1, 0.025])


def test_a_pose_is_approached(make_loop) -> None:
    loop, servo = make_loop(), Servo()
    for _ in range(300):
        servo.take(PoseTarget(loop.now_ns, np.array([0.2, -0.3, 0.0, 1.0, 0.0, 0.0, 0.0])))
        loop.cycle(Sink(servo))
    assert loop.plant.position == pytest.approx([0.2, -0.3], abs=1e-3)


def test_a_pose_turns_the_short_way() -> None:
    """A quarter turn about z and its negative quaternion are one orientation: pi/2 about z."""
    from robot_rl.real.arm.servo import _rotation_vector

    quarter = np.array([np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)])
    none = np.array([1.0, 0.0, 0.0, 0.0])
    assert _rotation_vector(quarter, none) == pytest.approx([0, 0, np.pi / 2])
    assert _rotation_vector(-quarter, none) == pytest.approx([0, 0, np.pi / 2])
    assert _rotation_vector(none, quarter) == pytest.approx([0, 0, -np.pi / 2])
    assert _rotation_vector(quarter, quarter).tolist() == [0, 0, 0]


def test_the_input_kind_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"servo\.command_in_type: got 'm/s', allowed: unitless or speed"):
        ServoConfig(command_in_type="m/s")
