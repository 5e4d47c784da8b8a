"""Mirror images: by hand, in closed form for every posture, and as the simulator goes on from one."""

import dataclasses
from typing import Any

import mujoco
import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import TABLE
from robot_rl.data.episodes import Episodes, EpisodesMeta
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.reflection import Reflection, reflection_of
from robot_rl.sim.robots import panda
from robot_rl.sim.robots.loading import load_robot
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]
SYMMETRIC = (
    "reach", "push_cube", "pick_cube", "pick_red_cube", "pick_blue_cube",
    "stack_cube", "open_drawer", "gantry_peg",
)  # fmt: skip


def names_that_turn(task: str) -> tuple[set[str], set[str]]:
    env = SimVectorEnv(EnvConfig(task=task, num_threads=1), 1)
    image = reflection_of(env.config)
    states = {name for name, sign in zip(env.state_names, image.sign, strict=True) if sign < 0}
    return states, {name for name, sign in zip(env.action_names, image.action_sign, strict=True) if sign < 0}


def test_what_turns_in_pick_cube() -> None:
    states, actions = names_that_turn("pick_cube")
    # The Panda's odd joints turn about axes in the mirror plane; y of every position, velocity and axis.
    joints = {f"joint{number}.pos" for number in (1, 3, 5, 7)}
    vectors = ("tool.pos", "tool.xaxis", "tool.linvel", "cube.pos", "cube.xaxis", "cube_in_tool.pos")
    assert states == joints | {f"{name}.1" for name in (*vectors, "cube_in_tool.xaxis", "goal_in_tool.pos")}
    assert actions == {"tool.dy", "tool.yaw"}


def test_a_posture_by_hand() -> None:
    image = reflection_of(EnvConfig(task="reach"))
    joints, fingers = [0.1, 0.2, 0.3, -2.0, 0.5, 2.0, 1.0], [0.02, 0.03]
    state = np.array([*joints, *fingers, 0.5, 0.1, 0.3, *[0.0] * 12], np.float32)
    # Home of joint 7 is 0.7854: from 1.0 it goes to 2 * 0.7854 - 1.0. The fingers change places.
    mirrored = [-0.1, 0.2, -0.3, -2.0, -0.5, 2.0, 0.5708, 0.03, 0.02, 0.5, -0.1, 0.3, *[0.0] * 12]
    np.testing.assert_allclose(image.state(state), mirrored, atol=1e-6)
    assert image.state(state).dtype == np.float32


def test_the_slides_of_the_gantry_mirror_its_y_and_yaw() -> None:
    states, actions = names_that_turn("gantry_peg")
    assert {"y.pos", "yaw.pos"} <= states
    assert not {"x.pos", "z.pos"} & states
    assert actions == {"tool.dy"}


@pytest.mark.parametrize("task", SYMMETRIC)
def test_the_image_of_the_image_is_the_state(task: str) -> None:
    image = reflection_of(EnvConfig(task=task))
    state = np.random.default_rng(0).normal(size=(5, len(image.sign)))
    np.testing.assert_allclose(image.state(image.state(state)), state, atol=1e-12)


def set_mirrored(env: SimVectorEnv, image: Reflection) -> None:
    """Puts every simulation into its mirror image: joints, free bodies, mocap bodies, all at rest."""
    model, qpos, robot = on_cpu(env.backend).model, env.backend.bind("qpos"), load_robot(env.robot)
    at = [int(model.joint(name).qposadr[0]) for name in (*robot.arm_joints, *robot.finger_joints)]
    count = len(at)
    qpos[:, at] = image.sign[:count] * qpos[:, at][:, image.index[:count]] + image.offset[:count]
    for joint in np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE):
        qpos[:, model.jnt_qposadr[joint] + np.array([1, 4, 6])] *= -1.0  # y; x and z of (w, x, y, z)
    env.backend.bind("mocap_pos")[:, :, 1] *= -1.0
    ctrl, arm = env.backend.bind("ctrl"), [model.actuator(name).id for name in robot.arm_actuators]
    ctrl[:, arm] = image.sign[: len(arm)] * ctrl[:, arm] + image.offset[: len(arm)]
    env.set_state(env.get_state())


def pair_of(task: str, num_envs: int) -> tuple[SimVectorEnv, SimVectorEnv, Reflection]:
    """Returns simulations at rest, the same ones mirrored, and the mirror."""
    config = EnvConfig(task=task, num_threads=1)
    envs = [SimVectorEnv(config, num_envs, autoreset="disabled") for _ in range(2)]
    for env in envs:
        env.reset(seed=0)
        env.backend.bind("qvel")[:] = 0.0
        env.backend.forward(np.arange(num_envs))
    image = reflection_of(config)
    set_mirrored(envs[1], image)
    return envs[0], envs[1], image


@pytest.mark.parametrize("task", SYMMETRIC)
def test_observations_of_the_mirrored_scene_are_the_mirrored_observations(task: str) -> None:
    env, mirrored, image = pair_of(task, 16)
    state, found = (e.load_state_dict(e.state_dict())["state"] for e in (env, mirrored))
    np.testing.assert_allclose(found, image.state(state), atol=1e-5)


def difference(task: str, steps: int) -> Array:
    """Returns the largest difference (D,) of an expert's episodes from the image of the mirrored ones."""
    env, mirrored, image = pair_of(task, 8)
    expert = env.expert()
    found = np.zeros(len(env.state_names))
    for _ in range(steps):
        action = expert.act()
        state, seen = env.step(action)[0]["state"], mirrored.step(image.action(action))[0]["state"]
        found = np.maximum(found, np.abs(image.state(state) - seen).max(axis=0))
    return found


def symmetric_links() -> tuple[Any, ...]:
    """Returns the Panda's links as points on their axes: the published inertias lean to one side."""
    return tuple(
        dataclasses.replace(link, com_m=(0.0,) * 3, inertia=(*[max(link.inertia[:3])] * 3, 0.0, 0.0, 0.0))
        for link in panda._LINKS
    )


def test_with_symmetric_links_the_mirrored_action_leads_to_the_mirrored_observation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(panda, "_LINKS", symmetric_links())
    assert difference("pick_cube", steps=12).max() < 1e-5


def test_with_the_panda_of_the_table_it_does_within_millimetres() -> None:
    env = SimVectorEnv(EnvConfig(task="pick_cube", num_threads=1), 1)
    place = [number for number, name in enumerate(env.state_names) if name.startswith("tool.pos")]
    assert difference("pick_cube", steps=12)[place].max() < 3e-3


def test_images_stand_behind_their_episodes() -> None:
    image = Reflection(
        index=np.array([1, 0, 2]),
        sign=np.array([1, 1, -1]),
        offset=np.array([0, 0, 2]),
        action_sign=np.array([1, -1]),
    )
    ends = np.array([False, True, True])
    episodes = Episodes(
        meta=EpisodesMeta(
            task="t",
            robot="r",
            control_hz=20.0,
            instruction="",
            state_names=tuple("abc"),
            action_names=("x", "y"),
        ),
        obs={"state": np.arange(9, dtype=np.float32).reshape(3, 3)},
        action=np.array([[1, 2], [3, 4], [5, 6]], np.float32),
        reward=np.array([0, 1, 0], np.float32),
        terminated=ends & [True, True, False],
        truncated=ends & [False, False, True],
        success=ends & [True, True, False],
        episode_index=np.array([0, 0, 1]),
        final_obs={"state": np.array([[9, 10, 11], [12, 13, 14]], np.float32)},
    )
    both = image.with_images(episodes)
    both.check()
    assert both.episode_index.tolist() == [0, 0, 1, 2, 2, 3]
    assert both.obs["state"][3:].tolist() == [[1, 0, 0], [4, 3, -3], [7, 6, -6]]
    assert both.final_obs["state"][2:].tolist() == [[10, 9, -9], [13, 12, -12]]
    assert both.action[3:].tolist() == [[1, -2], [3, -4], [5, -6]]
    assert both.episode_success().tolist() == [True, False, True, False]
    assert both.obs["state"].dtype == both.action.dtype == np.float32


def test_what_has_no_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"demos\.mirror: peg_insert has no mirror image.*Leave it out"):
        reflection_of(EnvConfig(task="peg_insert"), at="demos.mirror")
    with pytest.raises(ConfigError, match=r"env: got cameras \['front'\], allowed: none"):
        reflection_of(EnvConfig(task="reach", cameras=("front",)))


@pytest.mark.parametrize("robot", sorted(name for name in TABLE["robot"] if load_robot(name).kind == "arm"))
def test_a_robot_is_mirrored_or_refused(robot: str) -> None:
    config = EnvConfig(task="reach", robot=robot)
    if robot == "so_arm100":  # one jaw of two moves
        with pytest.raises(ConfigError, match=r"so_arm100 has no mirror image, \w+ is neither"):
            reflection_of(config)
    else:
        image = reflection_of(config)
        assert (np.abs(image.sign) == 1).all()
