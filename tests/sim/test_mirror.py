"""The mirror shows what was measured as simulation would: same observation, targets, verdict, expert."""

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.config import ResetsConfig
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

TASKS = ("pick_cube", "open_drawer", "peg_insert", "gantry_peg", "stack_cube", "pick_blue_cube")


def measured(env: SimVectorEnv, mirror: Mirror):
    """Returns what sensors on an arm and trackers of its objects would say of a simulation."""
    model, bind = on_cpu(env.backend).model, env.backend.bind
    qpos, qvel, pos, quat = (bind(name)[0] for name in ("qpos", "qvel", "xpos", "xquat"))
    arm, fingers = mirror.robot.arm_joints, mirror.robot.finger_joints
    objects = {
        name: np.concatenate([pos[model.body(name).id], quat[model.body(name).id]]) for name in mirror.objects
    }
    speed = {}
    if env.task == "open_drawer":
        joint = model.joint("drawer")
        speed["drawer"] = bind("xaxis")[0][joint.id] * qvel[joint.dofadr[0]]
    return (
        np.array([qpos[model.joint(name).qposadr[0]] for name in arm]),
        np.array([qvel[model.joint(name).dofadr[0]] for name in arm]),
        np.array([qpos[model.joint(name).qposadr[0]] for name in fingers]),
        objects,
        speed,
    )


@pytest.mark.parametrize(("task", "steps"), [*((task, False) for task in TASKS), ("pick_cube", True)])
def test_along_a_rollout_it_is_the_simulation(task: str, steps: bool) -> None:
    config = EnvConfig(task=task, reward="dense", gripper_steps=steps, num_threads=1)
    env = SimVectorEnv(config, 1, autoreset="disabled")
    mirror = Mirror(config)
    obs, _ = env.reset(seed=[11])
    mirror.begin(11)
    expert, seen = (shown.expert(bias_m=0.01, noise_m=0.01, noise_seed=3) for shown in (env, mirror))
    for _ in range(env.horizon):
        last = env._ctrl[:, env.index.effector_ctrl].copy()
        mirror.commanded(last[0, 0])
        shown = mirror.show(*measured(env, mirror))
        assert shown["state"] == pytest.approx(obs["state"], abs=1e-6)
        action = expert.act()
        assert seen.act() == pytest.approx(action, abs=1e-6)
        targets, gripper = mirror.targets(action)
        here = env.controller.joint_positions()
        assert targets == pytest.approx(env.controller.targets(action, here), abs=1e-9)
        assert gripper == env.controller.effectors(action, last)[:, 0]
        obs, reward, terminated, _, infos = env.step(action)
        mirror.show(*measured(env, mirror))
        success, _, mirrored = mirror.judge()
        assert success == infos["success"][0]
        assert mirrored == pytest.approx(reward[0], abs=1e-9)
        if terminated[0]:
            break


def test_one_opening_stands_for_both_fingers() -> None:
    config = EnvConfig(task="pick_cube")
    mirror = Mirror(config)
    env = SimVectorEnv(config, 1, autoreset="disabled")
    env.reset(seed=[0])
    position, velocity, fingers, objects, _ = measured(env, mirror)
    shown = mirror.show(position, velocity, 0.013, objects)
    names = mirror.env.state_names
    both = [shown["state"][0, names.index(f"{joint}.pos")] for joint in mirror.robot.finger_joints]
    assert both == pytest.approx([0.013, 0.013])
    assert len(fingers) == 2


def test_targets_after_the_first_follow_the_servo() -> None:
    # The gantry's joints are the tool's coordinates. A servo of 0.1 s closes 1 - exp(-0.05 / 0.1) = 0.39347
    # of its lead in a step of 20 Hz, so equal steps have targets at 1, 1.39347 and 1.78694 leads.
    mirror = Mirror(EnvConfig(task="gantry_peg"))
    objects = {name: np.array([0.5, 0.0, 0.1, 1.0, 0.0, 0.0, 0.0]) for name in mirror.objects}
    start = np.array(mirror.robot.home_rad)
    mirror.show(start, np.zeros(len(start)), mirror.robot.gripper_home, objects)
    actions = np.zeros((3, len(mirror.env.action_names)), np.float32)
    actions[:, 0] = 1.0
    targets, _ = mirror.targets(actions, servo_s=0.1)
    lead = mirror.env.controller.control.linear_m
    assert targets[:, 0] - start[0] == pytest.approx([lead, 1.39347 * lead, 1.78694 * lead], rel=0.02)
    assert targets[:, 1] == pytest.approx(start[1], abs=1e-3)


def test_an_object_without_a_pose_is_named() -> None:
    mirror = Mirror(EnvConfig(task="pick_cube"))
    zeros = np.zeros(7)
    with pytest.raises(ConfigError, match=r"nothing was measured of goal; needed: .*cube"):
        mirror.show(zeros, zeros, 0.0, {"cube": np.array([0.5, 0, 0, 1, 0, 0, 0])})


def test_what_varies_in_training_alone_is_not_asked_of_an_arm() -> None:
    """A robot's computer has neither the bank of starts nor the GPU, and no tracker sees absent boxes."""
    resets = ResetsConfig(bank="on another computer", evaluate="grasped")
    begun = EnvConfig(task="push_cube", engine="mujoco_warp", resets=resets)
    for config in (begun, EnvConfig(task="push_cube", variation="varied")):
        mirror = Mirror(config)
        mirror.begin(0)
        assert mirror.objects == ("goal", "cube")
        assert mirror.env.view["cube.half_size"].tolist() == [[0.025, 0.025, 0.025]]


def test_planned_gripper_steps_add_up_from_the_last_command() -> None:
    mirror = Mirror(EnvConfig(task="pick_cube", gripper_steps=True, num_threads=1))
    mirror.begin(0)
    mirror.commanded(0.003)  # m; a full-scale step of a control step of 50 ms is 2 mm
    actions = np.zeros((4, 5), np.float32)
    actions[:, 4] = [-1.0, -1.0, 0.0, 0.5]
    assert mirror.targets(actions)[1] == pytest.approx([0.001, 0.0, 0.0, 0.001])
    assert mirror.targets(actions)[1] == pytest.approx([0.001, 0.0, 0.0, 0.001])  # a plan commands nothing
