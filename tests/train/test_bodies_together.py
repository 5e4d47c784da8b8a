"""Robots with joints and actions of their own in one run, and their policy without it."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.config import build
from robot_rl.core.errors import CheckpointError, ConfigError
from robot_rl.data.episodes import episodes_meta
from robot_rl.data.store.reader import open_source
from robot_rl.policies.checkpoint import PolicyMeta
from robot_rl.rollout.envs import make_env
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.collect import _robots_of, _with_actions_of, env_of_robot, open_policy
from robot_rl.train.config import RunConfig
from robot_rl.train.phases import run
from tests.runs import SMALL, folder_of
from tests.train.test_robots import two

BODIES: dict[str, Any] = {
    "panda": {"robot": "panda", "num_envs": 2, "env_steps": 20, "share": 0.5},
    "gantry": {"robot": "gantry", "num_envs": 1, "env_steps": 10, "share": 0.25},
    "mobile": {
        "robot": "mobile_panda",
        "task": "mobile_reach",
        "num_envs": 1,
        "env_steps": 10,
        "share": 0.25,
    },
}


@pytest.mark.usefixtures("whole_runs")
def test_bodies_with_joints_and_actions_of_their_own_learn_one_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learning = {"batch": 8, "explore_steps": 10, "capacity": 1000, "demo_ratio": 0.0}
    listed = ["reach:panda", "reach:gantry", "mobile_reach:mobile_panda"]
    summary = run(
        two(
            out=str(tmp_path),
            method={"kind": "direct", **learning},
            stages=("look", "evaluate", "online", "evaluate"),
            n_exec=1,
            sources=BODIES,
            env={**SMALL["env"], "robots": listed},
        )
    )
    assert summary.env_steps == 40
    folder = folder_of(tmp_path)
    _, meta, env = open_policy(str(folder))
    assert (meta.robots, env.robots) == (("panda", "gantry", "mobile_panda"), tuple(listed))
    assert [name for name in meta.action_names if name.endswith(".delta")] == [
        f"mobile_panda.base_{axis}.delta" for axis in ("x", "y", "yaw")
    ]
    for name in BODIES:
        kept = open_source(folder / "experience" / name)
        assert kept.meta.state_names == meta.state_names
        steps = kept.read(0).obs["state"]
        present = [each for each in meta.state_names if each.endswith(".present")]
        seen = {each: set(steps[:, meta.state_names.index(each)].tolist()) for each in present}
        robot = BODIES[name]["robot"]
        assert seen == {each: {float(each == f"{robot}.present")} for each in present}
    assert main(["evaluate", f"run={folder}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("the same as in training" in line for line in lines) >= 3


@pytest.mark.usefixtures("whole_runs")
def test_a_policy_of_one_robot_among_others_goes_without_its_run(tmp_path: Path) -> None:
    env = {**SMALL["env"], "robot": "gantry", "robots": ["panda", "gantry"], "common_actions": True}
    run(
        build(
            RunConfig, {**SMALL, "env": env, "stages": ("demos", "clone", "evaluate"), "out": str(tmp_path)}
        )
    )
    alone = tmp_path / "alone" / "policy"
    shutil.copytree(folder_of(tmp_path) / "policy/base", alone)
    _, meta, shown = open_policy(str(alone))
    assert (shown.robot, shown.robots, shown.common_actions) == ("gantry", ("panda", "gantry"), True)
    assert main(["evaluate", f"policy={alone}", "episodes=2"]) == 0
    with pytest.raises(
        CheckpointError, match=r"at: it is of several robots and tasks\. Name it within its run"
    ):
        _robots_of(replace(meta, tasks=("reach", "mobile_reach")), at="at")


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
def test_a_policy_of_two_robots_with_joints_goes_without_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(two(out=str(tmp_path), env={**SMALL["env"], "robots": ["panda", "gantry"]}))
    shutil.copytree(folder_of(tmp_path) / "policy/final", tmp_path / "alone" / "policy")
    _, _, env = open_policy(str(tmp_path / "alone" / "policy"))
    assert (env.robot, env.robots) == ("panda", ("panda", "gantry"))
    assert main(["evaluate", f"policy={tmp_path / 'alone' / 'policy'}", "episodes=2"]) == 0
    *each, last = capsys.readouterr().out.splitlines()
    assert len(each) == 2
    assert "of 4 episodes" in last


def test_actions_of_a_policy_that_sees_its_past_are_found_by_their_names() -> None:
    shown = EnvConfig(task="reach", robots=("panda", "gantry"), state=("tool", "last_action"), num_threads=1)
    with closing(make_env(replace(shown, common_actions=True), 1, autoreset="disabled")) as env:
        meta = PolicyMeta(**vars(episodes_meta(env)), n_exec=1)
    assert meta.state_names[-1] == f"{meta.action_names[-1]}.last_action"
    assert _with_actions_of(meta, shown).common_actions


UNLIKE: dict[str, Any] = {
    "panda": {"robot": "panda", "num_envs": 2, "env_steps": 20},
    "gantry": {"robot": "gantry", "num_envs": 1, "env_steps": 10, "cameras": ["front"], "control_hz": 10.0},
}
EYES: dict[str, Any] = {**SMALL["policy"], "cameras": ["front", "wrist"], "image_features": 4}
SCENE: dict[str, Any] = {**SMALL["env"], "cameras": ["front", "wrist"], "image_size": [32, 32]}


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
def test_robots_with_cameras_and_rates_of_their_own_learn_one_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(two(out=str(tmp_path), sources=UNLIKE, policy=EYES, env={**SCENE, "robots": ["panda", "gantry"]}))
    folder = folder_of(tmp_path)
    kept = {name: open_source(folder / "experience" / name) for name in UNLIKE}
    assert [kept[name].meta.control_hz for name in UNLIKE] == [20.0, 10.0]
    for name, sees in (("panda", True), ("gantry", False)):
        episode = kept[name].read(0)
        assert np.any(episode.obs["wrist.rgb"][0]) == sees
        assert np.any(episode.obs["front.rgb"][0])
    _, meta, env = open_policy(str(folder))
    assert (meta.robots, meta.rates) == (("panda", "gantry"), (20.0, 10.0))
    assert [meta.rate_of(robot) for robot in ("panda", "gantry")] == [20.0, 10.0]
    shown = [env_of_robot(str(folder), meta, env, robot) for robot in ("panda", "gantry")]
    assert [(each.rate_hz, each.missing_cameras) for each in shown] == [(20.0, ()), (10.0, ("wrist",))]
    assert main(["evaluate", f"run={folder}"]) == 0
    assert sum("the same as in training" in line for line in capsys.readouterr().out.splitlines()) >= 2
    shutil.copytree(folder / "policy/base", tmp_path / "alone" / "policy")
    assert main(["evaluate", f"policy={tmp_path / 'alone' / 'policy'}", "episodes=2"]) == 0


@pytest.mark.parametrize(
    ("changes", "listed", "message"),
    [
        (
            {"control_hz": 10.0},
            [],
            r"sources\.gantry\.control_hz: got 10\.0, allowed: 20, or all robots in env\.robots",
        ),
        (
            {"robot": "panda", "control_hz": 10.0, "cameras": ["front"]},
            ["panda", "gantry"],
            r"sources\.gantry\.control_hz: got 10\.0, allowed: 20, that of sources\.panda: a robot has one",
        ),
    ],
)
def test_rates_that_a_policy_cannot_know_are_refused(
    tmp_path: Path, changes: dict[str, Any], listed: list[str], message: str
) -> None:
    common = {"state": ["tool", "goal"]} if not listed else {}
    env = {**SCENE, "robots": listed, **common}
    sources = {**UNLIKE, "gantry": {**UNLIKE["gantry"], **changes}}
    how: dict[str, Any] = {"policy": EYES, "env": env, "transport": "process"}
    with pytest.raises(ConfigError, match=message):
        run(two(out=str(tmp_path), sources=sources, **how))
    assert not list(tmp_path.iterdir())
