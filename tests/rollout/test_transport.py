"""The same run with its simulations in this process and in another: the same weights, the same rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.runs import TINY, rows_of, weights
from tests.train import test_grpo, test_gym_run, test_ppo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_runs")]

RUNS: dict[str, dict[str, Any]] = {
    "steps": {**TINY, "method": {"env_steps": 90, "explore_steps": 30, "batch": 16, "capacity": 1000}},
    "rollouts": test_ppo.RUN,
    "groups": test_grpo.RUN,
    "gymnasium": test_gym_run.SMALL,
}


def run(kind: str, out: Path, **changes: Any) -> Path:
    config = replace(build(RunConfig, RUNS[kind]), out=str(out), **changes)
    return Path(phases.run(config).run)


@pytest.mark.parametrize("kind", RUNS)
def test_who_acts_when_it_is_asked_makes_the_same_run(kind: str, tmp_path: Path) -> None:
    here = run(kind, tmp_path / "here")
    there = run(kind, tmp_path / "there", transport="process", ahead=0)
    assert weights(there, "final") == weights(here, "final")
    assert rows_of(there) == rows_of(here)


def test_who_is_ahead_takes_the_same_steps_and_updates(tmp_path: Path) -> None:
    here = run("steps", tmp_path / "here")
    there = run("steps", tmp_path / "there", transport="process", ahead=2)

    def collected(folder: Path) -> list[tuple[int, float]]:
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "collect/episodes" in row]
        return [(row["step"], row["updates"]) for row in rows]

    assert collected(there) == collected(here)


def test_a_run_is_never_less_than_level_with_its_learner() -> None:
    with pytest.raises(ConfigError, match="ahead: got -1, allowed: 0 or more"):
        build(RunConfig, {**TINY, "ahead": -1})
