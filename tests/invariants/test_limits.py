"""Invariant 8: the compiled model's limits and the robot file's are the same numbers, exactly."""

import numpy as np
import pytest
import yaml

from robot_rl.core.registry import table
from robot_rl.sim.robots.catalog import ROBOT_FILES
from robot_rl.sim.robots.loading import load_robot

ROBOTS = sorted(name for name in table("robot") if (ROBOT_FILES / f"{name}.yaml").is_file())


@pytest.mark.parametrize("name", ROBOTS)
def test_compiled_limits_equal_the_robot_file(name: str) -> None:
    robot = load_robot(name)
    model = robot.build().compile()
    written = yaml.safe_load((ROBOT_FILES / f"{name}.yaml").read_text())["limits"]
    ranges = np.array([model.joint(joint).range for joint in robot.arm_joints])
    np.testing.assert_array_equal(ranges[:, 0], written["position_low_rad"])
    np.testing.assert_array_equal(ranges[:, 1], written["position_high_rad"])
    assert all(model.joint(joint).limited[0] for joint in robot.arm_joints)
    forces = np.array([model.actuator(actuator).forcerange for actuator in robot.arm_actuators])
    np.testing.assert_array_equal(forces[:, 1], written["effort_n_m"])
    np.testing.assert_array_equal(forces[:, 0], -forces[:, 1])
    controls = np.array([model.actuator(actuator).ctrlrange for actuator in robot.arm_actuators])
    np.testing.assert_array_equal(controls, ranges)


@pytest.mark.parametrize("name", ROBOTS)
def test_limits_a_driver_reads_equal_the_robot_file(name: str) -> None:
    robot = load_robot(name)
    written = yaml.safe_load((ROBOT_FILES / f"{name}.yaml").read_text())["limits"]
    for key, values in written.items():
        assert getattr(robot.limits, key) == tuple(values)
    assert min(robot.limits.velocity_rad_s) > 0
    assert min(robot.limits.acceleration_rad_s2) > 0
    assert min(robot.limits.effort_n_m) > 0
