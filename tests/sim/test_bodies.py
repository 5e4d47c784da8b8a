"""Bodies of several parts: what each part of an action moves, and that every task can be done."""

from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from robot_rl.core.registry import table
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.robots.panda_bodies import MOBILE_PANDA, TWO_PANDAS
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]
SIDES = ("left", "right")


def make(task: str, num_envs: int = 4, **config: Any) -> SimVectorEnv:
    env = SimVectorEnv(EnvConfig(task=task, num_threads=1, **config), num_envs, autoreset="disabled")
    env.reset(seed=0)
    return env


def moved(env: SimVectorEnv, action: ArrayLike, steps: int, quantity: str = "tool.pos") -> Array:
    """Returns how far something moves (B, 3) while all envs act alike."""
    before = env.view[quantity].copy()
    for _ in range(steps):
        env.step(np.tile(np.asarray(action, np.float32), (env.num_envs, 1)))
    return env.view[quantity] - before


def success(env: SimVectorEnv, act: Any) -> float:
    solved, live = np.zeros(env.num_envs, bool), np.ones(env.num_envs, bool)
    for _ in range(env.horizon):
        _, _, terminated, truncated, infos = env.step_masked(act(env.view).astype(np.float32), live)
        solved |= infos["success"]
        live &= ~(terminated | truncated)
    return float(solved.mean())


@pytest.mark.parametrize("name", sorted(table("robot")))
def test_limits_are_those_of_the_model(name: str) -> None:
    robot = load_robot(name)
    model, limits = robot.build().compile(), robot.limits
    low, high = limits.position_low_rad, limits.position_high_rad
    for joint, servo, *ends, effort in zip(
        robot.arm_joints, robot.arm_actuators, low, high, limits.effort_n_m, strict=True
    ):
        assert model.joint(joint).range.tolist() == ends
        assert model.actuator(servo).ctrlrange.tolist() == ends
        assert model.actuator(servo).forcerange.tolist() == [-effort, effort]
    for effector in robot.all_effectors:
        ends = sorted((effector.low, effector.high))
        assert ends[0] <= effector.home <= ends[1]
        lowest, highest = model.actuator(effector.actuator).ctrlrange
        assert lowest - 1e-9 <= ends[0] < ends[1] <= highest + 1e-9


def test_the_base_moves_the_tool_by_its_own_displacement() -> None:
    model = MOBILE_PANDA.build().compile()
    state = mujoco.MjData(model)
    for joint, position in zip(MOBILE_PANDA.arm_joints, MOBILE_PANDA.home_rad, strict=True):
        state.joint(joint).qpos = position
    mujoco.mj_kinematics(model, state)
    # The Panda's tool at home, 0.48 m ahead and 0.28 m above its base, which stands 0.3 m high.
    home = state.site("arm_tool").xpos.copy()
    np.testing.assert_allclose(home, [0.48, 0.0, 0.58], atol=1e-3)
    state.joint("base_x").qpos, state.joint("base_y").qpos = 0.3, -0.2
    mujoco.mj_kinematics(model, state)
    np.testing.assert_allclose(state.site("arm_tool").xpos - home, [0.3, -0.2, 0.0], atol=1e-12)
    state.joint("base_yaw").qpos = np.pi / 2  # a quarter turn to the left: ahead is then y
    mujoco.mj_kinematics(model, state)
    np.testing.assert_allclose(state.site("arm_tool").xpos, [0.3, 0.28, 0.58], atol=1e-3)


def test_a_step_of_the_base_leaves_the_arm_where_it_is() -> None:
    env = make("mobile_reach")
    assert env.action_names[:4] == ("base_x.delta", "base_y.delta", "base_yaw.delta", "tool.dx")
    base = env.view["base_x.pos"].copy()
    way = moved(env, [1, 0, 0, 0, 0, 0], 20)
    # A lead of 0.1 m at 10 per second is 1 m/s: 1 m in a second, less the start.
    assert (way[:, 0] > 0.7).all()
    np.testing.assert_allclose(way[:, 0], (env.view["base_x.pos"] - base)[:, 0], atol=0.02)
    assert np.abs(way[:, 1:]).max() < 0.02


def test_a_step_of_the_tool_leaves_the_base_where_it_is() -> None:
    env = make("mobile_reach")
    base = env.backend.bind("qpos")[:, :3].copy()
    assert (moved(env, [0, 0, 0, 0, 0, 1], 8)[:, 2] > 0.08).all()
    assert np.abs(env.backend.bind("qpos")[:, :3] - base).max() < 0.005


def test_an_arm_of_two_acts_as_the_arm_alone() -> None:
    """At equal joints and with equal actions, the targets of each are those of the Panda."""
    both, alone = make("bimanual_reach"), make("reach")
    rng = np.random.default_rng(0)
    action = rng.uniform(-1, 1, (4, 6)).astype(np.float32)
    position = both.controller.joint_positions()
    targets = both.controller.targets(action, position)
    for side in range(2):
        arm = slice(7 * side, 7 * side + 7)
        alone.backend.bind("qpos")[:, :7] = position[:, arm]
        alone.backend.forward()
        expected = alone.controller.targets(action[:, 3 * side : 3 * side + 3], position[:, arm])
        np.testing.assert_allclose(targets[:, arm], expected, atol=1e-9)


@pytest.mark.parametrize("side", [0, 1])
def test_an_action_moves_the_tool_of_its_arm_alone(side: int) -> None:
    env, action = make("bimanual_reach"), np.zeros(6)
    action[3 * side] = 0.5
    other = env.view[f"{SIDES[1 - side]}_tool.pos"].copy()
    assert (moved(env, action, 8, f"{SIDES[side]}_tool.pos")[:, 0] > 0.05).all()
    assert np.abs(env.view[f"{SIDES[1 - side]}_tool.pos"] - other).max() < 0.02  # its posture comes home


def test_two_arms_stand_alike() -> None:
    model = TWO_PANDAS.build().compile()
    state = mujoco.MjData(model)
    for joint, position in zip(TWO_PANDAS.arm_joints, TWO_PANDAS.home_rad, strict=True):
        state.joint(joint).qpos = position
    mujoco.mj_kinematics(model, state)
    left, right = (state.site(arm.tool_site) for arm in TWO_PANDAS.all_arms)
    np.testing.assert_allclose(left.xmat, right.xmat, atol=1e-12)
    np.testing.assert_allclose(left.xpos - right.xpos, [0.0, 0.7, 0.0], atol=1e-12)


def test_common_actions_have_a_turn_and_a_grip_of_each_arm() -> None:
    names = make("bimanual_reach", 1, common_actions=True).action_names
    assert names[3::4] == ("left_tool.yaw", "right_tool.yaw")
    assert names[8:] == ("left_gripper", "right_gripper")
    assert make("mobile_reach", 1, common_actions=True).action_names[-2:] == ("tool.yaw", "gripper")


def test_driving_there_and_reaching_solves_mobile_reach() -> None:
    def act(view: Any) -> Array:
        way = view["goal.pos"] - view["tool.pos"]
        base = np.clip(3 * way, -1, 1) * [1, 1, 0]
        return np.concatenate([base, np.clip(10 * way, -1, 1) * [0, 0, 1]], axis=1)

    assert success(make("mobile_reach", 32), act) >= 0.9


def test_reaching_with_both_solves_bimanual_reach() -> None:
    def act(view: Any) -> Array:
        ways = [view[f"{side}_goal.pos"] - view[f"{side}_tool.pos"] for side in SIDES]
        return np.clip(20 * np.concatenate(ways, axis=1), -1, 1)

    assert success(make("bimanual_reach", 32), act) >= 0.9
    assert success(make("bimanual_reach", 32), lambda view: act(view) * [1, 1, 1, 0, 0, 0]) == 0.0
