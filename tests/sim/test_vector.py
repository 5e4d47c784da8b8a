"""The vector env: ends of episodes, messages, divergence, and what a broken action does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from robot_rl.core.errors import ConfigError, ModelError, UnknownComponentError
from robot_rl.core.seeding import EpisodeRng
from robot_rl.sim.backends.mujoco_cpu import on_cpu
from robot_rl.sim.domain_config import DomainConfig
from robot_rl.sim.mirror import Mirror
from robot_rl.sim.randomize import Randomizer, Vary
from robot_rl.sim.vector import EnvConfig, SimVectorEnv

Array = NDArray[Any]


def make(num_envs: int = 4, *, autoreset: str = "same_step", **config: Any) -> SimVectorEnv:
    mode = "same_step" if autoreset == "same_step" else "disabled"
    values: dict[str, Any] = {"task": "reach", "num_threads": 1, **config}
    return SimVectorEnv(EnvConfig(**values), num_envs, autoreset=mode)


def still(env: SimVectorEnv) -> Array:
    return np.zeros((env.num_envs, len(env.action_names)), np.float32)


# --- ends of episodes ----------------------------------------------------------------------------


def test_same_step_keeps_the_last_observation() -> None:
    env = make(3, horizon_s=0.2)  # 4 control steps of 50 ms
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    env.reset(seed=0)
    for _ in range(3):
        _, _, terminated, truncated, infos = env.step(still(env))
        assert not (terminated | truncated).any()
        assert "final_obs" not in infos
    obs, _, terminated, truncated, infos = env.step(still(env))
    assert truncated.all()
    assert not terminated.any()
    assert infos["_final_obs"].all()
    assert infos["final_info"]["success"].shape == (3,)
    assert infos["final_info"]["is_success"] is infos["final_info"]["success"]
    assert (infos["final_obs"]["state"] != obs["state"]).any(axis=1).all()
    twin = make(3, horizon_s=0.2)
    twin.reset(seed=0)
    np.testing.assert_array_equal(obs["state"], twin.reset()[0]["state"])  # episode 1 of the same seeds


def test_disabled_leaves_an_ended_env_where_it_is() -> None:
    env = make(2, autoreset="disabled", horizon_s=0.1)
    assert env.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    env.reset(seed=0)
    env.step(still(env))
    obs, _, _, truncated, infos = env.step(still(env))
    assert truncated.all()
    assert "final_obs" not in infos
    after = env.reset(options={"reset_mask": np.array([True, False])})[0]
    np.testing.assert_array_equal(after["state"][1], obs["state"][1])
    assert (after["state"][0] != obs["state"][0]).any()
    assert env.step(still(env))[3].tolist() == [False, True]


def test_success_terminates_and_pays_one() -> None:
    env = make(16, autoreset="disabled")
    env.reset(seed=0)
    expert, live, paid = env.expert(), np.ones(16, bool), np.zeros(16)
    while live.any():
        _, reward, terminated, truncated, infos = env.step_masked(expert.act(), live)
        np.testing.assert_array_equal(terminated, infos["success"])
        paid += reward
        live &= ~(terminated | truncated)
    np.testing.assert_array_equal(paid, 1.0)


def test_rows_that_wait_keep_state_and_clock() -> None:
    env = make(2, autoreset="disabled", horizon_s=0.1)
    env.reset(seed=0)
    before = env.get_state()
    active = np.array([True, False])
    _, reward, _, truncated, _ = env.step_masked(still(env) + 1.0, active)
    np.testing.assert_array_equal(env.get_state()[1], before[1])
    assert (env.get_state()[0] != before[0]).any()
    assert reward[1] == 0.0
    assert env.step_masked(still(env), None)[3].tolist() == [True, False]
    assert not truncated.any()


def test_a_reset_may_begin_from_given_states() -> None:
    env = make(2, autoreset="disabled")
    env.reset(seed=0)
    rows = env.get_state()
    for _ in range(3):
        env.step(still(env) + 1.0)
    env.reset(options={"states": rows, "reset_mask": np.array([True, False])})
    np.testing.assert_array_equal(env.get_state()[0], rows[0])
    assert (env.get_state()[1] != rows[1]).any()


def test_the_robot_is_the_tasks_own_unless_given() -> None:
    assert make(1, task="gantry_peg").robot == "gantry"
    assert make(1).robot == "panda"
    assert make(1, robot="gantry").robot == "gantry"


# --- messages ------------------------------------------------------------------------------------


def test_a_part_of_the_state_is_shown_by_name() -> None:
    whole = SimVectorEnv(EnvConfig(num_threads=1), 2)
    part = SimVectorEnv(EnvConfig(state=("finger", "cube."), num_threads=1), 2)
    places = [i for i, name in enumerate(whole.state_names) if name.startswith(("finger", "cube."))]
    assert part.state_names == tuple(whole.state_names[i] for i in places)
    assert len(places) == 8  # two fingers, position and x axis of the cube
    seen, all_of_it = part.reset(seed=3)[0]["state"], whole.reset(seed=3)[0]["state"]
    assert part.single_observation_space.contains({"state": part.reset(seed=3)[0]["state"][0]})
    assert (seen == all_of_it[:, places]).all()


@pytest.mark.parametrize("name", ["last_action", "finger_joint1.pos.change_2"])
def test_the_past_is_refused_by_what_does_not_keep_it(name: str) -> None:
    config = EnvConfig(task="reach", state=("joint", "finger", name), num_threads=1)
    message = f"env.state: got '{name}', which is of the past; allowed here: elements of the present"
    for make_one in (lambda: SimVectorEnv(config, 1), lambda: Mirror(config)):
        with pytest.raises(ConfigError, match=re.escape(message)):
            make_one()


@pytest.mark.parametrize(
    "config",
    [
        {"state": ("joint", "tool")},
        {"domain": DomainConfig(joint_noise_rad=0.01)},
        {"formula": "solved", "robots": ("panda", "gantry")},
    ],
)
def test_the_state_is_known_after_a_step_that_shows_nothing(config: dict[str, Any]) -> None:
    seen, unseen = (SimVectorEnv(EnvConfig(task="reach", num_threads=1, **config), 2) for _ in range(2))
    sent = np.full((2, len(seen.action_names)), 0.5, np.float32)
    for env in (seen, unseen):
        env.reset(seed=1)
    state = seen.step(sent)[0]["state"]
    assert unseen.step_unseen(sent, None)[0] == {}
    np.testing.assert_array_equal(unseen.shown_state(), state)


def test_actions_of_a_wrong_shape_are_refused() -> None:
    env = make(4)
    env.reset(seed=0)
    message = "reach: got actions of shape (4, 7), need (4, 4): tool.dx, tool.dy, tool.dz, gripper"
    with pytest.raises(ConfigError, match=re.escape(message)):
        env.step(np.zeros((4, 7), np.float32))


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(
        UnknownComponentError, match=r"env.task: no task named 'pick_cub'. Did you mean 'pick_cube'"
    ):
        make(1, task="pick_cub")
    with pytest.raises(UnknownComponentError, match=r"robot: no robot named 'gantri'. Did you mean 'gantry'"):
        make(1, robot="gantri")


def test_a_seed_of_none_goes_on_to_the_next_episode() -> None:
    """Of two envs the first begins at seed 9, the second with the second episode of its seed, 5 + 1."""
    env, twin = make(2), make(2)
    env.reset(seed=5)
    twin.reset(seed=5)
    obs = env.reset(seed=[9, None])[0]["state"]
    np.testing.assert_array_equal(obs[1], twin.reset()[0]["state"][1])
    np.testing.assert_array_equal(obs[0], twin.reset(seed=9)[0]["state"][0])


def test_resets_say_what_they_take() -> None:
    env = make(2)
    with pytest.raises(ConfigError, match=r"unknown options \['mask'\]; allowed: reset_mask, states"):
        env.reset(options={"mask": 1})
    with pytest.raises(ConfigError, match="got 3 seeds, need 2, one an env"):
        env.reset(seed=[1, 2, 3])
    with pytest.raises(ConfigError, match=re.escape("got rows of shape (2, 3), need (2, ")):
        env.set_state(np.zeros((2, 3)))
    with pytest.raises(ConfigError, match=r"env.horizon_s: got -1.0, allowed: above 0"):
        EnvConfig(horizon_s=-1.0)


# --- what was executed ----------------------------------------------------------------------------


def test_who_is_sent_the_executed_targets_goes_the_same_way() -> None:
    env, asked_only, twin = make(3, task="pick_cube"), make(3, task="pick_cube"), make(3, task="pick_cube")
    for each in (env, asked_only, twin):
        each.reset(seed=0)
    rng, limited = np.random.default_rng(0), 0
    for _ in range(40):
        action = 1.5 * np.sign(rng.uniform(-1, 1, (3, len(env.action_names)))).astype(np.float32)
        _, _, terminated, truncated, infos = env.step(action)
        assert not (terminated | truncated).any()
        np.testing.assert_array_equal(infos["commanded_action"], np.clip(action, -1, 1))
        limited += int(infos["limited"].sum())
        for other in (twin, asked_only):
            position = other.controller.joint_positions()
            wanted = other.controller.targets(np.clip(action, -1, 1), position)
            sent = infos["executed_target_rad"] if other is twin else wanted
            other._ctrl[:, other.index.arm_ctrl] = sent
            other._ctrl[:, other.index.effector_ctrl] = other.controller.effectors(np.clip(action, -1, 1))
            other.backend.step(other.num_substeps)
        np.testing.assert_array_equal(on_cpu(twin.backend).state, on_cpu(env.backend).state)
    assert limited > 60  # of 120: that which was asked leads elsewhere
    assert np.abs(asked_only.controller.joint_positions() - env.controller.joint_positions()).max() > 0.05


def test_a_row_that_waits_keeps_its_target() -> None:
    env = make(2)
    env.reset(seed=0)
    before = env.step(still(env) + 0.5)[4]["executed_target_rad"]
    after = env.step_masked(still(env) - 0.5, np.array([True, False]))[4]["executed_target_rad"]
    assert (after[0] != before[0]).any()
    np.testing.assert_array_equal(after[1], before[1])


# --- divergence ----------------------------------------------------------------------------------


def run_with(env: SimVectorEnv, *, bad_row: int | None) -> list[tuple[Array, Array, Array]]:
    """Returns observation, reward and truncation of six steps; NaN enters a state before the third."""
    env.reset(seed=0)
    rng, seen = np.random.default_rng(0), []
    for step in range(6):
        if step == 2 and bad_row is not None:
            env.backend.bind("qpos")[bad_row, 0] = np.nan
        action = rng.uniform(-1, 1, (env.num_envs, len(env.action_names))).astype(np.float32)
        obs, reward, _, truncated, infos = env.step(action)
        assert infos["diverged"].tolist() == [bad_row == i and step == 2 for i in range(env.num_envs)]
        seen.append((obs["state"], reward, truncated))
    return seen


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_a_diverged_env_is_reset_counted_and_dumped(tmp_path: Path, autoreset: str) -> None:
    env = make(4, autoreset=autoreset, dump_diverged=str(tmp_path / "dump"), reward="dense")
    seen = run_with(env, bad_row=2)
    expected = run_with(make(4, autoreset=autoreset, reward="dense"), bad_row=None)
    others = [0, 1, 3]
    for (obs, reward, truncated), (clean_obs, clean_reward, clean_truncated) in zip(
        seen, expected, strict=True
    ):
        np.testing.assert_array_equal(obs[others], clean_obs[others])
        np.testing.assert_array_equal(reward[others], clean_reward[others])
        np.testing.assert_array_equal(truncated[others], clean_truncated[others])
        assert np.isfinite(obs).all()
        assert np.isfinite(reward).all()
    assert seen[2][2].tolist() == [False, False, True, False]  # the end of that episode, and no success
    assert env.num_diverged == 1
    (file,) = (tmp_path / "dump").iterdir()
    dump = np.load(file)
    assert file.name == "diverged_000001.npz"
    assert np.isnan(dump["state_before"]).any()
    assert (dump["seed"].tolist(), dump["episode"].tolist(), dump["control_step"].tolist()) == ([2], [0], [2])
    assert np.isfinite(dump["ctrl"]).all()


def test_an_env_that_blows_up_within_a_step_is_truncated_and_can_go_on() -> None:
    env = make(2, autoreset="disabled", task="pick_cube")
    env.reset(seed=0)
    env.backend.bind("qvel")[1, -1] = 1e9  # a state as such, and too fast for a step
    obs, _, _, truncated, infos = env.step(still(env))
    assert infos["diverged"].tolist() == [False, True]
    assert truncated.tolist() == [False, True]
    assert np.isfinite(obs["state"]).all()
    env.reset(options={"reset_mask": truncated})
    for _ in range(3):
        assert not env.step(still(env))[4]["diverged"].any()
    assert env.num_diverged == 1


def test_every_divergence_of_one_simulation_is_noticed() -> None:
    env = make(2, autoreset="disabled", task="pick_cube")
    env.reset(seed=0)
    seen: list[list[bool]] = []
    for step in range(9):
        if step % 3 == 2:
            env.backend.bind("qpos")[0, 0] = np.nan
        if step % 4 == 3:
            env.backend.bind("qvel")[1, -1] = 1e9
        _, _, _, truncated, infos = env.step(still(env))
        assert truncated.tolist() == infos["diverged"].tolist()
        env.reset(options={"reset_mask": truncated})
        seen.append(infos["diverged"].tolist())
    # Env 0 in the third, sixth and ninth step, env 1 in the fourth and eighth.
    assert seen == [[step % 3 == 2, step % 4 == 3] for step in range(9)]
    assert env.num_diverged == 5


@pytest.mark.parametrize("element", [0, -1])
def test_a_broken_action_holds_its_row_and_no_other(element: int) -> None:
    env, clean = make(3, task="pick_cube"), make(3, task="pick_cube")
    env.reset(seed=0)
    clean.reset(seed=0)
    action = still(env) + 0.5
    poisoned = action.copy()
    poisoned[1, element] = np.nan
    for _ in range(3):
        obs, reward, _, _, infos = env.step(poisoned)
        expected, _, _, _, _ = clean.step(action)
        np.testing.assert_array_equal(obs["state"][[0, 2]], expected["state"][[0, 2]])
        np.testing.assert_array_equal(infos["commanded_action"][1], 0.0)
        assert infos["limited"][1]
        assert np.isfinite(obs["state"]).all()
        assert np.isfinite(reward).all()
    assert env.num_diverged == 0
    # The held arm stays: 0.15 s at half speed would be 3 cm.
    start = make(3, task="pick_cube")
    start.reset(seed=0)
    moved = np.linalg.norm(env.view["tool.pos"] - start.view["tool.pos"], axis=1)
    assert moved[1] < 0.003 < moved[0]


# --- randomisation -------------------------------------------------------------------------------


def test_terms_name_fields_and_objects_that_exist() -> None:
    backend = make(2, task="pick_cube").backend
    bad = {
        r"no field 'geom_frction'. Did you mean 'geom_friction'": Vary(
            field="geom_frction", element="cube", low=1, high=1
        ),
        r"no geom named 'cub'. Did you mean 'cube'": Vary(
            field="geom_friction", element="cub", low=1, high=1
        ),
        r"no field 'mass'": Vary(field="mass", element="cube", low=1, high=1),
    }
    for message, term in bad.items():
        with pytest.raises(ModelError, match=message):
            Randomizer((term,), backend)
    with pytest.raises(ModelError, match=r"vary body_mass of cube: low 2 is above high 1"):
        Vary(field="body_mass", element="cube", low=2, high=1)


def test_a_term_sets_or_scales_one_column_or_all() -> None:
    backend = make(3, task="pick_cube").backend
    row = on_cpu(backend).model.geom("cube").id
    terms = (
        Vary(field="geom_friction", element="cube", low=0.4, high=0.4, how="set", component=0),
        Vary(field="geom_size", element="cube", low=2.0, high=2.0),
    )
    randomizer = Randomizer(terms, backend)
    randomizer.apply(np.array([1]), EpisodeRng([0], [0]))
    friction, size = backend.expand("geom_friction"), backend.expand("geom_size")
    np.testing.assert_allclose(friction[:, row, 0], [1.0, 0.4, 1.0])
    np.testing.assert_allclose(friction[:, row, 1], 0.005)
    np.testing.assert_allclose(size[:, row, 2], [0.02, 0.04, 0.02])  # half of 4 cm, doubled
    # Contacts are looked for within the box's new radius, sqrt(3) times its half size.
    radii = [on_cpu(backend).batch.get_model(i).geom_rbound[row] for i in range(3)]
    np.testing.assert_allclose(radii, np.sqrt(3) * np.array([0.02, 0.04, 0.02]))
