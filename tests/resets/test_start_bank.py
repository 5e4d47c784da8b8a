"""Episodes that begin in rows of a bank: the same for one seed, never held-out ones, of no other model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.arrays import to_numpy
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.files import write_json
from robot_rl.core.registry import resolve
from robot_rl.core.seeding import EpisodeRng, Stream
from robot_rl.hal.conformance import check_vector_env
from robot_rl.sim.bank_files import HEAD, Bank, load_bank
from robot_rl.sim.config import EnvConfig, ResetsConfig
from robot_rl.sim.vector import SimVectorEnv
from tests.resets.conftest import ROWS

HELD_OUT = 3
"""A tenth of 24 rows, and what is left of one."""


def env_of(
    folder: Path,
    num: int = 12,
    *,
    horizon_s: float = 0.3,
    array: Any = "numpy",
    autoreset: Any = "same_step",
    **how: Any,
) -> Any:
    resets = ResetsConfig(bank=str(folder), **how)
    config = EnvConfig(task="gantry_peg", num_threads=1, resets=resets, horizon_s=horizon_s)
    return SimVectorEnv(config, num, autoreset=autoreset, array=array)


def env_state(env: Any, infos: dict[str, Any], i: int) -> Any:
    """Returns the row of the bank that env i began in."""
    starts = env._starts
    return starts._states[starts._offset[infos["reset_class"][i]] + infos["reset_row"][i]]


def test_a_bank_is_read_as_it_was_written(bank: Bank, folder: Path) -> None:
    read = load_bank(folder)
    assert (read.key, read.bills, list(read.sets)) == (bank.key, bank.bills, list(bank.sets))
    for name, found in bank.sets.items():
        for part in ("states", "varied", "solved", "coords"):
            np.testing.assert_array_equal(getattr(read.sets[name], part), getattr(found, part))


def test_episodes_begin_in_the_rows_that_infos_name(bank: Bank, folder: Path) -> None:
    env = env_of(folder)
    obs, infos = env.reset(seed=5)
    assert env.reset_classes == ("own", "reaching", "near_object", "grasped", "near_goal")
    for _ in range(8):  # past the end of the episodes of 6 steps
        for i, (kind, row) in enumerate(zip(infos["reset_class"], infos["reset_row"], strict=True)):
            name = env.reset_classes[kind]
            if env._elapsed[i] == 0:
                np.testing.assert_array_equal(env.backend.state[i], bank.sets[name].states[row])
            assert 0 <= row < ROWS - HELD_OUT
        env.step(np.zeros((12, 3)))
        infos = env._starts.infos()
    again, _ = env_of(folder).reset(seed=5)
    np.testing.assert_array_equal(again["state"], obs["state"])


def test_infos_of_a_step_are_of_the_episode_that_it_belongs_to(folder: Path) -> None:
    env = env_of(folder, 2)
    _, first = env.reset(seed=1)
    truncated = np.zeros(2, bool)
    for step in range(6):
        *_, truncated, infos = env.step(np.zeros((2, 3)))
        assert infos["reset_row"].tolist() == first["reset_row"].tolist(), step
    assert truncated.all()
    *_, infos = env.step(np.zeros((2, 3)))
    assert infos["reset_row"].tolist() == env._starts.row.tolist() != first["reset_row"].tolist()


def test_an_env_with_a_bank_keeps_the_rules(folder: Path) -> None:
    mix = {"own": 1.0, "near_goal": 1.0, "grasped": 1.0}
    check_vector_env(lambda num: env_of(folder, num, mix=mix, horizon_s=1.0))
    check_vector_env(lambda num: env_of(folder, num, horizon_s=1.0, autoreset="disabled"))


def test_a_mixture_is_drawn_by_its_weights(folder: Path) -> None:
    env = env_of(folder, 1, mix={"own": 1.0, "grasped": 3.0, "near_goal": 0.0})
    kind, row = env._starts.draw(EpisodeRng(np.arange(4000), np.zeros(4000)))
    assert set(kind.tolist()) == {0, 3}
    assert (kind == 3).mean() == pytest.approx(0.75, abs=0.03)
    assert (row[kind == 0] == -1).all()
    assert set(row[kind == 3].tolist()) == set(range(ROWS - HELD_OUT))


def test_what_failed_is_tried_again_and_what_was_solved_is_not(folder: Path) -> None:
    """Every other one of 12 episodes is noted as solved; with `retry` 0.99 the rest stay in their rows."""
    env = env_of(folder, retry=0.99)
    starts = env._starts
    _, first = env.reset(seed=5)
    drawn = starts.draw(EpisodeRng(env._seed, np.ones(12), stream=Stream.BANK_ROWS))
    solved = np.arange(12) % 2 == 0
    starts.note(np.ones(12, bool), solved)
    starts.begin(np.arange(12), env._seed, np.ones(12))
    np.testing.assert_array_equal(starts.row, np.where(solved, drawn[1], first["reset_row"]))
    np.testing.assert_array_equal(starts.kind, np.where(solved, drawn[0], first["reset_class"]))
    np.testing.assert_array_equal(env.backend.read_states()[1], env_state(env, first, 1))
    starts.note(np.ones(12, bool), np.zeros(12, bool))
    _, fresh = env.reset(seed=5)  # nothing goes on over a new seed
    assert fresh["reset_row"].tolist() == first["reset_row"].tolist()


def test_failed_starts_of_the_tasks_own_are_tried_again(randomized: tuple[Bank, Path]) -> None:
    """All of 12 fail twice, and begin three times in the same states, with the same masses."""
    how: dict[str, Any] = {"task": "gantry_peg", "num_threads": 1, "randomize": True}
    resets = ResetsConfig(bank=str(randomized[1]), mix={"own": 1.0, "grasped": 1.0}, retry=0.9999)
    env: Any = SimVectorEnv(EnvConfig(**how, resets=resets), 12, autoreset="disabled")
    _, first = env.reset(seed=5)
    assert set(first["reset_class"].tolist()) == {0, 1}
    ids, every = np.arange(12), np.ones(12, bool)
    states, drawn = env.backend.read_states().copy(), env.drawn(ids)
    for episode in (1, 2):
        env._starts.note(every, ~every)
        if episode == 2:  # also over a checkpoint
            saved, env = env.state_dict(), SimVectorEnv(env.config, 12, autoreset="disabled")
            env.load_state_dict(saved)
        _, infos = env.reset()
        assert (env._episode == episode).all()
        assert infos["reset_row"].tolist() == first["reset_row"].tolist()
        np.testing.assert_array_equal(env.backend.read_states(), states)
        np.testing.assert_array_equal(env.drawn(ids), drawn)
    env._starts.note(every, every)  # solved: the next ones are new
    env.reset()
    assert (np.abs(env.backend.read_states() - states).max(axis=1) > 0).all()


def test_given_states_that_fail_are_not_tried_again(folder: Path) -> None:
    env = env_of(folder, 4, mix={"own": 1.0}, retry=0.9999, autoreset="disabled")
    plain = SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1), 4, autoreset="disabled")
    for each in (env, plain):
        each.reset(seed=5)
    given = env.get_state()
    for each in (env, plain):
        each.reset(options={"states": given})
    env._starts.note(np.ones(4, bool), np.zeros(4, bool))
    np.testing.assert_array_equal(env.reset()[0]["state"], plain.reset()[0]["state"])


def test_a_step_that_fails_leads_to_the_same_row(folder: Path) -> None:
    """Episodes of 6 steps without motion are not solved: 9 of 10 of them begin in their row again."""
    env = env_of(folder, 200, retry=0.9)
    _, first = env.reset(seed=1)
    infos: dict[str, Any] = {}
    for _ in range(6):
        *_, infos = env.step(np.zeros((200, 3)))
    failed = ~infos["final_info"]["success"]
    again = (env._starts.row == first["reset_row"]) & (env._starts.kind == first["reset_class"])
    assert failed.sum() > 100
    assert again[failed].mean() == pytest.approx(0.9, abs=0.06)
    assert again[~failed].sum() <= 2  # by chance


def test_a_resumed_env_knows_what_failed_before_its_reset(folder: Path) -> None:
    env, other = (env_of(folder, retry=0.9, autoreset="disabled") for _ in range(2))
    _, begun = env.reset(seed=0)
    for _ in range(6):
        env.step(np.zeros((12, 3)))
    other.reset(seed=99)
    other.load_state_dict(env.state_dict())
    (_, mine), (_, theirs) = env.reset(), other.reset()
    assert (mine["reset_row"] == begun["reset_row"]).sum() > 6
    assert theirs["reset_row"].tolist() == mine["reset_row"].tolist()
    assert theirs["reset_class"].tolist() == mine["reset_class"].tolist()


@pytest.mark.parametrize("array", ["numpy", "torch"])
def test_weights_follow_what_is_being_learned(folder: Path, array: Any) -> None:
    """With l = 0.8 and success 1 and 1/2, weights 3 and 1 become 3 x 0.2 and 1 x 1.0: 37.5 and 62.5 %."""
    env = env_of(folder, 100, mix={"near_goal": 3.0, "grasped": 1.0}, learnability=0.8, array=array)
    env.reset(seed=0)
    starts = env._starts
    assert to_numpy(starts._until()).tolist() == [0.25]  # grasped first; the weights as given
    starts._success[4] = 1.0
    assert to_numpy(starts._until()) == pytest.approx([0.625])
    _, infos = env.reset(seed=1)
    assert np.mean(to_numpy(infos["reset_class"]) == 3) == pytest.approx(0.625, abs=0.12)


@pytest.mark.parametrize("array", ["numpy", "torch"])
def test_the_success_of_a_class_forgets(folder: Path, array: Any) -> None:
    """Of 4 episodes of `near_goal` that end, 3 are solved: 0.5 + (1 - 0.98^4) (0.75 - 0.5) = 0.51941."""
    env, again = (env_of(folder, 6, mix={"near_goal": 1.0}, learnability=0.5, array=array) for _ in range(2))
    env.reset(seed=0)
    ended, solved = (env.xp.asarray(np.array([True] * number + [False] * (6 - number))) for number in (4, 3))
    env._starts.note(ended, solved)
    assert to_numpy(env._starts._success) == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.519408], abs=1e-6)
    again.reset(seed=3)
    again.load_state_dict(env.state_dict())
    np.testing.assert_array_equal(to_numpy(again._starts._success), to_numpy(env._starts._success))


def test_the_draws_of_own_starts_do_not_shift(folder: Path) -> None:
    plain = SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1), 12, autoreset="disabled")
    own, _ = plain.reset(seed=5)
    obs, infos = env_of(folder, mix={"own": 1.0, "grasped": 1.0}).reset(seed=5)
    is_own = infos["reset_class"] == 0
    assert 0 < is_own.sum() < 12
    np.testing.assert_array_equal(obs["state"][is_own], own["state"][is_own])


def test_evaluations_begin_in_one_class_and_in_no_row_of_training(folder: Path) -> None:
    config = EnvConfig(task="gantry_peg", resets=ResetsConfig(bank=str(folder), mix={"near_goal": 1.0}))
    assert config.evaluated() == EnvConfig(task="gantry_peg")  # the task's own starts, and no bank at all
    asked = replace(config, resets=replace(config.resets, evaluate="grasped")).evaluated()
    env = SimVectorEnv(asked, 64, autoreset="disabled")
    _, infos = env.reset(seed=2**31)
    assert {env.reset_classes[kind] for kind in infos["reset_class"]} == {"grasped"}
    assert set(infos["reset_row"].tolist()) == set(range(ROWS - HELD_OUT, ROWS))


def test_a_reset_may_name_class_and_row(bank: Bank, folder: Path) -> None:
    env = env_of(folder, 3, autoreset="disabled")
    env.reset(seed=0)
    before = env.get_state()
    options = {"reset_class": [4, 0, 2], "reset_row": [23, 7, 0], "reset_mask": np.array([True, False, True])}
    _, infos = env.reset(options=options)
    np.testing.assert_array_equal(env.backend.state[0], bank.sets["near_goal"].states[23])
    np.testing.assert_array_equal(env.backend.state[2], bank.sets["near_object"].states[0])
    np.testing.assert_array_equal(env.get_state()[1], before[1])
    assert infos["reset_class"][[0, 2]].tolist() == [4, 2]
    _, infos = env.reset(options={"reset_class": 0})
    assert infos["reset_row"].tolist() == [-1, -1, -1]
    for kind, row in ((5, 0), (1, ROWS), (1, -1)):
        with pytest.raises(
            ConfigError, match=r"reset: got reset_class .* rows below 1 reaching: 24, 2 near_obj"
        ):
            env.reset(options={"reset_class": kind, "reset_row": row})
    with pytest.raises(ConfigError, match="reset_row: got 3, allowed: with reset_class"):
        env.reset(options={"reset_row": 3})
    for name, given in (("reset_class", [1, 2]), ("reset_class", 1.5), ("reset_row", "first")):
        with pytest.raises(
            ConfigError, match=f"reset: {name}: got .*, allowed: a number, or one for each of 3"
        ):
            env.reset(options={"reset_class": 1, name: given})


def test_a_reset_to_given_states_is_no_row_of_the_bank(randomized: tuple[Bank, Path]) -> None:
    """Envs 0 and 2 of 3 begin in states 1 and 5; their models are what their seeds draw without a bank."""
    how: dict[str, Any] = {"task": "gantry_peg", "num_threads": 1, "randomize": True}
    made, bank = randomized
    rows = made.sets["grasped"]
    resets = ResetsConfig(bank=str(bank))
    env = SimVectorEnv(EnvConfig(**how, resets=resets), 3, autoreset="disabled")
    plain = SimVectorEnv(EnvConfig(**how), 3, autoreset="disabled")
    plain.reset(seed=7)
    _, first = env.reset(seed=7)
    assert (first["reset_class"] == 1).all()
    kept = first["reset_row"][1]
    given = {"states": rows.states[[1, 3, 5]], "reset_mask": np.array([True, False, True])}
    plain.reset(options=given)
    _, infos = env.reset(options=given)
    np.testing.assert_array_equal(env.backend.read_states()[[0, 2]], rows.states[[1, 5]])
    *_, stepped = env.step(np.zeros((3, 3)))
    for found in (infos, stepped):
        assert found["reset_class"].tolist() == [0, 1, 0]
        assert found["reset_row"].tolist() == [-1, kept, -1]
    ids = np.array([0, 2])
    np.testing.assert_array_equal(env.drawn(ids), plain.drawn(ids))
    np.testing.assert_array_equal(env.drawn(np.array([1])), rows.varied[[kept]])
    assert (env.reset()[1]["reset_class"] == 1).all()  # the next episodes are drawn from the bank
    with pytest.raises(ConfigError, match="reset: states: got 'states with reset_class', allowed: one of"):
        env.reset(options={**given, "reset_class": 1})


def test_tensors_begin_in_the_same_rows(folder: Path) -> None:
    mix = {"own": 1.0, "near_goal": 1.0, "reaching": 1.0}
    ours, theirs = env_of(folder, mix=mix), env_of(folder, mix=mix, array="torch")
    _, infos = ours.reset(seed=9)
    _, found = theirs.reset(seed=9)
    for name in ("reset_class", "reset_row"):
        np.testing.assert_array_equal(to_numpy(found[name]), infos[name])
    np.testing.assert_array_equal(to_numpy(theirs.get_state()), ours.get_state())


def test_randomised_models_come_with_their_rows(randomized: tuple[Bank, Path]) -> None:
    made, bank = randomized
    assert made.key.varied == ("geom_friction peg 0", "body_mass peg 0")
    resets = ResetsConfig(bank=str(bank), mix={"own": 1.0, "grasped": 1.0})
    env = SimVectorEnv(EnvConfig(task="gantry_peg", num_threads=1, randomize=True, resets=resets), 16)
    _, infos = env.reset(seed=0)
    taken = infos["reset_class"] == 1
    assert 0 < taken.sum() < 16
    drawn = env.drawn(np.arange(16))
    np.testing.assert_array_equal(drawn[taken], made.sets["grasped"].varied[infos["reset_row"][taken]])
    assert np.unique(drawn[~taken, 1]).size == (~taken).sum()
    with pytest.raises(DatasetError, match=r"varied: \('geom_fric.*'\), here \(\); .*env.randomize.*=false"):
        SimVectorEnv(EnvConfig(task="gantry_peg", resets=resets), 1)


def test_a_bank_of_something_else_is_refused_by_what_differs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = ResetsConfig(bank=str(folder))
    with pytest.raises(DatasetError) as error:
        SimVectorEnv(EnvConfig(task="pick_cube", robot="gantry", resets=resets), 1)
    text = str(error.value)
    assert "env.resets.bank=" in text
    assert "task: 'gantry_peg', here 'pick_cube'" in text
    assert "model_hash" in text
    assert "robot:" not in text
    assert "robot-rl resets generate task=pick_cube robot=gantry" in text
    monkeypatch.setattr("robot_rl.sim.tasks.gantry_peg.PEG_HALF_M", (0.009, 0.01, 0.04))
    with pytest.raises(DatasetError, match=r"something else. model_hash: '\w{16}', here '\w{16}'. Make one"):
        SimVectorEnv(EnvConfig(task="gantry_peg", resets=resets), 1)


def test_a_bank_fits_scenes_that_look_or_show_otherwise(bank: Bank, folder: Path) -> None:
    resets = ResetsConfig(bank=str(folder))
    key = load_bank(folder).key
    for how in ({"looks": "varied"}, {"state": ("joint", "tip_in_hole")}):
        config: dict[str, Any] = how
        env = SimVectorEnv(EnvConfig(task="gantry_peg", **config), 1)
        assert env.bank_key() == key, how
    env = SimVectorEnv(EnvConfig(task="gantry_peg", looks="varied", resets=resets), 2)
    _, infos = env.reset(seed=0)
    name, row = env.reset_classes[infos["reset_class"][1]], infos["reset_row"][1]
    np.testing.assert_array_equal(env.backend.read_states()[1], bank.sets[name].states[row])


def test_damaged_banks_are_refused(bank: Bank, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"bank: '.*none' is no start bank: it has no bank.json"):
        load_bank(tmp_path / "none")
    bank.save(tmp_path / "bank")
    path = tmp_path / "bank" / "grasped.npz"
    whole = bytearray(path.read_bytes())
    # Behind a header of 30 bytes, a name and an extra field: a block of a type that does not exist.
    name_and_extra = int.from_bytes(whole[26:28], "little") + int.from_bytes(whole[28:30], "little")
    whole[30 + name_and_extra] = 0xFF
    for damaged in (b"no archive", bytes(whole), b""):
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"grasped.npz cannot be read"):
            load_bank(tmp_path / "bank")
    np.savez(
        tmp_path / "bank" / "grasped.npz", states=np.zeros((1, 2)), varied=[[]], solved=[False], coords=[[]]
    )
    with pytest.raises(DatasetError, match=r"states of shape \(1, 2\), need \(24, 123\)"):
        load_bank(tmp_path / "bank")
    head = json.loads((tmp_path / "bank" / HEAD).read_text())
    del head["key"]["robot"]
    write_json(tmp_path / "bank" / HEAD, {name: head[name] for name in ("key", "classes", "settings")})
    with pytest.raises(DatasetError, match=r"is not of this version"):
        load_bank(tmp_path / "bank")


def test_settings_of_starts_are_checked(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.resets.mix.grasped: got -1.0, allowed: 0 or more"):
        ResetsConfig(bank="x", mix={"grasped": -1.0})
    with pytest.raises(ConfigError, match=r"env.resets.mix: got .* a weight above 0"):
        ResetsConfig(bank="x", mix={"grasped": 0.0})
    with pytest.raises(
        ConfigError, match=r"env.resets: got 'grasped', allowed: own without a bank: give env.resets.bank"
    ):
        ResetsConfig(evaluate="grasped")
    with pytest.raises(ConfigError, match=r"env.resets.mix: no class 'graspt'. Did you mean 'grasped'"):
        env_of(folder, mix={"graspt": 1.0})
    with pytest.raises(ConfigError, match=r"env.resets.evaluate: no class 'near'. Did you mean 'near_goal'"):
        env_of(folder, evaluate="near")
    with pytest.raises(ConfigError, match=r"env.resets: got .*, allowed: left out with env.kind=gym"):
        EnvConfig(kind="gym", id="Hopper-v5", resets=ResetsConfig(bank="x"))


def test_what_motion_depends_on_is_in_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(**config: Any) -> str:
        return SimVectorEnv(EnvConfig(task="reach", **config), 1).bank_key().model_hash

    first = key()
    assert key(robot="gantry") != first
    monkeypatch.setattr("robot_rl.sim.scene.GREEN", (1.0, 0.0, 0.0, 1.0))
    assert key() == first
    build = resolve("task", "reach").scene

    def slower(self: Any, spec: Any, robot: Any) -> None:
        build(self, spec, robot)
        spec.option.timestep = 0.0025

    monkeypatch.setattr(resolve("task", "reach"), "scene", slower)
    assert key() != first
