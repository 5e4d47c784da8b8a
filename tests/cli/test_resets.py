"""`robot-rl resets`: a bank with its table and pictures, and mistakes in one line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from robot_rl.cli.main import main
from robot_rl.core.registry import resolve
from robot_rl.resets import plots
from robot_rl.sim.bank_files import load_bank


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def generate(*words: str) -> int:
    few = ("rows=6", "num_envs=8", "num_threads=1")
    return main(["resets", "generate", "task=gantry_peg", *few, *words])


def test_generate_info_and_view(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("classes=reaching,near_goal", "--json") == 0
    out, err = capsys.readouterr()
    facts = json.loads(out.splitlines()[-1])
    assert facts["bank"] == "banks/gantry_peg-gantry"
    assert facts["key"]["task"] == "gantry_peg"
    assert list(facts["classes"]) == ["reaching", "near_goal"]
    assert facts["classes"]["near_goal"]["rows"] == 6
    assert facts["control_steps"] == sum(one["control_steps"] for one in facts["classes"].values()) > 0
    assert "accepted %" in out
    assert "generate" in err  # progress
    bank = load_bank(facts["bank"])
    assert {name: len(found) for name, found in bank.sets.items()} == {"reaching": 6, "near_goal": 6}
    assert main(["resets", "info", "bank=banks/gantry_peg-gantry", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == facts
    (Path(facts["bank"]) / plots.COVERAGE).unlink()
    assert main(["resets", "view", "bank=banks/gantry_peg-gantry", "camera=overhead"]) == 0
    with Image.open(Path(facts["bank"]) / plots.COVERAGE) as figure:
        assert figure.size[0] > 1000
        assert np.ptp(np.asarray(figure.convert("L"))) > 200
    pictures = Path(facts["bank"]) / plots.PICTURES
    if pictures.exists():  # this machine can draw
        with Image.open(pictures) as grid:
            assert grid.size == (6 * 240, 2 * (180 + 18))
    assert generate() == 2
    assert "out: 'banks/gantry_peg-gantry' exists already" in capsys.readouterr().err


def test_a_class_that_accepts_nothing_is_one_line_and_a_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = resolve("task", "gantry_peg")
    monkeypatch.setattr(task, "evaluate", lambda self, view: {"success": view["tip.pos"][:, 0] > 0})
    assert generate("classes=reaching") == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(
        "error: resets of gantry_peg on gantry: class 'reaching' has accepted 0 of 32 starts"
    )
    assert "solved 32" in err
    rejected = Path("banks/gantry_peg-gantry") / plots.REJECTED
    assert rejected.exists() == ("rejected.png shows some" in err)


def test_a_thing_that_does_not_fit_is_one_line_and_a_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = resolve("task", "gantry_peg")
    monkeypatch.setattr(task, "resets", replace(task.resets, at_goal_m=(0.0, 0.0, 0.03)))
    assert generate("classes=near_goal") == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: resets of gantry_peg: 'peg' does not fit into its place in 'hole'")
    rejected = Path("banks/gantry_peg-gantry") / plots.REJECTED
    assert rejected.exists() == ("rejected.png shows some" in err)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["generat"], "resets: no sub-command 'generat'. Did you mean 'generate'?"),
        (["generate"], "task: missing"),
        (["generate", "task=gantry_pg"], "task: no task named 'gantry_pg'. Did you mean 'gantry_peg'?"),
        (["generate", "task=reach", "rows=0"], "rows: got 0, allowed: 1 to 1000000"),
        (
            ["generate", "task=reach", "classes=grasped"],
            "classes: got 'grasped', reach on panda has reaching",
        ),
        (["info", "bank=none"], "bank: 'none' is no start bank: it has no bank.json."),
    ],
)
def test_mistakes(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resets", *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {error}")


def test_help_explains_the_sub_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resets"]) == 0
    assert "resets generate task=" in capsys.readouterr().out
