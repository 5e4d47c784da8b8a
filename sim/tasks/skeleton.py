"""The source of a new task that runs as it is: a shipped task under another name, each part explained.

Read as text, so that a wrong name is answered before MuJoCo is loaded.
"""

from __future__ import annotations

import ast
import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from robot_rl.core.errors import ConfigError, nearest
from robot_rl.core.registry import TABLE, table

PARTS = {
    "instruction": "What a policy that reads language is given.",
    "horizon_s": "An episode ends after this time.",
    "control": "What an action is; without `needs_gripper`, arms without a gripper do the task too.",
    "observation": "What the policy observes after joints and tool: docs/tasks.md, Names of quantities.",
    "privileged": "What only success, reward and expert read.",
    "resets": "Of which starts `robot-rl resets generate` makes a bank: docs/resets.md.",
    "vary": "What env.randomize=true draws at each reset.",
    "scene": "What is on the table; robot, table and cameras are there.",
    "start": "How episodes begin: rows of `rng`, one for each.",
    "evaluate": "The one source of success, for rewards, ends and logs; `fail` ends an episode, too.",
    "dense_reward": "What env.reward=dense pays on the way, 0 to 1.",
    "assist": "Which way virtual forces pull: docs/transfer.md. Leave it out if nothing is to be pulled.",
    "expert": "Where a scripted expert moves the tool; it looks at the present state only.",
}
"""Attribute or function of a task -> the comment above it."""


def likes() -> list[str]:
    """Returns the tasks whose file holds one task: those that a new one can begin from."""
    return [
        name
        for name, (_, tree) in ((name, _source(name)) for name in TABLE["task"])
        if len(_tasks(tree)) == 1
    ]


def parts_of(like: str) -> set[str]:
    """Returns which of `PARTS` one of `likes` has."""
    (node,) = _tasks(_source(like)[1])
    return {what for what, _ in _parts(node)}


def task_source(name: str, like: str) -> str:
    """Returns the module of a new task.

    Args:
        name: of the task: lower case words with `_` between them.
        like: the shipped task that it begins from.

    Raises:
        ConfigError: the name is no such name, or is taken; `like` is no shipped task of a file of its own.
    """
    _check_name(name)
    if like not in (known := likes()):
        raise ConfigError(f"like: got {like!r}, allowed: {', '.join(known)}.{nearest(like, known)}")
    text, tree = _source(like)
    (node,) = _tasks(tree)
    new = class_name(name)
    used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)} - {node.name}
    if new in used | _imported(tree):
        raise ConfigError(
            f"name: got {name!r}, whose class {new} is a name of {like}'s module. Take another."
        )
    lines = text.splitlines()
    for part in sorted(_parts(node), key=lambda each: each[1], reverse=True):
        what, number = part
        lines.insert(number - 1, f"    # {PARTS[what]}")
    text = "\n".join(lines) + "\n"
    text = re.sub(rf"\b{node.name}\b", new, text)
    text = re.sub(rf'^    name = "{like}"$', f'    name = "{name}"', text, flags=re.MULTILINE)
    return _with_origin(text, ast.get_docstring(tree) or "", like)


def rules_test(name: str) -> str:
    """Returns a test that the task keeps the rules of tasks."""
    return f'''"""The task {name} keeps the rules of tasks."""

from robot_rl.sim.conformance import check_task


def test_{name}_keeps_the_rules() -> None:
    """Raises ConformanceError, which names the rule."""
    check_task("{name}:{class_name(name)}")
'''


def project(name: str) -> str:
    """Returns the pyproject.toml of a package of one task, which `pip install -e` registers."""
    return f"""[project]
name = "{name.replace("_", "-")}"
version = "0.1"

{entry_point(name)}

[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
py-modules = ["{name}"]
"""


def entry_point(name: str) -> str:
    """Returns the lines of a pyproject.toml by which robot_rl finds the task."""
    return f'[project.entry-points."robot_rl.components"]\n"task.{name}" = "{name}:{class_name(name)}"'


def class_name(name: str) -> str:
    """Returns `MyTask` for my_task."""
    return "".join(word.capitalize() for word in name.split("_"))


def _with_origin(text: str, docstring: str, like: str) -> str:
    """Returns a module whose docstring has a second paragraph, on what it began from."""
    first = docstring.partition("\n")[0]
    longer = f"{first}\n\nBegun from robot_rl's task {like}: change what differs."
    return (
        text.replace(f'{first}"""', f'{longer}\n"""', 1)
        if first == docstring
        else text.replace(first, longer, 1)
    )


def _check_name(name: str) -> None:
    allowed = "lower case words with _ between them, such as lift_cube"
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(f"name: got {name!r}, allowed: {allowed}.")
    taken = table("task").get(name)
    if taken is not None:
        raise ConfigError(f"name: the task {name!r} is {taken} already. Take another name.")
    spec = find_spec(name)
    if spec is not None and spec.origin is not None:
        raise ConfigError(f"name: a module {name!r} is installed here already ({spec.origin}). Take another.")


def _source(task: str) -> tuple[str, ast.Module]:
    """Returns the text of a shipped task's file, and its tree; the module is not imported."""
    spec = find_spec(TABLE["task"][task].partition(":")[0])
    assert spec is not None, f"{TABLE['task'][task]} is missing"
    assert spec.origin is not None, f"{TABLE['task'][task]} has no file"
    text = Path(spec.origin).read_text(encoding="utf-8")
    return text, ast.parse(text)


def _tasks(tree: ast.Module) -> list[ast.ClassDef]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in classes if any(ast.unparse(base) == "Task" for base in node.bases)]


def _imported(tree: ast.Module) -> set[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def _parts(node: ast.ClassDef) -> list[tuple[str, int]]:
    """Returns the parts of a task that have a comment, and the first line of each."""
    found: list[tuple[str, int]] = []
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            found.append((each.name, each.lineno))
        elif isinstance(each, ast.Assign):
            found.append((ast.unparse(each.targets[0]), each.lineno))
    return [part for part in found if part[0] in PARTS]
