"""The command table: help that teaches, one line for every mistake, sweeps, interruption."""

import errno
import sys
from pathlib import Path
from types import ModuleType

import pytest

from robot_rl.cli import main as cli
from robot_rl.core.errors import ConfigError


class Recorder(ModuleType):
    """A command that notes its arguments and answers as told."""

    def __init__(self, answer: int | BaseException = 0) -> None:
        super().__init__("recorder")
        self.calls: list[list[str]] = []
        self.answer = answer

    def run(self, argv: list[str]) -> int:
        self.calls.append(argv)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stands where `train` stands."""
    command = Recorder()
    monkeypatch.setitem(sys.modules, "tests_recorder", command)
    monkeypatch.setitem(cli.COMMANDS, "train", "tests_recorder")
    return command


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_teaches_what_to_type_and_where_results_go(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name:<15}{cli.summary(name)}\n" in text
    assert "robot-rl train recipe=smoke" in text
    assert "Results go to runs/" in text


def test_help_imports_no_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    cli.main(["--help"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("robot-rl 0.")


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "error: robot-rl: no command 'trian'. Did you mean 'train'? `robot-rl --help` explains them.\n"
    )


def test_arguments_and_exit_code_pass_through(recorder: Recorder) -> None:
    recorder.answer = 3
    assert cli.main(["train", "seed=1", "--json"]) == 3
    assert recorder.calls == [["seed=1", "--json"]]


def test_a_mistake_of_the_user_is_one_line(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    recorder.answer = ConfigError("seed: got 'a', allowed: a whole number.")
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == "error: seed: got 'a', allowed: a whole number.\n"


def test_a_sweep_runs_jobs_one_after_another(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "-m", "recipe=smoke", "seed=0,1"]) == 0
    assert recorder.calls == [["recipe=smoke", "seed=0"], ["recipe=smoke", "seed=1"]]
    assert "job 2/2: robot-rl train recipe=smoke seed=1\n" in capsys.readouterr().err


def test_a_failing_job_ends_the_sweep(recorder: Recorder) -> None:
    recorder.answer = 1
    assert cli.main(["train", "--multirun", "seed=0,1"]) == 1
    assert len(recorder.calls) == 1


def test_interruption_says_how_to_resume(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.answer = KeyboardInterrupt()
    run = tmp_path / "20260101-120000-smoke-seed0"
    run.mkdir()
    (run / "config.yaml").touch()
    assert cli.main(["train", f"out={tmp_path}"]) == 130
    assert capsys.readouterr().err == f"interrupted. Continue with: robot-rl train resume={run}\n"
    assert cli.main(["train", "resume=runs/x"]) == 130
    assert capsys.readouterr().err == "interrupted. Continue with: robot-rl train resume=runs/x\n"
    assert cli.main(["train", f"out={tmp_path / 'empty'}"]) == 130
    assert capsys.readouterr().err == "interrupted.\n"


def test_a_disk_that_refuses_is_one_line_and_a_fault_of_ours_is_not(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.answer = OSError(errno.ENOSPC, "No space left on device")
    assert cli.main(["train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: robot-rl train: the disk is full (")
    assert said.endswith("Make room, then do it again.\n")
    recorder.answer = FileNotFoundError(errno.ENOENT, "No such file")
    with pytest.raises(FileNotFoundError):
        cli.main(["train"])


def test_a_mistake_is_json_too(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    recorder.answer = ConfigError("seed: got 'x'")
    assert cli.main(["train", "seed=x", "--json"]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == """{"error": "seed: got 'x'"}"""
