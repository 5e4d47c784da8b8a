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
