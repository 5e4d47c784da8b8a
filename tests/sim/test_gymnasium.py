"""Gymnasium's side: ids, its own checker, make and make_vec, and a learner that is not ours."""

import re
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import DependencyNotInstalled
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import robot_rl
from robot_rl.core.errors import ConfigError
from robot_rl.core.registry import TABLE, plugins
from robot_rl.sim.registration import env_id, register_envs
from robot_rl.sim.single import SingleEnv, make_vector
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

TASKS = sorted(TABLE["task"])


def test_ids_are_the_tasks_in_camel_case() -> None:
    assert robot_rl.__version__
    assert env_id("pick_cube") == "robot_rl/PickCube-v0"
    registered = {name for name in gymnasium.registry if name.startswith("robot_rl/")}
    assert registered == {env_id(task) for task in TASKS}
    names = (
        "Reach",
        "PushCube",
        "PickCube",
        "StackCube",
        "PegInsert",
        "OpenDrawer",
        "GantryPeg",
        "PickRedCube",
    )
    assert registered >= {f"robot_rl/{name}-v0" for name in names}
    register_envs()  # again: nothing happens, no warning either


def test_importing_the_package_registers_and_loads_no_simulator() -> None:
    code = (
        "import sys, robot_rl, gymnasium; "
        "assert 'robot_rl/Reach-v0' in gymnasium.registry; "
        "print([name for name in ('mujoco', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_ids_can_be_imported_first() -> None:
    code = (
        "from robot_rl.sim.registration import register_envs; register_envs(); import gymnasium; "
        "print('robot_rl/Reach-v0' in gymnasium.registry)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("task", TASKS)
def test_passes_gymnasiums_checker(task: str) -> None:
    env = gymnasium.make(env_id(task)).unwrapped
    with warnings.catch_warnings():
        # Positions have no natural bound, and drawing is tested with the cameras.
        warnings.filterwarnings("ignore", message=".*observation space (minimum|maximum) value is.*infinity")
        check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("task", TASKS)
def test_make_is_make_vec_is_the_vector_env(task: str) -> None:
    alone, vector = gymnasium.make(env_id(task)), gymnasium.make_vec(env_id(task), num_envs=3)
    ours = SimVectorEnv(EnvConfig(task=task, reward="dense"), 3)
    assert isinstance(vector, SimVectorEnv)
    assert vector.config == ours.config
    obs, info = alone.reset(seed=7)
    batch, infos = vector.reset(seed=7)
    assert infos["is_success"] is infos["success"]
    expected, _ = ours.reset(seed=7)
    assert info["success"] is False
    rng = np.random.default_rng(0)
    for _ in range(3):
        np.testing.assert_array_equal(obs["state"], batch["state"][0])
        np.testing.assert_array_equal(batch["state"], expected["state"])
        action = rng.uniform(-1, 1, vector.action_space.shape or ()).astype(np.float32)
        obs, reward, terminated, truncated, info = alone.step(action[0])
        batch, rewards, _, _, infos = vector.step(action)
        assert infos["is_success"] is infos["success"]  # under both names, without a copy
        expected = ours.step(action)[0]
        assert reward == rewards[0]
        assert (type(terminated), type(truncated), type(info["success"])) == (bool, bool, bool)
    for env in (alone, vector, ours):
        env.close()


def test_make_takes_every_field_of_the_config() -> None:
    env = gymnasium.make("robot_rl/Reach-v0", reward="sparse", robot="gantry", horizon_s=0.1)
    batch = env.unwrapped
    assert isinstance(batch, SingleEnv)
    assert (batch.batch.robot, batch.batch.horizon, batch.batch.config.reward) == ("gantry", 2, "sparse")
    env.reset(seed=0)
    ends = [env.step(np.zeros(4, np.float32))[2:4] for _ in range(2)]
    assert ends == [(False, False), (False, True)]


def test_make_says_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"gymnasium.make: no keyword 'rewrd'. Did you mean 'reward'"):
        SingleEnv(task="reach", rewrd="dense")
    with pytest.raises(ConfigError, match=re.escape("render_mode: got 'human', allowed: None, rgb_array")):
        make_vector(2, task="reach", render_mode="human")
    env = SingleEnv(task="reach")
    with pytest.raises(ConfigError, match=r"reach.reset: unknown options \['reset_mask'\]; allowed: state"):
        env.reset(options={"reset_mask": [True]})


def test_a_reset_without_seed_goes_on_from_the_seed_before() -> None:
    first, second = SingleEnv(task="reach"), SingleEnv(task="reach")
    seen = []
    for env in (first, second):
        env.reset(seed=3)
        seen.append([env.reset()[0]["state"] for _ in range(3)])
    np.testing.assert_array_equal(seen[0], seen[1])
    assert len(np.unique(seen[0], axis=0)) == 3


def test_a_reset_may_begin_from_a_state() -> None:
    env = SingleEnv(task="pick_cube")
    env.reset(seed=0)
    row, action = env.batch.get_state()[0], np.full(5, 0.5, np.float32)
    expected = env.step(action)[0]["state"]
    env.reset(seed=5, options={"state": row})
    np.testing.assert_array_equal(env.step(action)[0]["state"], expected)


def test_vectorisation_by_gymnasium_agrees_with_ours() -> None:
    env = gymnasium.make_vec("robot_rl/GantryPeg-v0", num_envs=2, vectorization_mode="sync", num_threads=1)
    ours = make_vector(2, task="gantry_peg", reward="dense")
    np.testing.assert_array_equal(env.reset(seed=1)[0]["state"], ours.reset(seed=1)[0]["state"])


def test_who_resets_is_chosen() -> None:
    env = gymnasium.make_vec("robot_rl/Reach-v0", num_envs=2, autoreset_mode="Disabled", horizon_s=0.1)
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    with pytest.raises(ConfigError, match=re.escape("got 'NextStep', allowed: SameStep, Disabled")):
        make_vector(2, task="reach", autoreset_mode="NextStep")


def test_a_task_of_a_plugin_has_an_id_too(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("task.my_reach", "robot_rl.sim.tasks.reach:Reach", "robot_rl.components")
    monkeypatch.setattr("robot_rl.core.registry.entry_points", lambda group: [point])
    plugins.cache_clear()
    try:
        register_envs()
        env = gymnasium.make("robot_rl/MyReach-v0")
        env.reset(seed=0)
        info = env.step(env.action_space.sample())[4]
        assert info["is_success"] is info["success"] is False
    finally:
        plugins.cache_clear()
        gymnasium.registry.pop("robot_rl/MyReach-v0")


def test_stable_baselines_sees_what_the_vector_env_says() -> None:
    from robot_rl.sim.stable_baselines import StableBaselinesEnv

    config = EnvConfig(task="reach", reward="dense", horizon_s=0.1)  # two steps
    env, ours = StableBaselinesEnv(SimVectorEnv(config, 3)), SimVectorEnv(config, 3)
    env.seed(4)
    np.testing.assert_array_equal(env.reset()["state"], ours.reset(seed=4)[0]["state"])
    action = np.full((3, len(ours.action_names)), 0.5, np.float32)
    _, _, done, told = env.step(action)
    assert not done.any()
    assert told == [{}, {}, {}]
    ours.step(action)
    env.step_async(action)
    obs, reward, done, told = env.step_wait()
    expected, rewards, _, _, infos = ours.step(action)
    np.testing.assert_array_equal(obs["state"], expected["state"])  # of the next episode
    np.testing.assert_allclose(reward, rewards, rtol=1e-6)
    assert done.all()
    for row, info in enumerate(told):
        np.testing.assert_array_equal(
            info.pop("terminal_observation")["state"], infos["final_obs"]["state"][row]
        )
        assert info == {"TimeLimit.truncated": True, "is_success": False}
    assert env.get_attr("task") == ["reach"] * 3
    with pytest.raises(ConfigError, match=r"no single env has 'expert'; call it on `.env`"):
        env.env_method("expert")
    with pytest.raises(ConfigError, match="got autoreset 'disabled', allowed: 'same_step'"):
        StableBaselinesEnv(SimVectorEnv(config, 3, autoreset="disabled"))


@pytest.mark.slow
def test_stable_baselines_sees_pictures() -> None:
    from stable_baselines3 import SAC

    from robot_rl.sim.stable_baselines import StableBaselinesEnv

    config = EnvConfig(task="reach", reward="dense", horizon_s=0.1, cameras=("wrist",), image_size=(36, 36))
    env, ours = StableBaselinesEnv(SimVectorEnv(config, 2)), SimVectorEnv(config, 2, autoreset="disabled")
    space: Any = env.observation_space
    assert set(space.spaces) == {"state", "wrist_rgb"}  # torch allows no dot in a name
    env.seed(4)
    np.testing.assert_array_equal(env.reset()["wrist_rgb"], ours.reset(seed=4)[0]["wrist.rgb"])
    action = np.zeros((2, len(ours.action_names)), np.float32)
    env.step(action)
    ours.step(action)
    _, _, done, told = env.step(action)
    last = ours.step(action)[0]
    assert done.all()
    np.testing.assert_array_equal(told[1]["terminal_observation"]["wrist_rgb"], last["wrist.rgb"][1])
    model = SAC("MultiInputPolicy", env, learning_starts=4, batch_size=4, buffer_size=40, device="cpu")
    assert model.learn(12)._n_updates > 0


@pytest.mark.slow
def test_stable_baselines_learns_from_all_envs_and_counts_successes() -> None:
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecMonitor

    from robot_rl.sim.stable_baselines import StableBaselinesEnv

    env = VecMonitor(StableBaselinesEnv(SimVectorEnv(EnvConfig(task="reach", reward="dense"), 16)))
    model = PPO("MultiInputPolicy", env, n_steps=32, batch_size=128, seed=0, device="cpu")
    model.learn(2048)
    assert model.ep_success_buffer  # of episodes that ended


@pytest.mark.slow
def test_stable_baselines_trains_unmodified() -> None:
    from stable_baselines3 import SAC

    model = SAC(
        "MultiInputPolicy", "robot_rl/Reach-v0", learning_starts=100, batch_size=32, seed=0, device="cpu"
    )
    actor = model.policy.actor
    before = [weight.detach().clone() for weight in actor.parameters()]
    model.learn(400)
    moved = [
        float((new.detach() - old).abs().max()) for new, old in zip(actor.parameters(), before, strict=True)
    ]
    assert model.num_timesteps == 400
    assert max(moved) > 1e-3


def test_recording_a_video_without_moviepy_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moviepy", None)  # as where it is not installed
    env = gymnasium.make("robot_rl/Reach-v0", render_mode="rgb_array")
    with pytest.raises(DependencyNotInstalled, match="moviepy is not installed, run `pip install"):
        gymnasium.wrappers.RecordVideo(env, str(tmp_path))
    env.close()
