"""`robot-rl new`: files that are complete as they are, and mistakes in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from robot_rl.cli.main import main
from robot_rl.config import load
from robot_rl.core.registry import TABLE, resolve
from robot_rl.sim.conformance import check_robot, check_task
from robot_rl.sim.tasks import skeleton
from robot_rl.train.before import check_before_learner
from robot_rl.train.config import RunConfig
from tests.arms import JOINTS, write_arm
from tests.sim.test_two_arms import BOTH, write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, object]]:
    """Returns what a command printed, and its JSON object."""
    capsys.readouterr()
    assert main(["new", *words, "--json"]) == 0
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    return text, json.loads(last)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns the error of a command."""
    capsys.readouterr()
    assert main(["new", *words]) == 2
    return capsys.readouterr().err


def test_a_robot_its_test_and_what_was_decided(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_arm(tmp_path)
    words = ("robot", "file=ur.xml", "name=mine", "out=robots/mine.yaml", "test=tests/test_mine.py")
    text, facts = answer(capsys, *words)
    assert facts["files"] == ["robots/mine.yaml", "tests/test_mine.py"]
    assert facts["broken"] == []
    assert yaml.safe_load(Path("robots/mine.yaml").read_text())["arm_joints"] == list(JOINTS)
    check_robot("robots/mine.yaml")
    assert text.startswith("robots/mine.yaml: robot mine, an arm of 6 joints with no gripper\n\ndecided\n")
    decided, chosen = text.split("\nchosen, since no model holds it: set what you know in the file\n")
    assert "model: the 6 joints in a row on 'base'" in decided
    assert "limits.velocity_rad_s" in chosen
    assert "rules of robots: all kept" in text
    assert text.endswith(
        "next\n  pytest tests/test_mine.py\n  robot-rl doctor robot=robots/mine.yaml task=reach\n"
        "  robot-rl train recipe=reach env.robot=robots/mine.yaml"
    )
    scope: dict[str, object] = {"__file__": str(tmp_path / "tests/test_mine.py"), "__name__": "test_mine"}
    exec(compile(Path("tests/test_mine.py").read_text(), "test_mine.py", "exec"), scope)
    rule = scope["test_mine_keeps_the_rules"]
    assert callable(rule)
    rule()
    assert "out: 'robots/mine.yaml' exists already. Give another out=" in refusal(capsys, *words)
    Path("robots/mine.yaml").unlink()
    assert "test: 'tests/test_mine.py' exists already" in refusal(capsys, *words)
    assert not Path("robots/mine.yaml").exists()  # nothing is written in part


def test_two_arms_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, BOTH)
    words = ("robot", "file=both.xml", "name=mine", "test=test_mine.py")
    text, facts = answer(capsys, *words)
    assert facts["broken"] == []
    arms = " and ".join(f"a {side} arm of 3 joints with a gripper" for side in ("left", "right"))
    assert text.startswith(f"mine.yaml: robot mine, {arms}\n")
    assert "left.tool_site" not in text
    assert "right.model.tool" in text
    assert text.endswith(
        "next\n  pytest test_mine.py\n  robot-rl doctor robot=mine.yaml\n"
        "  robot-rl train recipe=plain_ppo env.task=bimanual_reach env.reward=dense env.robot=mine.yaml"
    )
    check_robot("mine.yaml")
    words = ("robot", "file=both.xml", "name=other", "keep=left_x,right_x", "tool=left_z,left_y")
    assert "tool: no body 'left_y' on the end of the arm. Known: right_z." in refusal(capsys, *words)
    settings = ["recipe=plain_ppo", "env.task=bimanual_reach", "env.reward=dense", "env.robot=mine.yaml"]
    check_before_learner(load(RunConfig, settings, config_name="train"))


def test_a_rule_that_the_draft_breaks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_arm(tmp_path, base_m="-2 0 0")
    path = tmp_path / "ur.xml"
    path.write_text(path.read_text().replace('<body name="base"', "<body").replace("-3.2 3.2", "-0.3 0.3"))
    text, facts = answer(capsys, "robot", "file=ur.xml", "name=mine")
    assert "none was found with the tool pointing down" in text
    assert "rules of robots: broken\n  robot mine: z axis of the tool at home: got" in text
    assert len(str(facts["broken"])) > 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "new: nothing named ''. Known: robot, task. `robot-rl new --help`"),
        (["robt"], "new: nothing named 'robt'. Did you mean 'robot'?"),
        (["robot"], "file: missing"),
        (["robot", "file=gone.xml"], "file: 'gone.xml': there is no such file. Give an MJCF or a URDF."),
        (["robot", "file=7.xml"], "name: the file's, '7', begins with no letter. Give one: name=my_arm"),
        (["robot", "file=7.xml", "name=a-b"], "name: got 'a-b', allowed: letters, digits and _, a letter"),
        (["robot", "file=7.xml", "out=a.xml"], "out: got 'a.xml', allowed: a path that ends in .yaml"),
        (["robot", "file=7.xml", "test=a.py"], "test: got 'a.py', allowed: a path that ends in test_<somet"),
        (["robot", "fil=7.xml"], "fil"),
        (["robot", "file=7.xml", "name=a"], "no serial chain"),
        (["task"], "name: missing"),
        (["task", "name=Lift"], "name: got 'Lift', allowed: lower case words with _ between them"),
        (["task", "name=class"], "name: got 'class', allowed: lower case words"),
        (["task", "name=reach"], "name: the task 'reach' is robot_rl.sim.tasks.reach:Reach already. Take an"),
        (["task", "name=task"], "name: got 'task', whose class Task is a name of reach's module"),
        (["task", "name=json"], "name: a module 'json' is installed here already"),
        (["task", "name=lift", "like=raech"], "like: got 'raech', allowed: reach, push_cube, pick_cube, "),
        (["task", "name=lift", "like=pick_red_cube"], "like: got 'pick_red_cube', allowed: reach, "),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("7.xml").write_text("<mujoco/>")
    if words:
        error = refusal(capsys, *words)
        assert message in error
        assert error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["7.xml"]


def test_a_task_is_a_package(capsys: pytest.CaptureFixture[str]) -> None:
    text, facts = answer(capsys, "task", "name=lift_cube", "like=pick_cube")
    files = ["lift_cube/lift_cube.py", "lift_cube/test_lift_cube.py", "lift_cube/pyproject.toml"]
    assert facts == {"task": "lift_cube", "like": "pick_cube", "files": files}
    assert "pip install -e lift_cube" in text
    assert 'check_task("lift_cube:LiftCube")' in Path(files[1]).read_text()
    assert '"task.lift_cube" = "lift_cube:LiftCube"' in Path(files[2]).read_text()
    assert "name: 'lift_cube/lift_cube.py' exists already" in refusal(capsys, "task", "name=lift_cube")
    text, facts = answer(capsys, "task", "name=lift_it", "out=lift_cube")
    assert facts["files"] == ["lift_cube/lift_it.py", "lift_cube/test_lift_it.py"]
    assert "add to lift_cube/pyproject.toml, which was there before\n[project.entry-points." in text
    assert "lift_it" not in Path(files[2]).read_text()


@pytest.mark.parametrize("like", skeleton.likes())
def test_the_steps_that_follow_a_task_can_be_taken(like: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = answer(capsys, "task", f"name=own_{like}", f"like={like}")
    steps = [line.strip() for line in text.partition("\nnext\n")[2].splitlines()]
    task = resolve("task", like)
    assert any(step.startswith("robot-rl collect") for step in steps) == task.has_expert()
    assert any(step.startswith("robot-rl resets generate") for step in steps) == (task.resets is not None)
    (words,) = [step.split()[2:] for step in steps if step.startswith("robot-rl train")]
    config = load(RunConfig, [word.replace(f"own_{like}", like) for word in words], config_name="train")
    check_before_learner(config)


@pytest.mark.parametrize(
    "like",
    ["reach", *(pytest.param(name, marks=pytest.mark.slow) for name in skeleton.likes() if name != "reach")],
)
def test_a_task_keeps_the_rules_as_it_is_written(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(capsys, "task", f"name=own_{like}", f"like={like}", "out=own")
    monkeypatch.syspath_prepend(tmp_path / "own")
    name = f"own_{like}"
    check_task(f"{name}:{skeleton.class_name(name)}")
    assert name not in TABLE["task"]  # only while it is checked


def test_what_is_written_is_in_our_own_style(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_arm(tmp_path)
    answer(capsys, "robot", "file=ur.xml", "test=test_ur.py", "out=new.yaml")
    for like in skeleton.likes():
        answer(capsys, "task", f"name=my_{like}", f"like={like}", "out=own")
        text = Path(f"own/my_{like}.py").read_text()
        assert "# The one source of success" in text
        assert "# How episodes begin" in text
        assert f'name = "my_{like}"' in text
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), "."]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_what_is_written_has_its_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_arm(tmp_path)
    answer(capsys, "robot", "file=ur.xml", "test=test_ur.py", "out=new.yaml")
    for like in skeleton.likes():
        answer(capsys, "task", f"name=my_{like}", f"like={like}", "out=own")
    files = sorted(map(str, tmp_path.rglob("*.py")))
    command = [sys.executable, "-m", "pyright", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
