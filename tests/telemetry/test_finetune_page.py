"""The page of a fine-tuning run, from a made-up run folder."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from robot_rl.core.errors import ConfigError
from robot_rl.telemetry.finetune import duration, error_curve
from robot_rl.telemetry.report import write_report
from robot_rl.telemetry.runs import load_run

GROUPS = {"policy": {"left hand": 0.1}, "nearest neighbour": {"left hand": 0.2}, "ACT": {"left hand": 0.3}}
VERDICT = {
    "baseline": "last action",
    "baseline_error": 0.13,
    "text": "nothing trained beats the best baseline: policy 0.1500 is 15.4 % above last action 0.1300",
}


def predictor(error: float) -> dict[str, Any]:
    by_step = [error + 0.001 * step for step in range(16)]
    return {"normalised": error, "interval": None, "by_step": by_step, "moving": 0.77, "still": None}


PREDICTORS = {
    "policy": {**predictor(0.15), "interval": [0.14, 0.16]},
    "last action": predictor(0.13),
    "nearest neighbour": predictor(0.2),
    "ACT": predictor(0.3),
}


def make_run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    summary = {
        "heldout_error": 0.15,
        "nearest_neighbour_error": 0.2,
        "single_neighbour_error": 0.27,
        "robot": "panda",
        "act_error": 0.3,
        "minutes": 21.5,
        "seed": 0,
        "parameters": 2_000_000,
        "updates": 4000,
        "policy_minutes": 10.0,
        "act_parameters": 12_000_000,
        "act_updates": 900,
        "act_minutes": 10.01,
        "train_episodes": [0, 1, 2],
        "heldout_episodes": [3, 4],
        "chunks": 160,
        "predictors": PREDICTORS,
        "verdict": VERDICT,
        "groups": GROUPS,
        "units": GROUPS,
        "nearest_neighbour": {"picture_weight": 0.3, "neighbours": 64, "relative": True, "error": 0.22},
        "act": {"chosen": {}, "tried": [{"lr": 1e-4, "batch": 8, "updates": 50, "error": 0.71}]},
        "command": "robot-rl finetune policy=small_vla dataset=bottle",
        "timing": {"policy update": 600.0},
        "versions": {"torch": "2.11"},
        "machine": {"cores": 2},
        **changes,
    }
    rows = [
        {"step": 0, "updates": 0, "phase": "neighbour", "wall_s": 1, "heldout/error": 0.2},
        *[
            {"step": 0, "updates": 10 * i, "phase": phase, "wall_s": i, f"{phase}/loss": 1.0 / (i + 1)}
            | {"heldout/error": 0.5 / (i + 1), "heldout/minutes": float(i)}
            for phase in ("policy", "act")
            for i in range(3)
        ],
    ]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("policy: small_vla\ndataset: bottle\nheldout: 2\nseed: 0\n")
    return folder


def test_the_page_compares(tmp_path: Path) -> None:
    report = write_report([make_run(tmp_path / "run")])
    text = re.sub(r"<[^>]+>", " ", report.path.read_text())
    assert report.missing == ()
    assert "Held-out error 0.150 on 2 episodes" in text
    assert "25.0 % below nearest neighbours (0.200) and 50.0 % below LeRobot's ACT (0.300)" in text.replace(
        "&#x27;", "'"
    )
    for part in (
        "left hand",
        "0.1000",
        "0.3000",
        "12,000,000",
        "the mean of 64",
        "nearest neighbours, tuned (64)",
        "nearest neighbour, single",
        "0.2700",
        "ResNet-18",
        "panda",
        "bottle",
        "0-2 (3)",
        "3-4 (2)",
        "21.5 min",
        "robot-rl finetune policy=",
    ):
        assert part in text, part


def test_a_worse_policy_is_said_to_be_worse(tmp_path: Path) -> None:
    text = write_report([make_run(tmp_path / "run", heldout_error=0.25, act_error=None)]).path.read_text()
    assert "25.0 % above nearest neighbours (0.200)." in text


def test_the_page_says_what_training_was_worth(tmp_path: Path) -> None:
    text = re.sub(r"<[^>]+>", " ", write_report([make_run(tmp_path / "run")]).path.read_text())
    assert "Nothing trained beats the best baseline: policy 0.1500 is 15.4 % above last action" in text
    assert "the best baseline" in text
    # Best first: the last action at 0.13, with no interval and no joint that stands still.
    table = text[text.index("Errors by predictor") :]
    assert table.index("last action") < table.index("policy")
    for part in ("0.1400 to 0.1600", "action 1 ", "action 16", "0.1450", "joints that move", "0.7700"):
        assert part in table, part


def test_a_run_that_is_not_over_has_a_curve(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    report = write_report([folder])
    assert "This run has not ended" in report.path.read_text()
    assert error_curve(load_run(folder)) is not None


def test_there_is_no_curve_without_points(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    assert error_curve(load_run(folder)) is None


def test_a_page_is_of_one_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"report\.run: got 2 runs, allowed: one"):
        write_report([make_run(tmp_path / name) for name in ("a", "b")])


def test_short_runs_are_told_in_seconds() -> None:
    assert [duration(minutes) for minutes in (None, 0.05, 1.5, 2.0)] == ["-", "3 s", "90 s", "2.0 min"]
