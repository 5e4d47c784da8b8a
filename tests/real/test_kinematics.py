"""Forward kinematics: by hand, and against MuJoCo's model of the same arm."""

from math import pi

import mujoco
import numpy as np
import pytest

from robot_rl.real.kinematics import JointConfig, Kinematics, KinematicsConfig, Origin
from robot_rl.real.station import load_station
from robot_rl.sim import kinematics as simulated

Z = (0.0, 0.0, 1.0)


def test_two_links_in_a_plane():
    # 1 m along y, then 0.5 m back along x; stretched out 1.5 m along x; folded onto itself 0.5 m.
    joints = {"a": JointConfig(axis=Z), "b": JointConfig(xyz=(1.0, 0.0, 0.0), axis=Z)}
    arm = Kinematics(KinematicsConfig(joints=joints, tool=Origin(xyz=(0.5, 0.0, 0.0))), ("a", "b"))
    angles = np.array([[pi / 2, -pi / 2], [0.0, 0.0], [0.0, pi]])
    expected = [[0.5, 1.0, 0.0], [1.5, 0.0, 0.0], [0.5, 0.0, 0.0]]
    assert arm.tool_m(angles) == pytest.approx(np.array(expected), abs=1e-12)
    assert arm.tool_m(angles[0]) == pytest.approx([0.5, 1.0, 0.0], abs=1e-12)
    assert arm.base_from_tool(angles.reshape(3, 1, 2)).shape == (3, 1, 4, 4)


def test_angles_of_an_origin_are_about_the_fixed_axes_x_then_y_then_z():
    # 90 degrees about x take y to z and z to -y, then about z: z stays, -y goes to x. So the joint turns
    # about x of the base, and a tool along its y points up; after a quarter turn, along -y.
    joint = JointConfig(xyz=(0.0, 0.0, 2.0), rpy=(pi / 2, 0.0, pi / 2), axis=Z)
    arm = Kinematics(KinematicsConfig(joints={"a": joint}, tool=Origin(xyz=(0.0, 1.0, 0.0))), ("a",))
    assert arm.tool_m(np.array([[0.0], [pi / 2]])) == pytest.approx(
        np.array([[0.0, 0.0, 3.0], [0.0, -1.0, 2.0]]), abs=1e-12
    )
    # 90 degrees about y take x to -z; then about x nothing was.
    tilted = JointConfig(rpy=(0.0, pi / 2, 0.0), axis=Z)
    arm = Kinematics(KinematicsConfig(joints={"a": tilted}, tool=Origin(xyz=(1.0, 0.0, 0.0))), ("a",))
    assert arm.tool_m(np.zeros(1)) == pytest.approx([0.0, 0.0, -1.0], abs=1e-12)


def test_a_third_of_a_turn_about_the_diagonal_swaps_the_axes():
    # x goes to y, y to z, z to x; the axis is given to four digits and made 1.
    joint = JointConfig(axis=(0.5774, 0.5774, 0.5774))
    arm = Kinematics(KinematicsConfig(joints={"a": joint}, tool=Origin(xyz=(1.0, 2.0, 3.0))), ("a",))
    assert arm.tool_m(np.array([2 * pi / 3])) == pytest.approx([3.0, 1.0, 2.0], abs=1e-12)


def test_the_chain_of_the_shipped_panda_is_that_of_our_model():
    station = load_station("panda_ros2")
    assert station.kinematics is not None
    ours, model = Kinematics(station.kinematics, station.joints), simulated.Kinematics("panda")
    rng = np.random.default_rng(0)
    angles = rng.uniform(station.limits.position_low_rad, station.limits.position_high_rad, (100, 7))
    frames = ours.base_from_tool(angles)
    for position_rad, frame in zip(angles, frames, strict=True):
        pose, turn = model.tool_pose(position_rad), np.empty(9)
        mujoco.mju_quat2Mat(turn, pose[3:])
        assert frame[:3, 3] == pytest.approx(pose[:3], abs=1e-6)
        assert frame[:3, :3] == pytest.approx(turn.reshape(3, 3), abs=1e-6)
