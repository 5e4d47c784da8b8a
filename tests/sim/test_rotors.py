"""The quadrotor: forces and torques by hand, a lag by its formula, and what counts as holding a point."""

import math
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.sim.checkup import check_robot
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.robots.crazyflie import CRAZYFLIE, MAX_THRUST_N, MOTOR_TIME_S
from robot_rl.sim.robots.panda import PANDA
from robot_rl.sim.tasks.quadrotor_hover import GOAL_M, QuadrotorHover
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

HOVER_N = 0.027 * 9.81 / 4  # 27 g on four rotors
HOVER = 2 * HOVER_N / 0.148830 - 1  # 3.16e-10 * 21702^2 = 0.148830 N is the action +1
DT_S = 0.005
Array = NDArray[np.float32]


def flying(*thrusts_n: float) -> tuple[mujoco.MjModel, mujoco.MjData]:
    """Returns the quadrotor at rest in the air, its rotors at these thrusts already."""
    model = CRAZYFLIE.build().compile()
    state = mujoco.MjData(model)
    state.qpos[2] = 1.0
    state.act[:] = state.ctrl[:] = thrusts_n
    mujoco.mj_forward(model, state)
    return model, state


def after_one_step(*more_n: float) -> NDArray[np.float64]:
    """Returns the velocity (6,) after a step with these thrusts on top of a hover's."""
    model, state = flying(*(HOVER_N + more for more in more_n))
    mujoco.mj_step(model, state)
    return state.qvel.copy()


def make(num_envs: int = 4, **config: Any) -> SimVectorEnv:
    return SimVectorEnv(
        EnvConfig(task="quadrotor_hover", num_threads=1, **config), num_envs, autoreset="disabled"
    )


def at_goal(env: SimVectorEnv) -> None:
    """Puts all envs at rest at the goal."""
    env.reset(seed=0)
    rows = env.get_state()
    env.backend.bind("qpos")[:] = [*GOAL_M, 1, 0, 0, 0]
    env._qvel[:] = 0.0
    rows[:, : env.backend.state_size] = env.backend.read_states()
    env.set_state(rows)


def actions(env: SimVectorEnv, value: float) -> Array:
    return np.full((env.num_envs, 4), value, np.float32)


def test_the_thrusts_of_a_hover_are_the_weight() -> None:
    assert sum(effector.home for effector in CRAZYFLIE.all_effectors) == pytest.approx(0.26487)
    assert np.abs(after_one_step(0, 0, 0, 0)).max() < 1e-12


def test_without_thrust_it_falls() -> None:
    model, state = flying(0, 0, 0, 0)
    for _ in range(40):
        mujoco.mj_step(model, state)
    # Velocity first, then position: 1 m - 9.81 * 0.005^2 * (1 + 2 + .. + 40) = 1 - 9.81 * 0.0205
    assert state.qpos[2] == pytest.approx(1 - 0.201105, abs=1e-9)
    assert state.qvel[2] == pytest.approx(-9.81 * 0.2, abs=1e-9)


def test_a_rotor_follows_a_step_with_the_lag_of_its_motor() -> None:
    model, state = flying(*[HOVER_N] * 4)
    state.ctrl[:] = MAX_THRUST_N
    for _ in range(30):  # one time constant of 0.15 s
        mujoco.mj_step(model, state)
    assert MOTOR_TIME_S == 0.15
    assert state.act == pytest.approx([HOVER_N + (0.148830 - HOVER_N) * (1 - math.exp(-1))] * 4, rel=1e-5)


def test_the_rotors_that_turn_clockwise_turn_the_body_to_the_left() -> None:
    # 4 rotors x 0.01 N x 0.005964552 m on 5.9675e-6 kg m^2, for 5 ms
    expected = DT_S * 4 * 0.01 * 0.005964552 / 5.9675e-6
    assert after_one_step(-0.01, 0.01, -0.01, 0.01) == pytest.approx([0, 0, 0, 0, 0, expected], abs=1e-9)


def test_rotors_on_the_left_roll_it_right_and_those_in_front_lift_the_nose() -> None:
    # 4 rotors x 0.01 N x 0.028 m on 3.85e-6 kg m^2, for 5 ms; a raised nose turns about -y
    expected = DT_S * 4 * 0.01 * 0.028 / 3.85e-6
    left, front = (-0.01, 0.01, 0.01, -0.01), (0.01, 0.01, -0.01, -0.01)
    assert after_one_step(*left) == pytest.approx([0, 0, 0, expected, 0, 0], abs=1e-9)
    assert after_one_step(*front) == pytest.approx([0, 0, 0, 0, -expected, 0], abs=1e-9)


def test_actions_are_the_set_points_of_the_motors() -> None:
    env = make(3)
    env.reset(seed=0)
    env.step(np.array([[-1] * 4, [1] * 4, [-1, 0, HOVER, 1]], np.float32))
    np.testing.assert_allclose(
        env._ctrl, [[0] * 4, [0.14883] * 4, [0, 0.074415, HOVER_N, 0.14883]], rtol=1e-5, atol=1e-9
    )
    assert env.action_names == ("rotor1", "rotor2", "rotor3", "rotor4")
    assert env.limits is None


def test_an_action_that_is_no_number_leaves_the_motors_as_they_were() -> None:
    env = make(2)
    env.reset(seed=0)
    env.step(actions(env, 0.5))
    before = env._ctrl.copy()
    action = actions(env, -0.5)
    action[1, 2] = np.nan
    env.step(action)
    np.testing.assert_array_equal(env._ctrl[1], before[1])
    assert (env._ctrl[0] < before[0]).all()


def test_a_new_episode_shows_the_thrusts_that_it_begins_with() -> None:
    env = make(2)
    env.reset(seed=0)
    for _ in range(20):
        env.step(actions(env, 1.0))
    obs, _ = env.reset()
    shown = obs["state"][:, [env.state_names.index(f"rotor{i}.thrust") for i in range(1, 5)]]
    np.testing.assert_allclose(shown, HOVER_N, rtol=1e-6)


def test_starts_are_within_their_ranges() -> None:
    env = make(256)
    env.reset(seed=0)
    away = np.abs(env.backend.bind("qpos")[:, :3] - GOAL_M)
    tilt = 2 * np.arccos(env.backend.bind("qpos")[:, 3])
    assert 0.19 < away.max() <= 0.2
    assert 1.5 < tilt.max() <= np.pi / 2
    assert 0.95 < np.abs(env._qvel).max() <= 1.0


def test_the_point_counts_once_it_was_held() -> None:
    env = make()
    at_goal(env)
    found = [env.step(actions(env, HOVER)) for _ in range(30)]
    # Half a second at 50 Hz is 25 control steps; the episode goes on.
    assert [step[4]["success"].tolist() for step in found] == [[False] * 4] * 24 + [[True] * 4] * 6
    assert not any((step[2] | step[3]).any() for step in found)
    assert found[-1][1].tolist() == [1.0] * 4


def test_what_breaks_off_counts_anew() -> None:
    env = make(2)
    at_goal(env)
    for _ in range(20):
        env.step(actions(env, HOVER))
    rows = env.get_state()
    env.backend.bind("qpos")[0, 0] += 0.06  # the goal is 5 cm wide
    away = env.get_state()
    env.set_state(away)
    env.step(actions(env, HOVER))
    env.set_state(np.concatenate([rows[:, :-1], env.get_state()[:, -1:]], axis=1))
    successes = [env.step(actions(env, HOVER))[4]["success"].tolist() for _ in range(25)]
    assert successes.index([False, True]) == 3  # 21 steps before
    assert successes.index([True, True]) == 24  # 25 from the break


def test_a_state_row_says_how_long_the_point_was_held() -> None:
    env, other = make(), make()
    at_goal(env)
    for _ in range(24):
        env.step(actions(env, HOVER))
    other.reset(seed=9)
    other.set_state(env.get_state())
    assert other.step(actions(other, HOVER))[4]["success"].all()


def test_leaving_the_box_fails() -> None:
    env = make(2)
    at_goal(env)
    env._qvel[0, 1] = 2.0  # m/s: 1 m in half a second
    env.set_state(env.get_state())
    lost = [env.step_masked(actions(env, HOVER), None)[2].tolist() for _ in range(26)]
    assert lost[23] == [False, False]
    assert lost[25] == [True, False]


def test_the_reward_is_the_one_of_the_docstring() -> None:
    env = make(1)
    at_goal(env)
    half = math.pi / 6  # turned by 60 degrees about z
    place_m = (GOAL_M[0] + 0.3, GOAL_M[1], GOAL_M[2] - 0.4)
    env.backend.bind("qpos")[:] = [*place_m, math.cos(half), 0, 0, math.sin(half)]
    env._qvel[:] = [0, 2.0, 0, 0, 0, 0]
    env.backend.bind("act")[:] = [HOVER_N + 0.074415, HOVER_N, HOVER_N, HOVER_N]  # 1 more of [-1, 1]
    env.set_state(env.get_state())
    # 1 - (2 * 0.5 + 0.5 * sin^2(30 deg) + 0.05 * 2^2 + 0.1 * 1^2) / 2 = 1 - (1 + 0.125 + 0.2 + 0.1) / 2
    assert QuadrotorHover().dense_reward(env.view) == pytest.approx([0.2875], abs=1e-5)


PARTS = [
    ({"kind": "rotors"}, "7 arm_joints, kind rotors has none|0 effectors, kind rotors has at least one"),
    ({"kind": "two_arms"}, "got 0 entries of arms, kind two_arms has 2"),
    ({"effectors": CRAZYFLIE.effectors}, "got 4 effectors, kind arm has none"),
    ({"kind": "hand", "arm_joints": (), "arm_actuators": (), "home_rad": (), "limits": CRAZYFLIE.limits},
     "got 0 arm_joints, kind hand has at least one"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), PARTS)
def test_parts_that_make_no_body_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(PANDA, **change)


def test_what_needs_an_arm_refuses_rotors() -> None:
    with pytest.raises(ConfigError, match=r"task: got 'quadrotor_hover', allowed: none: .* of kind rotors"):
        check_robot("crazyflie", ["quadrotor_hover"])
    with pytest.raises(ConfigError, match=r"env.robot: got crazyflie, of kind rotors; env.domain needs one"):
        make(1, domain=DomainConfig(damping=(0.5, 2.0)))
    with pytest.raises(ConfigError, match=r"env.robot: got crazyflie.*what is measured on a station"):
        Mirror(EnvConfig(task="quadrotor_hover"))
