"""Runs on Gymnasium environments: from nothing, cut short, evaluated again, reported by their return."""

import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.config import build, load
from robot_rl.core.errors import ConfigError
from robot_rl.data.demos import load_episodes
from robot_rl.policies.checkpoint import load_policy
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.telemetry.report import write_report
from robot_rl.telemetry.runs import load_run
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import DirectSettings
from robot_rl.train.improve.method import settings_of
from robot_rl.train.phases import resume, run
from tests.runs import folder_of, killed_after

pytestmark = pytest.mark.usefixtures("whole_runs")

SMALL: dict[str, Any] = {
    "recipe": "small",
    "stages": ("look", "evaluate", "online", "evaluate"),
    "num_envs": 2,
    "n_exec": 1,
    "env": {"kind": "gym", "id": "Pendulum-v1", "settings": {"max_episode_steps": 15}},
    "demos": {"episodes": 3},
    "method": {
        "kind": "direct",
        "env_steps": 40,
        "batch": 8,
        "demo_ratio": 0.0,
        "explore_steps": 10,
        "capacity": 1000,
        "algorithm": {"actor": {"width": 16}, "critic": {"width": 16}},
    },
    "evaluate": {"episodes": 4, "num_envs": 2, "every_env_steps": 20, "quick_episodes": 2},
    "checkpoint": {"every_s": 0.0, "every_steps": 2},
}


def small(out: Path, **changes: Any) -> RunConfig:
    return build(RunConfig, {**SMALL, "out": str(out), **changes})


def test_a_run_on_an_environment_without_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(small(tmp_path))
    folder = folder_of(tmp_path)
    assert (summary.task, summary.env_steps, summary.says_success) == ("Pendulum-v1", 40, False)
    assert (summary.final_success, summary.demo_env_steps) == (0.0, 45)
    # Of 15 steps each loses 16.3 at most; standing still upside down is no end of it.
    assert summary.base_return is not None
    assert summary.final_return is not None
    assert -15 * 16.3 < summary.base_return < 0
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "eval/return" in row]
    assert [row["step"] for row in rows] == [0, 20, 40, 40]
    _, meta = load_policy(folder / "policy/final")
    assert (meta.task, meta.action_names) == ("Pendulum-v1", ("action_0",))
    assert main(["evaluate", f"run={folder}", "--json"]) == 0  # the digest of training
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(
        f"Pendulum-v1, final of {folder}: return {summary.final_return:.1f} over 4 episodes"
    )
    assert json.loads(told[1])["return"] == summary.final_return


def test_environments_in_other_processes_make_the_same_policy(tmp_path: Path) -> None:
    ours = run(small(tmp_path / "ours"))
    env = {**SMALL["env"], "kind": "process", "workers": 2}
    theirs = run(small(tmp_path / "theirs", env=env))
    assert theirs.final_digest == ours.final_digest
    told = (folder_of(tmp_path / "theirs") / "config.yaml").read_text()
    assert "workers: 2" in told
    assert "timeout_s" not in (folder_of(tmp_path / "ours") / "config.yaml").read_text()


def test_it_goes_on_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    whole = run(small(tmp_path / "whole"))
    with killed_after(8):
        run(small(tmp_path / "cut"))
    resumed = resume(folder_of(tmp_path / "cut"))
    assert (resumed.final_digest, resumed.final_return) == (whole.final_digest, whole.final_return)


def test_reports_show_returns(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(small(tmp_path, seed=seed))
    folders = sorted(tmp_path.glob("2*"))
    one, both = write_report(folders[:1]), write_report(folders, tmp_path / "both.html")
    assert not one.missing or all("success" not in missing for missing in one.missing)
    returned = load_run(folders[0]).number("final_return")
    assert f"{returned:,.1f}" in one.path.read_text()
    assert "return over control steps" in one.path.read_text()
    assert "Mean return of held-out episodes" in both.path.read_text()


class Solved(gymnasium.Wrapper):
    """Says that every step succeeds."""

    def step(self, action: Any) -> Any:
        *step, info = self.env.step(action)
        return *step, {**info, "is_success": True}


def test_an_environment_that_tells_successes_is_counted_by_them(tmp_path: Path) -> None:
    gymnasium.register(
        "SolvedPendulum-v0", entry_point=lambda **how: Solved(gymnasium.make("Pendulum-v1", **how)),
        max_episode_steps=15,
    )  # fmt: skip
    try:
        summary = run(small(tmp_path, env={"kind": "gym", "id": "SolvedPendulum-v0"}))
    finally:
        del gymnasium.registry["SolvedPendulum-v0"]
    assert (summary.says_success, summary.final_success) == (True, 1.0)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"env": {"kind": "gym"}}, "env.id: missing, env.kind=gym needs it"),
        ({"env": {"kind": "gym", "id": "A-v1", "robot": "panda"}}, "env.robot: got 'panda', allowed: left"),
        ({"env": {"id": "Pendulum-v1"}}, "env.id: got 'Pendulum-v1', allowed: none with env.kind=sim"),
        ({"stages": ()}, "nobody demonstrates Pendulum-v1. Begin with 'look' instead, as recipe=crossq does"),
        ({"human": {"input": "scripted"}, "num_envs": 1}, "env.kind: got 'gym', allowed: sim with an arm"),
    ],
)  # fmt: skip
def test_what_cannot_be(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        small(tmp_path, **changes)


def test_an_environment_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="env 'Nothing-v7'"):
        run(small(tmp_path / "runs", env={"kind": "gym", "id": "Nothing-v7"}))
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("recipe", ["crossq", "xqc"])
def test_the_recipe(recipe: str) -> None:
    config = load(RunConfig, [f"recipe={recipe}", "env.id=Walker2d-v5"], config_name="train")
    assert (config.env.name, settings_of(config, DirectSettings).algorithm.critic.target) == (
        "Walker2d-v5",
        "none",
    )


BEAD: dict[str, Any] = {
    **SMALL,
    "stages": ("demos", "clone", "evaluate"),
    "num_envs": 2,
    "n_exec": 1,
    "env": {
        "kind": "process",
        "workers": 1,
        "id": "foreign_envs:bead",
        "settings": {"max_episode_steps": 14},
        "expert": "foreign_envs:slides",
    },
    "demos": {"episodes": 20},
    "policy": {"horizon": 1, "width": 32, "depth": 2, "time_dim": 8, "steps": 2},
    "bc": {"updates": 200, "batch": 64},
    "evaluate": {"episodes": 40, "num_envs": 10, "every_env_steps": 40, "quick_episodes": 4},
}


@pytest.fixture
def beads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has the environment and its expert."""
    shutil.copy(Path(__file__).parents[1] / "envs/foreign_envs.py", tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("beads")
def test_an_expert_of_an_environment_of_others_is_cloned(capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(build(RunConfig, {**BEAD, "out": "runs"}))
    # The farthest way is 2 m: 10 steps of 0.2 m, so the expert always arrives in 14.
    assert (summary.demo_success, summary.says_success) == (1.0, True)
    assert summary.final_success > 0.5
    folder = folder_of(Path("runs"))
    told = (folder / "config.yaml").read_text()
    assert "expert: foreign_envs:slides" in told
    assert "noise_m" not in told
    assert main(["evaluate", f"run={folder}"]) == 0
    said = capsys.readouterr().out
    assert f"success {summary.final_success:.1%} of 40 episodes (95 % interval " in said
    assert "the same as in training" in said


@pytest.mark.usefixtures("beads")
def test_a_clone_of_it_is_improved() -> None:
    for method in ({"kind": "residual", "explore_steps": 10}, {"kind": "dagger"}):
        online = {**method, "env_steps": 40, "batch": 8}
        changes = {"stages": (), "method": online, "bc": {"updates": 20, "batch": 8}}
        summary = run(build(RunConfig, {**BEAD, **changes, "out": f"runs/{method['kind']}"}))
        assert (summary.env_steps, summary.demo_success) == (40, 1.0)


@pytest.mark.usefixtures("beads")
def test_its_episodes_are_collected_for_later_runs(capsys: pytest.CaptureFixture[str]) -> None:
    env = [
        "env.kind=process",
        "env.workers=1",
        "env.id=foreign_envs:bead",
        "env.settings.max_episode_steps=14",
    ]
    words = ["collect", *env, "env.expert=foreign_envs:slides", "episodes=6", "num_envs=3", "out=demos"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("demos: 6 episodes, ")
    episodes = load_episodes("demos")
    assert (episodes.meta.task, episodes.meta.state_names) == ("foreign_envs:bead", ("state_0", "state_1"))
    place, mark = episodes.obs["state"].T
    np.testing.assert_allclose(episodes.action[:, 0], np.clip((mark - place) / 0.2, -1, 1), atol=1e-5)
    changes = {"demos": {"path": "demos"}, "bc": {"updates": 2, "batch": 8}}
    assert run(build(RunConfig, {**BEAD, **changes, "out": "runs"})).demo_success == 1.0
    shutil.rmtree("demos")
    for wrong, message in (
        (words[:5], "env: allowed: env.kind=gym or process, env.id=<id> and env.expert=<module:function>"),
        ([*words[:6], "task=reach"], "task: got 'reach', allowed: left out with env.*"),
        (["collect", "env.task=reach"], "Tasks of ours have settings of their own: task=, robot=, cameras="),
    ):
        assert main([*wrong, "out=demos"]) == 2
        assert message in capsys.readouterr().err
