"""`robot-rl doctor`: checks this machine or a robot, and lists what can be chosen by name."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robot_rl.cli.command import parser_of, source_of
from robot_rl.config import CONFIGS, options
from robot_rl.core.check import Check, State
from robot_rl.core.errors import ConfigError, RobotRLError, UnknownComponentError, nearest
from robot_rl.core.files import at_home
from robot_rl.core.machine import usable_cores
from robot_rl.core.registry import TABLE, table
from robot_rl.sched.leases import LeaseStore

if TYPE_CHECKING:
    from robot_rl.sim.checkup import Checkup

SUMMARY = "check this machine or a robot; list recipes, bases, tasks, robots, policies"

_COLOURS: dict[State, int] = {"ok": 32, "note": 33, "fail": 31}  # of terminals: green, yellow, red
_GROUPS = ("base", "recipe")  # of configs
_LINE = 90  # characters of a description in a list
_ROBOT_KEYS = ("robot", "task")

MIN_FREE_GB = 2.0
"""Disk space for a training run with videos and checkpoints."""
MIN_MEMORY_GB = 4.0
"""Memory for `recipe=pick_cube` on a desktop with other programs."""


def run(argv: list[str]) -> int:
    """Prints the report or a list; returns 1 if a check failed."""
    parser = parser_of("doctor", SUMMARY)
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="robot=<name or file>: measures the servos, gripper, home pose and reach of an arm; checks the "
        "rules of robots on any other body; task=<name>,...: for these tasks of an arm only",
    )
    parser.add_argument("--list", metavar="KIND", help=f"lists all names of a kind: {', '.join(kinds())}")
    words = parser.parse_args(argv)
    if words.settings:
        return _robot(_settings(words.settings), as_json=words.json)
    return _list(words.list, as_json=words.json) if words.list else _report(as_json=words.json)


def kinds() -> list[str]:
    """Returns the kinds that `--list` takes."""
    return sorted([*TABLE, *_GROUPS])


def names(kind: str) -> list[str]:
    """Returns the names of one kind, with those of other packages."""
    if kind not in kinds():
        raise UnknownComponentError(f"doctor: no kind {kind!r}.{nearest(kind, kinds())}")
    return options(kind) if kind in _GROUPS else sorted(table(kind))


def checks() -> list[Check]:
    """Runs every check; none raises."""
    return [
        _python(),
        _package("torch", "2.7"),
        _package("mujoco", "4.0"),
        _package("gymnasium", "1.4"),
        _cores(),
        _memory(),
        _disk(),
        _guarded("renderer", "note", _renderer),
        _guarded("leases", "fail", _leases),
        _guarded("run folder", "fail", _run_folder),
    ]


def _list(kind: str, *, as_json: bool) -> int:
    found = names(kind)
    about = {
        name: _config_line(kind, name) if kind in _GROUPS else _source_line(kind, name) for name in found
    }
    width = max(map(len, found), default=0) + 2
    for name in found:
        lines = textwrap.wrap(about[name], _LINE, break_on_hyphens=False) or [""]
        print(f"{name:<{width}}{lines[0]}".rstrip(), *(" " * width + line for line in lines[1:]), sep="\n")
    if as_json:
        print(json.dumps({"kind": kind, "names": found, "about": about}))
    return 0


def _config_line(kind: str, name: str) -> str:
    """Returns the first sentence of the comment at the top of a config."""
    lines = (CONFIGS / kind / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return _sentence(" ".join(line.lstrip("# ") for line in comment if "@package" not in line))


def _source_line(kind: str, name: str) -> str:
    """Returns the first sentence about a component, without importing it: that of its docstring or file."""
    module, _, attribute = table(kind)[name].partition(":")
    tree = source_of(module)
    if tree is None:
        return ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return _sentence(ast.get_docstring(node) or "")
    if (CONFIGS / f"{kind}s" / f"{name}.yaml").is_file():  # a robot
        return _config_line(f"{kind}s", name)
    return _sentence(ast.get_docstring(tree) or "")


def _sentence(text: str) -> str:
    """Returns the first sentence of a text, without its full stop, in one line."""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[\w)`])\.(?:\s+(?=[A-Z`])|$)", first, maxsplit=1)[0]


def _settings(words: list[str]) -> dict[str, str]:
    """Returns the settings for the check of a robot."""
    found = dict(word.split("=", 1) for word in words if "=" in word)
    for word in words:
        key = word.partition("=")[0]
        if key not in _ROBOT_KEYS or "=" not in word:
            raise ConfigError(
                f"doctor: no setting {word!r}.{nearest(key, _ROBOT_KEYS)} Write it as key=value."
            )
    if "robot" not in found:
        raise ConfigError("robot: missing. task= says for which tasks robot=<name or file> is checked.")
    return found | {"robot": at_home(found["robot"])}


def _robot(settings: dict[str, str], *, as_json: bool) -> int:
    """Measures an arm and prints the results; returns 1 if a check failed."""
    from robot_rl.sim.config import check_names

    tasks = settings["task"].split(",") if "task" in settings else []
    for task in tasks or [None]:
        check_names(task, settings["robot"], at="")
    from robot_rl.sim.checkup import check_robot  # MuJoCo

    print(f"measuring {settings['robot']}: a few seconds for each task", file=sys.stderr)
    found = check_robot(settings["robot"], tasks)
    if found.joints:
        _print_joints(found)
    code = _print_checks(found.checks)
    if found.servos:
        print(f"\nservos for the masses of {found.robot}, for `model:` in its file:\n{found.servos}")
    if as_json:
        print(json.dumps({"ok": code == 0, **asdict(found), "joints": _rows(found)}))
    return code


def _print_joints(found: Checkup) -> None:
    width = max(len("joint"), *(len(row.joint) for row in found.joints)) + 2
    head = "    kp     kd    63 %  over settles   weight, of effort     sag, if not compensated"
    print(f"{'joint':<{width}}{head}")
    for row in found.joints:
        print(
            f"{row.joint:<{width}}{row.kp:>6.4g} {row.kd:>6.4g}  {row.lag_s:>4.2f} s {row.overshoot:>5.0%} "
            f"{row.settle_s:>5.2f} s {row.weight:>8.2f}  {row.weight / row.effort:>9.0%} "
            f"{row.sag:>7.4f}  {row.sag_uncompensated:>18.4f} {row.unit}"
        )
    print()


def _rows(found: Checkup) -> list[dict[str, Any]]:
    """Returns the joints for JSON, which has no infinity: null means never."""
    return [
        {key: None if value == math.inf else value for key, value in asdict(row).items()}
        for row in found.joints
    ]


def _report(*, as_json: bool) -> int:
    found = checks()
    code = _print_checks(found)
    if as_json:
        print(json.dumps({"ok": code == 0, "checks": [asdict(check) for check in found]}))
    return code


def _print_checks(found: list[Check]) -> int:
    """Prints a table; returns 1 if a check failed."""
    width = max(len(check.name) for check in found) + 2
    print(f"{'check':<{width}}state  found")
    for check in found:
        detail = f"{check.detail}. {check.remedy}" if check.remedy else check.detail
        print(f"{check.name:<{width}}{_coloured(check.state)}  {detail}")
    failed = [check.name for check in found if check.state == "fail"]
    repair = f"; repair: {', '.join(failed)}" if failed else ""
    print(f"{len(found) - len(failed)} of {len(found)} checks passed{repair}")
    return 1 if failed else 0


def _coloured(state: State) -> str:
    """Returns a state in five columns, coloured without rich, which takes longer to load than all checks."""
    text = f"{state:<5}"
    return f"\x1b[{_COLOURS[state]}m{text}\x1b[0m" if sys.stdout.isatty() else text


def _python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= (3, 12):
        return Check("python", "ok", detail)
    return Check("python", "note", detail, "The lerobot extra needs Python 3.12; everything else works.")


def _package(name: str, minimum: str) -> Check:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, "fail", "not installed", f"Install it: pip install '{name}>={minimum}'.")
    if _numbers(found) < _numbers(minimum):
        return Check(name, "fail", f"{found}, needs {minimum} or later", f"pip install '{name}>={minimum}'.")
    return Check(name, "ok", found)


def _numbers(text: str) -> tuple[int, ...]:
    """Returns (2, 11, 0) for 2.11.0+cpu."""
    parts = text.split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def _cores() -> Check:
    return Check("cores", "ok", f"{usable_cores()} usable")


def _memory() -> Check:
    total_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    if total_gb < MIN_MEMORY_GB:
        return Check("memory", "note", f"{total_gb:.1f} GB", "Use fewer envs: num_envs=4.")
    return Check("memory", "ok", f"{total_gb:.1f} GB")


def _disk() -> Check:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    if free_gb < MIN_FREE_GB:
        remedy = "Free some, or write elsewhere: out=<folder>."
        return Check("disk", "note", f"{free_gb:.1f} GB free here", remedy)
    return Check("disk", "ok", f"{free_gb:.1f} GB free here")


def _guarded(name: str, state: State, look: Callable[[], str]) -> Check:
    """Returns the result of `look`, or its error, as a check."""
    try:
        return Check(name, "ok", look())
    except (RobotRLError, ImportError, OSError) as error:
        found = "fail" if isinstance(error, ConfigError) else state  # a wrong setting breaks every command
        return Check(name, found, str(error).split("\n", 1)[0])


def _renderer() -> str:
    return str(importlib.import_module("robot_rl.sim.gl").find_backend())


def _leases() -> str:
    """Opens the lease database for writing, as a training run does."""
    store = LeaseStore()
    return f"{store.path}, {len(store.active())} held"


def _run_folder() -> str:
    """Writes and removes a file, because permission bits do not show a read-only mount."""
    folder = Path("runs") if Path("runs").is_dir() else Path.cwd()
    with tempfile.TemporaryFile(dir=folder):
        return f"{folder} is writable"
