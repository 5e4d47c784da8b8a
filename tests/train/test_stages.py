"""Which lists of stages a run can be, and what runs of other lists than the usual one leave."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.config import build
from robot_rl.core.errors import ConfigError
from robot_rl.data.demos import load_episodes
from robot_rl.policies.checkpoint import load_policy
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.telemetry.runs import load_run
from robot_rl.train.config import RunConfig
from robot_rl.train.phases import resume, run
from robot_rl.train.record import write_report
from robot_rl.train.stages import check_stages
from tests.runs import SMALL, folder_of, killed_after, weights

pytestmark = pytest.mark.usefixtures("whole_runs")
SCRATCH = ("look", "evaluate", "online", "evaluate")


def config(out: Path, stages: tuple[str, ...], **changes: Any) -> RunConfig:
    direct = {
        **SMALL["method"],
        "kind": "direct",
        "demo_ratio": 0.0,
        "algorithm": {"critic": {"width": 16}, "actor": {"width": 16}},
    }
    words = {**SMALL, "out": str(out), "stages": stages, "n_exec": 1, "method": direct}
    return build(RunConfig, {**words, **changes})


# --- lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stages",
    [
        ("demos", "clone", "evaluate"),
        ("demos", "filter", "clone", "evaluate", "online", "distil", "evaluate"),
        ("demos", "clone", "online", "evaluate"),
        ("demos", "finetune", "evaluate", "online", "evaluate"),
        ("demos", "finetune", "evaluate"),
        SCRATCH,
        ("look", "evaluate"),
    ],
)
def test_lists_that_can_be(stages: tuple[str, ...]) -> None:
    check_stages(stages)


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        (("demos", "clon", "evaluate"), r"stages: got 'clon'. Did you mean 'clone'\?"),
        (("clone", "evaluate"), "stages: 'clone' needs demonstrations, .* Put 'demos' before it."),
        (
            ("online", "evaluate"),
            "stages: 'online' needs a base, .* Put 'look' or 'clone' or 'finetune' before it",
        ),
        (("finetune", "evaluate"), "stages: 'finetune' needs demonstrations, .* Put 'demos' before it."),
        (("look", "finetune", "evaluate"), "stages: 'finetune' needs demonstrations, .* Put 'demos' before"),
        (("demos", "finetune"), "allowed: lists that end with 'evaluate'"),
        (("demos", "online", "clone", "evaluate"), "stages: 'online' needs a base"),
        (
            ("demos", "clone", "distil", "evaluate"),
            "'distil' needs an improved policy, .* Put 'online' before it",
        ),
        (("demos", "clone"), "allowed: lists that end with 'evaluate'"),
        (("demos", "demos", "clone", "evaluate"), "stages: got 'demos' twice"),
        (("demos", "clone", "evaluate", "evaluate"), "stages: got 'evaluate' twice"),
        (("look", "online", "evaluate", "evaluate"), "stages: got 'evaluate' behind 'online'"),
    ],
)
def test_lists_that_cannot_be(stages: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_stages(stages)


def test_what_a_method_needs_besides() -> None:
    with pytest.raises(ConfigError, match="'online' needs demonstrations"):
        check_stages(SCRATCH, ("demonstrations",))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"method": {"kind": "residual", "demo_ratio": 0.0}}, "'online' needs demonstrations"),
        ({"method": {"kind": "direct", "demo_ratio": 0.5}}, "'online' needs demonstrations"),
        (
            {"method": {"kind": "direct", "demo_ratio": 0.0, "pretrain_updates": 5}},
            "'online' needs demonstrations",
        ),
        (
            {"demos": {"filter": {"updates": 5}}},
            r"demos.filter.updates: got 5, allowed: 0 without that stage",
        ),
        ({"stages": ("look", "demos", "clone", "evaluate")}, "got 'look' and 'demos', allowed: one of them"),
        (
            {"bc": {"policy": "runs/a/policy/base"}},
            "bc.policy: got 'runs/a/policy/base', allowed: none without",
        ),
        ({"human": {"input": "scripted"}, "num_envs": 1}, "no `look` with an arm"),
    ],
)
def test_stages_that_the_other_settings_do_not_go_with(tmp_path: Path, changes: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        config(tmp_path, **{"stages": SCRATCH, **changes})


def test_the_usual_list() -> None:
    usual = build(RunConfig, SMALL)
    assert usual.plan == ("demos", "clone", "evaluate", "online", "evaluate")
    filtered = build(RunConfig, {**SMALL, "demos": {"episodes": 3, "filter": {"updates": 5}}})
    assert filtered.plan[:3] == ("demos", "filter", "clone")


# --- runs ----------------------------------------------------------------------------------------


def test_a_run_that_learns_from_nothing(tmp_path: Path) -> None:
    summary = run(config(tmp_path, SCRATCH))
    folder = folder_of(tmp_path)
    rows = read_metrics(folder / "metrics.jsonl")
    assert list(dict.fromkeys(row["phase"] for row in rows)) == ["look", "base", "direct", "final"]
    assert not (folder / "demos").exists()
    seen = load_episodes(folder / "look")
    assert summary.demo_success is None
    assert summary.demo_env_steps == len(seen.reward)
    base, _ = load_policy(folder / "policy/base")
    final, _ = load_policy(folder / "policy/final")
    assert (base.kind, final.kind) == ("noise", "actor")
    mean = seen.obs["state"].mean(axis=0)
    learned: Any = final
    np.testing.assert_allclose(learned.normaliser.get_buffer("mean_state"), mean, rtol=1e-4, atol=1e-5)
    assert summary.env_steps == 40
    assert summary.final_digest != summary.base_digest
    # The same seed plays the same noise and learns the same; half-way it goes on the same way.
    again = run(config(tmp_path / "again", SCRATCH))
    assert (again.base_digest, again.final_digest) == (summary.base_digest, summary.final_digest)


def test_it_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    whole = run(config(tmp_path / "whole", SCRATCH))
    with killed_after(11):
        run(config(tmp_path / "cut", SCRATCH))
    resumed = resume(folder_of(tmp_path / "cut"))
    assert (resumed.final_digest, resumed.env_steps) == (whole.final_digest, 40)


def test_a_run_that_clones_and_no_more(tmp_path: Path) -> None:
    stages = ("demos", "clone", "evaluate")
    summary = run(replace(build(RunConfig, SMALL), out=str(tmp_path), stages=stages))
    folder = folder_of(tmp_path)
    rows = read_metrics(folder / "metrics.jsonl")
    assert list(dict.fromkeys(row["phase"] for row in rows)) == ["demos", "bc", "final"]
    assert (summary.base_success, summary.base_ci, summary.base_digest) == (None, None, None)
    assert (summary.env_steps, summary.episodes) == (0, 4)
    whole = run(replace(build(RunConfig, SMALL), out=str(tmp_path / "whole")))
    assert summary.final_digest == whole.base_digest
    assert weights(folder, "base") == weights(folder, "final")
    assert json.loads((folder / "summary.json").read_text())["base_success"] is None
    write_report(folder)
    assert "Success on held-out episodes is " in (folder / "report.html").read_text()
    assert load_run(folder).outcome("base") is None
