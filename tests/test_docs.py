"""What the documents tell people to type exists: make targets, commands and their keys, snippets."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from robot_rl.cli import bench
from robot_rl.cli.main import COMMANDS, main
from robot_rl.cli.sweep import AT_ONCE
from robot_rl.config import load, sweep

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md", "CONTRIBUTING.md", "docs/real.md", "docs/improve.md", "docs/resets.md", "docs/variation.md",
    "docs/formula.md",
)  # fmt: skip
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]


def fenced(language: str, text: str) -> list[str]:
    """Returns the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def blocks(language: str, names: Sequence[str] = DOCUMENTS) -> list[str]:
    """Returns the fenced blocks of one language in the documents, in order."""
    return [block for name in names for block in fenced(language, (ROOT / name).read_text(encoding="utf-8"))]


def shell_lines(program: str) -> list[str]:
    """Returns every line of the shell blocks that starts with a program."""
    lines = [line.strip() for block in blocks("sh", PAGES) for line in block.splitlines()]
    return sorted({line for line in lines if line.split(" ", 1)[0] == program})


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the help of a command; argparse ends the program after printing its own."""
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    return capsys.readouterr().out


def test_documents_have_commands_and_snippets() -> None:
    assert len(shell_lines("make")) >= 3
    assert len(shell_lines("robot-rl")) >= 5
    assert len(blocks("python")) >= 2


@pytest.mark.parametrize("line", shell_lines("make"))
def test_make_targets_exist(line: str) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(line.split()[1:]) <= set(targets)


def test_make_finds_the_tests_in_a_folder_with_a_space() -> None:
    make = ["make", "--dry-run", "CURDIR=/a b", "test-faults"]
    text = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [shlex.split(line) for line in text.splitlines() if "tests/faults" in line]
    assert {(words[0], words[2].rpartition("/")[0]) for words in lines} == {
        ("PYTHONPATH=/a b", "tests/faults")
    }


@pytest.mark.parametrize("line", shell_lines("robot-rl"))
def test_commands_and_their_keys_exist(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = shlex.split(line)[1:]
    assert name in COMMANDS
    monkeypatch.chdir(tmp_path)
    for value in (word.partition("=")[2].strip("[]") for word in words):
        if re.fullmatch(r"\w+\.yaml", value):  # a robot file that the text wrote before
            Path(value).write_text("gripper_actuator: gripper\nfinger_joints: [finger]")
        elif "/" in value:  # a folder that the text made before
            Path(value).mkdir(parents=True, exist_ok=True)
    keys = [word.split("=", 1)[0] for word in words if "=" in word]
    text = help_of(name, capsys)
    if name == "train" and keys != ["resume"]:
        from robot_rl.train.config import RunConfig

        told = [word for word in words if "=" in word and not word.startswith(f"{AT_ONCE}=")]
        for job in sweep(told) if "-m" in words else [told]:
            load(RunConfig, job, config_name="train")
    elif name == "bench":
        bench.settings_of(words[0], [word for word in words if "=" in word])
    else:
        assert [key for key in keys if not re.search(rf"\b{re.escape(key)}\b", text)] == []


def patterns(line: str) -> str:
    """Returns the characters of a command that zsh takes for a pattern of file names, outside quotes."""
    bare = re.sub(r"""'[^']*'|"[^"]*"|\$\(|\$\{\w+\}|\s#.*$""", "", line)
    return "".join(re.findall(r"[\[\](){}*?]", bare))


def test_patterns_are_found_where_a_shell_finds_them() -> None:
    assert patterns("robot-rl collect cameras=[front] out=a*") == "[]*"
    assert patterns("robot-rl train env.cameras=front,side  # [not read]") == ""
    assert patterns("""robot-rl bench improve "settings=['a.b=(50)']" 'x?'""") == ""


@pytest.mark.parametrize("name", [name for name in PAGES if name != "docs/results.md"])
def test_commands_of_a_page_need_no_quotes(name: str) -> None:
    """zsh refuses `cameras=[front]`: no matches found. docs/results.md says what was typed, in bash."""
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = [line.strip() for block in fenced("sh", text) for line in block.splitlines()]
    lines += [line for line in re.findall(r"`([^`\n]+)`", text) if line.startswith("robot-rl ")]
    assert [line for line in lines if not line.startswith("#") and patterns(line)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_a_help_text_need_no_quotes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage, _, text = help_of(command, capsys).partition("\n\n")
    assert "robot-rl" in usage
    lines = [line.strip() for line in text.splitlines()]
    examples = [line.split("   ")[0] for line in lines if line.startswith("robot-rl ")]
    assert [line for line in examples if patterns(line)] == []
    settings = [word for line in lines for word in line.split() if re.match(r"[\w.]+=[\[{(]", word)]
    assert settings == []


def run_snippet(snippet: str) -> None:
    exec(compile(snippet, "README.md", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("snippet", blocks("python"), ids=lambda text: text.splitlines()[-1])
def test_python_snippets_run(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippet(snippet)
    assert capsys.readouterr().out


ALONE = blocks("python", ("docs/data.md", "docs/policies.md"))
"""Snippets that need nothing of one another."""


@pytest.mark.parametrize("snippet", ALONE, ids=lambda text: text.splitlines()[-1])
def test_snippets_of_a_page_run_alone_in_an_empty_folder(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippet(snippet)


@pytest.mark.slow  # each imports torch anew
@pytest.mark.parametrize("snippet", ALONE, ids=lambda text: text.splitlines()[-1])
def test_snippets_of_a_page_run_in_a_program_of_their_own(snippet: str, tmp_path: Path) -> None:
    at = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, env=at, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_snippets_of_a_page_run_one_after_another_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = blocks("python", ("docs/data.md",))
    assert len(snippets) == 4
    for snippet in snippets:
        run_snippet(snippet)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", blocks("python slow"), ids=lambda text: text.splitlines()[-1])
def test_python_snippets_that_train_run(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippet(snippet)
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", PAGES)
def test_files_that_documents_name_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:robot_rl|sim|policies|configs|tests|real)/[\w./-]+\.(?:py|yaml))`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_what_the_walk_through_the_house_names_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"([\w/]+/\w+\.py)(?:: ([\w.]+))?", text)
    assert len(named) > 25
    missing: list[str] = []
    for file, name in named:
        path = next((at for at in (ROOT / "robot_rl" / file, ROOT / file) if at.exists()), None)
        code = "" if path is None else path.read_text(encoding="utf-8")
        parts = name.split(".") if name else []
        if path is None or not all(re.search(rf"\b(?:def|class) {part}\b", code) for part in parts):
            missing.append(f"{file}: {name}")
    assert missing == []


def test_the_changelog_puts_breaking_changes_first() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for release in text.split("\n## ")[1:]:
        assert re.findall(r"^### (\w+)", release, re.MULTILINE)[0] == "Breaking"


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    folders = [ROOT / name for name in ("docs", "configs", "real", "sim", "policies", "robot_rl", "ros")]
    files = [path for folder in folders for end in ("md", "py", "yaml") for path in folder.rglob(f"*.{end}")]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    # An extra is that of a clone: pip install -e '.[ros2]'.
    wrong = [path for path in files if "robot-rl[" in path.read_text(encoding="utf-8")]
    assert len(files) > 300
    assert not wrong
