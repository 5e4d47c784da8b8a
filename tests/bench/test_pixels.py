"""The table of policies that see: runs are those of `train`, finished ones stay, rows by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robot_rl.bench import pixels, trials
from robot_rl.config import dump, load
from robot_rl.core.errors import ConfigError
from robot_rl.telemetry.intervals import wilson_interval
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import ResidualSettings
from robot_rl.train.record import load_config

Commands = list[dict[str, str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Stands in for the processes: of 10 episodes, a run of seed k solves k before DAgger and 9 after."""
    commands: Commands = []

    def train(command: list[str], **_: Any) -> SimpleNamespace:
        words = command[command.index("train") + 1 :]
        commands.append(dict(word.split("=", 1) for word in words))
        folder = Path(commands[-1]["out"]) / "1-run"
        folder.mkdir()
        (folder / "config.yaml").write_text(dump(load(RunConfig, words, config_name="train")))
        alone = "stages" in commands[-1]
        spent = {
            which: {"minutes": at, "cpu_minutes": at / 2} for which, at in (("base", 2.0), ("final", 6.0))
        }
        summary = {
            "base_success": None if alone else int(commands[-1]["seed"]) / 10,
            "final_success": 0.6 if alone else 0.9,
            "episodes": 10,
            "demo_env_steps": 9000 if alone else 4500,
            "env_steps": 0 if alone else 7500,
            "spent": spent,
            "versions": {"robot_rl_commit": "abc"},
            "machine": {"cores": "2", "processor": "abacus"},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trials.subprocess, "run", train)
    monkeypatch.setattr(pixels, "solved", lambda env, name, seed, episodes: FakeSolved(episodes))
    return commands


class FakeSolved:
    """All episodes but one."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes

    def sum(self) -> int:
        return self._episodes - 1


def run(out: Path, **how: Any) -> dict[str, Any]:
    how = {"tasks": ("reach",), "settings": ("evaluate.episodes=10",), "figure": "", **how}
    return pixels.run(jobs=1, out=str(out), **how)


def test_rows_by_hand_and_finished_runs_stay(tmp_path: Path, started: Commands) -> None:
    run(tmp_path, seeds=(4,), arms=("dagger",))
    result = run(tmp_path, seeds=(4, 6))
    assert [words["seed"] for words in started] == ["4", "6"]
    assert (started[0]["recipe"], started[0]["env.task"]) == ("pick_cube_pixels", "reach")
    found = [(row["arm"], row["seed"], row["success"], row["labels"]) for row in result["rows"]]
    assert found == [
        ("clone", 4, 0.4, 4500),
        ("clone", 6, 0.6, 4500),
        ("dagger", 4, 0.9, 12_000),
        ("dagger", 6, 0.9, 12_000),
        ("expert", 4, 0.9, None),
        ("expert", 6, 0.9, None),
    ]
    first = result["rows"][0]
    assert (first["ci_low"], first["ci_high"]) == wilson_interval(4, 10)
    assert (first["minutes"], first["cpu_minutes"], first["commit"]) == (2.0, 1.0, "abc")
    assert first["machine"] == "2 cores, abacus"
    assert result["rows"][2]["cpu_minutes"] == 3.0
    clone, _, expert = result["means"]
    assert (clone["success"], clone["low"], clone["high"], clone["seeds"]) == (0.5, 0.4, 0.6, 2)
    assert (clone["ci_low"], clone["ci_high"]) == wilson_interval(10, 20)
    assert (clone["minutes"], expert["minutes"]) == (2.0, None)
    kept = json.loads((tmp_path / "pixels.json").read_text())
    assert (kept["rows"], kept["means"]) == (result["rows"], result["means"])


def test_the_long_clone_has_the_labels_and_updates_of_dagger(tmp_path: Path, started: Commands) -> None:
    result = run(tmp_path, seeds=(4,), arms=("dagger", "clone_long"))
    recipe = load(RunConfig, ["recipe=pick_cube_pixels"], config_name="train")
    _, long = started
    assert long["stages"] == "[demos,clone,evaluate]"
    # 12,000 labels where the demonstrations had 4,500.
    assert int(long["demos.episodes"]) == round(recipe.demos.episodes * 12_000 / 4500)
    method: Any = recipe.method
    assert int(long["bc.updates"]) == recipe.bc.updates + round(method.utd * method.env_steps)
    row = result["rows"][1]
    assert (row["arm"], row["success"], row["labels"], row["minutes"]) == ("clone_long", 0.6, 9000, 6.0)


def test_reinforcement_learning_begins_with_the_clone_and_asks_for_no_label(
    tmp_path: Path, started: Commands
) -> None:
    result = run(tmp_path, seeds=(4,), arms=("clone", "rl"))
    dagger, rl = [Path(words["out"]) / "1-run/config.yaml" for words in started]
    before, now = [load_config(path.parent) for path in (dagger, rl)]
    assert (before.demos, before.policy, before.bc) == (now.demos, now.policy, now.bc)
    assert isinstance(now.method, ResidualSettings)
    assert now.method.algorithm.residual_l2 == 1.0
    assert now.demos.disturb == 0.15  # its replay gets what was executed
    row = result["rows"][1]
    # The demonstrations alone have labels; 6 minutes at the end of the run.
    assert (row["arm"], row["success"], row["labels"], row["minutes"]) == ("rl", 0.9, 4500, 6.0)


def test_reinforcement_learning_alone_needs_no_other_run(tmp_path: Path, started: Commands) -> None:
    result = run(tmp_path, seeds=(4,), arms=("rl",))
    assert [Path(words["out"]).name for words in started] == ["reach-rl-seed4"]
    assert [row["arm"] for row in result["rows"]] == ["rl"]


def test_the_figure_has_a_bar_for_each_arm(tmp_path: Path, started: Commands) -> None:
    figure = tmp_path / "pixels.png"
    result = run(tmp_path, tasks=("reach", "push_cube"), seeds=(4,), figure=str(figure))
    assert [(row["task"], row["arm"]) for row in result["means"]] == [
        (task, arm) for task in ("reach", "push_cube") for arm in ("clone", "dagger", "expert")
    ]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_expert_alone_needs_no_run(tmp_path: Path, started: Commands) -> None:
    result = run(tmp_path, seeds=(4,), arms=("expert",))
    assert not started
    assert [row["arm"] for row in result["rows"]] == ["expert"]


def test_mistakes(tmp_path: Path, started: Commands) -> None:
    with pytest.raises(ConfigError, match=r"bench pixels: task: no task named 'reech'\. .* 'reach'"):
        run(tmp_path, tasks=("reech",))
    run(tmp_path, seeds=(4,), arms=("clone",))
    with pytest.raises(ConfigError, match=r"begun with evaluate\.episodes=10, got 20.*out="):
        run(tmp_path, seeds=(4,), settings=("evaluate.episodes=20",))
