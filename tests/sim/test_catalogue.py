"""docs/tasks.md: its table is what the tasks say, and its snippets run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from robot_rl.core.registry import TABLE
from robot_rl.sim.tasks.catalogue import described, row, update
from robot_rl.sim.tasks.pick_cube import PickCube

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
SNIPPETS = [
    pytest.param(text, id=text.splitlines()[-1], marks=[pytest.mark.slow] if slow else [])
    for slow, text in re.findall(r"^```python( slow)?\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
]
EXPERT = re.compile(r" (\d+) % ")


@pytest.mark.parametrize("task", TABLE["task"])
def test_the_table_is_current(task: str) -> None:
    """`robot_rl.sim.tasks.catalogue.update(Path("docs/tasks.md"))` writes it anew."""
    expected = row(task)
    (written,) = [
        line for line in TEXT.splitlines() if line.startswith(f"| `{task}`") and "robot_rl/" in line
    ]
    assert EXPERT.sub("", written) == EXPERT.sub("", expected)
    for said, measured in zip(EXPERT.findall(written), EXPERT.findall(expected), strict=True):
        assert abs(int(said) - int(measured)) <= 5  # 3 of 64 episodes may round differently on another CPU


def test_update_changes_nothing_but_the_table(tmp_path: Path) -> None:
    copy = tmp_path / "tasks.md"
    start, end = TEXT.index("| task |"), TEXT.index("<!-- end")
    copy.write_text(TEXT[:start] + "old\n" + TEXT[end:], encoding="utf-8")
    update(copy)
    again = copy.read_text(encoding="utf-8")
    assert again[:start] == TEXT[:start]
    assert again[again.index("<!-- end") :] == TEXT[end:]
    assert again.count("\n| `") == TEXT.count("\n| `")


def test_a_docstring_is_what_success_and_randomised() -> None:
    assert described(PickCube()) == (
        "Pick up the cube and hold it at the goal point.",
        "cube position and yaw, goal position, arm posture; with `randomize`, friction and mass",
        "the cube's centre within 2.5 cm of the goal, which is always in the air",
    )


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout
    assert done.stdout
