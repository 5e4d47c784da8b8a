"""The outside check: a run that is cut goes on, a finished one stays, rows by hand, mistakes are named."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from robot_rl.bench import crossq
from robot_rl.bench.crossq import Plan, Trial
from robot_rl.core.errors import ConfigError, RobotRLError

PLAN = Plan(env="Pendulum-v1", learner="crossq", width=16, seed=4, steps=430, evaluate_every=410, episodes=2)


@pytest.fixture(autouse=True)
def few_random_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossq, "_RANDOM_STEPS", 390)


def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    whole, cut = Trial(PLAN, tmp_path / "whole"), Trial(PLAN, tmp_path / "cut")
    whole.go_on(math.inf)
    for _ in range(405):  # two episodes of Pendulum, five steps of the third, and fifteen updates
        cut._step()
    cut.go_on(-math.inf)
    assert (cut.row()["steps"], cut.row()["return"], cut.row()["done"]) == (405, None, False)
    resumed = Trial(PLAN, tmp_path / "cut")
    resumed.go_on(math.inf)
    ours, theirs = (trial._learner.policy_weights() for trial in (whole, resumed))
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    assert resumed.spent.curve == whole.spent.curve
    # Two evaluations: at 410 and at the end. An episode of Pendulum earns between -2000 and 0.
    assert [point["steps"] for point in whole.spent.curve] == [410, 430]
    assert -2000 < whole.row()["return"] <= 0
    written = json.loads((tmp_path / "cut" / "row.json").read_text())
    assert (written["row"]["done"], written["curve"]) == (True, whole.spent.curve)
    with pytest.raises(ConfigError, match="was begun with width=16, got 8"):
        Trial(replace(PLAN, width=8), tmp_path / "cut")


def test_finished_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Counted(Trial):
        def _step(self) -> None:
            self.spent.steps = self.plan.steps
            calls.append((self.plan.learner, self.plan.width, self.plan.seed))

        def _evaluate(self) -> None:
            self.spent.curve.append({"steps": self.plan.steps, "return": 10.0 * len(calls), "std": 0.0})

    monkeypatch.setattr(crossq, "Trial", Counted)
    how: dict[str, Any] = {"envs": ("Pendulum-v1",), "steps": 400, "width": 16, "sac_width": 8}
    how["out"] = str(tmp_path)
    crossq.run(seeds=(4,), **how)
    assert calls == [("crossq", 16, 4), ("sac", 8, 4)]
    result = crossq.run(seeds=(4, 5), **how)
    assert [call[2] for call in calls] == [4, 4, 5, 5]
    (ours, sac) = result["rows"]
    assert (ours["return"], ours["low"], ours["high"], ours["seeds"]) == (20.0, 10.0, 30.0, 2)
    # 10 and 30: standard deviation sqrt(200), t(1) = 12.706, so 20 +- 12.706 * sqrt(200) / sqrt(2).
    assert (ours["ci_low"], ours["ci_high"]) == pytest.approx((20 - 127.06, 20 + 127.06))
    assert (sac["learner"], sac["width"], sac["return"]) == ("sac", 8, 30.0)
    # What is out of time is no row of the table, but of the runs.
    late = crossq.run(seeds=(6,), minutes=0.0, **how)
    assert (late["rows"], [row["done"] for row in late["runs"]]) == ([], [False, False])


def test_published_returns_stand_beside_ours() -> None:
    row = {"env": "Hopper-v5", "width": 64, "steps": 9, "return": 1.0}
    times = {"s_per_1000_steps": 2.0, "cpu_s_per_1000_steps": 3.0}
    rows = crossq.summary([{**row, **times, "learner": name} for name in ("crossq", "sac", "sac")])
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


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="steps: got 390, allowed: above 390"):
        crossq.run(steps=390)
    with pytest.raises(RobotRLError, match="Hoper-v5"):
        crossq.make("Hoper-v5")
