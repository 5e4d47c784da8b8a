"""Runs of chunked Q-learning: offline before the first control step, online after it, exact resume."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from robot_rl.algos.chunk_q import ChunkQ
from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.data.demos import load_episodes
from robot_rl.data.normalize import Normaliser
from robot_rl.policies.checkpoint import load_policy
from robot_rl.policies.chunk import FlowPolicy
from robot_rl.policies.config import ChunkPolicyConfig
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train.assemble import generator
from robot_rl.train.config import RunConfig
from robot_rl.train.improve.config import ChunkedSettings
from robot_rl.train.improve.method import settings_of
from robot_rl.train.phases import Summary, resume, run
from tests.runs import folder_of, undisturbed

pytestmark = pytest.mark.usefixtures("whole_runs")

SMALL: dict[str, Any] = {
    "recipe": "small",
    "num_envs": 2,
    "n_exec": 3,
    "env": {"task": "reach", "horizon_s": 0.5, "num_threads": 1},
    "demos": {"episodes": 3},
    "policy": {"horizon": 4, "width": 16, "depth": 1, "time_dim": 8, "steps": 2},
    "bc": {"updates": 6, "batch": 8},
    "method": {
        "kind": "chunked",
        "env_steps": 40,
        "batch": 8,
        "capacity": 1000,
        "offline_updates": 20,
        "algorithm": {"candidates": 3, "critics": {"width": 16, "depth": 1}},
    },
    "evaluate": {"episodes": 4, "num_envs": 2, "every_env_steps": 20, "quick_episodes": 2},
    "checkpoint": {"every_s": 0.0, "every_steps": 4},
    "video": {"episodes": 0, "failures": 0},
}


def small(out: Path, **algorithm: Any) -> RunConfig:
    method = {**SMALL["method"], "algorithm": {**SMALL["method"]["algorithm"], **algorithm}}
    return build(RunConfig, {**SMALL, "method": method, "out": str(out)})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Summary]:
    """Trains with an actor, once; returns what the run came to."""

    @functools.cache
    def train(actor: str) -> Summary:
        out = tmp_path_factory.mktemp("whole")
        with undisturbed(out / "state"):
            return run(small(out, actor=actor))

    return train


@pytest.mark.parametrize(("actor", "kind"), [("fql", "one_step"), ("best_of_n", "best_of_n")])
def test_it_learns_offline_then_online(actor: str, kind: str, whole: Callable[[str], Summary]) -> None:
    summary = whole(actor)
    folder = Path(summary.run)
    rows = read_metrics(folder / "metrics.jsonl")
    names = list(dict.fromkeys(row["phase"] for row in rows))
    assert names == ["demos", "bc", "base", "chunked offline", "chunked", "final"]
    offline = [row for row in rows if row["phase"] == "chunked offline"]
    assert max(row["updates"] for row in offline) == 20
    assert {row["step"] for row in offline} == {0}
    # The first look is at what was learned offline; quick evaluations follow at 20 and 40 steps.
    looks = [row["step"] for row in rows if row["phase"] == "chunked" and "eval/success" in row]
    assert looks == [0, 20, 40]
    assert summary.env_steps == 40
    assert load_policy(folder / "policy" / "final")[0].kind == kind


@pytest.mark.parametrize("fails_at", [14, 35])
@pytest.mark.parametrize("actor", ["fql", "best_of_n"])
def test_a_run_cut_short_offline_or_online_ends_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    actor: str,
    fails_at: int,
    whole: Callable[[str], Summary],
) -> None:
    unbroken = whole(actor)
    update, left = ChunkQ.update, [fails_at]

    def fails(self: ChunkQ, batch: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return update(self, batch)

    monkeypatch.setattr(ChunkQ, "update", fails)
    with pytest.raises(KeyboardInterrupt):
        run(small(tmp_path / "cut", actor=actor))
    resumed: Summary = resume(folder_of(tmp_path / "cut"))
    assert resumed.final_digest == unbroken.final_digest
    rows = [read_metrics(Path(summary.run) / "metrics.jsonl") for summary in (unbroken, resumed)]
    learned = [[(r["phase"], r["step"], r.get("updates")) for r in found] for found in rows]
    assert learned[0] == learned[1]


def test_it_may_learn_offline_alone(tmp_path: Path) -> None:
    config = small(tmp_path / "offline")
    summary = run(replace(config, method=replace(config.method, env_steps=0)))
    assert summary.env_steps == 0
    assert summary.final_digest != summary.base_digest
    neither = replace(settings_of(config, ChunkedSettings), env_steps=0, offline_updates=0)
    summary = run(replace(small(tmp_path / "neither"), method=neither))
    assert summary.final_digest == summary.base_digest


def test_it_looks_on_while_it_learns_from_data_alone(tmp_path: Path) -> None:
    config = small(tmp_path, actor="fql")
    looks = replace(config.evaluate, every_updates=6)
    learned = run(replace(config, evaluate=looks, method=replace(config.method, env_steps=0)))
    rows = [row for row in read_metrics(folder_of(tmp_path) / "metrics.jsonl") if "eval/success" in row]
    # Each sixth of 20 updates, and what came of them; none of it changes what is learned.
    assert [(row["phase"], row["updates"]) for row in rows] == [
        ("base", 0),
        *[("chunked", updates) for updates in (6, 12, 18, 20)],
        ("final", 0),
    ]
    blind = run(replace(small(tmp_path / "blind", actor="fql"), method=replace(config.method, env_steps=0)))
    assert learned.final_digest == blind.final_digest


def test_a_base_may_stay_as_it_is_drawn_and_every_step_count_the_same(tmp_path: Path) -> None:
    config = small(tmp_path, actor="fql")
    stages = ("demos", "clone", "online", "evaluate")
    method = replace(settings_of(config, ChunkedSettings), demo_ratio=None)
    summary = run(replace(config, stages=stages, bc=replace(config.bc, updates=0), method=method))
    assert (summary.base_success, summary.env_steps) == (None, 40)
    folder = folder_of(tmp_path)
    base, episodes = (
        cast("FlowPolicy", load_policy(folder / "policy/base")[0]),
        load_episodes(folder / "demos"),
    )
    drawn = FlowPolicy(
        cast("ChunkPolicyConfig", config.policy),
        state_dim=base.state_dim,
        action_dim=base.action_dim,
        normaliser=Normaliser.fit(episodes.obs, episodes.action),
        generator=generator(config.seed, "policy"),
    )
    assert all(
        value.equal(drawn.state_dict()[name]) for name, value in cast("Any", base).state_dict().items()
    )


def test_the_base_has_to_be_a_flow(tmp_path: Path) -> None:
    config = small(tmp_path)
    policy = replace(config.policy, kind="diffusion", train_steps=4)
    with pytest.raises(
        ConfigError, match=r"policy\.kind: got 'diffusion', allowed: flow with method=chunked"
    ):
        replace(config, policy=policy)
