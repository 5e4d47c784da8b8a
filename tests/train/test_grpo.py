"""Whole runs on groups of episodes: every reward from the same base, what is refused, exact resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import build, load
from robot_rl.core.errors import ConfigError
from robot_rl.sim.tasks import reach
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.runs import TINY, killed_after, rows_of, weights

pytestmark = pytest.mark.usefixtures("whole_runs")

RUN: dict[str, Any] = {
    **TINY,
    "num_envs": 8,
    "method": {
        "kind": "grpo",
        "env_steps": 500,
        "group": 4,
        "algorithm": {"batch": 8, "epochs": 2, "width": 16, "depth": 1, "actor_lr": 1e-3},
    },
}
GRPO = {"kind": "grpo"}
REWARDS: dict[str, dict[str, Any]] = {
    "success": {},
    "progress": {"keep": [0.0, 0.9]},
    "process": {"keep": [0.0, 1.0]},
}


@pytest.fixture(autouse=True)
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "GOAL_RADIUS_M", 0.2)  # a policy that knows nothing sometimes gets there


def tiny(out: Path, reward: str = "success") -> RunConfig:
    section = {**RUN["method"], "reward": reward, **REWARDS[reward]}
    return replace(build(RunConfig, {**RUN, "method": section}), out=str(out))


@pytest.mark.parametrize("reward", REWARDS)
def test_every_reward_improves_the_same_base(reward: str, tmp_path: Path) -> None:
    summary = phases.run(tiny(tmp_path, reward))
    folder = Path(summary.run)
    # 8 episodes of at most 14 control steps: 112 a rollout, and never more than one too many.
    assert 500 <= summary.env_steps < 612
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "grpo"]
    figures = [row for row in rows if "collect/groups" in row]
    assert sum(row["collect/groups"] for row in figures) * 4 == sum(
        row["collect/episodes"] for row in figures
    )
    learning = [row for row in rows if "grpo/kl" in row]
    assert learning
    assert any("grpo/value" in row for row in rows) == (reward == "process")
    assert weights(folder, "final") != weights(folder, "base")


@pytest.mark.parametrize("reward", ["success", "process"])
def test_a_run_cut_short_ends_as_the_unbroken_one(reward: str, tmp_path: Path) -> None:
    unbroken = phases.run(tiny(tmp_path / "unbroken", reward))
    with killed_after(10 + 4):  # ten of cloning
        phases.run(tiny(tmp_path / "cut", reward))
    (folder,) = (tmp_path / "cut").glob("*-tiny-seed0")
    assert not (folder / "policy" / "final").exists()
    phases.resume(folder)
    assert weights(folder, "final") == weights(Path(unbroken.run), "final")

    assert rows_of(folder) == rows_of(Path(unbroken.run))


@pytest.mark.parametrize("recipe", ["grpo", "srpo"])
def test_recipes_share_the_base_of_pick_cube(recipe: str) -> None:
    config, usual = (
        load(RunConfig, [f"recipe={name}"], config_name="train") for name in (recipe, "flow_sde")
    )
    assert config.method.kind == "grpo"
    for name in ("demos", "bc", "n_exec", "env", "policy"):
        assert getattr(config, name) == getattr(usual, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_envs": 10}, "num_envs: got 10, allowed: multiples of method.group, 4"),
        ({"method": {**GRPO, "group": 1}}, "method.group: got 1, allowed: 2 or more"),
        (
            {"method": {"kind": "grpo", "keep": [0.9, 0.1]}},
            "method.keep: got (0.9, 0.1), allowed: 0 to 1, the lower one first",
        ),
        (
            {"method": {"kind": "grpo", "algorithm": {"scale_reward": True}}},
            "method.algorithm.scale_reward: got True",
        ),
        (
            {"method": {"kind": "grpo", "exploration": {"process": "flow_ode"}}},
            "method.exploration: got process flow_ode",
        ),
        ({"num_envs": 1, "real_time": True}, "method: got 'grpo', allowed: methods with a replay"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(RunConfig, {**RUN, **change})
    assert message in str(error.value)
