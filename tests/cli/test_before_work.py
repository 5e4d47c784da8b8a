"""What commands refuse before any work, and what they print where nobody asked for JSON."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from robot_rl.cli import finetune, train
from robot_rl.cli.main import main
from robot_rl.sim.backends import mujoco_cpu
from robot_rl.sim.config import MANY_SIMS
from robot_rl.sim.single import make_vector
from robot_rl.train import phases
from robot_rl.train.finetune import run as finetuning
from robot_rl.train.finetune import split

COMMANDS = {
    "train": ["train", "recipe=smoke"],
    "finetune": ["finetune", "dataset=."],
    "collect": ["collect", "task=reach"],
}


class Usage(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, and commands that fail the test when they begin."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "robot_rl.train.phases.run",
        "robot_rl.train.finetune.run.run",
        "robot_rl.cli.collect._collect",
    ):
        monkeypatch.setattr(name, lambda config: pytest.fail("the work was begun"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_is_refused_before_any_work(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert main([*COMMANDS[command], "out=file/x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: out: 'file/x")
    assert "cannot be written: another file than expected is there" in said
    assert [path.name for path in Path().iterdir()] == ["file"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_told_before_any_work(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=2**20))
    assert main([*COMMANDS[command], "out=x"]) == 2
    assert capsys.readouterr().err.startswith("error: out: 1.0 MB are free for 'x")
    assert not list(Path().iterdir())


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_a_full_disk_is_told_before_a_run_goes_on(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("dataset: .\n" if command == "finetune" else "seed: 0\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=2**20))
    assert main([command, "resume=run"]) == 2
    assert capsys.readouterr().err.startswith("error: resume: 1.0 MB are free for 'run/checkpoints'")


class Told(SimpleNamespace):
    """What a run came to."""

    def to_json(self) -> dict[str, Any]:
        return vars(self)


TRAINED = Told(
    task="reach",
    says_success=True,
    base_success=0.5,
    final_success=1.0,
    env_steps=9,
    control_steps={"sim": 9},
    train_minutes=1.0,
    episodes=2,
    finetune=None,
    run="runs/x",
    sources={},
)
ERRORS: dict[str, Any] = {
    "normalised": 0.5,
    "interval": None,
    "by_step": [0.4, 0.6],
    "moving": 0.5,
    "still": 0.5,
}
FINETUNED = Told(
    policy="small_vla",
    heldout_error=0.5,
    predictors={"policy": ERRORS, "ridge": {**ERRORS, "normalised": 0.4}},
    updates=3,
    minutes=1.0,
    chunks=9,
    heldout_episodes=(5, 6),
    verdict={"text": "Nothing beats ridge."},
    units={"policy": {}, "ridge": {}},
    groups={"policy": {}, "ridge": {}},
    run="runs/x",
)


def test_only_who_asks_for_json_gets_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "run", lambda config: TRAINED)
    monkeypatch.setattr(train, "_demonstrations", lambda settings: "none")
    assert main(["train", "recipe=smoke"]) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("reach: success 50.0% before, 100.0% after 9 simulated control steps")
    assert "{" not in plain
    assert main(["train", "recipe=smoke", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == plain.splitlines()
    assert json.loads(lines[-1])["final_success"] == 1.0


def test_a_run_that_fine_tunes_says_what_the_errors_are_and_ends_with_its_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Told(**{**vars(TRAINED), "finetune": vars(FINETUNED)})
    monkeypatch.setattr(phases, "run", lambda config: trained)
    assert main(["train", "recipe=finetune_then_rl", "finetune.updates=700"]) == 0
    said = capsys.readouterr()
    assert "fine-tuning of small_vla, 700 updates, " in said.err
    lines = said.out.splitlines()
    assert any(line.startswith("\u2502 ridge") for line in lines)
    assert lines[-2] == "Nothing beats ridge."
    assert lines[-1].startswith("reach: success 50.0% before, 100.0% after 9 simulated control steps")


def test_finetune_prints_no_json_unless_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetuning, "run", lambda config: FINETUNED)
    monkeypatch.setattr(split, "open_data", lambda config: None)  # there is none
    assert main(["finetune", "dataset=."]) == 0
    plain = capsys.readouterr().out
    assert "Nothing beats ridge." in plain
    assert "{" not in plain
    assert main(["finetune", "dataset=.", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["heldout_error"] == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["minutes=2"],
            "the policy trains for 2 minutes, the run takes 4 to 6 with ACT (base",
        ),
        (["minutes=2", "policy=act"], "the policy trains for 2 minutes, plus the time to read pictures"),
        (["minutes=2", "baselines=false"], "the policy trains for 2 minutes, plus the time to read pictures"),
        (["updates=3000"], ": 3,000 updates, batch"),
        ([], ": until it stops improving, batch"),
    ],
)
def test_finetune_says_at_the_start_how_long_it_takes(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetuning, "run", lambda config: FINETUNED)
    monkeypatch.setattr(split, "open_data", lambda config: None)  # there is none
    monkeypatch.setattr(finetune, "find_spec", lambda name: name == "lerobot")  # ACT is there
    finetune.result(["dataset=.", *words])
    assert said in capsys.readouterr().err


MANY = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
from robot_rl.cli.main import main
from robot_rl.sim.backends import mujoco_cpu
def endless(*words, **how):
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the thread that it runs in is deaf, as in C
    threading.Event().wait(20)
    os._exit(1)
mujoco_cpu.Batch = endless
sys.exit(main(["collect", "task=reach", "out=x", "num_envs=5000", "episodes=1"]))
"""


@pytest.mark.slow
def test_many_simulations_are_announced_and_ctrl_c_is_heard_while_they_are_made() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.stderr.splitlines() == [
        "expert of reach: 1 episodes",
        "making 5,000 simulations first (Ctrl-C ends it)",
        "interrupted.",
    ]
    assert done.returncode == 130
    assert not Path("x").exists()


def test_a_batch_that_cannot_be_made_says_why_from_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: object, **how: object) -> None:
        raise MemoryError("no more maps")

    monkeypatch.setattr(mujoco_cpu, "Batch", refused)
    with pytest.raises(MemoryError, match="no more maps"):
        make_vector(5000, task="reach")


def test_many_simulations_are_those_of_a_few() -> None:
    many, few = make_vector(MANY_SIMS, task="reach"), make_vector(2, task="reach")
    first = many.reset(seed=3)[0]["state"][:2]
    np.testing.assert_array_equal(first, few.reset(seed=3)[0]["state"])
    many.close()
    few.close()
