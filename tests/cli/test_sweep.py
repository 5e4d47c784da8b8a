"""Sweeps: all jobs are checked first, a failure ends no other, one table and one report at the end."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from robot_rl.cli import main as cli
from robot_rl.core.errors import ConfigError, DeviceError


class Command(ModuleType):
    """A command whose seed 1 cannot be trained, and whose seeds below 0 are mistakes."""

    def __init__(self, out: Path) -> None:
        super().__init__("command")
        self.out, self.begun, self.more = out, list[str](), dict[str, Any]()

    def config(self, words: list[str]) -> None:
        seed = words[-1]
        if seed.startswith("seed=-"):
            raise ConfigError(f"seed: got {seed.removeprefix('seed=')}, allowed: 0 to 2147483647")

    def result(self, words: list[str]) -> dict[str, Any]:
        seed = words[-1].removeprefix("seed=")
        self.begun.append(seed)
        if seed == "1":
            raise DeviceError("the arm is gone")
        if seed == "9":
            raise KeyboardInterrupt
        folder = self.out / f"run-{seed}"
        folder.mkdir()
        summary: dict[str, Any] = {"task": "reach", "recipe": "smoke", "seed": int(seed), "episodes": 10}
        summary |= {"base_success": 0.5, "final_success": 0.9, "run": str(folder), **self.more}
        (folder / "summary.json").write_text(json.dumps(summary))
        return summary


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Stands where `train` stands."""
    found = Command(tmp_path)
    monkeypatch.setitem(sys.modules, "tests_sweep", found)
    monkeypatch.setitem(cli.COMMANDS, "train", "tests_sweep")
    return found


def test_no_job_begins_where_one_has_a_mistake(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "-m", "recipe=smoke", "seed=0,-1,2,-3"]) == 2
    assert command.begun == []
    assert capsys.readouterr().err == (
        "error: job 2 of 4 (seed=-1): seed: got -1, allowed: 0 to 2147483647\n"
        "job 4 of 4 (seed=-3): seed: got -3, allowed: 0 to 2147483647\nNo job was begun.\n"
    )


def test_a_job_that_fails_ends_no_other(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "-m", "seed=0,1,2", "--json"]) == 1
    assert command.begun == ["0", "1", "2"]
    said = capsys.readouterr()
    assert "job 3/3: robot-rl train seed=2\n" in said.err
    assert "error: the arm is gone\n" in said.err
    lines = said.out.splitlines()
    assert sum("reach" in line and "50.0%" in line and "90.0%" in line for line in lines) == 2
    assert sum("seed=1" in line and "the arm is gone" in line for line in lines[:-1]) == 1
    found = json.loads(lines[-1])
    assert [job["job"] for job in found["jobs"]] == ["seed=0", "seed=1", "seed=2"]
    assert found["report"] == str(tmp_path / "report.html")
    assert "90.0 %" in (tmp_path / "report.html").read_text()  # 9 of 10, twice


def test_where_no_success_is_told_returns_are_shown(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command.more = {"says_success": False, "base_success": 0.0, "base_return": 17.04, "final_return": 2741.26}
    assert cli.main(["train", "-m", "seed=0,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("17.0" in line and "2741.3" in line for line in lines) == 2
    assert not any("%" in line or "base_success" in line for line in lines)


def test_ctrl_c_ends_a_sweep_and_shows_what_was_done(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "-m", "seed=0,9,2"]) == 130
    assert command.begun == ["0", "9"]
    said = capsys.readouterr()
    assert "1 of 3 jobs ended\n" in said.err
    assert "90.0%" in said.out


def test_a_command_without_settings_of_its_own_is_swept_too(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter((0, 3))
    plain = ModuleType("plain")
    vars(plain)["run"] = lambda argv: next(codes)
    monkeypatch.setitem(sys.modules, "tests_sweep", plain)
    assert cli.main(["train", "--multirun", "a=1,2"]) == 1
    assert next(codes, None) is None
