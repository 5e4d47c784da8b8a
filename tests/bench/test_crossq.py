"""The outside check: runs are those of `train`, finished ones stay, rows by hand, mistakes are named."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from robot_rl.bench import crossq, trials
from robot_rl.config import dump, load
from robot_rl.core.errors import ConfigError
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import DirectSettings
from robot_rl.train.improve.method import settings_of

Commands = list[dict[str, str]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Stands in for the processes: the run of call k earns 10 k."""
    commands: Commands = []

    def train(command: list[str], **_: Any) -> SimpleNamespace:
        words = command[command.index("train") + 1 :]
        commands.append(dict(word.split("=", 1) for word in words))
        folder = Path(commands[-1]["out"]) / "1-run"
        folder.mkdir()
        (folder / "config.yaml").write_text(dump(load(RunConfig, words, config_name="train")))
        rows = [("base", 0, -9.0), ("direct", 200, 1.0), ("final", 400, 10.0 * len(commands))]
        same = {"updates": 0, "wall_s": 1.0}
        lines = [
            {**same, "phase": phase, "step": step, "eval/return": earned} for phase, step, earned in rows
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        timing = {"collect": 1.0, "update": 2.0, "sample": 0.5, "replay": 0.5, "evaluate": 60.0}
        summary = {"final_return": 10.0 * len(commands), "timing": timing}
        (folder / "summary.json").write_text(json.dumps(summary))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trials.subprocess, "run", train)
    return commands


def run(out: Path, **how: Any) -> dict[str, Any]:
    two: dict[str, Any] = {"envs": ("Pendulum-v1",), "learners": ("crossq", "sac")}
    how = {**two, "steps": 400, "width": 16, "sac_width": 8, "episodes": 2, **how}
    return crossq.run(jobs=1, out=str(out), **how)


def test_rows_by_hand_and_finished_runs_stay(tmp_path: Path, started: Commands) -> None:
    run(tmp_path, seeds=(4,))
    found = [(words["recipe"], words["method.algorithm.critic.width"], words["seed"]) for words in started]
    assert found == [("crossq", "16", "4"), ("sac", "8", "4")]
    result = run(tmp_path, seeds=(4, 5))
    assert [words["seed"] for words in started] == ["4", "4", "5", "5"]
    (ours, sac) = result["rows"]
    assert (ours["return"], ours["low"], ours["high"], ours["seeds"]) == (20.0, 10.0, 30.0, 2)
    # 10 and 30: standard deviation sqrt(200), t(1) = 12.706, so 20 +- 12.706 * sqrt(200) / sqrt(2).
    assert (ours["ci_low"], ours["ci_high"]) == pytest.approx((20 - 127.06, 20 + 127.06))
    assert ours["s_per_1000_steps"] == 10.0  # 4 s of 400 steps
    assert (sac["learner"], sac["width"], sac["return"]) == ("sac", 8, 30.0)
    kept = json.loads((tmp_path / "crossq.json").read_text())
    assert (kept["rows"], kept["runs"][0].pop("curve")) == (
        result["rows"],
        [{"steps": 200, "return": 1.0}, {"steps": 400, "return": 10.0}],
    )
    assert kept["runs"][0] == result["runs"][0]
    assert [words["method.explore_steps"] for words in started] == ["20"] * 4
    (tmp_path / "Pendulum-v1-crossq-16-seed4").rename(tmp_path / "Pendulum-v1-crossq-32-seed4")
    with pytest.raises(ConfigError, match=r"begun with .*=.*16.*, got .*32.*out="):
        run(tmp_path, seeds=(4,), width=32, learners=("crossq",))


def test_xqc_is_as_wide_as_crossq(tmp_path: Path, started: Commands) -> None:
    (row,) = run(tmp_path, seeds=(4,), learners=("xqc",))["rows"]
    assert (started[0]["recipe"], started[0]["method.algorithm.critic.width"]) == ("xqc", "16")
    assert (row["learner"], row["width"], row["return"], row["published"]) == ("xqc", 16, 10.0, None)
    hopper = crossq.summary([{**row, "env": "Hopper-v5"}])[0]
    assert (hopper["published"], hopper["return"]) == (2828.0, 10.0)


def test_the_recipes_are_the_papers_settings() -> None:
    recipes = [load(RunConfig, [f"recipe={name}"], config_name="train") for name in ("crossq", "sac", "xqc")]
    methods = [settings_of(config, DirectSettings) for config in recipes]
    ours, theirs, xqc = (method.algorithm for method in methods)
    assert (methods[2].utd, methods[2].batch, methods[2].explore_steps) == (2.0, 256, 5000)
    atoms = {"value": "c51", "atoms": 101, "low": -500.0, "high": 500.0}
    assert xqc == replace(ours, critic=replace(ours.critic, **atoms, unit_weights=True))
    assert (ours.critic.norm, ours.critic.target, ours.beta1, ours.actor_every) == ("batch", "none", 0.5, 3)
    assert theirs == DirectSettings().algorithm


def test_published_returns_stand_beside_ours() -> None:
    row = {"env": "Hopper-v5", "width": 64, "steps": 9, "return": 1.0, "s_per_1000_steps": 2.0}
    rows = crossq.summary([{**row, "learner": name} for name in ("crossq", "sac", "sac")])
    assert [(one["published"], one["seeds"]) for one in rows] == [(2764.0, 1), (1103.0, 2)]


class ThreeSteps(gymnasium.Env[Any, Any]):
    """Earns 1 and the action at each of three steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(2.0, 4.0, (1,), np.float32)
    step_count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.step_count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_count += 1
        return np.zeros(1, np.float32), 1.0 + float(action[0]), False, self.step_count == 3, {}


def test_what_needs_no_learning_stands_beside_it() -> None:
    gymnasium.register("Three-v0", lambda **_: ThreeSteps(), max_episode_steps=9)
    zero, random = crossq.trivial("Three-v0", (0, 1), episodes=40)
    # Three times 1 and an action of 3, the middle of [2, 4].
    assert zero == {"env": "Three-v0", "policy": "zero", "return": 12.0, "low": 12.0, "high": 12.0}
    # The mean of 240 draws is within 0.15 of it (4 sigma).
    assert random["return"] == pytest.approx(12.0, abs=0.45)
    assert 9.0 <= random["low"] < random["high"] <= 15.0
    gymnasium.registry.pop("Three-v0")


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bench crossq: steps: got 0, allowed: 1 or more"):
        crossq.run(steps=0)
    with pytest.raises(ConfigError, match="seed: got -1"):
        run(tmp_path, seeds=(-1,))
