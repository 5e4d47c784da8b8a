"""Kinematics of a robot alone: against finite differences, and against the simulation of a task."""

import numpy as np
import pytest

from robot_rl.sim.kinematics import Kinematics
from robot_rl.sim.plant import MujocoPlant
from robot_rl.sim.robots.panda import PANDA

STEP_RAD = 1e-6


@pytest.fixture(scope="module")
def kinematics():
    return Kinematics("panda")


def test_the_tool_is_where_the_simulation_of_a_task_has_it(kinematics):
    plant = MujocoPlant("reach", "panda")
    expected = plant.tool_pose()
    pose = kinematics.tool_pose(plant.measure().position_rad)
    assert pose[:3] == pytest.approx(expected[:3], abs=1e-6)
    assert abs(pose[3:] @ expected[3:]) == pytest.approx(1.0, abs=1e-6)  # q and -q are one turn


def test_the_linear_jacobian_is_the_difference_of_positions(kinematics):
    at_rad = np.array(PANDA.home_rad) + 0.1
    columns = [
        (kinematics.tool_pose(at_rad + step)[:3] - kinematics.tool_pose(at_rad - step)[:3]) / (2 * STEP_RAD)
        for step in STEP_RAD * np.eye(7)
    ]
    assert kinematics.jacobian(at_rad)[:3] == pytest.approx(np.array(columns).T, abs=1e-6)


def test_the_last_joint_turns_the_tool_about_its_own_axis(kinematics):
    angular = kinematics.jacobian(np.array(PANDA.home_rad))[3:, 6]
    # At home the gripper points down, and the flange's axis z with it.
    assert angular == pytest.approx([0.0, 0.0, -1.0], abs=1e-3)
