"""`robot-rl new`: drafts a robot file from a model, or writes a task that runs as it is."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from robot_rl.cli.command import Outcome, run_command
from robot_rl.core.errors import ConfigError, StorageError, nearest, require
from robot_rl.core.files import at_home, is_yaml, make_folder, replace_file
from robot_rl.core.refusal import refusals

if TYPE_CHECKING:
    from robot_rl.sim.robots.draft import Draft
    from robot_rl.sim.robots.robot import Robot

SUMMARY = "draft a robot file from an MJCF or a URDF; begin a task of your own"

_HELP = """\
Usage: robot-rl new robot file=<MJCF or URDF> [name=...] [out=<name>.yaml] [test=<file>]
                          [keep=<body>[,<body>]] [tool=<body>[,<body>]] [fingers=<joint>,<joint>]
                          [--json]
       robot-rl new task name=<name> [like=reach] [out=<folder>] [--json]

robot   reads the model, finds the arm's joints, the tool and the fingers, measures them, finds a home with
        the tool pointing down, computes servos from the masses, and writes a robot file with a reason above
        each number. It prints what it decided, and what it had to choose: what no model holds. test= writes
        a test that checks the rules of robots on the file. Where a model leaves a choice, the message names
        the setting: keep= (the arm, by its top-level body), tool= (the body at the arm's end), fingers= (the
        gripper's joints; fingers=none for an arm without a gripper). Two arms on one base become a robot of
        two arms: the left, towards y, and the right. keep=<left>,<right> says which they are, by the bodies
        on which they hang, tool=<left>,<right> their ends.
task    writes a folder (default <name>/) with the task as a Python module, begun from a shipped task, a
        test that checks the rules of tasks on it, and the pyproject.toml that registers it.

No file is written over. docs/tasks.md explains robot files and tasks.

Examples:
  robot-rl new robot file=ur5e.urdf
  robot-rl new robot file=scene.xml keep=left_arm name=left out=robots/left.yaml test=tests/test_left.py
  robot-rl new task name=lift_cube like=pick_cube
"""


@dataclass(frozen=True, kw_only=True)
class NewRobotConfig:
    """Settings of `new robot`."""

    file: str
    """MJCF or URDF."""
    name: str | None = None
    """Of the robot; that of the file if None."""
    out: str | None = None
    """Robot file to write; <name>.yaml if None."""
    test: str | None = None
    """Test file to write; none if None."""
    keep: tuple[str, ...] = ()
    """Top-level body of the arm, where the model holds several; of two arms the bodies they hang on, left
    first."""
    tool: tuple[str, ...] = ()
    """Body that carries the tool, where it cannot be found; of two arms one each, left first."""
    fingers: tuple[str, ...] | None = None
    """Joints of the gripper, where they cannot be found; `none` for none."""

    def __post_init__(self) -> None:
        allowed = "letters, digits and _, a letter first"
        require(self.name is None or _is_name(self.name), "name", self.name, allowed)
        out = self.out
        require(out is None or is_yaml(out), "out", out, "a path that ends in .yaml")
        test = self.test
        is_test = test is None or re.fullmatch(r"test_\w+\.py", Path(test).name) is not None
        require(is_test, "test", test, "a path that ends in test_<something>.py, so that pytest finds it")


@dataclass(frozen=True, kw_only=True)
class NewTaskConfig:
    """Settings of `new task`."""

    name: str
    """Of the task: lower case words with _ between them."""
    like: str = "reach"
    """The shipped task that it begins from."""
    out: str | None = None
    """Folder; <name> if None."""


def run(argv: list[str]) -> int:
    """Runs a sub-command and prints what it wrote."""
    return run_command(argv or ["--help"], _HELP, _run)


def _run(words: list[str]) -> Outcome:
    commands = {"robot": _robot, "task": _task}
    if not words or words[0] not in commands:
        got = words[0] if words else ""
        raise ConfigError(f"new: nothing named {got!r}.{nearest(got, commands)} `robot-rl new --help`")
    return commands[words[0]](words[1:])


# A robot


def _robot(words: list[str]) -> Outcome:
    from robot_rl.config import load  # Hydra: not for --help

    options = load(NewRobotConfig, words, config_name="new")
    model = Path(at_home(options.file))
    if not model.is_file():
        raise ConfigError(f"file: {options.file!r}: there is no such file. Give an MJCF or a URDF.")
    name = options.name or re.sub(r"\W+", "_", model.stem)
    if not _is_name(name):
        raise ConfigError(f"name: the file's, {name!r}, begins with no letter. Give one: name=my_arm")
    out = Path(at_home(options.out or f"{name}.yaml"))
    test = None if options.test is None else Path(at_home(options.test))
    _refuse_existing("out" if options.out else "name", out)
    if test is not None:
        _refuse_existing("test", test)
    from robot_rl.sim.conformance import broken_rules  # MuJoCo
    from robot_rl.sim.robots.draft import draft_robot

    fingers = () if options.fingers == ("none",) else options.fingers
    draft = draft_robot(model, out, name=name, keep=options.keep, tool=options.tool, fingers=fingers)
    written = {out: draft.text} | ({} if test is None else {test: _robot_test(name, out, test)})
    _write(written)
    broken = list(broken_rules(draft.robot).values())
    _print_robot(draft, out, test, broken)
    return 0, {
        "robot": name,
        "files": [str(path) for path in written],
        "decided": [finding._asdict() for finding in draft.decided],
        "chosen": [finding._asdict() for finding in draft.chosen],
        "broken": broken,
    }


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) is not None


def _robot_test(name: str, out: Path, test: Path) -> str:
    """Returns a test of the robot file, which it finds from its own folder."""
    way = Path(os.path.relpath(out.resolve(), test.resolve().parent)).as_posix()
    return f'''"""The robot {name} keeps the rules of robots."""

from pathlib import Path

from robot_rl.sim.conformance import check_robot

ROBOT_FILE = Path(__file__).parent / "{way}"


def test_{name.lower()}_keeps_the_rules() -> None:
    """Raises ConformanceError, which names the rule."""
    check_robot(str(ROBOT_FILE))
'''


def _print_robot(draft: Draft, out: Path, test: Path | None, broken: Sequence[str]) -> None:
    robot = draft.robot
    print(f"{out}: robot {draft.name}, {_arms(robot)}\n\ndecided")
    _print_rows([(each.field, each.value, f"{each.source}: {each.why}") for each in draft.decided])
    print("\nchosen, since no model holds it: set what you know in the file")
    _print_rows([(each.field, each.value, each.why) for each in draft.chosen])
    print("\nrules of robots: " + ("all kept" if not broken else "broken\n  " + "\n  ".join(broken)))
    print("\nnext")
    if robot.kind == "two_arms":
        settings = "env.task=bimanual_reach env.reward=dense"
        steps = [
            f"robot-rl doctor robot={out}",
            f"robot-rl train recipe=plain_ppo {settings} env.robot={out}",
        ]
    else:
        steps = [f"robot-rl doctor robot={out} task=reach", f"robot-rl train recipe=reach env.robot={out}"]
    if test is not None:
        steps.insert(0, f"pytest {test}")
    if robot.gripper_actuator:
        steps.append(f"robot-rl doctor robot={out} task=pick_cube")
    print("\n".join(f"  {step}" for step in steps))


def _arms(robot: Robot) -> str:
    """Returns what the robot consists of, in words."""
    words: list[str] = []
    for arm in robot.all_arms:
        gripper = (
            "a gripper" if any(e.name.startswith(arm.name) for e in robot.all_effectors) else "no gripper"
        )
        which = f"a {arm.name.rstrip('_')} arm" if arm.name else "an arm"
        words.append(f"{which} of {len(arm.joints)} joints with {gripper}")
    return " and ".join(words)


def _print_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    """Prints a field, its value, and on the next line the reason."""
    width = max(len(row[0]) for row in rows) + 2
    for field, value, why in rows:
        print(f"  {field:<{width}}{value}\n  {'':<{width}}{why}")


# A task


def _task(words: list[str]) -> Outcome:
    from robot_rl.config import load
    from robot_rl.sim.tasks import skeleton

    options = load(NewTaskConfig, words, config_name="new")
    name, like = options.name, options.like
    source = skeleton.task_source(name, like)
    folder = Path(at_home(options.out or name))
    written = {
        folder / f"{name}.py": source,
        folder / f"test_{name}.py": skeleton.rules_test(name),
    }
    for path in written:
        _refuse_existing("out" if options.out else "name", path)
    project = folder / "pyproject.toml"
    has_project = project.exists()
    if not has_project:
        written[project] = skeleton.project(name)
    _write(written)
    print(f"{folder}: the task {name}, begun from {like}")
    print("\n".join(f"  {path}" for path in written))
    if has_project:
        print(f"\nadd to {project}, which was there before\n{skeleton.entry_point(name)}")
    print("\nnext")
    print(f"  pytest {folder / f'test_{name}.py'}")
    print(f"  pip install -e {folder}   # registers it: robot-rl doctor --list task")
    print("\n".join(f"  {step}" for step in _steps(name, like, skeleton.parts_of(like))))
    return 0, {"task": name, "like": like, "files": [str(path) for path in written]}


def _steps(name: str, like: str, parts: Collection[str]) -> list[str]:
    """Returns what can be done with a task that has some of `skeleton.PARTS`."""
    steps: list[str] = []
    if "expert" in parts:
        steps.append(f"robot-rl collect task={name} episodes=5 out=demos/{name}")
    if "resets" in parts:
        steps.append(f"robot-rl resets generate task={name} rows=100")
    if "expert" in parts:
        settings = "recipe=reach" if like == "reach" else "recipe=pick_cube"
    else:  # the recipes of both would clone demonstrations
        settings = "recipe=quadrotor" if like == "quadrotor_hover" else "recipe=plain_ppo env.reward=dense"
    return [*steps, f"robot-rl train {settings} env.task={name}"]


# Files


def _refuse_existing(key: str, path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{key}: {str(path)!r} exists already. Give another {key}=, or remove it first.")


def _write(files: dict[Path, str]) -> None:
    """Writes new files whole, and their folders."""
    for path, text in files.items():
        with refusals(StorageError, path):
            make_folder(path.parent)
            replace_file(path, text)
