"""The OGBench comparison without OGBench: its data as episodes, and a trial that is cut and goes on."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from robot_rl.bench import ogbench
from robot_rl.bench.ogbench import Plan, Trial
from robot_rl.bench.ogbench_env import Cubes, episodes_of
from robot_rl.core.errors import ConfigError
from robot_rl.data.episodes import Episodes

PLAN = Plan(
    task="cube-single",
    actor="fql",
    horizon=2,
    seed=3,
    offline_updates=6,
    online_steps=8,
    evaluate_every=4,
    episodes=2,
    data_steps=40,
    width=8,
    depth=1,
    batch=8,
    flow_steps=2,
    candidates=2,
    alpha=10.0,
)


class FakeCubes:
    """Episodes of three steps; the action's sign is the success."""

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, seed: int) -> NDArray[np.float32]:
        self.steps = 0
        return np.full(3, seed % 7, np.float32)

    def oracle(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        return np.full(5, 1.0 if obs[0] == 2 else -1.0, np.float32)

    def step(self, action: NDArray[Any]) -> dict[str, Any]:
        self.steps += 1
        return {
            "obs": np.full(3, self.steps, np.float32),
            "reward": -1.0,
            "terminated": self.steps == 3 and action[0] > 0,
            "truncated": self.steps == 3 and action[0] <= 0,
            "success": bool(action[0] > 0),
        }


def play() -> Episodes:
    rng = np.random.default_rng(0)
    data: dict[str, Any] = {
        "state": rng.normal(size=(40, 3)).astype(np.float32),
        "action": rng.uniform(-1, 1, (40, 5)).astype(np.float32),
        "reward": np.full(40, -1.0, np.float32),
        "solved": np.arange(40) % 13 == 12,
        "ends": np.arange(40) % 20 == 19,
        "final": rng.normal(size=(2, 3)).astype(np.float32),
    }
    return episodes_of("cube-single", data)


def trial(folder: Path, **changes: Any) -> Trial:
    return Trial(replace(PLAN, **changes), play(), cast("Cubes", FakeCubes()), folder)


def test_play_ends_where_the_task_would() -> None:
    # Two recordings of 3 and 2 steps; the second step of the first begins in the goal.
    state = np.array([[1], [2], [3], [11], [12]], np.float32)
    found = episodes_of(
        "cube-single",
        {
            "state": state,
            "action": np.zeros((5, 5), np.float32),
            "reward": np.array([-1, 0, -1, -1, -1], np.float32),
            "solved": np.array([0, 1, 0, 0, 0]),
            "ends": np.array([0, 0, 1, 0, 1]),
            "final": np.array([[4], [13]], np.float32),
        },
    )
    assert found.episode_index.tolist() == [0, 0, 1, 2, 2]
    assert found.terminated.tolist() == [False, True, False, False, False]
    assert found.truncated.tolist() == [False, False, True, False, True]
    assert found.final_obs["state"][:, 0].tolist() == [3, 4, 13]
    found.check()


@pytest.mark.parametrize("actor", ["fql", "best_of_n"])
def test_a_trial_learns_offline_then_online(tmp_path: Path, actor: str) -> None:
    whole = trial(tmp_path, actor=actor)
    whole.go_on(math.inf)
    row = whole.row()
    assert (row["updates"], row["env_steps"], row["done"]) == (14, 8, True)
    curve = json.loads((tmp_path / "row.json").read_text())["curve"]
    # At 6 offline is over; 4, 8 and 12 are due, 14 is the end. Steps follow the updates from 6 on.
    assert [(point["updates"], point["env_steps"]) for point in curve] == [
        (4, 0),
        (6, 0),
        (8, 2),
        (12, 6),
        (14, 8),
    ]
    assert row["offline"] == curve[1]["success"]
    again = trial(tmp_path, actor=actor)  # done already: nothing is learned again
    again.go_on(math.inf)
    assert again.row() == row


def test_a_trial_that_ran_out_of_time_goes_on(tmp_path: Path) -> None:
    whole, cut = trial(tmp_path / "whole"), trial(tmp_path / "cut")
    whole.go_on(math.inf)
    for _ in range(3):
        cut._update()
    cut.go_on(-math.inf)
    assert cut.row()["updates"] == 3
    resumed = trial(tmp_path / "cut")
    resumed.go_on(math.inf)
    ours, theirs = (t._learner.state_dict()["critics"] for t in (whole, resumed))
    assert all(value.equal(theirs[name]) for name, value in ours.items())
    with pytest.raises(ConfigError, match=r"was begun with alpha=10\.0, got 11\.0"):
        trial(tmp_path / "cut", alpha=11.0)


def test_what_needs_no_learning_stands_beside_it(tmp_path: Path) -> None:
    class ThreeCubes(FakeCubes):
        played = 0

        def reset(self, seed: int) -> NDArray[np.float32]:
            self.played += 1
            return super().reset(seed)

    cubes = ThreeCubes()
    play: Callable[[], list[dict[str, Any]]] = partial(
        ogbench.trivial, cast("Cubes", cubes), "cube-single", 3, 40, tmp_path / "new"
    )
    rows = play()
    zero, random, oracle = rows
    # The last of three steps decides. Zero is not positive; noise is in half of 40 (0.5 +- 0.24, 3 sigma).
    assert zero == {"policy": "zero", "seed": 3, "success": 0.0}
    assert random["policy"] == "random"
    assert 0.26 < random["success"] < 0.74
    # Here the oracle goes the right way only at observation 2, which is that before the last step.
    assert oracle == {"policy": "oracle", "seed": 3, "success": 1.0}
    assert (cubes.played, play(), cubes.played) == (120, rows, 120)  # its file is read


def test_unknown_tasks_and_actors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bench ogbench: task: got 'maze', allowed: cube-single"):
        ogbench.run(task="maze")
    with pytest.raises(ConfigError, match=r"bench ogbench: actor: got 'sac'"):
        ogbench.run(actor="sac")


def test_means_over_seeds() -> None:
    rows = [
        {"h": 5, "success": 0.6},
        {"h": 1, "success": 0.5},
        {"h": 5, "success": 0.7},
        {"h": 5, "success": 0.8},
    ]
    five, one = ogbench.means(rows)
    assert (five["h"], five["seeds"], five["low"], five["high"]) == (5, 3, 0.6, 0.8)
    # Standard deviation 0.1, t(2) = 4.303: 0.7 +- 4.303 * 0.1 / sqrt(3).
    assert (five["success"], five["ci_low"]) == pytest.approx((0.7, 0.7 - 0.24843), abs=1e-5)
    assert five["ci_high"] == pytest.approx(0.7 + 0.24843, abs=1e-5)
    assert (one["h"], one["success"], one["ci_low"]) == (1, 0.5, None)
