"""Whole runs of PPO through the chain: every method from the same base, what is refused, exact resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robot_rl.config import build, load
from robot_rl.core.errors import ConfigError
from robot_rl.policies.checkpoint import load_policy
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.train import phases
from robot_rl.train.config import RunConfig
from tests.runs import TINY, killed_after, rows_of, weights

pytestmark = pytest.mark.usefixtures("whole_runs")

RUN: dict[str, Any] = {
    **TINY,
    "method": {
        "kind": "ppo",
        "env_steps": 240,
        "decisions": 5,
        "algorithm": {"batch": 8, "epochs": 2, "width": 16, "depth": 1},
    },
}
METHODS: dict[str, dict[str, Any]] = {
    "flow_sde": {},
    "reinflow": {"exploration": {"process": "flow_noise"}, "algorithm": {"reduction": "joint"}},
    "fpo": {"exploration": {"process": "flow_cfm", "pairs": 2}, "algorithm": {"reduction": "joint"}},
}


def tiny(out: Path, **ppo: Any) -> RunConfig:
    section = {key: {**RUN["method"].get(key, {}), **value} for key, value in ppo.items()}
    return replace(build(RunConfig, {**RUN, "method": {**RUN["method"], **section}}), out=str(out))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_improves_the_same_base(method: str, tmp_path: Path) -> None:
    summary = phases.run(tiny(tmp_path, **METHODS[method]))
    folder = Path(summary.run)
    # 3 envs, 5 chunks of up to 4 control steps: at most 60 a rollout, and never more than one too many.
    assert 240 <= summary.env_steps < 300
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "ppo"]
    blocks = {row["updates"] for row in rows}
    assert all(count % 4 == 0 for count in blocks)  # 2 epochs of 2 minibatches a rollout
    learning = [row for row in rows if "ppo/kl" in row]
    assert learning
    assert not any("ppo/kl" in row for row in rows if row["updates"] <= 4)  # value first
    final: Any = load_policy(folder / "policy" / "final")[0]
    assert final.config.scored == 4  # the executed actions
    assert weights(folder, "final") != weights(folder, "base")
    assert not (folder / "experience").exists()


@pytest.mark.parametrize("saves", [5, 7])
def test_a_run_cut_short_ends_as_the_unbroken_one(saves: int, tmp_path: Path) -> None:
    unbroken = phases.run(tiny(tmp_path / "unbroken"))
    with killed_after(saves + 10):  # ten of cloning
        phases.run(tiny(tmp_path / "cut"))
    (folder,) = (tmp_path / "cut").glob("*-tiny-seed0")
    assert not (folder / "policy" / "final").exists()
    phases.resume(folder)
    assert weights(folder, "final") == weights(Path(unbroken.run), "final")

    assert rows_of(folder) == rows_of(Path(unbroken.run))


@pytest.mark.parametrize("recipe", ["flow_sde", "dppo", "reinflow", "fpo"])
def test_recipes_share_the_base_of_pick_cube(recipe: str) -> None:
    config, usual = (
        load(RunConfig, [f"recipe={name}"], config_name="train") for name in (recipe, "pick_cube")
    )
    assert config.method.kind == "ppo"
    assert (config.demos, config.bc, config.n_exec, config.env) == (
        usual.demos,
        usual.bc,
        usual.n_exec,
        usual.env,
    )
    if recipe != "dppo":
        assert config.policy == usual.policy


def test_the_four_step_variant_of_dppo() -> None:
    words = ["recipe=dppo", "policy.steps=4", "method.exploration.tuned_steps=2"]
    policy: Any = load(RunConfig, words, config_name="train").policy
    assert policy.train_steps == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": {"kind": "ppo", "exploration": {"process": "flow_noise"}}},
            "'single' where flow_noise scores 2 transitions",
        ),
        (
            {"method": {"kind": "ppo", "exploration": {"process": "ddpm"}}},
            "method.exploration: policy process: 'ddpm' does not fit",
        ),
        (
            {"method": {"kind": "ppo", "exploration": {"process": "flow_sde", "eta": 0.0}}},
            "which does not explore. Use flow_sde",
        ),
        ({"num_envs": 1, "real_time": True}, "method: got 'ppo', allowed: methods with a replay"),
        (
            {"policy": {"kind": "diffusion", "tuned_steps": 1}, "method": {"kind": "residual"}},
            "policy.tuned_steps: got 1, allowed: 0: cloning is of all steps",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(RunConfig, {**RUN, **change})
    assert message in str(error.value)


# --- Sources elsewhere


def rows_of_ppo(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "ppo"]


def test_another_process_that_acts_when_it_is_asked_makes_the_same_weights(tmp_path: Path) -> None:
    here = phases.run(tiny(tmp_path / "here"))
    there = phases.run(replace(tiny(tmp_path / "there"), transport="process", ahead=0))
    assert weights(Path(there.run), "final") == weights(Path(here.run), "final")
    assert not any("collect/staleness" in row for row in rows_of_ppo(Path(there.run)))


def test_a_source_that_is_ahead_is_weighed_and_its_age_is_counted(tmp_path: Path) -> None:
    summary = phases.run(replace(tiny(tmp_path), transport="process", ahead=1))
    rows = [row for row in rows_of_ppo(Path(summary.run)) if "collect/staleness" in row]
    assert rows
    assert all(0 < row["collect/staleness"] <= 8 for row in rows)  # two blocks of 4 updates
    assert sum(row["collect/stale_steps_dropped"] for row in rows) == 0
    assert 240 <= summary.env_steps < 300


@pytest.mark.slow
def test_rollouts_that_are_too_old_are_dropped_and_the_run_ends_all_the_same(tmp_path: Path) -> None:
    config = replace(tiny(tmp_path), transport="process", ahead=1)
    config = replace(config, method=replace(config.method, max_staleness=0))
    summary = phases.run(config)
    rows = rows_of_ppo(Path(summary.run))
    assert sum(row.get("collect/stale_steps_dropped", 0) for row in rows) > 0
    assert 240 <= summary.env_steps < 300
    rollouts = summary.env_steps // 60  # at least, of at most 60 steps; each would be 4 updates
    assert rows[-1]["updates"] < 4 * rollouts


@pytest.mark.parametrize("transport", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_several_sources_share_a_policy_and_spend_their_budgets(transport: str, tmp_path: Path) -> None:
    method = {key: value for key, value in RUN["method"].items() if key != "env_steps"}
    words = {key: value for key, value in RUN.items() if key != "num_envs"}
    other = {"robot": "gantry"} if transport == "inline" else {}
    sources = {
        "one": {"num_envs": 3, "env_steps": 240},
        "two": {"num_envs": 2, "env_steps": 120, **other},
    }
    env = {**words["env"], "state": ["tool", "goal"]}
    config = build(
        RunConfig,
        {
            **words,
            "env": env,
            "method": method,
            "sources": sources,
            "transport": transport,
            "out": str(tmp_path),
        },
    )
    summary = phases.run(config)
    assert 240 <= summary.sources["one"]["env_steps"] < 300
    assert 120 <= summary.sources["two"]["env_steps"] < 160
    assert weights(Path(summary.run), "final") != weights(Path(summary.run), "base")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": {"kind": "ppo", "max_staleness": 3}},
            "method.max_staleness: got 3, allowed: null with tr",
        ),
        (
            {"method": {"kind": "ppo", "max_staleness": -1}},
            "method.max_staleness: got -1, allowed: 0 or more",
        ),
        (
            {"num_envs": 16, "sources": {"one": {"env_steps": 100, "share": 1.0}}},
            "sources: got {'one': 1.0}, allowed: none with method=ppo",
        ),
        (
            {"num_envs": 16, "sources": {"one": {"env_steps": 100, "world": "worlds/reach"}}},
            "method: got 'ppo', allowed: a method with a replay, for a world model",
        ),
    ],
)
def test_what_does_not_fit_sources_of_rollouts(change: dict[str, Any], message: str) -> None:
    method = {key: value for key, value in RUN["method"].items() if key != "env_steps"}
    with pytest.raises(ConfigError) as error:
        build(RunConfig, {**RUN, "method": method, **change})
    assert str(error.value).startswith(message)
