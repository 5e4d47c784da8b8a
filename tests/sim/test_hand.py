"""The hand: where its tips go, by hand; what an angle is; and that it can turn the object."""

import math
from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.sim.robots.claw import CLAW
from robot_rl.sim.tasks.hand_turn import HandTurn
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]
LENGTH_M = 0.045 + 0.035 + 0.030
"""Of an upright finger; its foot is 0.06 m from the middle, 0.1 m high."""


def tips(**joints_rad: float) -> Array:
    """Returns where the four tips are (4, 3), with all other joints at 0."""
    model = CLAW.build().compile()
    state = mujoco.MjData(model)
    for name, angle in joints_rad.items():
        state.joint(name).qpos = angle
    mujoco.mj_kinematics(model, state)
    return np.array([state.geom(f"finger{finger}_tip").xpos for finger in range(1, 5)])


def make(num_envs: int) -> SimVectorEnv:
    env = SimVectorEnv(EnvConfig(task="hand_turn", num_threads=1), num_envs, autoreset="disabled")
    env.reset(seed=0)
    return env


def test_the_fingers_stand_in_a_square() -> None:
    assert CLAW.num_arm_joints == 16
    height = 0.1 + LENGTH_M
    expected = [[0.06, 0, height], [0, 0.06, height], [-0.06, 0, height], [0, -0.06, height]]
    np.testing.assert_allclose(tips(), expected, atol=1e-12)


def test_a_swing_moves_a_tip_counter_clockwise_and_a_bend_inwards() -> None:
    swung = tips(finger1_swing=0.3, finger2_swing=0.3)
    sideways, height = LENGTH_M * math.sin(0.3), 0.1 + LENGTH_M * math.cos(0.3)
    np.testing.assert_allclose(swung[:2], [[0.06, sideways, height], [-sideways, 0.06, height]], atol=1e-12)
    bent = tips(finger1_bend1=0.4, finger1_bend2=0.2)
    inwards = 0.045 * math.sin(0.4) + 0.065 * math.sin(0.6)
    assert bent[0, 0] == pytest.approx(0.06 - inwards)


def test_every_joint_has_an_element_of_the_action() -> None:
    env = make(2)
    assert env.action_names == tuple(f"{joint}.delta" for joint in CLAW.arm_joints)
    action = np.zeros((2, 16), np.float32)
    action[0, 4] = 1.0
    before = env.controller.joint_positions().copy()
    for _ in range(6):
        env.step(action)
    moved = np.abs(env.controller.joint_positions() - before)
    assert moved[0].argmax() == 4
    assert moved[0, 4] > 0.15


def test_the_error_is_the_angle_between_object_and_mark() -> None:
    env = make(3)
    env.backend.bind("qpos")[:, env.index.qpos_of["object"]] = [0.5, -2.0, 3.0]
    mark = np.array([0.9, -1.2, -3.0])
    mocap = env.backend.bind("mocap_pos")
    mocap[:, 0, 0], mocap[:, 0, 1] = 0.09 * np.cos(mark), 0.09 * np.sin(mark)
    env.backend.forward()
    # 0.9 - 0.5, -1.2 + 2.0, and across pi: 2 pi - 6
    np.testing.assert_allclose(HandTurn().error_rad(env.view), [0.4, 0.8, 2 * np.pi - 6], atol=1e-9)


def test_goals_are_to_both_sides() -> None:
    env = make(128)
    mark = env.view["goal_in_object.pos"]
    angle = np.arctan2(mark[:, 1], mark[:, 0])
    assert np.abs(angle).min() >= 0.4
    assert np.abs(angle).max() <= 1.0
    assert 0.35 < (angle > 0).mean() < 0.65


def test_gripping_and_swinging_turns_the_object_to_its_goal() -> None:
    """Swing away from the goal with open fingers, grip, and swing towards it."""
    env = make(32)
    swings = np.array([name.endswith("swing.delta") for name in env.action_names])

    def angle() -> Array:
        mark = env.view["goal_in_object.pos"]
        return np.arctan2(mark[:, 1], mark[:, 0])[:, None]

    side, solved, live = np.sign(angle()), np.zeros(32, bool), np.ones(32, bool)
    for step in range(env.horizon):
        position, action = env.controller.joint_positions(), np.zeros((32, 16), np.float32)
        back = 10 * (-0.2 * side - position[:, swings])
        action[:, swings] = np.clip(back if step < 16 else 1.5 * angle(), -1, 1)
        action[:, ~swings] = 0.6 if step >= 8 else -position[:, ~swings]
        _, _, terminated, truncated, infos = env.step_masked(action, live)
        solved |= infos["success"]
        live &= ~(terminated | truncated)
    assert solved.mean() >= 0.9
