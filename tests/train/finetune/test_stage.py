"""Fine-tuning as a stage of a training run: fine-tuning, then reinforcement learning, in one run."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from robot_rl.config import build, load, plain
from robot_rl.core.errors import CheckpointError, ConfigError, DatasetError, RobotRLError
from robot_rl.core.files import without_checksum
from robot_rl.core.registry import TABLE
from robot_rl.data.demos import load_episodes, save_episodes
from robot_rl.policies.checkpoint import load_policy
from robot_rl.sched.opened import opened
from robot_rl.telemetry.metrics import read_metrics
from robot_rl.telemetry.report import write_report
from robot_rl.telemetry.runs import flatten
from robot_rl.train import phases
from robot_rl.train.assemble import evaluator
from robot_rl.train.config import RunConfig
from robot_rl.train.demos import collect_demonstrations
from robot_rl.train.finetune import run as finetune
from robot_rl.train.finetune.config import FinetuneConfig
from robot_rl.train.improve.config import FINETUNED, MethodSettings
from tests.runs import SMALL, folder_of, killed_after, weights

pytestmark = pytest.mark.usefixtures("whole_runs")

STAGE: dict[str, Any] = {
    "size": "tiny",
    "horizon": 4,
    "options": {"steps": 2},
    "heldout": 1,
    "updates": 6,
    "batch": 4,
    "stride": 4,
    "curve_points": 2,
    "baselines": False,
}
TINY: dict[str, Any] = {
    "recipe": "tiny",
    "stages": ["demos", "finetune", "evaluate", "online", "evaluate"],
    "num_envs": 2,
    "n_exec": 3,
    "metrics_rows": 10,
    "env": {
        "task": "reach",
        "horizon_s": 0.7,
        "num_threads": 1,
        "cameras": ["front"],
        "image_size": [16, 24],
    },
    "demos": {"episodes": 4, "bias_m": 0.02},
    "finetune": STAGE,
    "method": {
        "kind": "residual",
        "env_steps": 12,
        "batch": 4,
        "explore_steps": 6,
        "capacity": 1000,
        "algorithm": {"num_critics": 2, "width": 8, "depth": 1, "critic_warmup": 2},
    },
    "evaluate": {"episodes": 2, "num_envs": 2, "every_env_steps": 0},
    "checkpoint": {"every_s": 0.0, "every_steps": 2},
    "video": {"episodes": 0, "failures": 0},
}
ALONE = ["demos", "finetune", "evaluate"]
CLONED = ["demos", "clone", "evaluate"]


def tiny(out: Path, **changes: Any) -> RunConfig:
    return build(RunConfig, {**TINY, "out": str(out), **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns the folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOT_RL_STATE", str(out / "state"))
        patch.setattr(phases, "write_report", lambda folder: folder / "report.html")
        yield Path(phases.run(tiny(out / "runs")).run)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Records two demonstrations of an env that differs from the run's."""

    def record(**changes: Any) -> Path:
        config = tiny(Path(), env={**TINY["env"], **changes})
        folder = tmp_path_factory.mktemp("recorded") / "demos"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ROBOT_RL_STATE", str(folder.parent / "state"))
            with opened(evaluator(config), holder="test") as env:
                asked = replace(config.demos, episodes=4)
                save_episodes(folder, collect_demonstrations(env, asked, 0))
        return folder

    return record


def summary_of(folder: Path) -> dict[str, Any]:
    return without_checksum(json.loads((folder / "summary.json").read_text()))


def result(folder: Path) -> dict[str, Any]:
    """Returns what a run came to, without what the clock says."""
    rows = read_metrics(folder / "metrics.jsonl")
    clock = ("wall_s", "heldout/minutes")
    summary = summary_of(folder)
    for name in ("policy_minutes", "dataset"):
        del summary["finetune"][name]
    return {
        "rows": [repr({key: value for key, value in row.items() if key not in clock}) for row in rows],
        "digests": (summary["base_digest"], summary["final_digest"]),
        "finetune": summary["finetune"],
        "base": weights(folder, "base"),
    }


# --- one run -------------------------------------------------------------------------------------


def test_what_was_fine_tuned_is_the_base_of_reinforcement_learning(whole: Path) -> None:
    summary = summary_of(whole)
    base, meta = load_policy(whole / "policy" / "base")
    final: Any = load_policy(whole / "policy" / "final")[0]
    assert (base.kind, final.kind) == ("small_vla", "residual")
    assert (meta.task, meta.n_exec) == ("reach", 3)  # the run's, not the chunk's 4
    first: Any = base
    frozen = final.base.state_dict()
    assert all(torch.equal(frozen[name], value) for name, value in first.state_dict().items())
    assert summary["env_steps"] == 12
    assert summary["base_digest"] != summary["final_digest"]
    rows = [row["phase"] for row in read_metrics(whole / "metrics.jsonl")]
    assert list(dict.fromkeys(rows)) == ["demos", "baselines", "policy", "base", "residual", "final"]


def test_the_run_has_the_held_out_errors_beside_its_successes(whole: Path) -> None:
    found = summary_of(whole)["finetune"]
    names = {"policy", "mean action", "last action", "ridge"}
    assert names <= set(found["predictors"])
    assert found["heldout_error"] == found["predictors"]["policy"]["normalised"]
    assert (found["train_episodes"], found["heldout_episodes"]) == ([0, 1, 2], [3])
    assert found["act"] == "baselines=false"
    assert (whole / "baseline-ridge" / "policy.json").is_file()
    assert not (whole / "pictures").exists()
    page = write_report([whole], whole / "page.html").path.read_text()
    for text in ("Fine-tuning", "Errors by predictor", "ridge", "Success before and after"):
        assert text in page


def test_the_stage_and_the_command_are_one_program(whole: Path, tmp_path: Path) -> None:
    given = {"dataset": str(whole / "demos"), "picture": [16, 24], "out": str(tmp_path), "metrics_rows": 10}
    alone = finetune.run(build(FinetuneConfig, {**STAGE, **given}))
    base = whole / "policy" / "base" / "policy.safetensors"
    assert (Path(alone.run) / "policy" / "policy.safetensors").read_bytes() == base.read_bytes()
    assert (
        alone.predictors == summary_of(whole)["finetune"]["predictors"]
        or json.loads(json.dumps(alone.predictors)) == (summary_of(whole)["finetune"]["predictors"])
    )


# Saves: demos, pictures, baselines, neighbour, length, 3 in the loop, policy, act settings, act ...
@pytest.mark.parametrize("saves", [2, 6, 11])
def test_fine_tuning_cut_short_ends_as_the_unbroken_run(saves: int, whole: Path, tmp_path: Path) -> None:
    with killed_after(saves):
        phases.run(tiny(tmp_path, stages=ALONE))
    folder = folder_of(tmp_path)
    assert not (folder / "summary.json").exists()
    phases.resume(folder)
    assert weights(folder, "final") == weights(whole, "base")
    found, unbroken = result(folder), result(whole)
    assert found["finetune"] == unbroken["finetune"]
    count = next(number for number, row in enumerate(unbroken["rows"]) if "'base'" in row)
    assert found["rows"][:count] == unbroken["rows"][:count]


@pytest.mark.slow
@pytest.mark.parametrize("saves", [5, 14, 18])
def test_a_run_cut_short_anywhere_ends_as_the_unbroken_one(saves: int, whole: Path, tmp_path: Path) -> None:
    with killed_after(saves):
        phases.run(tiny(tmp_path))
    phases.resume(folder_of(tmp_path))
    assert result(folder_of(tmp_path)) == result(whole)


@pytest.mark.slow
def test_ppo_trains_what_was_fine_tuned(tmp_path: Path) -> None:
    ppo = {
        "kind": "ppo",
        "env_steps": 40,
        "decisions": 5,
        "algorithm": {"batch": 8, "epochs": 1, "width": 8, "depth": 1, "actor_lr": 1e-3},
    }
    phases.run(tiny(tmp_path, method=ppo))
    final, _ = load_policy(folder_of(tmp_path) / "policy" / "final")
    assert final.kind == "small_vla"
    assert weights(folder_of(tmp_path), "final") != weights(folder_of(tmp_path), "base")


def test_a_saved_policy_goes_on_and_the_command_says_how_long(whole: Path, tmp_path: Path) -> None:
    given = {**STAGE, "policy": str(whole / "policy/base"), "updates": None, "minutes": 1e-4, "lr": 1e-9}
    demos = {"path": str(whole / "demos")}
    summary = phases.run(tiny(tmp_path, stages=ALONE, finetune=given, demos=demos))
    found = summary.finetune
    assert found is not None
    error = summary_of(whole)["finetune"]["heldout_error"]
    assert found["heldout_error"] == pytest.approx(error, rel=1e-3)
    assert f"finetune.updates={found['updates']}" in summary.command
    assert "minutes" not in summary.command


def test_a_flow_that_another_run_cloned_is_fine_tuned(tmp_path: Path) -> None:
    cloned = phases.run(build(RunConfig, {**SMALL, "out": str(tmp_path / "cloned"), "stages": CLONED}))
    given = {**STAGE, "policy": f"{cloned.run}/policy/base", "horizon": 8}
    phases.run(
        build(RunConfig, {**SMALL, "out": str(tmp_path / "tuned"), "stages": ALONE, "finetune": given})
    )
    first, tuned = folder_of(tmp_path / "cloned"), folder_of(tmp_path / "tuned")
    assert load_policy(tuned / "policy/base")[0].kind == "flow"
    assert weights(tuned, "base") != weights(first, "base")


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"stages": ["demos", "clone", "finetune", "evaluate"]},
            "stages: got 'clone' and 'finetune', allowed: one of them",
        ),
        (
            {"stages": ["demos", "filter", "finetune", "evaluate"], "demos": {"filter": {"updates": 3}}},
            "stages: got 'filter' and 'finetune', allowed: one of them",
        ),
        ({"demos": {"mirror": True}}, "demos.mirror: got True, allowed: false with the stage `finetune`"),
        ({"demos": {"episodes": 2}}, r"finetune.heldout: got 1, allowed: at most 0 of demos.episodes=2"),
        ({"n_exec": 5}, "n_exec: got 5, allowed: 1 to finetune.horizon, which is 4"),
        (
            {"method": {"kind": "direct"}},
            r"finetune.policy: small_vla: got 'small_vla', allowed: flow, .* Use method=residual, dagger, ",
        ),
        (
            {"method": {"kind": "chunked"}},
            r"allowed: flow with method=chunked. Use method=residual, dagger, ppo, grpo or latent",
        ),
        ({"bc": {"policy": "runs/a"}}, "bc.policy: got 'runs/a', allowed: none without the stage `clone`"),
        ({"finetune": {"policy": "smolvla"}}, "finetune.policy: got 'smolvla', allowed: small_vla, or the "),
        ({"finetune": {"policy": "own/name"}}, "finetune.policy: got 'own/name', allowed: small_vla, or "),
        ({"finetune": {"policy": "smal_vla"}}, r"finetune.policy: no policy and .* Did you mean 'small_vla'"),
        ({"finetune": {"updates": 3, "minutes": 1}}, "finetune.minutes: got 1 with finetune.updates=3"),
        ({"finetune": {"batch": 0}}, "finetune.batch: got 0, allowed: 1 or more"),
        ({"finetune": {"lr": -1.0}}, "finetune.lr: got -1.0"),
        ({"finetune": {"precision": "fp16"}}, "finetune.precision: got 'fp16' with device=cpu"),
        ({"finetune": {"history": 3}}, "finetune.history: no such key"),
    ],
)
def test_what_cannot_be_is_refused_by_the_settings_alone(changes: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        tiny(Path(), **changes)


def test_the_methods_that_are_named_are_those_that_can() -> None:
    can = {
        name
        for name in TABLE["method"]
        if set(FINETUNED) <= set(MethodSettings.of_kind(name, "method").bases)
    }
    assert can == {"residual", "latent", "ppo", "grpo", "dagger"}


@pytest.mark.parametrize(
    ("changes", "error", "what"),
    [
        ({"finetune": {**STAGE, "options": {"deep": 3}}}, ConfigError, "small_vla: no option 'deep'"),
        (
            {"finetune": {**STAGE, "options": {"picture": [24, 32]}}},
            ConfigError,
            r"finetune.policy: small_vla: reads cameras front at \(24, 32\), the run shows front at",
        ),
        (
            {"method": {"kind": "ppo", "exploration": {"process": "flow_noise"}}},
            ConfigError,
            "method.exploration: small_vla process: got 'flow_noise', allowed: flow_ode, flow_sde",
        ),
        (
            {"method": {"kind": "ppo"}, "finetune": {**STAGE, "options": {"horizons": [2, 4]}}},
            ConfigError,
            r"finetune.policy: small_vla: horizons: got \(2, 4\), allowed: \(\) with method=ppo",
        ),
        ({"finetune": {**STAGE, "policy": "WHOLE", "horizon": 5}}, ConfigError, None),
    ],
)
def test_what_cannot_be_improved_is_refused_before_a_folder_is_made(
    changes: dict[str, Any], error: type[RobotRLError], what: str | None, whole: Path, tmp_path: Path
) -> None:
    if what is None:  # a saved policy whose chunks are shorter than what is measured
        changes["finetune"]["policy"] = str(whole / "policy/base")
        changes["demos"] = {"path": str(whole / "demos")}
        what = "finetune.horizon: got 5, the policy predicts 4 control steps. Use finetune.horizon=4"
    with pytest.raises(error, match=what):
        phases.run(tiny(tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recorded", "changes", "error", "what"),
    [
        (
            {"cameras": ["front", "side"]},
            {},
            ConfigError,
            r"env.cameras: got front, .* have front, side, .* env.cameras=\[front,side\], .*=\[front\]",
        ),
        (
            {"state": ["joint"]},
            {},
            DatasetError,
            "does not fit this run: its state elements differ: it lacks",
        ),
        ({}, {"heldout": 3}, DatasetError, "4 episodes, finetune.heldout=3 leaves 1 to learn from"),
        ({}, {"horizon": 99}, DatasetError, r"finetune.horizon=99. Use finetune.horizon=\d+ or less"),
    ],
)
def test_demonstrations_of_something_else_are_refused_before_a_folder_is_made(
    recorded: dict[str, Any],
    changes: dict[str, Any],
    error: type[RobotRLError],
    what: str,
    record: Callable[..., Path],
    tmp_path: Path,
) -> None:
    demos = {"path": str(record(**recorded))}
    with pytest.raises(error, match=what):
        phases.run(tiny(tmp_path / "out", demos=demos, finetune={**STAGE, **changes}))
    assert not (tmp_path / "out").exists()


def test_a_saved_policy_of_another_state_is_refused(whole: Path, tmp_path: Path) -> None:
    env = {**TINY["env"], "state": ["joint"]}
    given = {**STAGE, "policy": str(whole / "policy/base")}
    with pytest.raises(
        CheckpointError, match=r"was trained with \d+ elements, the env has 7; they differ in"
    ):
        phases.run(tiny(tmp_path / "out", env=env, finetune=given))
    assert not (tmp_path / "out").exists()


# --- settings ------------------------------------------------------------------------------------


def test_a_run_names_the_settings_of_its_base_and_of_no_other(whole: Path) -> None:
    recipe = load(RunConfig, ["recipe=finetune_then_rl"], config_name="train")
    used = recipe.used()
    assert "finetune" in used
    assert not {"policy", "bc"} & used.keys()
    assert len(flatten(used)) <= 150
    assert build(RunConfig, used) == recipe
    cloned = RunConfig().used()
    assert "finetune" not in cloned
    assert {"policy", "bc"} <= cloned.keys()
    assert len(load_episodes(whole / "demos").reward) == summary_of(whole)["demo_env_steps"]


def test_both_ways_to_fine_tune_have_the_same_fields(tmp_path: Path) -> None:
    own, alone = plain(RunConfig().finetune), plain(FinetuneConfig(dataset=str(tmp_path)))
    assert own.items() <= alone.items()
