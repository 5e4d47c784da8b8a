"""The controller: its Jacobian is MuJoCo's, +x goes +x, the tool stays upright, zero action stays."""

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.core.registry import table
from robot_rl.hal.conformance import check_vector_env
from robot_rl.sim.backends.model_index import ModelIndex
from robot_rl.sim.backends.mujoco_cpu import MujocoCpu, on_cpu
from robot_rl.sim.control import Controller
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.poses import compose, quaternion_product, rotate, yaw_quaternion
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.task import Control
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

SIX_AXES = ("panda", "viperx")
"""Arms that can hold any orientation; so_arm100 has five joints."""
ROBOTS = sorted(name for name in table("robot") if load_robot(name).kind == "arm")
UPRIGHT = sorted(set(ROBOTS) - {"so_arm100"})


def make(robot: str, task: str = "pick_cube", num_envs: int = 4) -> SimVectorEnv:
    env = SimVectorEnv(EnvConfig(task=task, robot=robot, num_threads=1), num_envs, autoreset="disabled")
    env.reset(seed=0)
    return env


def one_simulation(env: SimVectorEnv, sim: int) -> tuple[mujoco.MjModel, mujoco.MjData]:
    batch = on_cpu(env.backend).batch
    model, data = batch.get_model(sim), batch.get_data(sim)
    mujoco.mj_forward(model, data)
    return model, data


def jacobian_of_mujoco(env: SimVectorEnv, sim: int) -> NDArray[np.float64]:
    """Returns (6, n): linear and angular velocity of the tool for unit joint speeds."""
    model, data = one_simulation(env, sim)
    rows = np.zeros((6, model.nv))
    robot = load_robot(env.robot)
    mujoco.mj_jacSite(model, data, rows[:3], rows[3:], model.site(robot.tool_site).id)
    return rows[:, [int(model.joint(name).dofadr[0]) for name in robot.arm_joints]]


@pytest.mark.parametrize("robot", ROBOTS)
def test_the_step_is_damped_least_squares_on_mujocos_jacobian(robot: str) -> None:
    env = make(robot)
    rng = np.random.default_rng(0)
    action = rng.uniform(-1, 1, (4, 5)).astype(np.float32)
    control = Control()
    position = env.controller.joint_positions()
    step = env.controller.targets(action, position) - position
    for sim in range(4):
        jacobian = jacobian_of_mujoco(env, sim)
        data = one_simulation(env, sim)[1]
        rotation = data.site("tool").xmat.reshape(3, 3)
        # The tool points down: what turns its z axis back to -z is half their cross product.
        turn = 0.5 * np.cross(rotation[:, 2], env.controller._home_mat[:, 2])
        turn[2] = control.angular_rad * action[sim, 3]
        twist = np.concatenate([control.linear_m * action[sim, :3], turn])
        posture = 0.1 * (np.asarray(load_robot(robot).home_rad) - position[sim])
        gram = jacobian @ jacobian.T + 0.05**2 * np.eye(6)
        expected = posture + jacobian.T @ np.linalg.solve(gram, twist - jacobian @ posture)
        np.testing.assert_allclose(step[sim], expected, atol=1e-9)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("robot", UPRIGHT)
def test_a_commanded_direction_is_where_the_tool_goes(robot: str, axis: int) -> None:
    env = make(robot)
    start = env.view["tool.pos"].copy()
    action = np.zeros((4, 5), np.float32)
    action[:, axis], action[:, 4] = (-0.5 if axis == 2 else 0.5), 1.0
    for _ in range(8):
        env.step(action)
    moved = env.view["tool.pos"] - start
    along = moved[:, axis] * np.sign(action[0, axis])
    aside = np.linalg.norm(np.delete(moved, axis, axis=1), axis=1)
    # Half of a 5 cm lead at 10 per second is 0.25 m/s; 0.4 s of it, less the start, is 5 to 10 cm.
    assert along.min() > 0.04
    assert (aside < 0.35 * along).all()


@pytest.mark.parametrize("robot", UPRIGHT)
def test_the_tool_stays_upright_while_it_moves(robot: str) -> None:
    env = make(robot)
    rng = np.random.default_rng(1)
    worst = 0.0
    for _ in range(5):
        action = np.repeat(rng.uniform(-0.6, 0.6, (1, 5)), 4, axis=0).astype(np.float32)
        action[:, 2] = np.abs(action[:, 2]) - 0.2  # not into the table
        for _ in range(6):
            env.step(action)
            worst = max(worst, float(np.arccos(-env.view["tool.zaxis"][:, 2].clip(-1, 1)).max()))
    assert np.rad2deg(worst) < 3.0


@pytest.mark.parametrize("robot", ROBOTS)
def test_zero_action_stays(robot: str) -> None:
    env = make(robot)
    start = env.view["tool.pos"].copy()
    action = np.zeros((4, 5), np.float32)
    # On arms of half a metre the damping lets some of the pull to the posture through: 2.02 mm measured.
    limit_m = 0.002 if robot in ("panda", "gantry") else 0.003
    for _ in range(40):  # 2 s
        env.step(action)
        assert np.linalg.norm(env.view["tool.pos"] - start, axis=1).max() < limit_m


@pytest.mark.parametrize("robot", SIX_AXES)
def test_yaw_turns_about_the_vertical(robot: str) -> None:
    env = make(robot)
    before = env.view["tool.xaxis"].copy()
    action = np.zeros((4, 5), np.float32)
    action[:, 3] = 0.5
    for _ in range(10):
        env.step(action)
    turned = np.arctan2(
        np.cross(before, env.view["tool.xaxis"])[:, 2], (before * env.view["tool.xaxis"]).sum(axis=1)
    )
    # 0.125 rad of lead at 10 per second, 0.5 s: 0.6 rad less the start.
    assert turned.min() > 0.3
    assert turned.max() < 0.7


def test_without_rotation_the_yaw_is_held_too() -> None:
    env = make("panda", "reach")
    action = np.zeros((4, 4), np.float32)
    action[:, 1] = 0.6
    for _ in range(10):
        env.step(action)
    heading = np.arctan2(env.view["tool.xaxis"][:, 1], env.view["tool.xaxis"][:, 0])
    assert np.rad2deg(np.abs(heading)).max() < 3.0


def test_action_names_say_what_moves() -> None:
    assert make("panda").action_names == ("tool.dx", "tool.dy", "tool.dz", "tool.yaw", "gripper")
    assert make("panda", "reach").action_names == ("tool.dx", "tool.dy", "tool.dz", "gripper")
    assert make("gantry", "gantry_peg").action_names == ("tool.dx", "tool.dy", "tool.dz")


def controller_of(control: Control, robot: str = "gantry") -> Controller:
    loaded = load_robot(robot)
    backend = MujocoCpu(loaded.build(), loaded, [], 2, 1)
    backend.forward()
    return Controller(control, loaded, backend)


def test_joint_deltas_are_leads_over_the_measured_position() -> None:
    controller = controller_of(Control(kind="joint_delta", joint_rad=0.1))
    assert controller.action_names == ("x.delta", "y.delta", "z.delta", "yaw.delta", "gripper")
    position = np.array([[0.3, 0.0, 0.2, 0.5], [0.4, 0.1, 0.2, 0.5]])
    action = np.array([[1.0, -1.0, 0.5, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, -1.0]], np.float32)
    expected = [[0.4, -0.1, 0.25, 0.5], [0.4, 0.1, 0.2, 0.5]]  # position + 0.1 * action
    np.testing.assert_allclose(controller.targets(action, position), expected, atol=1e-12)
    np.testing.assert_allclose(controller.effectors(action)[:, 0], [0.04, 0.0])  # open 4 cm, closed 0


def test_a_shut_gripper_is_no_part_of_the_action() -> None:
    controller = controller_of(Control(gripper="shut"))
    assert controller.action_names == ("tool.dx", "tool.dy", "tool.dz", "tool.yaw")
    np.testing.assert_allclose(controller.effectors(np.ones((2, 4), np.float32))[:, 0], [0.0, 0.0])


def test_gripper_steps_change_the_last_command_by_a_stroke_per_second() -> None:
    controller = controller_of(Control(kind="joint_delta", gripper="step", hz=20.0))
    assert controller.action_names[-1] == "gripper.step"
    action = np.zeros((2, 5), np.float32)
    action[:, 4] = [0.5, 1.0]
    last = np.array([[0.01], [0.039]])  # of 0 to 0.04 m: a stroke per second is 2 mm in a control step
    np.testing.assert_allclose(controller.effectors(action, last)[:, 0], [0.011, 0.04])
    np.testing.assert_array_equal(controller.effectors(0 * action, last), last)
    position, opening = controller.joint_positions(), np.array([-0.45, -1.0])  # 0.011 m, shut
    assert controller.towards(position, opening, last)[:, 4] == pytest.approx([0.5, -1.0])


@pytest.mark.parametrize(("hz", "steps"), [(20.0, 20), (10.0, 10)])
def test_a_gripper_that_is_stepped_shuts_in_a_second_and_then_holds(hz: float, steps: int) -> None:
    config = EnvConfig(task="pick_cube", gripper_steps=True, control_hz=hz, num_threads=1)
    env = SimVectorEnv(config, 2, autoreset="disabled")
    env.reset(seed=0)
    shut, column = np.zeros((2, 5), np.float32), env.index.effector_ctrl
    shut[:, 4] = [-1.0, -0.5]
    for _ in range(steps):
        env.step(shut)
    np.testing.assert_allclose(env._ctrl[:, column][:, 0], [0.0, 0.02], atol=1e-9)
    env.step(0 * shut)
    np.testing.assert_allclose(env._ctrl[:, column][:, 0], [0.0, 0.02], atol=1e-9)
    check_vector_env(lambda n: SimVectorEnv(config, n))


def test_steps_of_an_end_effector_whose_closed_end_is_the_larger_one() -> None:
    controller = controller_of(Control(kind="joint_delta", gripper="step"), "suction_gantry")
    action = np.zeros((2, 5), np.float32)
    action[:, 4] = -1.0  # pulls more: a stroke per second is 0.05 of the force in a control step
    np.testing.assert_allclose(controller.effectors(action, np.array([[0.2], [0.99]]))[:, 0], [0.25, 1.0])
    np.testing.assert_allclose(controller.effectors(-action, np.array([[0.2], [0.01]]))[:, 0], [0.15, 0.0])


def test_gripper_steps_under_way_count() -> None:
    """Three steps of -1 and then none: whatever the delay, the command ends 6 mm below the open end."""
    domain = DomainConfig(delay_steps=4)
    config = EnvConfig(task="pick_cube", gripper_steps=True, domain=domain, num_threads=1)
    env = SimVectorEnv(config, 16, autoreset="disabled")
    env.reset(seed=0)
    assert len(set(env._domain.delays().tolist())) > 2
    action = np.zeros((16, 5), np.float32)
    for step in range(10):
        action[:, 4] = -1.0 if step < 3 else 0.0
        env.step(action)
    np.testing.assert_allclose(env._ctrl[:, env.index.effector_ctrl][:, 0], 0.034, atol=1e-9)


@pytest.mark.parametrize("robot", ["panda", "suction_gantry"])
def test_the_expert_lifts_with_gripper_steps(robot: str) -> None:
    config = EnvConfig(task="pick_cube", robot=robot, gripper_steps=True)
    env = SimVectorEnv(config, 20, autoreset="disabled")
    env.reset(seed=np.arange(20).tolist())
    expert, solved = env.expert(), np.zeros(20, bool)
    for _ in range(env.horizon):
        solved |= env.step(expert.act())[4]["success"]
    assert solved.mean() >= 0.9


@pytest.mark.parametrize("task", ["push_cube", "quadrotor_hover"])
def test_gripper_steps_want_a_gripper(task: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.gripper_steps: got True, allowed: false: no action of"):
        SimVectorEnv(EnvConfig(task=task, gripper_steps=True), 1)


def test_the_gantrys_joints_are_its_tools_coordinates() -> None:
    env = make("gantry")
    np.testing.assert_allclose(env.controller.joint_positions()[:, :3], env.view["tool.pos"], atol=1e-12)
    poses = env.controller.tool_poses(np.arange(4))
    np.testing.assert_allclose(poses[:, :3], env.view["tool.pos"], atol=1e-12)
    xaxis = rotate(poses[:, 3:], np.tile([1.0, 0.0, 0.0], (4, 1)))
    np.testing.assert_allclose(xaxis, env.view["tool.xaxis"], atol=1e-9)


def test_arms_of_other_joints_are_refused() -> None:
    robot = load_robot("gantry")
    spec = robot.build()
    spec.joint("yaw").type, spec.joint("yaw").range = mujoco.mjtJoint.mjJNT_BALL, [0.0, 3.0]
    spec.delete(spec.actuator("yaw"))
    with pytest.raises(ModelError, match="robot gantry: arm joints must be hinges or slides"):
        ModelIndex(spec.compile(), robot)


def test_poses_compose() -> None:
    # A quarter turn about z takes (1, 0, 0) to (0, 1, 0); then 2 m along x: (2, 1, 0).
    quarter = yaw_quaternion(np.array([np.pi / 2]))
    np.testing.assert_allclose(rotate(quarter, np.array([[1.0, 0.0, 0.0]])), [[0.0, 1.0, 0.0]], atol=1e-15)
    a_from_b = np.concatenate([[[2.0, 0.0, 0.0]], quarter], axis=1)
    b_from_c = np.array([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(compose(a_from_b, b_from_c)[0, :3], [2.0, 1.0, 0.0], atol=1e-15)
    half = yaw_quaternion(np.array([np.pi]))
    np.testing.assert_allclose(quaternion_product(quarter, quarter), half, atol=1e-15)
