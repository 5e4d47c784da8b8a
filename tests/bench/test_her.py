"""The race against hindsight replay: goals without leaks, demonstrations as they were, ratios by hand."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.bench import her
from robot_rl.bench.her import Limits, Trial
from robot_rl.bench.her_peer import Goals, PeerConfig, PushGoals, add_demonstrations, learn, reward_of
from robot_rl.core.errors import ConfigError, DeviceError
from robot_rl.data.episodes import Episodes, EpisodesMeta
from robot_rl.telemetry.progress import ProgressDisplay

NAMES = ("tool.pos.0", "cube.pos.0", "cube.pos.1", "goal.pos.0", "goal.pos.1", "goal_in_tool.pos.0")


def test_the_reward_is_zero_within_the_radius() -> None:
    # 2.5 cm: at 2.4 cm the cube is there, at 3 cm (1.8 and 2.4 cm along the axes) it is not.
    achieved = np.array([[0.524, 0.0], [0.518, 0.024]], np.float32)
    assert reward_of(achieved, np.array([[0.5, 0.0]], np.float32)).tolist() == [0.0, -1.0]


def test_the_goal_is_in_the_goal_alone() -> None:
    split = Goals(NAMES).split({"state": np.arange(6.0)})
    assert split["observation"].tolist() == [0, 1, 2]
    assert (split["achieved_goal"].tolist(), split["desired_goal"].tolist()) == ([1, 2], [3, 4])


def test_an_episode_goes_on_where_the_task_is_solved() -> None:
    env = PushGoals()
    assert env.reset(seed=3)[0]["observation"].shape == (30,)  # 36 without goal.pos and goal_in_tool.pos
    expert = env._env.batch.expert()
    rewards: list[float] = []
    ends: list[tuple[bool, bool]] = []
    for _ in range(100):
        _, reward, terminated, truncated, _ = env.step(expert.act()[0])
        rewards.append(reward)
        ends.append((terminated, truncated))
    assert rewards[0] == -1.0
    assert rewards[-10:] == [0.0] * 10
    assert ends == [(False, False)] * 99 + [(False, True)]
    env.close()


def episodes() -> Episodes:
    """Two steps that end at the goal, and one that the clock ends."""
    state = np.array([[0, 0.1, 0, 0.2, 0, 0], [1, 0.15, 0, 0.2, 0, 0], [2, 0.3, 0, 0.4, 0, 0]], np.float32)
    final = np.array([[5, 0.2, 0, 0.2, 0, 0], [6, 0.31, 0, 0.4, 0, 0]], np.float32)
    meta = EpisodesMeta(
        task="push_cube",
        robot="panda",
        control_hz=20.0,
        instruction="push",
        state_names=NAMES,
        action_names=("x",),
    )
    return Episodes(
        meta=meta,
        obs={"state": state},
        action=np.array([[0.1], [0.2], [0.3]], np.float32),
        reward=np.array([0.0, 1.0, 0.0], np.float32),
        terminated=np.array([False, True, False]),
        truncated=np.array([False, False, True]),
        success=np.array([False, True, False]),
        episode_index=np.array([0, 0, 1]),
        final_obs={"state": final},
    )


class FakeReplay:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add(self, obs: Any, after: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        row = (obs["achieved_goal"][0, 0], after["achieved_goal"][0, 0], after["observation"][0, 0])
        self.rows.append((*map(float, row), action.item(), reward.item(), done.item(), infos))


def test_demonstrations_lead_where_they_led() -> None:
    replay = FakeReplay()
    add_demonstrations(replay, episodes())
    cut = [{"TimeLimit.truncated": True}]
    expected = [
        (0.1, 0.15, 1.0, 0.1, -1.0, False, [{}]),
        (0.15, 0.2, 5.0, 0.2, 0.0, True, cut),
        (0.3, 0.31, 6.0, 0.3, -1.0, True, cut),
    ]
    for row, wanted in zip(replay.rows, expected, strict=True):
        assert row[:5] == pytest.approx(wanted[:5])
        assert row[5:] == wanted[5:]


@pytest.mark.slow  # seven seconds, of which importing the peer takes most
def test_the_peer_learns_and_is_looked_at(tmp_path: Path) -> None:
    curve = tmp_path / "curve.jsonl"
    cfg = PeerConfig(
        seed=10,
        curve=str(curve),
        every_env_steps=60,
        episodes=2,
        batch=8,
        width=8,
        demos=2,
        learning_starts=50,
        capacity=1000,
    )
    learn(cfg, env_steps=130)
    rows = [json.loads(line) for line in curve.read_text().splitlines()]
    assert [row["step"] for row in rows] == [60, 120]
    assert all(row["eval/success"] in (0.0, 0.5, 1.0) for row in rows)


class Scripted(Trial):
    """Its program writes evaluations, and then waits or fails."""

    code = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", f"path = {str(self.folder / 'curve.jsonl')!r}\n{self.code}"]


def measured(tmp_path: Path, code: str, *, wall_s: float = 30.0, cpu_s: float = 30.0) -> dict[str, Any]:
    kind = type("Kind", (Scripted,), {"code": code})
    how: dict[str, Any] = {"demos": 1, "noise_m": 0.0, "episodes": 4, "batch": 8, "width": 8, "settings": ()}
    trial = kind(learner="her", seed=0, folder=tmp_path, **how)
    with ProgressDisplay() as display, display.phase("her", 10, unit="s") as progress:
        return her.measure(trial, 0.95, Limits(wall_s=wall_s, cpu_s=cpu_s), progress)


WRITES = """
with open(path, "w") as file:
    file.write('{"step": 5, "loss": 1}\\n{"step": 10, "eval/success": 0.5}\\n')
    file.write('{"step": 20, "eval/success": %s}\\n{"step": 30, "eval/succ')
"""


def test_it_is_stopped_at_the_target_or_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(her, "_LOOK_EVERY_S", 0.05)
    waits = "import time; time.sleep(60)"
    reached, late, spins = (tmp_path / name for name in ("reached", "late", "spins"))
    for folder in (reached, late, spins):
        folder.mkdir()
    row = measured(reached, WRITES % "0.96" + waits)
    assert (row["reached"], row["env_steps"], row["best"]) == (True, 20, 0.96)
    assert 0 < row["minutes"] * 60 < 20
    (late / "curve.jsonl").write_text('{"step": 20, "eval/success": 0.9}\n')  # it may start too late to write
    row = measured(late, waits, wall_s=0.4)
    assert (row["reached"], row["best"]) == (False, 0.9)
    assert 0.4 <= row["minutes"] * 60 < 20
    # On a busy machine it has had less of the processor than of the clock, and is stopped by the former.
    row = measured(spins, "while True: pass", cpu_s=0.3)
    assert 0.25 < row["cpu_minutes"] * 60 < 20


def test_a_failure_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=f"see {tmp_path}/log"):
        measured(tmp_path, "raise SystemExit(3)")


def test_rows_stay_and_ratios_are_of_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, float, float]] = []

    def measure(trial: Trial, target: float, limits: Limits, progress: Any) -> dict[str, Any]:
        asked.append((trial.learner, trial.seed, limits.wall_s, limits.cpu_s))
        took = 2.0 if trial.learner == "robot_rl" else limits.cpu_s / 30
        row = {"learner": trial.learner, "seed": trial.seed, "reached": trial.learner == "robot_rl"}
        return {**row, "minutes": took, "cpu_minutes": 0.5 * took, "curve": []}

    monkeypatch.setattr(her, "measure", measure)
    how: dict[str, Any] = {"learners": ("robot_rl", "her"), "out": str(tmp_path)}
    her.run(seeds=(1,), times=4.0, **how)
    result = her.run(seeds=(1, 2), times=4.0, **how)
    # Ours: a minute of the processor, two of the clock. The peer has four; 60 where ours has no time yet.
    ours, peer = (3600, 3600), (3600, 240)
    wanted = [("robot_rl", 1, *ours), ("her", 1, *peer), ("robot_rl", 2, *ours), ("her", 2, *peer)]
    assert asked == wanted
    assert [(row["seed"], row["ratio"], row["at_least"]) for row in result["ratios"]] == [
        (1, 4.0, True),
        (2, 4.0, True),
    ]
    with pytest.raises(ConfigError, match=r"was begun with target=0\.95, got 0\.9"):
        her.run(seeds=(1,), target=0.9, **how)


def finished(learner: str, seed: int, minutes: float, *, reached: bool = True) -> dict[str, Any]:
    row: dict[str, Any] = {"learner": learner, "seed": seed, "reached": reached}
    return {**row, "minutes": minutes, "cpu_minutes": minutes / 2, "best": 1.0, "curve": []}


def test_means_over_seeds_have_an_interval() -> None:
    rows = [finished("robot_rl", seed, minutes) for seed, minutes in enumerate((3.0, 4.0, 5.0))]
    rows += [finished("her", seed, minutes) for seed, minutes in enumerate((9.0, 16.0, 25.0))]
    ours, peer = her.means(rows)
    # Standard deviation 1, t(2) = 4.303: 4 +- 4.303 / sqrt(3).
    assert (ours["learner"], ours["seeds"], ours["at_least"]) == ("robot_rl", 3, False)
    assert (ours["minutes"], ours["low"], ours["high"], ours["cpu_minutes"]) == (4.0, 3.0, 5.0, 2.0)
    assert (ours["ci_low"], ours["ci_high"]) == pytest.approx((4 - 2.4843, 4 + 2.4843), abs=1e-4)
    assert peer["minutes"] == pytest.approx(50 / 3)
    # Ratios 3, 4 and 5, seed by seed.
    (ratio,) = her.mean_ratios(rows)
    assert (ratio["learner"], ratio["ratio"], ratio["ci_low"]) == ("her", 4.0, ours["ci_low"])


def test_the_mean_of_what_was_stopped_is_a_bound_without_an_interval() -> None:
    rows = [finished("robot_rl", seed, 2.0) for seed in (0, 1)]
    rows += [finished("her", 0, 8.0), finished("her", 1, 12.0, reached=False)]
    ours, peer = her.means(rows)
    assert (ours["at_least"], ours["ci_low"]) == (False, 2.0)
    assert (peer["at_least"], peer["minutes"], peer["ci_low"], peer["ci_high"]) == (True, 10.0, None, None)
    (ratio,) = her.mean_ratios(rows)
    assert (ratio["at_least"], ratio["ratio"], ratio["ci_low"]) == (True, 5.0, None)
    # A seed that we lost is not left out of the comparison: there is none.
    assert her.mean_ratios([*rows[1:], finished("robot_rl", 0, 60.0, reached=False)]) == []


def test_rows_from_before_there_were_settings_are_understood(tmp_path: Path) -> None:
    published = Path(__file__).resolve().parents[2] / "docs/results/her.json"
    assert any("settings" not in row["asked"] for row in json.loads(published.read_text()))
    shutil.copy(published, tmp_path / "her.json")
    how: dict[str, Any] = {"learners": ("robot_rl",), "seeds": (0, 1, 2), "out": str(tmp_path)}
    result = her.run(**how)  # all are there: nothing is measured
    ours = next(row for row in result["means"] if row["learner"] == "robot_rl")
    # 3.962, 4.354 and 4.628 minutes.
    assert (ours["seeds"], ours["minutes"]) == (3, pytest.approx(4.3148, abs=1e-4))
    with pytest.raises(ConfigError, match=r"was begun with settings=\[\], got \['bc.updates=5'\]"):
        her.run(settings=("bc.updates=5",), **how)


def test_our_run_is_told_all(tmp_path: Path) -> None:
    how: dict[str, Any] = {"batch": 8, "width": 8, "settings": ("bc.updates=5",)}
    trial = Trial(learner="robot_rl", seed=4, folder=tmp_path, demos=7, noise_m=0.01, episodes=9, **how)
    words = trial.command
    for word in ("seed=4", "demos.episodes=7", "evaluate.quick_episodes=9", "bc.updates=5"):
        assert word in words
    assert trial.curve() == []
