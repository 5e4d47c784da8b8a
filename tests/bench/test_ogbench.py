"""The OGBench comparison without OGBench: its play as a dataset, its runs of `train`, their rows."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robot_rl.bench import ogbench, ogbench_env, trials
from robot_rl.bench.ogbench import Plan, Trial, episodes_of, play_of
from robot_rl.bench.ogbench_env import Program, env_id
from robot_rl.cli.main import main
from robot_rl.config import dump, load
from robot_rl.core.errors import ConfigError, RobotRLError
from robot_rl.data.demos import load_episodes
from robot_rl.data.episodes import EpisodesMeta
from robot_rl.rollout.envs import simulation
from robot_rl.sched.opened import opened
from robot_rl.sim.vector import EnvConfig
from robot_rl.train.config import RunConfig

PLAN: dict[str, Any] = {
    "task": "cube-single",
    "actor": "fql",
    "offline_updates": 6,
    "online_steps": 8,
    "evaluate_every": 4,
    "episodes": 2,
    "data_steps": 40,
    "width": 8,
    "depth": 1,
    "batch": 8,
    "flow_steps": 2,
    "candidates": 2,
    "alpha": 10.0,
}
STATE, _ = ogbench_env.TASKS["cube-single"]
META = EpisodesMeta(
    task="cubes",
    robot="ur5e",
    control_hz=20.0,
    instruction="cubes",
    state_names=("state_0",),
    action_names=tuple(f"action_{i}" for i in range(5)),
)


class FakeProgram:
    """Episodes of three steps; the sign of the last action is the success, the oracle's is positive."""

    started: list[str]
    """By task."""
    seeds: list[int]

    def __init__(self, task: str, *, oracle: bool = False) -> None:
        self.started.append(task)
        self._oracle, self._steps = oracle, 0

    def ask(self, *, do: str, **how: Any) -> dict[str, Any]:
        return getattr(self, do)(**how)

    def close(self) -> None:
        self.started.remove("cube-single")

    def reset(self, seed: int) -> dict[str, Any]:
        self.seeds.append(seed)
        self._steps = 0
        return {"obs": [seed % 7] * STATE}

    def step(self, action: list[float]) -> dict[str, Any]:
        self._steps += 1
        ends = self._steps == 3
        solved = ends and (self._oracle or action[0] > 0)
        return {
            "obs": [float(self._steps)] * STATE,
            "reward": -1.0,
            "terminated": solved,
            "truncated": ends and not solved,
            "success": solved,
        }

    def collect(self, steps: int, seed: int, path: str) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        np.savez(
            path,
            state=rng.normal(size=(steps, STATE)).astype(np.float32),
            action=rng.uniform(-1, 1, (steps, 5)).astype(np.float32),
            reward=np.full(steps, -1.0, np.float32),
            solved=np.arange(steps) % 13 == 12,
            ends=np.arange(steps) % 20 == 19,
            final=rng.normal(size=(steps // 20, STATE)).astype(np.float32),
        )
        return {}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FakeProgram]:
    """Stands in for OGBench's process, and for the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    FakeProgram.started, FakeProgram.seeds = [], []
    for module in (ogbench_env, ogbench):
        monkeypatch.setattr(module, "Program", FakeProgram)
    return FakeProgram


def plan(**changes: Any) -> Plan:
    settings: dict[str, Any] = {**PLAN, "horizon": 2, "seed": 3, **changes}
    return Plan(**settings)


def test_play_ends_where_the_task_would() -> None:
    # Two recordings of 3 and 2 steps; the second step of the first begins in the goal.
    state = np.array([[1], [2], [3], [11], [12]], np.float32)
    found = episodes_of(
        META,
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


def test_play_is_a_dataset_that_is_made_once(program: type[FakeProgram], tmp_path: Path) -> None:
    folder = play_of("cube-single", 40)
    data = load_episodes(folder)
    # Steps 12, 25 and 38 begin in the goal, 19 and 39 are the last of a recording.
    assert data.bounds()[1].tolist() == [13, 20, 26, 39, 40]
    assert data.episode_success().tolist() == [True, False, True, True, False]
    with np.load(folder.with_name(f"{folder.name}.npz")) as play:
        assert (data.obs["state"] == play["state"]).all()
    made = (folder / "meta/info.json").stat().st_mtime_ns
    assert (play_of("cube-single", 40), (folder / "meta/info.json").stat().st_mtime_ns) == (folder, made)
    assert program.started == []  # and closed


def test_the_task_is_an_environment_whose_process_begins_with_an_episode(program: type[FakeProgram]) -> None:
    device = simulation(EnvConfig(kind="gym", id=env_id("cube-single")), 2)
    with opened(device, holder="a test") as env:
        assert (env.control_hz, len(env.state_names), len(env.action_names)) == (20.0, STATE, 5)
        assert program.started == []
        obs, _ = env.reset(seed=[2**31 + 5, 8])
        assert (program.seeds, obs["state"][:, 0].tolist()) == ([5, 8], [5.0, 1.0])
        steps = [env.step_masked(np.array([[0.5] * 5, [-0.5] * 5]), None) for _ in range(3)]
        _, _, terminated, truncated, infos = steps[-1]
        assert (terminated.tolist(), truncated.tolist()) == ([True, False], [False, True])
        assert infos["success"].tolist() == [True, False]
    assert program.started == []


def test_a_program_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such cube >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(ogbench_env, "environment", lambda *_, **__: python)
    program = Program("cube-single")
    with pytest.raises(RobotRLError, match="bench ogbench: cube-single failed:\nno such cube"):
        program.ask(do="reset", seed=0)
    program.close()


@pytest.mark.parametrize("actor", ["fql", pytest.param("best_of_n", marks=pytest.mark.slow)])
def test_a_row_is_a_run_that_learns_offline_then_online(
    actor: str, program: type[FakeProgram], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_runs: None
) -> None:
    done: list[list[str]] = []

    def train(command: list[str], **_: Any) -> SimpleNamespace:
        done.append(command[command.index("train") :])
        return SimpleNamespace(returncode=main(done[-1]))

    processes = SimpleNamespace(run=train, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(trials, "subprocess", processes)
    how: dict[str, Any] = {
        **PLAN,
        "actor": actor,
        "horizons": (2,),
        "seeds": (3,),
        "out": str(tmp_path / "out"),
    }
    result = ogbench.run(**how)
    (row,) = result["rows"]
    assert (row["h"], row["seed"], row["updates"], row["env_steps"], row["done"]) == (2, 3, 14, 8, True)
    kept = json.loads((tmp_path / f"out/cube-single-{actor}-h2-seed3/row.json").read_text())
    # After 4 and all 6 updates offline, after 4 and 8 steps with one more update each.
    places = [(point["updates"], point["env_steps"]) for point in kept["curve"]]
    assert places == [(4, 0), (6, 0), (10, 4), (14, 8)]
    assert (row["offline"], row["success"]) == (kept["curve"][1]["success"], kept["curve"][-1]["success"])
    assert all(row[name] > 0 for name in ("s_per_1000_updates", "s_per_1000_env_steps", "evaluate_s"))
    assert "40 steps in 5 episodes, of which 3 end" in result["notes"][2]
    assert ogbench.run(**how)["rows"] == result["rows"]
    assert len(done) == 1
    how["alpha"] = 11.0
    with pytest.raises(ConfigError, match=r"was begun with alpha=10\.0, got 11\.0"):
        ogbench.run(**how)


def test_a_run_that_runs_out_of_time_goes_on(
    program: type[FakeProgram], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, limits, calls = play_of("cube-single", 40), list[float](), list[list[str]]()
    lines = [("chunked offline", 4, 0, None), ("chunked", 4, 0, 0.5), ("chunked", 6, 0, 0.0)]
    lines += [("chunked", 2, 2, None), ("final", 8, 8, 1.0)]

    def train(command: list[str], *, timeout: float, **_: Any) -> SimpleNamespace:
        words = command[command.index("train") + 1 :]
        limits.append(timeout)
        calls.append(words)
        folder = tmp_path / "out/1-run"
        folder.mkdir(parents=True, exist_ok=True)
        if len(calls) == 1:
            (folder / "config.yaml").write_text(dump(load(RunConfig, words, config_name="train")))
        rows = [
            {"phase": phase, "updates": updates, "step": step, "wall_s": 1.0}
            | ({} if success is None else {"eval/success": success})
            for phase, updates, step, success in lines[: 4 if len(calls) == 1 else None]
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if len(calls) == 1:
            raise subprocess.TimeoutExpired("train", timeout)
        timing = {"sample": 1.0, "update": 6.0, "collect": 3.0, "replay": 1.0, "evaluate": 9.0}
        (folder / "summary.json").write_text(json.dumps({"timing": timing}))
        return SimpleNamespace(returncode=0)

    processes = SimpleNamespace(run=train, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(trials, "subprocess", processes)
    (row,) = ogbench.learned([Trial(plan(), play, tmp_path / "out")], minutes=2.0)
    assert (row["updates"], row["env_steps"], row["offline"], row["done"]) == (8, 2, 0.0, False)
    assert (row["success"], row["s_per_1000_updates"]) == (0.0, None)
    assert 119.0 < limits[0] <= 120.0
    assert ogbench.learned([Trial(plan(), play, tmp_path / "out")], minutes=0.0) == [row]  # no time, no call
    (row,) = ogbench.learned([Trial(plan(), play, tmp_path / "out")], minutes=2.0)
    assert calls[1:] == [[f"resume={tmp_path}/out/1-run"]]
    assert (row["updates"], row["env_steps"], row["success"], row["done"]) == (14, 8, 1.0, True)
    # 7 s of 14 updates, 4 s of 8 steps, 9 s of three evaluations.
    took = (row["s_per_1000_updates"], row["s_per_1000_env_steps"], row["evaluate_s"])
    assert took == (500.0, 500.0, 3.0)


def test_offline_alone_is_judged_by_the_last_evaluation(program: type[FakeProgram], tmp_path: Path) -> None:
    words = plan(horizon=5, online_steps=0).words(play_of("cube-single", 40))
    config = load(RunConfig, list(words), config_name="train")
    assert config.plan == ("demos", "clone", "online", "evaluate")
    assert (config.bc.updates, config.n_exec, config.policy.horizon) == (0, 5, 5)
    assert (config.method.env_steps, config.evaluate.every_updates) == (0, 4)


def test_rows_of_finished_trials_stay(tmp_path: Path) -> None:
    published = Path(__file__).resolve().parents[2] / "docs/results/ogbench.json"
    first = json.loads(published.read_text())[0]  # written before these were runs of train
    (tmp_path / "row.json").write_text(json.dumps(first))
    kept = Trial(Plan(**first["plan"]), tmp_path / "play", tmp_path)
    assert ogbench.learned([kept], minutes=1.0) == [first["row"]]


def test_what_needs_no_learning_stands_beside_it(program: type[FakeProgram], tmp_path: Path) -> None:
    rows = ogbench.trivial("cube-single", 3, 40, tmp_path / "new")
    zero, random, oracle = rows
    # The last of three steps decides. Zero is not positive; noise is in half of 40 (0.5 +- 0.24, 3 sigma).
    assert zero == {"policy": "zero", "seed": 3, "success": 0.0}
    assert random["policy"] == "random"
    assert 0.26 < random["success"] < 0.74
    assert oracle == {"policy": "oracle", "seed": 3, "success": 1.0}
    played = len(program.seeds)
    assert (played, ogbench.trivial("cube-single", 3, 40, tmp_path / "new")) == (120, rows)
    assert len(program.seeds) == played  # its file is read


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
