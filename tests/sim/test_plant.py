"""The arm's body: the same starts and the same motion as the vector env it comes from."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.sim.plant import MujocoPlant
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]


@pytest.fixture(name="plant")
def make_plant() -> Generator[MujocoPlant]:
    plant = MujocoPlant("pick_cube")
    yield plant
    plant.close()


def make_env() -> SimVectorEnv:
    return SimVectorEnv(EnvConfig(task="pick_cube", num_threads=1), 1, autoreset="disabled")


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5])
def test_reset_gives_the_start_of_the_env(plant: MujocoPlant, seed: int) -> None:
    env = make_env()
    plant.step(0.1)
    plant.reset(seed)
    env.reset(seed=[seed])
    assert plant.state().tobytes() == env.get_state()[0].tobytes()


@pytest.mark.parametrize("cycle_s", [0.005, 0.002, 0.01])
def test_targets_held_for_a_control_step_move_as_in_the_env(plant: MujocoPlant, cycle_s: float) -> None:
    env, rng = make_env(), np.random.default_rng(0)
    env.reset(seed=[3])
    plant.reset(3)
    servos = env.backend.bind("ctrl")
    for _ in range(10):
        env.step(rng.uniform(-1, 1, (1, len(env.action_names))).astype(np.float32))
        plant.command(servos[0, :7], float(servos[0, 7]))
        for _ in range(round(0.05 / cycle_s)):
            plant.step(cycle_s)
        assert plant.state().tobytes() == env.get_state()[0].tobytes()


def test_what_is_left_of_a_physics_step_is_kept(plant: MujocoPlant) -> None:
    """300 Hz: 1/300 s is 0.667 physics steps; after three seconds 600 of 5 ms were made."""
    state = plant.state()
    for _ in range(900):
        plant.step(1 / 300)
    assert plant.state()[0] - state[0] == pytest.approx(3.0, abs=0.006)  # the first number is the time


def test_it_measures_what_the_model_says(plant: MujocoPlant) -> None:
    state = plant.measure()
    assert state.position_rad == pytest.approx([0, -0.1432, 0, -2.3651, 0, 2.2220, 0.7854], abs=0.02)
    assert state.velocity_rad_s.tolist() == [0.0] * 7
    assert state.gripper == pytest.approx(0.04)
    assert plant.fingers().tolist() == [0.04, 0.04]
    assert set(plant.objects()) == {"cube", "goal"}
    assert plant.objects()["cube"][2] == pytest.approx(0.02, abs=1e-3)  # it lies on the table
    plant.command(state.position_rad + 0.05, 0.0)
    plant.step(0.05)
    later = plant.measure()
    assert (later.position_rad > state.position_rad + 0.005).all()
    assert later.gripper < 0.035
    assert later.effort_n_m is not None
    assert np.abs(later.effort_n_m).max() > 1.0
    assert state.position_rad is not later.position_rad
    plant.reset(0)
    fresh = plant.measure()
    assert fresh.effort_n_m is not None
    assert fresh.effort_n_m.tolist() == [0.0] * 7  # no torque of the episode before


def test_the_jacobian_is_the_derivative_of_the_tool(plant: MujocoPlant) -> None:
    """A joint turned by 1e-6 rad moves the tool by 1e-6 times its column."""
    start, jacobian = plant.state(), plant.jacobian()
    tool, step = plant.tool_pose(), 1e-6
    first = 1  # the row begins with the time
    for joint in range(7):
        row = start.copy()
        row[first + joint] += step
        plant.set_state(row)
        moved = (plant.tool_pose()[:3] - tool[:3]) / step
        assert moved == pytest.approx(jacobian[:3, joint], abs=1e-5)
    plant.set_state(start)
    assert plant.tool_pose().tobytes() == tool.tobytes()


def test_friction_slows_the_arm() -> None:
    def moved(friction_n_m: float) -> Array:
        plant = MujocoPlant("reach", friction_n_m=friction_n_m)
        start = plant.measure().position_rad
        plant.command(start + 0.02, 0.04)
        plant.step(0.5)
        return plant.measure().position_rad - start

    free, sticky = moved(0.0), moved(2.0)
    assert free == pytest.approx(0.02, abs=0.002)
    # A servo of stiffness kp stops within friction / kp of its target: 2/400 on the first four joints,
    # 2/120 on two, and on the last 2/50 is more than the whole way: MuJoCo's friction only creeps there.
    assert (0.02 - sticky[:4] > 0.002).all()
    assert sticky[6] < 0.2 * free[6]


def test_limits_are_the_robots(plant: MujocoPlant) -> None:
    low, high = plant.position_limits_rad
    assert (low[3], high[3]) == (-3.0718, -0.0698)
    assert plant.velocity_limits_rad_s[0] == 2.175
    assert plant.effort_limits_n_m[6] == 12.0
    # (kd + joint damping) / kp: (40 + 1) / 400 on the first joint, (5 + 1) / 50 on the last.
    assert plant.servo_s[[0, 6]] == pytest.approx([0.1025, 0.12])
    assert plant.gripper_range == (0.0, 0.04)
    assert plant.finger_names == ("finger_joint1", "finger_joint2")


def test_friction_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"friction_n_m: got -1, allowed: 0 or more"):
        MujocoPlant(friction_n_m=-1)
