"""One state and one action for several robots: where the elements of each are, which change nothing."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.data.episodes import together
from robot_rl.data.normalize import STD_FLOOR, Normaliser
from robot_rl.rollout.envs import make_expert
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.reflection import reflection_of
from robot_rl.sim.robots.catalog import ROBOT_FILES
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.vector import EnvConfig, SimVectorEnv
from robot_rl.train.demos import Pushes, collect_episodes
from robot_rl.train.deploy.online import hand_names

Array = NDArray[Any]
BOTH = ("panda", "gantry")
SHARED = ("tool.pos", "tool.xaxis", "tool.linvel", "goal.pos", "goal_in_tool.pos")


def make(num_envs: int = 2, *, task: str = "reach", **config: Any) -> SimVectorEnv:
    return SimVectorEnv(EnvConfig(task=task, num_threads=1, **config), num_envs, autoreset="disabled")


def own_of(robot: str) -> tuple[str, ...]:
    known = load_robot(robot)
    return tuple(f"{robot}.{joint}.pos" for joint in (*known.arm_joints, *known.finger_joints))


@pytest.mark.parametrize("robot", BOTH)
def test_each_robot_has_its_own_elements_and_the_other_is_at_rest(robot: str) -> None:
    alone, among = make(robot=robot), make(robot=robot, robots=BOTH)
    assert among.state_names == (
        *own_of("panda"),
        *own_of("gantry"),
        "panda.present",
        "gantry.present",
        *(f"{name}.{i}" for name in SHARED for i in range(3)),
    )
    assert among.action_names == alone.action_names
    seen, state = (env.reset(seed=3)[0]["state"] for env in (alone, among))
    assert among.observation_space.contains({"state": state})
    shown = dict(zip(among.state_names, state.T, strict=True))
    for name, values in zip(alone.state_names, seen.T, strict=True):
        np.testing.assert_array_equal(shown[name if name in shown else f"{robot}.{name}"], values)
    other = "gantry" if robot == "panda" else "panda"
    assert [shown[f"{name}.present"].tolist() for name in (robot, other)] == [[1.0, 1.0], [0.0, 0.0]]
    known = load_robot(other)
    home = [*known.home_rad, *(known.gripper_home for _ in known.finger_joints)]
    np.testing.assert_allclose([shown[name][0] for name in own_of(other)], home, rtol=1e-6)


def test_a_body_takes_its_part_of_an_action_and_nothing_else_of_it() -> None:
    robots = ("reach:panda", "mobile_reach:mobile_panda", "bimanual_reach:two_pandas")
    steps = [f"tool.{step}" for step in ("dx", "dy", "dz")]
    names = (
        *(f"mobile_panda.base_{axis}.delta" for axis in ("x", "y", "yaw")),
        *steps,
        *(f"{side}_{step}" for side in ("left", "right") for step in steps),
        "gripper",
    )
    rng = np.random.default_rng(0)
    for task, robot in (
        ("reach", "panda"),
        ("mobile_reach", "mobile_panda"),
        ("bimanual_reach", "two_pandas"),
    ):
        alone, among = make(task=task, robot=robot), make(task=task, robot=robot, robots=robots)
        assert among.action_names == names
        for env in (alone, among):
            env.reset(seed=1)
        own = [names.index(n) if n in names else names.index(f"{robot}.{n}") for n in alone.action_names]
        for _ in range(5):
            actions = rng.uniform(-1.2, 1.2, (2, len(names))).astype(np.float32)
            infos = [env.step(given)[-1] for env, given in ((alone, actions[:, own]), (among, actions))]
            np.testing.assert_array_equal(alone.get_state(), among.get_state())
            np.testing.assert_array_equal(infos[1]["commanded_action"], np.clip(actions, -1.0, 1.0))
            np.testing.assert_array_equal(among.own_actions(actions), actions[:, own])


@pytest.mark.parametrize(("steps", "gripper"), [(False, "gripper"), (True, "gripper.step")])
def test_the_gripper_is_last_and_noise_on_demonstrations_leaves_it(steps: bool, gripper: str) -> None:
    other = () if steps else ("bimanual_reach:two_pandas",)  # which leaves its grippers shut
    robots = ("reach:panda", *other, "pick_cube:panda")
    env = make(2, task="pick_cube", robots=robots, gripper_steps=steps)
    assert env.action_names[-1] == gripper
    assert env.own_action_names == (*(f"tool.{step}" for step in ("dx", "dy", "dz", "yaw")), gripper)
    env.reset(seed=0)
    pushes = Pushes(np.arange(8, dtype=np.uint64), env.action_names, 0.5)
    pushed = pushes.on(np.zeros((8, len(env.action_names)), np.float32))
    assert pushed[:, :-1].any()
    assert not pushed[:, -1].any()


def test_arrays_of_torch_have_the_same_elements() -> None:
    names = ("mobile_reach:mobile_panda", "panda")
    config = EnvConfig(task="reach", robots=names, num_threads=1)
    ours, theirs = (SimVectorEnv(config, 2, array=kind) for kind in ("numpy", "torch"))
    seen = [env.reset(seed=4)[0]["state"] for env in (ours, theirs)]
    np.testing.assert_array_equal(seen[0], np.asarray(seen[1]))
    actions = np.random.default_rng(0).uniform(-1, 1, (2, len(ours.action_names))).astype(np.float32)
    stepped = [env.step(env.xp.asarray(actions)) for env in (ours, theirs)]
    np.testing.assert_array_equal(stepped[0][0]["state"], np.asarray(stepped[1][0]["state"]))
    acted, theirs_acted = (np.asarray(env.expert().act()) for env in (ours, theirs))
    np.testing.assert_allclose(acted, theirs_acted, atol=1e-6)


def test_nothing_of_the_env_s_own_robot_may_be_shown() -> None:
    env = make(robot="gantry", robots=BOTH, state=("panda",))
    state = env.reset(seed=0)[0]["state"]
    assert env.state_names == (*own_of("panda"), "panda.present", "gantry.present")
    np.testing.assert_array_equal(state[0], state[1])


def test_a_person_s_hand_moves_the_env_s_own_tool_alone() -> None:
    robots = ("reach:panda", "bimanual_reach:two_pandas")
    with pytest.raises(ConfigError, match="keys and sticks move the tool, these actions do not"):
        hand_names(make(task="bimanual_reach", robots=robots))
    names = hand_names(make(task="reach", robots=robots))
    assert [name for name in names if name] == ["tool.dx", "tool.dy", "tool.dz", "gripper"]


def test_an_action_that_is_no_number_holds_the_robot_as_ever() -> None:
    alone, among = make(), make(robots=("mobile_reach:mobile_panda", "panda"))
    for env in (alone, among):
        env.reset(seed=1)
        actions = np.full((2, len(env.action_names)), 0.5, np.float32)
        actions[1, -1] = np.nan
        assert not env.step(actions)[-1]["commanded_action"][1].any()
    np.testing.assert_array_equal(alone.get_state(), among.get_state())


@pytest.mark.parametrize("robot", BOTH)
def test_the_expert_solves_the_task_and_a_person_moves_the_tool(robot: str) -> None:
    env = make(4, robot=robot, robots=("mobile_reach:mobile_panda", *BOTH))
    env.reset(seed=5)
    expert, solved, live = (
        make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0),
        np.zeros(4, bool),
        np.ones(4, bool),
    )
    for _ in range(env.horizon):
        action = expert.act()
        assert not action[:, :3].any()
        _, _, terminated, truncated, infos = env.step_masked(action, live)
        solved, live = solved | infos["success"], live & ~(terminated | truncated)
    assert solved.all()
    own = env.action_towards(env.controller.joint_positions() + 0.01, np.ones(4))
    alone = env.controller.towards(env.controller.joint_positions() + 0.01, np.ones(4))
    np.testing.assert_array_equal(own[:, 3:], alone)
    assert not own[:, :3].any()


def test_an_arm_shows_and_takes_what_simulation_does() -> None:
    env, mirror = (
        make(1, robot="panda", robots=BOTH),
        Mirror(EnvConfig(task="reach", robots=BOTH, num_threads=1)),
    )
    obs, _ = env.reset(seed=[2])
    mirror.begin(2)
    index, bind = env.index, env.backend.bind
    shown = mirror.show(
        bind("qpos")[0][index.arm_qpos],
        bind("qvel")[0][index.arm_dof],
        bind("qpos")[0][index.finger_qpos],
        {"goal": np.concatenate([bind("mocap_pos")[0, 0], bind("mocap_quat")[0, 0]])},
    )
    np.testing.assert_allclose(shown["state"], obs["state"], atol=1e-6)
    action = np.array([[0.3, -0.2, 0.1, 1.0]], np.float32)
    targets, gripper = mirror.targets(action)
    np.testing.assert_allclose(targets, env.controller.targets(action, env.controller.joint_positions()))
    assert gripper == env.controller.effectors(action)[:, 0]


def test_a_choice_of_the_state_counts_for_every_robot() -> None:
    names = make(robots=BOTH, state=("joint", "goal")).state_names
    joints = [f"{robot}.{joint}.pos" for robot in BOTH for joint in load_robot(robot).arm_joints]
    assert names == (
        *joints,
        "panda.present",
        "gantry.present",
        *(f"goal.pos.{i}" for i in range(3)),
        *names[-3:],
    )
    assert make(robots=BOTH, state=names).state_names == names
    with pytest.raises(
        ConfigError,
        match=r"env\.state: got 'gaol', with which no element of the state begins\. Known: gantry\.f",
    ):
        make(robots=BOTH, state=("gaol",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"robots": ("gantry",)},
            r"env\.robots: got \[gantry\], allowed: a list with panda, the robot of this",
        ),
        ({"robots": ("panda", "gantri")}, r"env\.robots: robot: no robot and no file named 'gantri'"),
        ({"robots": ("panda", "reech:gantry")}, r"env\.robots: task: no task named 'reech'"),
        (
            {"robots": BOTH, "state": ("pandaa.present",)},
            r"env\.state: got 'pandaa.present', with which no element of the state begins",
        ),
        ({"robots": ("panda", "claw")}, r"env\.robots: robot: claw is of kind hand"),
    ],
)
def test_lists_of_robots_that_cannot_be(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**config)


def test_two_robots_of_one_name_are_refused_and_one_file_is_one_robot(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for file in files:
        shutil.copy(ROBOT_FILES / "so_arm100.yaml", file)
    with pytest.raises(
        ConfigError, match=r"env\.robots: got '.*b\.yaml', allowed: one robot named so_arm100"
    ):
        make(robot=str(files[0]), robots=tuple(map(str, files)))
    env = make(robot=str(files[0]), robots=(str(files[0]), f"pick_cube:{files[0]}"))
    state = env.reset(seed=0)[0]["state"]
    assert state[0, env.state_names.index("so_arm100.present")] == 1.0


def test_the_image_of_a_mirror_is_of_one_robot() -> None:
    with pytest.raises(ConfigError, match=r"env\.robots: .*allowed: none with demos\.mirror"):
        reflection_of(EnvConfig(task="reach", robots=BOTH), at="demos.mirror")


def test_the_scale_of_a_robots_own_elements_is_that_of_its_own_steps() -> None:
    parts = []
    for robot in BOTH:
        env = make(2, robot=robot, robots=BOTH)
        expert = make_expert(env, bias_m=0.0, noise_m=0.0, noise_seed=0)
        parts.append(collect_episodes(env, expert, np.arange(4, dtype=np.uint64)))
    both = together(parts)
    fitted, names = Normaliser.of(both), both.meta.state_names
    mean, std = (fitted.get_buffer(f"{what}_state").numpy() for what in ("mean", "std"))
    for robot, part in zip(BOTH, parts, strict=True):
        own = [names.index(name) for name in own_of(robot)]
        np.testing.assert_allclose(mean[own], part.obs["state"][:, own].mean(axis=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            std[own], np.maximum(part.obs["state"][:, own].std(axis=0), STD_FLOOR), rtol=1e-3
        )
    shared = [names.index(f"goal.pos.{i}") for i in range(3)]
    np.testing.assert_allclose(mean[shared], both.obs["state"][:, shared].mean(axis=0), rtol=1e-4, atol=1e-5)
