"""A robot without a gripper: what it may leave out of its file, which tasks it does, and which refuse it."""

from pathlib import Path

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, ModelError
from robot_rl.hal.conformance import check_vector_env
from robot_rl.sim.config import check_names
from robot_rl.sim.plant import MujocoPlant
from robot_rl.sim.reflection import reflection_of
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.tasks.catalogue import expert_success
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from tests.arms import JOINTS, SERVOS, write_arm

NO_GRIPPER = (
    r"robot: ur has no gripper, and {task} needs one\. Tasks that need none: reach, push_cube, open_drawer\. "
    r"Or name the gripper in the robot file\."
)


@pytest.fixture(name="bare", scope="module")
def _bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_arm(tmp_path_factory.mktemp("bare")))


def make(task: str, robot: str, num_envs: int = 16, horizon_s: float | None = None) -> SimVectorEnv:
    config = EnvConfig(task=task, robot=robot, horizon_s=horizon_s, num_threads=1)
    return SimVectorEnv(config, num_envs, autoreset="disabled")


def test_its_file_names_no_gripper(bare: str) -> None:
    robot = load_robot(bare)
    assert (robot.effector_actuators, robot.finger_joints) == ((), ())
    model = robot.build().compile()
    assert (model.nu, model.njnt) == (6, 6)


@pytest.mark.parametrize(("task", "actions"), [("reach", 3), ("push_cube", 4), ("open_drawer", 4)])
def test_it_does_tasks_that_need_no_gripper(task: str, actions: int, bare: str) -> None:
    env = make(task, bare)
    # 6 joints, no fingers; the tool's position and x axis.
    assert env.state_names[:7] == (*(f"{joint}.pos" for joint in JOINTS), "tool.pos.0")
    assert len(env.action_names) == actions
    assert "gripper" not in env.action_names
    assert (
        expert_success(env) >= 0.9
    )  # measured: 15 of 16 goals of reach, one is farther than the arm; all others


def test_with_fingers_the_gripper_is_an_action_again(tmp_path: Path) -> None:
    env = make("reach", str(write_arm(tmp_path, fingers=True)))
    assert env.action_names == ("tool.dx", "tool.dy", "tool.dz", "gripper")
    assert env.state_names[6:8] == ("finger_left.pos", "finger_right.pos")


@pytest.mark.parametrize("task", ["pick_cube", "stack_cube", "peg_insert", "gantry_peg"])
def test_a_task_that_needs_one_is_refused_with_those_that_do_not(task: str, bare: str) -> None:
    with pytest.raises(ConfigError, match="^env." + NO_GRIPPER.format(task=task)):
        make(task, bare)


def test_it_is_refused_before_anything_is_made(bare: str) -> None:
    with pytest.raises(ConfigError, match="^" + NO_GRIPPER.format(task="pick_cube")):
        check_names("pick_cube", bare, at="")
    check_names("reach", bare, at="")


def test_it_keeps_the_contract_of_envs(bare: str) -> None:
    check_vector_env(lambda count: make("reach", bare, count, horizon_s=0.5))


def test_a_broken_action_holds_the_arm(bare: str) -> None:
    env = make("reach", bare, 2)
    env.reset(seed=0)
    before = env.controller.joint_positions().copy()
    action = np.array([[np.nan, 0, 0], [1, 0, 0]], np.float32)
    env.step(action)
    moved = np.abs(env.controller.joint_positions() - before).max(axis=1)
    assert moved[0] < 1e-3 < 1e-2 < moved[1]


def test_a_plant_has_no_fingers(bare: str) -> None:
    plant = MujocoPlant("reach", bare)
    try:
        plant.command(plant.measure().position_rad + 0.05, 0.7)  # nobody hears the 0.7
        plant.step(0.1)
        assert (plant.finger_names, plant.gripper_range, plant.targets()[1]) == ((), (0.0, 0.0), 0.0)
        assert plant.measure().gripper == 0.0
    finally:
        plant.close()


def test_its_mirror_image_is_looked_for_among_its_joints(bare: str) -> None:
    # The shoulder stands 13 cm beside the plane y = 0: such an arm has no image, with fingers or without.
    with pytest.raises(ConfigError, match="ur has no mirror image, lift is neither in the plane"):
        reflection_of(EnvConfig(task="reach", robot=bare))


def without(path: Path, *keys: str) -> str:
    lines = [line for line in path.read_text().splitlines() if not line.strip().startswith(keys)]
    path.write_text("\n".join(lines))
    return str(path)


def test_half_a_gripper_is_refused(tmp_path: Path) -> None:
    path = write_arm(tmp_path, fingers=True)
    with pytest.raises(ModelError, match=r"ur\.yaml: missing finger_joints, gripper_home\."):
        load_robot(without(path, "gripper_home", "finger_joints"))


def test_servos_of_a_gripper_go_with_the_gripper(tmp_path: Path) -> None:
    path = write_arm(tmp_path, fingers=True)
    with pytest.raises(ModelError, match=r"model\.servos: missing gripper_armature, gripper_effort\."):
        load_robot(without(path, "gripper_armature", "gripper_effort"))
    path = write_arm(tmp_path, servos={**SERVOS, "gripper_kp": (5,)})
    path.write_text(path.read_text().replace("gripper_kp: [5]", "gripper_kp: 5"))
    with pytest.raises(ModelError, match=r"model\.servos: got gripper_kp, but the file names no gripper\."):
        load_robot(str(path))
