"""The command table: help that teaches, one line for every mistake, sweeps, interruption."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from robot_rl.cli import main as cli
from robot_rl.config import build
from robot_rl.core.errors import ConfigError, StorageError
from robot_rl.train.config import RunConfig


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


@pytest.mark.parametrize("name", ["arm", "bench", "new", "replay", "reward"])
def test_a_command_that_needs_words_explains_itself_without_any(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def output(words: list[str]) -> str:
        with contextlib.suppress(SystemExit):  # argparse ends so after its help
            assert cli.main(words) == 0
        return capsys.readouterr().out

    assert output([name]) == output([name, "--help"]) != ""


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


def test_interruption_says_how_to_resume_what_was_begun_here(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "20260101-120000-smoke-seed0"  # of another process, or of yesterday
    other.mkdir()
    (other / "config.yaml").touch()
    recorder.answer = KeyboardInterrupt()
    assert cli.main(["train", f"out={tmp_path}"]) == 130
    assert capsys.readouterr().err == "interrupted.\n"
    recorder.answer.add_note("Continue with: robot-rl train resume=runs/own")
    assert cli.main(["train", f"out={tmp_path}"]) == 130
    assert capsys.readouterr().err == "interrupted. Continue with: robot-rl train resume=runs/own\n"


@pytest.mark.parametrize("words", [["train", "seed=0"], ["--help"]])
def test_the_first_words_load_nothing_heavy(words: list[str]) -> None:
    """Half a second of Gymnasium, of Hydra or of NumPy is what a newcomer feels, and cannot interrupt."""
    code = f"""
import sys
import robot_rl.cli.main as cli
if {words!r} == ["--help"]:
    cli.main(["--help"])
found = [name for name in ("numpy", "gymnasium", "hydra", "rich", "torch", "mujoco") if name in sys.modules]
sys.exit(f"loaded: {{found}}" if found else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MISTAKES = [
    ["train", "recipe=rl100", "sed=3"],
    ["train", "recipe=fast_sac", "method.utd=0"],
    ["train", "recipe=smoke", "seed=many"],
    ["train", "recipe=finetune_then_rl", "method=direct"],
    ["train", "recipe=finetune_then_rl", "finetune.policy=smal_vla"],
    ["train", "resume=/no/such"],
    ["train", "recipe=reach", "demos.path=/no/such"],
    ["finetune", "dataset=/no/such"],
    ["finetune", "dataset=.", "policy=smal_vla"],
    ["finetune", "dataset=.", "policy=runs/gone"],
    ["evaluate", "run=/no/such"],
    ["evaluate", "policy=/no/such"],
    ["collect", "task=pick_cub", "out=x"],
    ["collect", "policy=/no/such", "out=x"],
    ["deploy", "run=/no/such", "station=sim_arm"],
    ["bench", "policy", "sample=3"],
    ["bench", "sim", "rounds=many"],
    ["bench", "trivial", "policy=expert"],
    ["bench", "her", "learners=her_demo"],
    ["replay", "info", "/no/such"],
    ["replay", "inof", "."],
    ["report", "run=/no/such"],
    ["reward", "train", "data=/no/such", "out=x"],
    ["serve-policy", "run=/no/such", "token_file=x"],
    ["serve-policy", "run=/no/such"],
    ["serve-policy", "run=/no/such", "protocol=vla-eval", "host=0.0.0.0"],
    ["serve-sim-arm", "delay=3"],
    ["new", "robot", "file=/no/such"],
    ["new", "task", "name=reach"],
]


def test_a_mistake_is_answered_before_the_learner_is_loaded(tmp_path: Path) -> None:
    """`import torch` alone takes five of the six seconds that a wrong key took."""
    code = f"""
import sys
from robot_rl.cli.main import main
for words in {MISTAKES!r}:
    code = main(words)
    found = [name for name in ("torch", "mujoco", "diffusers", "pyarrow") if name in sys.modules]
    if code != 2 or found:
        sys.exit(f"{{words}}: code {{code}}, loaded {{found}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(MISTAKES)
    assert not list(tmp_path.iterdir())  # who is refused leaves no folder


LATER_MISTAKES = [
    (["finetune", "dataset=demos", "horizon=4", "heldout=30"], "heldout=30 leaves 0 to learn from"),
    (["finetune", "dataset=demos", "rename=a:b"], "rename: there is no 'a'"),
    (["finetune", "dataset=demos", "horizon=5000"], "a chunk needs horizon=5000"),
    (["train", "recipe=pick_cube", "demos.path=demos"], "task 'reach', not 'pick_cube'"),
    (["train", "recipe=reach", "env.robot=viperx", "demos.path=demos"], "robot 'panda', not 'viperx'"),
    (["train", "recipe=reach", "env.cameras=[front]", "demos.path=demos"], "front.rgb nowhere"),
    (["train", "recipe=reach", "env.cameras=[frnt]"], "the model has no camera 'frnt'"),
    (["train", "recipe=reach", "env.state=[elbow]"], "env.state: got 'elbow'"),
    (["train", "recipe=pick_cube", "replay.reuse=demos"], "replay.reuse: demos does not fit this run"),
    (["train", "recipe=reach", "bc.policy=demos"], "policy.json: there is no such file"),
    (["train", "recipe=finetune_then_rl", "env.task=reach", "demos.path=demos", "finetune.heldout=30"],
     "finetune.heldout=30 leaves 0"),
    (["train", "recipe=crossq", "env.id=Hoper-v5"], "Did you mean: `Hopper`?"),
]  # fmt: skip


def test_what_an_environment_or_a_dataset_decides_is_answered_before_torch_is_loaded(tmp_path: Path) -> None:
    assert cli.main(["collect", "task=reach", "episodes=3", f"out={tmp_path / 'demos'}"]) == 0
    code = f"""
import sys
from robot_rl.cli.main import main
for words, _ in {LATER_MISTAKES!r}:
    code = main(words)
    if code != 2 or "torch" in sys.modules:
        sys.exit(f"{{words}}: code {{code}}, torch {{'torch' in sys.modules}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = done.stderr.split("error: ")[1:]
    assert len(answers) == len(LATER_MISTAKES)
    for answer, (_, part) in zip(answers, LATER_MISTAKES, strict=True):
        assert part in answer
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]


def test_a_wrong_name_of_a_renderer_is_one_line(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUJOCO_GL", "foo")
    recorder.answer = RuntimeError("invalid value for environment variable MUJOCO_GL: foo")  # `import mujoco`
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: MUJOCO_GL: the environment variable is 'foo', allowed: egl"
    )
    recorder.answer = RuntimeError("a fault of ours")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.main(["train"])


def test_hydras_cfg_job_shows_the_settings_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "recipe=smoke", "seed=3", "--cfg", "job"]) == 0
    shown = build(RunConfig, yaml.safe_load(capsys.readouterr().out))
    assert (shown.recipe, shown.seed) == ("smoke", 3)
    assert cli.main(["collect", "task=reach", "out=gone/x", "--cfg=job"]) == 0
    assert "task: reach" in capsys.readouterr().out
    assert cli.main(["train", "--cfg", "hydra"]) == 2
    assert cli.main(["doctor", "--cfg", "job"]) == 2
    assert capsys.readouterr().err == (
        "error: --cfg: got 'hydra', allowed: job.\n"
        "error: --cfg: robot-rl doctor has no configuration. See `robot-rl doctor --help`.\n"
    )


def test_a_disk_that_refuses_is_one_line_and_a_fault_of_ours_is_not(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.answer = OSError(errno.ENOSPC, "No space left on device")
    assert cli.main(["train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: robot-rl train: the disk is full (")
    assert said.endswith("Make room, then do it again.\n")
    recorder.answer = StorageError("out: the disk is full. Make room, then do it again.")
    recorder.answer.add_note("2 of 3 are kept.")
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err.endswith("Make room, then do it again. 2 of 3 are kept.\n")
    recorder.answer = FileNotFoundError(errno.ENOENT, "No such file")
    with pytest.raises(FileNotFoundError):
        cli.main(["train"])


def test_a_mistake_is_json_too(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    recorder.answer = ConfigError("seed: got 'x'")
    assert cli.main(["train", "seed=x", "--json"]) == 2
    assert capsys.readouterr().out.splitlines()[-1] == """{"error": "seed: got 'x'"}"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["doctor", "--list", "recipe"]])
def test_a_reader_that_leaves_is_no_fault(words: list[str], unbuffered: str) -> None:
    program = "import sys; from robot_rl.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *words]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `head` does when it has seen enough
        assert process.stderr.read() == b""
    assert process.returncode == cli.EXIT_PIPE
