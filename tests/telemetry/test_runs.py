import json
import math

import numpy as np
import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.telemetry.runs import Outcome, flatten, load_run


def make_run(folder, *, summary=None, rows=(), config="recipe: smoke\nseed: 4\nenv: {task: reach}\n"):
    folder.mkdir(parents=True, exist_ok=True)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if rows:
        lines = [json.dumps({"phase": "residual", "wall_s": 0.0, **row}) for row in rows]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(config)
    return folder


def test_rows_that_a_cut_between_two_took_are_missed(tmp_path):
    rows = [{"step": step} for step in range(2)]
    assert load_run(make_run(tmp_path, summary={"rows": 2}, rows=rows)).missing == []
    missing = load_run(make_run(tmp_path, summary={"rows": 5}, rows=rows)).missing
    assert missing == ["metrics.jsonl: 3 of 5 rows are not there"]


def test_outcomes_come_from_shares_or_from_single_episodes(tmp_path):
    summary = {"base_success": 0.435, "final_successes": [1, 1, 0, 1], "final_success": 0.1, "episodes": 200}
    run = load_run(make_run(tmp_path, summary=summary))
    assert run.outcome("base") == Outcome(87, 200)
    assert run.outcome("final") == Outcome(3, 4)


@pytest.mark.parametrize(
    "summary", [{}, {"base_success": 1.2, "episodes": 10}, {"base_success": "0.5", "episodes": 10}]
)
def test_an_outcome_that_makes_no_sense_is_none(tmp_path, summary):
    assert load_run(make_run(tmp_path, summary=summary)).outcome("base") is None


def test_task_recipe_and_seed_come_from_the_settings_of_an_unfinished_run(tmp_path):
    run = load_run(make_run(tmp_path))
    assert (run.task, run.recipe, run.seed, run.label) == ("reach", "smoke", 4, "seed 4")


def test_a_curve_runs_over_steps_or_updates_or_rows(tmp_path):
    cloning = [{"step": 0, "updates": 10 * i, "bc/loss": 1.0 / (i + 1)} for i in range(3)]
    learning = [{"step": 5 * i, "updates": 2 * i, "critic/loss": float(i)} for i in range(3)]
    single = [{"step": 7, "updates": 0, "time/fps": 3.0}]
    run = load_run(make_run(tmp_path, rows=[*cloning, *learning, *single]))
    found = {name: (run.curve(name).unit, run.curve(name).x.tolist()) for name in run.names()}
    assert found == {
        "bc/loss": ("updates", [0, 10, 20]),
        "critic/loss": ("control steps", [0, 5, 10]),
        "time/fps": ("rows", [1]),
    }


def test_the_last_evaluation_of_a_step_counts(tmp_path):
    rows = [
        {"step": 0, "eval/success": 0.2, "eval/episodes": 10},
        {"step": 0, "eval/success": 0.4, "eval/episodes": 10},
        {"step": 9, "eval/success": math.nan, "eval/episodes": 10},
        {"step": 10, "eval/success": 0.8, "eval/episodes": 10},
    ]
    steps, outcomes = load_run(make_run(tmp_path, rows=rows)).evaluations()
    assert steps.tolist() == [0, 10]
    assert outcomes == [Outcome(4, 10), Outcome(8, 10)]


def test_counts_are_summed_or_read_off_the_end(tmp_path):
    rows = [{"step": i, "collect/safety_clamps": 2, "collect/nan_resets": i} for i in range(4)]
    run = load_run(make_run(tmp_path, rows=rows))
    # Four rows of 2 since the last row; a counter that stands at 3.
    assert run.counted("safety_clamps", cumulative=False) == 8
    assert run.counted("nan_resets", cumulative=True) == 3
    assert run.counted("stops", cumulative=False) is None
    run = load_run(make_run(tmp_path, rows=rows, summary={"safety_clamps": 5}))
    assert run.counted("safety_clamps", cumulative=False) == 5


def test_damaged_files_are_named(tmp_path):
    make_run(tmp_path, config="a: [")
    (tmp_path / "summary.json").write_text("[1]")
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "index.json").write_text('[{"file": "gone.png"}]')
    missing = load_run(tmp_path).missing
    assert missing[0] == "summary.json: not readable (not an object but list)"
    assert missing[1].startswith("config.yaml: not readable (while parsing")
    assert missing[2] == "metrics.jsonl: not there or empty, so there are no curves"
    assert missing[3] == "failures/: gone.png not there"
    (tmp_path / "failures" / "index.json").write_text('{"file": 1}')
    assert load_run(tmp_path).missing[3].startswith("failures/index.json: not readable")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    make_run(tmp_path / "2026-01-01-smoke-seed0")
    with pytest.raises(
        ConfigError, match=r"there is no folder '.*seed1'\. Did you mean '2026-01-01-smoke-seed0'"
    ):
        load_run(tmp_path / "2026-01-01-smoke-seed1")
    message = r"is no run folder, it has none of config.yaml, metrics.jsonl, summary.json. Pass one that"
    with pytest.raises(ConfigError, match=message):
        load_run(tmp_path)


def test_settings_are_flattened_with_dots():
    assert flatten({"a": 1, "b": {"c": [2], "d": {"e": 3}}}) == {"a": 1, "b.c": [2], "b.d.e": 3}


def test_nulls_are_gaps_in_a_curve(tmp_path):
    rows = [{"step": 1, "critic/loss": None}, {"step": 2, "critic/loss": 1.0}]
    y = load_run(make_run(tmp_path, rows=rows)).curve("critic/loss").y
    assert np.isnan(y).tolist() == [True, False]
