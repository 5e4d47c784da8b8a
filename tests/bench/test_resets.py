"""The table of what diverse starts are worth: arms by hand, equal budgets, a small real run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robot_rl.bench import resets, trials
from robot_rl.config import dump, load
from robot_rl.core.errors import ConfigError
from robot_rl.sim.bank_files import Bank, BankKey, ClassBill, StartSet
from robot_rl.train.config import RunConfig

COSTS = {"reaching": 100, "grasped": 250, "near_goal": 40}


def bill(steps: int) -> ClassBill:
    return ClassBill(tried=1, rejected={}, control_steps=steps, physics_steps=10 * steps, seconds=1.0)


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """A bank by hand; nothing simulates its rows here."""
    key = BankKey(task="gantry_peg", robot="gantry", model_hash="m", num_state=3, mujoco="4", varied=())
    one = StartSet(
        states=np.zeros((2, 3)),
        varied=np.zeros((2, 0)),
        solved=np.zeros(2, bool),
        coords=np.zeros((2, 6), np.float32),
    )
    bills = {name: bill(steps) for name, steps in COSTS.items()}
    Bank(key=key, sets=dict.fromkeys(COSTS, one), bills=bills).save(tmp_path / "bank")
    return tmp_path / "bank"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Stands in for the processes: a run of seed k has solved k of 10 episodes, and of each class all."""
    commands: list[dict[str, str]] = []

    def train(command: list[str], **_: Any) -> SimpleNamespace:
        words = command[command.index("train") + 1 :]
        commands.append(dict(word.split("=", 1) for word in words))
        folder = Path(commands[-1]["out"]) / "1-run"
        folder.mkdir()
        (folder / "config.yaml").write_text(dump(load(RunConfig, words, config_name="train")))
        solved = int(commands[-1]["seed"])
        summary = {
            "final_success": solved / 10,
            "episodes": 10,
            "env_steps": int(commands[-1]["method.env_steps"]),
            "spent": {"final": {"minutes": 2.0}},
            "versions": {"robot_rl_commit": "abc"},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "starts.json").write_text(json.dumps({"own": solved, **dict.fromkeys(COSTS, 10)}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(trials.subprocess, "run", train)
    return commands


def run(bank: Path, **how: Any) -> dict[str, Any]:
    how = {"seeds": (2, 4), "env_steps": 1000, "figure": "", "jobs": 1, **how}
    return resets.run(bank=str(bank), out=str(bank.parent / "runs"), **how)


def test_every_arm_has_its_classes_and_the_same_budget(bank: Path, started: list[dict[str, str]]) -> None:
    result = run(bank, figure=str(bank.parent / "bars.png"))
    begun = {words["env.resets.mix"]: int(words["method.env_steps"]) for words in started}
    assert begun == {
        "{reaching:1.0,grasped:1.0,near_goal:1.0}": 1000 - 390,
        "{own:1.0}": 1000,
        "{near_goal:1.0}": 1000 - 40,
        "{grasped:1.0,near_goal:1.0}": 1000 - 290,
        "{reaching:1.0,near_goal:1.0}": 1000 - 140,
        "{reaching:1.0,grasped:1.0}": 1000 - 350,
    }
    assert len(started) == 12
    assert [words["seed"] for words in started[:7]] == ["2"] * 6 + ["4"]  # whole seeds first
    assert all(row["env_steps"] + row["bank_steps"] == 1000 for row in result["rows"])
    keys = [(row["arm"], row["seed"], row["class"]) for row in result["rows"]]
    assert keys[:5] == [
        *(("diverse", 2, name) for name in ("own", *COSTS)),
        ("diverse", 4, "own"),
    ]
    own = next(row for row in result["means"] if (row["arm"], row["class"]) == ("nominal", "own"))
    assert own["success"] == pytest.approx(0.3)
    assert (own["low"], own["high"], own["seeds"], own["bank_steps"]) == (0.2, 0.4, 2, 0)
    assert (bank.parent / "bars.png").stat().st_size > 5000
    run(bank)
    assert len(started) == 12  # finished runs are not repeated


def test_mistakes_are_refused(bank: Path, started: list[dict[str, str]]) -> None:
    with pytest.raises(ConfigError, match=r"no arm 'without_grasp'.*Did you mean 'without_grasped'"):
        run(bank, arms=("without_grasp",))
    with pytest.raises(ConfigError, match="env_steps: got 390, allowed: more than 390, which making"):
        run(bank, env_steps=390)
    run(bank, arms=("nominal",), seeds=(2,))
    with pytest.raises(ConfigError, match=r"bench resets.*method.env_steps=1000, got 2000"):
        run(bank, arms=("nominal",), seeds=(2,), env_steps=2000)
    assert len(started) == 1


@pytest.mark.slow
def test_a_small_real_table(tmp_path: Path) -> None:
    from robot_rl.cli.main import main

    assert main(["resets", "generate", "task=gantry_peg", "rows=20", f"out={tmp_path / 'bank'}"]) == 0
    small = (
        "num_envs=8",
        "method.steps=4",
        "evaluate.episodes=4",
        "evaluate.every_env_steps=0",
        "demos.episodes=2",
    )
    how: dict[str, Any] = {"arms": ("diverse",), "seeds": (3,), "settings": small, "figure": "", "jobs": 1}
    spent = json.loads((tmp_path / "bank" / "bank.json").read_text())["classes"]
    budget = sum(one["control_steps"] for one in spent.values()) + 64
    result = resets.run(bank=str(tmp_path / "bank"), out=str(tmp_path / "runs"), env_steps=budget, **how)
    assert [row["class"] for row in result["rows"]] == ["own", *spent]
    assert {row["env_steps"] for row in result["rows"]} == {64}
    assert all(0 <= row["success"] <= 1 and row["episodes"] == 4 for row in result["rows"])
