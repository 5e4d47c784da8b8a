"""Controllers cycle by cycle: what they command, when a goal ends, and how."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robot_rl.real.arm.controllers import (
    Execution,
    ForwardPositionController,
    ForwardVelocityController,
    Grip,
    GripperController,
    JointTrajectoryController,
)
from robot_rl.real.arm.trajectory import Code, TrajectoryRules, Verdict, tolerances

JOINTS = ("a", "b")


def to(*rows: tuple[float, list[float]], stamp_s: float = 0.0) -> SimpleNamespace:
    """Returns a trajectory of (time in s, positions)."""
    points = [
        SimpleNamespace(
            positions=np.array(positions),
            velocities=np.zeros(0),
            accelerations=np.zeros(0),
            effort=np.zeros(0),
            time_from_start=SimpleNamespace(sec=0, nanosec=round(1e9 * time_s)),
        )
        for time_s, positions in rows
    ]
    stamp = SimpleNamespace(sec=0, nanosec=round(1e9 * stamp_s))
    return SimpleNamespace(header=SimpleNamespace(stamp=stamp), joint_names=list(JOINTS), points=points)


def execution(message: Any, **rules: Any) -> Execution:
    allowed = tolerances(None, JOINTS, TrajectoryRules(**rules))
    assert not isinstance(allowed, Verdict)
    return Execution(message, allowed)


def follow(loop: Any, message: Any, **rules: Any) -> tuple[JointTrajectoryController, Execution]:
    controller = JointTrajectoryController(JOINTS)
    controller.activate(loop.body)
    goal = execution(message, **rules)
    controller.follow(goal)
    return controller, goal


# --- trajectories --------------------------------------------------------------------------------


def test_a_trajectory_is_followed_and_held(make_loop) -> None:
    loop = make_loop()
    controller, goal = follow(loop, to((1.0, [0.5, -0.5])))
    loop.run(0.5, controller)
    # The 50th cycle is at 0.49 s: the first began at 0.
    assert loop.plant.target == pytest.approx([0.245, -0.245])
    assert goal.verdict is None
    loop.run(0.7, controller)
    assert goal.verdict == Verdict(Code.SUCCESSFUL, "Goal successfully reached!")
    assert goal.done.is_set()
    loop.run(1.0, controller)
    assert loop.plant.position == pytest.approx([0.5, -0.5])


def test_soft_servos_follow_a_trajectory_as_the_drives_of_an_arm_do(make_loop) -> None:
    """0.5 rad/s on servos of 0.1 s lags by 0.05 rad, unless the target leads by as much."""
    loop = make_loop(lag_s=0.1)
    loop.plant.servo_s = np.full(2, 0.1)
    controller, _ = follow(loop, to((1.0, [0.5, -0.5])))
    loop.run(0.8, controller)
    assert loop.plant.target == pytest.approx([0.445, -0.445])
    assert loop.plant.position == pytest.approx([0.4, -0.4], abs=0.006)
    loop.run(0.5, controller)
    assert loop.plant.target == pytest.approx([0.5, -0.5])  # at rest nothing leads


def test_a_stamp_says_when_it_begins(make_loop) -> None:
    """ROS time is 5 s ahead; a stamp 0.2 s from now leads to the point at 0.5 s."""
    loop = make_loop()
    controller, _ = follow(loop, to((0.3, [0.5, 0.0]), stamp_s=5.2))
    for _ in range(26):
        loop.cycle(controller, ros_ns=loop.now_ns + 5 * 10**9)
    assert loop.plant.target[0] == pytest.approx(0.25)


def test_off_the_path_it_aborts_and_holds(make_loop) -> None:
    """5 mrad a cycle, 5 % of the error closed in each: 0.1 (1 - 0.95^k) behind, 0.0603 at k = 18."""
    loop = make_loop(lag_s=0.2)
    controller, goal = follow(loop, to((1.0, [0.5, 0.0])), path_tolerance_rad=0.06)
    loop.run(1.0, controller)
    assert goal.verdict is not None
    assert goal.verdict.code == Code.PATH_TOLERANCE_VIOLATED
    assert goal.verdict.text == "Aborted due to path tolerance violation: a is off by 0.0603 rad"
    assert 0.02 < loop.plant.position[0] < 0.1
    assert loop.plant.velocity == pytest.approx([0, 0], abs=1e-6)


def test_a_goal_that_is_not_reached_in_time_aborts(make_loop) -> None:
    loop = make_loop(lag_s=1e9)  # it does not move at all
    controller, goal = follow(loop, to((0.1, [0.5, 0.0])), goal_time_s=0.5)
    loop.run(0.61, controller)
    assert goal.verdict is None
    loop.run(0.02, controller)
    assert goal.verdict is not None
    assert goal.verdict.code == Code.GOAL_TOLERANCE_VIOLATED
    assert goal.verdict.text == (
        "Aborted due to goal_time exceeding by 0.010000 seconds: a is off by 0.5000 rad"
    )


def test_a_goal_waits_for_the_arm_to_settle(make_loop) -> None:
    loop = make_loop(lag_s=0.1)
    controller, goal = follow(loop, to((0.5, [0.5, 0.0])))
    loop.run(0.51, controller)
    assert goal.verdict is None  # it is 0.1 rad behind and moving
    loop.run(1.0, controller)
    assert goal.verdict == Verdict(Code.SUCCESSFUL, "Goal successfully reached!")


def test_a_new_goal_aborts_the_old_and_begins_where_the_arm_is(make_loop) -> None:
    loop = make_loop()
    controller, first = follow(loop, to((1.0, [0.5, 0.0])))
    loop.run(0.5, controller)
    second = execution(to((1.0, [0.0, 0.0])))
    controller.follow(second)
    assert first.verdict == Verdict(Code.INVALID_GOAL, "Current goal cancelled due to new incoming action.")
    loop.cycle(controller)
    assert loop.plant.target[0] == pytest.approx(0.245)
    loop.run(1.1, controller)
    assert second.verdict is not None
    assert second.verdict.code == Code.SUCCESSFUL
    assert loop.plant.position[0] == pytest.approx(0.0)


def test_a_cancelled_goal_holds(make_loop) -> None:
    loop = make_loop()
    controller, goal = follow(loop, to((1.0, [0.5, 0.0])))
    loop.run(0.5, controller)
    loop.body.read(0)
    controller.cancel(goal, loop.body)
    assert goal.verdict == Verdict(Code.SUCCESSFUL, "Goal cancelled; holding position.")
    loop.run(0.5, controller)
    assert loop.plant.position[0] == pytest.approx(0.245)
    controller.cancel(goal, loop.body)  # late: another goal might run by now
    assert goal.verdict == Verdict(Code.SUCCESSFUL, "Goal cancelled; holding position.")


# --- forward commands ----------------------------------------------------------------------------


def test_positions_are_passed_on(make_loop) -> None:
    loop, controller = make_loop(), ForwardPositionController(JOINTS)
    loop.plant.position = np.array([0.3, 0.3])
    loop.body.read(0)
    controller.activate(loop.body)
    loop.cycle(controller)
    assert loop.plant.target.tolist() == [0.3, 0.3]  # it holds until somebody says otherwise
    controller.set(np.array([0.2, 0.4]))
    loop.cycle(controller)
    assert loop.plant.target.tolist() == [0.2, 0.4]


def test_speeds_are_integrated_and_limited(make_loop) -> None:
    """Joint a may do 1 rad/s: 0.5 s of 3 rad/s are 0.5 rad, and 0.5 s of -0.4 rad/s -0.2."""
    loop, controller = make_loop(), ForwardVelocityController(JOINTS)
    controller.activate(loop.body)
    for _ in range(50):
        controller.set(np.array([3.0, -0.4]))
        loop.cycle(controller)
    assert loop.plant.position == pytest.approx([0.5, -0.2])
    for _ in range(200):
        controller.set(np.array([3.0, -0.4]))
        loop.cycle(controller)
    assert loop.plant.position == pytest.approx([1.0, -1.0])  # a is at its limit
    assert loop.body.num_beyond_limits == 0


def test_soft_servos_have_a_speed_at_once_and_end_it_at_once(make_loop) -> None:
    """As the drives of an arm that takes speeds: it neither lags by 0.05 rad, nor goes on by as much."""
    loop, controller = make_loop(lag_s=0.1), ForwardVelocityController(JOINTS)
    loop.plant.servo_s = np.full(2, 0.1)
    controller.activate(loop.body)
    for cycle in range(100):
        controller.set(np.array([0.5 if cycle < 50 else 0.0, 0.0]))
        loop.cycle(controller)
        if cycle == 49:
            assert loop.plant.position[0] == pytest.approx(0.25, abs=0.006)  # a cycle is 0.005 rad
            assert loop.plant.velocity[0] == pytest.approx(0.5, abs=1e-3)
    assert loop.plant.position[0] == pytest.approx(0.25, abs=0.006)
    for _ in range(300):  # at its limit it stays, whatever the speed was
        controller.set(np.array([1.0, 0.0]))
        loop.cycle(controller)
    for _ in range(100):
        controller.set(np.zeros(2))
        loop.cycle(controller)
    assert loop.plant.position[0] == pytest.approx(1.0, abs=1e-3)


def test_silence_ends_a_speed(make_loop) -> None:
    loop, controller = make_loop(), ForwardVelocityController(JOINTS, timeout_s=0.1)
    controller.activate(loop.body)
    controller.set(np.array([1.0, 0.0]))
    loop.run(2.0, controller)
    assert 0.09 <= loop.plant.position[0] <= 0.11


def test_without_a_time_out_a_speed_goes_on_as_in_ros2_control(make_loop) -> None:
    loop, controller = make_loop(), ForwardVelocityController(JOINTS, timeout_s=None)
    controller.activate(loop.body)
    controller.set(np.array([0.4, 0.0]))
    loop.run(2.0, controller)
    assert loop.plant.position[0] == pytest.approx(0.8)


# --- gripper -------------------------------------------------------------------------------------


def test_the_gripper_reaches(make_loop) -> None:
    """1 mm a cycle: from 40 to 12 mm, which is within 2 mm of 10, in 28 cycles; one more sees it."""
    loop, controller = make_loop(), GripperController(("finger",))
    controller.activate(loop.body)
    grip = Grip(0.01)
    controller.go(grip)
    loop.run(0.28, controller)
    assert not grip.done.is_set()
    loop.cycle(controller)
    assert grip.done.is_set()
    assert (grip.reached, grip.stalled) == (True, False)


def test_the_gripper_holds_a_thing(make_loop) -> None:
    loop, controller = make_loop(), GripperController(("finger",))
    loop.plant.stuck_at = 0.02
    controller.activate(loop.body)
    grip = Grip(0.0)
    controller.go(grip)
    loop.run(0.6, controller)
    assert not grip.done.is_set()
    loop.run(0.2, controller)
    assert grip.done.is_set()
    assert (grip.reached, grip.stalled) == (False, True)
    controller.set(0.04)
    loop.run(0.3, controller)
    assert loop.plant.opening == pytest.approx(0.04)
