"""The doctor tells what is there, what is missing, and the command that mends it."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from robot_rl.cli import doctor
from robot_rl.core.errors import ConfigError, RenderError, UnknownComponentError
from robot_rl.core.registry import TABLE
from robot_rl.sim.conformance import ROBOT_RULES
from tests.arms import JOINTS, write_arm


class Usage(NamedTuple):
    """What `shutil.disk_usage` returns, in bytes."""

    total: float
    used: float
    free: float


def test_a_healthy_machine_passes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor.run(["--json"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    answer = json.loads(lines[-1])
    assert answer["ok"] is True
    assert {"python", "torch", "mujoco", "cores", "renderer", "leases", "run folder"} <= {
        c["name"] for c in answer["checks"]
    }
    assert "10 of 10 checks passed" in lines[-2]


@pytest.mark.parametrize("kind", [*TABLE, "base", "recipe"])
def test_lists_every_kind(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(["--list", kind, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    first = [line.split()[0] for line in lines[:-1] if not line.startswith(" ")]
    assert first == found["names"] == sorted(found["names"])
    assert (found["kind"], set(found["about"])) == (kind, set(found["names"]))
    assert all(found["about"].values()), found["about"]
    assert max(map(len, lines[:-1])) < 130


def test_a_list_says_what_a_recipe_is(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.run(["--list", "recipe"])
    words = " ".join(capsys.readouterr().out.split())
    assert "smoke All stages in under a minute on two cores, with little learning" in words
    assert "..." not in words, "no sentence is cut"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("As in `robot-rl bench crossq`. `robot-rl train` runs it.", "As in `robot-rl bench crossq`"),
        ("QARL (Reddi et al. 2024). Next.", "QARL (Reddi et al. 2024)"),
        ("Uses the base unless it `is_contested`.", "Uses the base unless it `is_contested`"),
        (
            "Trains a chain; one step at\nlast.\n\ndemonstrations -> critics",
            "Trains a chain; one step at last",
        ),
        ("Walker2d-v5 in 0.5 s, no end", "Walker2d-v5 in 0.5 s, no end"),
    ],
)
def test_the_first_sentence_is_whole_and_alone(text: str, first: str) -> None:
    assert doctor._sentence(text) == first


def test_a_robot_of_a_file_is_described_by_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.run(["--list", "robot"])
    words = " ".join(capsys.readouterr().out.split())
    assert "so_arm100 The Robot Studio SO-ARM100, five joints and a jaw" in words
    assert "viperx Trossen ViperX 300" in words


def test_a_wrong_name_of_a_renderer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "foo")
    check = doctor._guarded("renderer", "note", doctor._renderer)
    assert check.state == "fail"
    assert check.detail.startswith("MUJOCO_GL: the environment variable is 'foo', allowed: egl, osmesa")


def test_an_unknown_kind_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownComponentError, match=r"doctor: no kind 'robots'\. Did you mean 'robot'\?"):
        doctor.run(["--list", "robots"])


def test_a_missing_or_old_package_fails_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor._package("no-such-package", "1.0")
    assert (check.state, check.detail) == ("fail", "not installed")
    assert check.remedy == "Install it: pip install 'no-such-package>=1.0'."
    monkeypatch.setattr(doctor, "version", lambda name: "3.10.1+cpu")
    check = doctor._package("mujoco", "4.0")
    assert (check.state, check.detail) == ("fail", "3.10.1+cpu, needs 4.0 or later")
    assert doctor._package("mujoco", "3.9").state == "ok"  # 3.10 is after 3.9


def test_little_disk_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(10e9, 9e9, 1e9))
    check = doctor._disk()
    assert check == doctor.Check(
        "disk", "note", "1.0 GB free here", "Free some, or write elsewhere: out=<folder>."
    )


def test_a_missing_renderer_is_a_note_and_a_locked_folder_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def no_renderer() -> str:
        raise RenderError("no EGL: apt install libegl1")

    def read_only() -> str:
        raise PermissionError("runs is read-only")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_renderer", no_renderer)
    monkeypatch.setattr(doctor, "_run_folder", read_only)
    assert doctor.run(["--json"]) == 1
    lines = capsys.readouterr().out.strip().splitlines()
    states = {c["name"]: (c["state"], c["detail"]) for c in json.loads(lines[-1])["checks"]}
    assert states["renderer"] == ("note", "no EGL: apt install libegl1")
    assert states["run folder"] == ("fail", "runs is read-only")
    assert "repair: run folder" in lines[-2]


def test_a_robot_is_measured_for_the_tasks_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_arm(tmp_path, base_m="-0.5 0 0")
    assert doctor.run([f"robot={path}", "task=reach", "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["joint", "kp", "kd"]
    assert lines[1].split()[:3] == ["pan", "400", "40"]
    assert lines[-2] == "4 of 5 checks passed; repair: reach: reach"
    answer = json.loads(lines[-1])
    assert (answer["ok"], answer["robot"], answer["servos"]) == (False, "ur", "")
    assert [row["joint"] for row in answer["joints"]] == list(JOINTS)
    assert answer["joints"][0]["settle_s"] == pytest.approx(0.2, abs=0.05)


def test_the_rules_of_robots_are_checked_on_two_arms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pair.yaml"
    arms = {"left": -0.35, "right": 0.35}
    sides = [f"{side}: {{robot: panda, pos_m: [0, {y_m}, 0]}}\n" for side, y_m in arms.items()]
    path.write_text("name: pair\n" + "".join(sides))
    assert doctor.run([f"robot={path}", "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["check", "state", "found"]
    assert (
        lines[-2] == f"{len(ROBOT_RULES) - 1} of {len(ROBOT_RULES)} checks passed; repair: left is towards y"
    )
    answer = json.loads(lines[-1])
    assert [check["name"].replace(" ", "_") for check in answer["checks"]] == list(ROBOT_RULES)
    (failed,) = [check["detail"] for check in answer["checks"] if check["state"] == "fail"]
    assert failed.startswith("robot pair: way along y from right_tool to left_tool at home: got -0.700 m")
    assert doctor.run(["robot=two_pandas"]) == 0


def test_a_robot_file_as_people_type_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_arm(tmp_path)
    path.rename(path.with_name("J\xf6rgs Arm (neu), a=b.yaml"))
    doctor.run(["robot=~/J\xf6rgs Arm (neu), a=b.yaml", "task=reach", "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["robot"] == "ur"


def test_what_never_settles_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_arm(tmp_path, servos=None, kp=(3.0,) * 6, kd=(0.3,) * 6)
    assert doctor.run([f"robot={path}", "task=reach", "--json"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1])["joints"][0]["settle_s"] is None
    assert "  servos:" in out  # the block to paste


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["robt=panda"], r"doctor: no setting 'robt=panda'\. Did you mean 'robot'\?"),
        (["panda"], r"doctor: no setting 'panda'\..* Write it as key=value\."),
        (["task=reach"], r"robot: missing\. task= says for which tasks"),
        (["robot=pandas"], r"robot: no robot and no file named 'pandas'\. Did you mean 'panda'\?"),
        (["robot=panda", "task=reach,lift"], r"task: no task named 'lift'\."),
    ],
)
def test_a_wrong_word_about_a_robot_is_answered(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        doctor.run(words)


def test_without_a_robot_it_loads_neither_simulator_nor_learner() -> None:
    # The drawing test loads OpenGL alone, and says so where it fails.
    code = "import sys; from robot_rl.cli.main import main; main(['doctor']); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(ast.literal_eval(out.splitlines()[-1]))
    assert not {"mujoco", "torch", "hydra", "robot_rl.sim.checkup"} & loaded
