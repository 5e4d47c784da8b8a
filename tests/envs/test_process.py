"""Environments in other processes: failures, and what they must not change."""

import os
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError, RobotRLError, StorageError
from robot_rl.envs.gym import GymVectorEnv, _warn_about_seeds
from robot_rl.envs.process import ProcessVectorEnv
from robot_rl.rollout.envs import make_env, make_expert
from robot_rl.sim.config import EnvConfig

PUSHER, ENDS = "foreign_envs:make", {"max_episode_steps": 9}


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker finds modules in the working folder."""
    shutil.copy(Path(__file__).with_name("foreign_envs.py"), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def pushers(
    num_envs: int = 4,
    *,
    expert: str | None = None,
    timeout_s: float = 60.0,
    workers: int = 2,
    autoreset: Any = "same_step",
    **settings: Any,
) -> "closing[ProcessVectorEnv]":
    how: dict[str, Any] = {"autoreset": autoreset, "timeout_s": timeout_s, "workers": workers}
    how |= {"expert": expert}
    return closing(ProcessVectorEnv(PUSHER, num_envs, settings=ENDS | settings, **how))


def actions(steps: int, num_envs: int = 4) -> Any:
    return np.random.default_rng(0).uniform(-1, 1, (steps, num_envs, 2)).astype(np.float32)


def assert_equal(one: Any, two: Any, rows: Any = slice(None)) -> None:
    for a, b in zip(one[:4], two[:4], strict=True):
        if isinstance(a, dict):
            for key in a:
                np.testing.assert_array_equal(a[key][rows], b[key][rows])
        else:
            np.testing.assert_array_equal(a[rows], b[rows])


def test_steps_are_those_of_this_process_and_pictures_have_their_cameras_name() -> None:
    with pushers() as ours, closing(GymVectorEnv(PUSHER, 4, settings=ENDS)) as theirs:
        assert ours.state_names == ("agent_pos_0", "agent_pos_1")
        assert_equal(ours.reset(seed=5), theirs.reset(seed=5))
        both = [(ours.step(action), theirs.step(action)) for action in actions(20)]
        for one, two in both:
            assert_equal(one, two)
            np.testing.assert_array_equal(one[4]["success"], two[4]["success"])
        assert (both[-1][0][0]["top.rgb"] == 20 % 8).all()
        assert ours.says_success


@pytest.mark.parametrize("fails", ["die", "hang"])
def test_a_worker_that_fails_is_started_again_and_its_episodes_are_cut_off(
    tmp_path: Path, fails: str
) -> None:
    once = tmp_path / "once"
    once.touch()
    quick = 60.0 if fails == "die" else 1.0
    with (
        pushers(timeout_s=quick, fails=fails, once=str(once), seed=5) as env,
        closing(GymVectorEnv(PUSHER, 4, settings=ENDS)) as sound,
    ):
        steps = actions(8)
        env.reset(seed=5)  # rows 0 and 1 are one worker's
        sound.reset(seed=5)
        before = [(env.step(action), sound.step(action)) for action in steps[:2]][-1][0][0]
        cut, kept = env.step(steps[2]), sound.step(steps[2])
        assert cut[3].tolist() == [True, True, False, False]  # truncated
        assert cut[2].tolist() == [False] * 4
        assert cut[1][:2].tolist() == [0.0, 0.0]
        np.testing.assert_array_equal(cut[4]["final_obs"]["state"][:2], before["state"][:2])
        assert_equal(cut, kept, slice(2, 4))
        assert (cut[0]["top.rgb"][:2] == 0).all()  # the next episodes have begun
        for action in steps[3:5]:
            assert_equal(env.step(action), sound.step(action), slice(2, 4))


def test_rows_that_were_not_asked_to_step_lose_nothing(tmp_path: Path) -> None:
    once = tmp_path / "once"
    how: dict[str, Any] = {"fails": "die", "once": str(once), "at": 2, "seed": 5}
    with pushers(2, workers=1, autoreset="disabled", **how) as env:
        env.reset(seed=5)
        first, second = actions(2, 2)
        before = env.step(first)[0]
        once.touch()
        obs, _, _, truncated, _ = env.step_masked(second, np.array([True, False]))
        assert truncated.tolist() == [True, False]
        np.testing.assert_array_equal(obs["state"], before["state"])
        after = env.step_masked(second, np.array([False, True]))[0]
        np.testing.assert_allclose(after["state"][1, 1], 2 * (first + second)[1, 1], rtol=1e-6)


def test_arrays_that_the_shared_memory_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("robot_rl.envs.foreign.size_of", lambda _: 2**60)
    with pytest.raises(StorageError, match=r"num_envs=4 take \d+ MB .* Give a smaller num_envs, or more"):
        pushers()


def test_a_worker_that_fails_in_a_reset_is_asked_again(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    with pushers(fails="reset", once=str(once), seed=6) as env:
        obs, _ = env.reset(seed=5)
        assert obs["state"][:, 0].tolist() == [5, 6, 7, 8]
        assert not once.exists()


def test_one_that_always_fails_ends_the_run_with_what_it_printed() -> None:
    with pushers(fails="reset", seed=6) as env:
        message = r"3 restarts did not help: a process ended with code 7\. It printed last: .*about to fail"
        with pytest.raises(RobotRLError, match=message):
            env.reset(seed=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fails": "raise", "seed": 7}, "it raised ZeroDivisionError: a ball without a mass"),
        ({"fails": "nan"}, "env 0: the reward is nan"),
        ({"fails": "nan", "seed": 6, "at": 1}, "the reward is nan"),
    ],
)
def test_what_an_environment_raises_is_said(settings: dict[str, Any], message: str) -> None:
    with pushers(**settings) as env:
        env.reset(seed=5)
        with pytest.raises(RobotRLError, match=message):
            [env.step(action) for action in actions(4)]


def test_an_expert_acts_in_the_environments_units_and_is_another_one_in_each_episode() -> None:
    named: dict[str, Any] = {"expert": "foreign_envs:Brakes", "autoreset": "disabled"}
    with (
        pushers(2, **named) as ours,
        closing(GymVectorEnv(PUSHER, 2, settings=ENDS, **named)) as theirs,
    ):
        for env in (ours, theirs):
            for seed in (10, 50):
                env.reset(seed=seed)
                act = make_expert(env, bias_m=0.0, noise_m=0.01, noise_seed=3).act
                # 2, 1, 0, ... and 0.01 of the seed, of 2 at most
                pushes = np.array([[2.0, 1.0, 0.0], [0.01 * seed, 0.01 * seed, 0.01 * seed]]).T / 2.0
                given = []
                for _ in pushes:
                    given.append(act()[0])
                    env.step(given[-1][None].repeat(2, axis=0))
                np.testing.assert_allclose(given, pushes, rtol=1e-6)


def test_an_expert_whose_process_ends_is_asked_again(tmp_path: Path) -> None:
    with pushers(expert="foreign_envs:dies_once", autoreset="disabled") as env:
        env.reset(seed=5)
        expert = env.expert()
        for _ in range(2):
            env.step(expert.act())
        (tmp_path / "once").touch()
        np.testing.assert_array_equal(expert.act(), np.tile(np.array([0.5, 0.25], np.float32), (4, 1)))
        assert not (tmp_path / "once").exists()
        obs, *_, truncated, _ = env.step(expert.act())
        assert not truncated.any()  # nothing was lost: the steps were played again
        np.testing.assert_array_equal(obs["state"], [[5, 1.5], [6, 1.5], [7, 1.5], [8, 1.5]])


@pytest.mark.parametrize(
    ("expert", "message"),
    [
        ("nowhere:act", r"env\.expert: 'nowhere:act': No module named 'nowhere'\. Allowed: module:function"),
        ("foreign_envs:missing", r"env\.expert: got 'foreign_envs:missing', which is None\. Allowed"),
        ("foreign_envs:NO_EXPERT", r"which is 'no function'\. Allowed: module:function, or module:class"),
    ],
)
def test_an_expert_that_is_not_there_is_named(expert: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProcessVectorEnv(PUSHER, 1, settings=ENDS, expert=expert)


def test_what_an_expert_gives_is_an_action() -> None:
    with pushers(2, workers=1, expert="foreign_envs:gives_nan") as env:
        env.reset(seed=5)
        message = r"env 0: the expert's action is \[ 1\. nan\], allowed: \(2,\) finite numbers\. Look at env"
        with pytest.raises(RobotRLError, match=message):
            env.expert().act()
    with pushers(1, workers=1) as env, pytest.raises(ConfigError, match=r"nobody demonstrates .*env\.expert"):
        env.expert()


def test_what_an_environment_prints_fills_no_disk() -> None:
    with pushers(1, workers=1, fails="chat") as env:
        env.reset(seed=5)
        log: Any = env._envs
        sizes = []
        for action in actions(6, 1):  # 2^19 bytes each
            env.step(action)
            sizes.append(os.fstat(log._all[0]._log).st_size)
        assert max(sizes) <= 2**20


@pytest.mark.parametrize("ignores", [False, True])
def test_a_seed_that_decides_nothing_ignores_once(ignores: bool, caplog: pytest.LogCaptureFixture) -> None:
    _warn_about_seeds.cache_clear()
    for _ in range(2):
        GymVectorEnv(PUSHER, 2, settings=ENDS | {"fails": "seedless" if ignores else ""})
    lines = [line for line in caplog.messages if "the same seed began two different episodes" in line]
    assert len(lines) == ignores


def test_a_state_goes_on_to_the_same_bytes_in_other_processes() -> None:
    with pushers() as env, pushers() as fresh:
        env.reset(seed=5)
        now = [env.step(action)[0] for action in actions(11)][-1]
        np.testing.assert_array_equal(fresh.load_state_dict(env.state_dict())["state"], now["state"])
        for action in actions(9):
            assert_equal(env.step(action), fresh.step(action))


def test_a_python_without_the_packages_says_which(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match="No module named 'gymnasium'"):
        ProcessVectorEnv(PUSHER, 1, python=str(bare))
    with pytest.raises(ConfigError, match=r"env\.python: 'nowhere' is no program"):
        ProcessVectorEnv(PUSHER, 1, python="nowhere")
    with pytest.raises(ConfigError, match=r"env 'Hoper-v5'"):
        ProcessVectorEnv("Hoper-v5", 1)
    with pytest.raises(ConfigError, match="nothing ends its episodes"):
        ProcessVectorEnv(PUSHER, 1)


def test_settings_of_processes_are_refused_elsewhere() -> None:
    env = make_env(EnvConfig(kind="process", id=PUSHER, settings=ENDS, workers=1, timeout_s=9.0), 2)
    assert env.num_envs == 2
    env.close()
    with pytest.raises(ConfigError, match=r"env\.python: got 'python3', allowed: left out but with"):
        EnvConfig(kind="gym", id="Hopper-v5", python="python3")
    with pytest.raises(ConfigError, match=r"env\.workers: got 2, allowed: left out but with"):
        EnvConfig(workers=2)
    with pytest.raises(ConfigError, match=r"env\.timeout_s: got 0"):
        EnvConfig(kind="process", id=PUSHER, timeout_s=0.0)
    with pytest.raises(ConfigError, match=r"env\.expert: got 'a:b', allowed: left out but with"):
        EnvConfig(kind="points", id="a", expert="a:b")
    with pytest.raises(ConfigError, match=r"env\.expert: got 'act', allowed: module:function or"):
        EnvConfig(kind="process", id=PUSHER, expert="act")
