"""`robot-rl collect` that was cut short: what is kept, what goes on, and what does not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.cli.collect import _asked, _identity, config
from robot_rl.cli.main import main
from robot_rl.core.errors import ConfigError, DatasetError
from robot_rl.core.files import make_folder, read_json, write_json
from robot_rl.data import collecting as at
from robot_rl.data.demos import load_episodes
from robot_rl.data.keep import Facts
from robot_rl.train import demos

WORDS = ["collect", "task=reach", "episodes=6", "num_envs=2"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A collection that Ctrl-C ended in its second batch; the process stands beside it."""
    monkeypatch.chdir(tmp_path)
    batches, played = 0, demos.played

    def interrupted(*words: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == 2:
            raise KeyboardInterrupt
        return played(*words)

    with monkeypatch.context() as patched:
        patched.setattr("robot_rl.train.collect.played", interrupted)
        assert main([*WORDS, "out=demos"]) == 130
    said = capsys.readouterr().err
    assert (
        "interrupted. 2 of the 2 episodes that have ended are kept in .collecting-demos; the same command "
        "goes on with them, also with other episodes=, attempts= and shares of keep.\n"
    ) in said
    assert not Path("demos").exists()
    return tmp_path


def test_it_prints_no_json_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["collect", "task=reach", "episodes=1", "num_envs=1"]
    assert main([*words, "out=a"]) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("a: 1 episodes")
    assert "{" not in plain
    assert main([*words, "out=b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 1


def test_the_same_command_goes_on_and_says_so(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "out=demos"]) == 0
    said = capsys.readouterr().err
    assert "goes on: 2 of the 2 episodes that have ended are kept in .collecting-demos;" in said
    (broken / "unbroken").mkdir()
    os.chdir(broken / "unbroken")
    assert main([*WORDS, "out=demos"]) == 0
    assert files(broken / "unbroken") == {f"demos/{k}": v for k, v in files(broken / "demos").items()}


def test_other_settings_are_refused_but_more_episodes_are_not(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, got, begun in (
        (["seed=1"], "seed=1", "seed=0"),
        (["images=video", "noise_m=0"], "noise_m=0.0, images=video", "noise_m=0.01, images=png"),
        (["keep.max_steps=9"], "keep.max_steps=9", "keep.max_steps=null"),
    ):
        assert main([*WORDS, "out=demos", *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: collect: got {got}, but the episodes in .collecting-demos were begun")
        assert (
            f"with {begun}. Give these to go on with them, or give another out=. To begin again, remove"
            in said
        )
    assert main([*WORDS[:2], "num_envs=2", "episodes=4", "out=demos"]) == 0
    assert load_episodes("demos").num_episodes == 4


def test_a_kill_after_all_was_done_leaves_nothing_to_do(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dataset has its place, and what it was made of was not removed yet."""
    settings = read_json(broken / ".collecting-demos/settings.json", DatasetError, "")
    assert main([*WORDS, "out=demos", "--json"]) == 0
    told = capsys.readouterr().out
    make_folder(broken / ".collecting-demos")
    write_json(broken / ".collecting-demos/settings.json", settings, is_checked=True)
    assert main([*WORDS, "out=demos", "--json"]) == 0
    assert capsys.readouterr().out == told
    assert not (broken / ".collecting-demos").exists()
    assert main([*WORDS, "out=demos"]) == 2
    assert "out: 'demos' exists already. Choose another folder" in capsys.readouterr().err


def test_a_policy_that_is_another_by_now_does_not_go_on(tmp_path: Path) -> None:
    """Its folder is the same, the weights are not."""
    out, settings = tmp_path / "out", {"policy": "runs/a", "policy_crc32": 1}
    with at.UnfinishedCollection(out, settings) as into:
        into.add(Facts(np.array([False]), np.array([3]), np.array([0.1])), [])
    at.check_settings(out, {"policy": "runs/a"})  # before the policy is read
    with pytest.raises(ConfigError, match=r"got policy_crc32=2, but the episodes .* with policy_crc32=1\."):
        at.check_settings(out, settings | {"policy_crc32": 2})


def test_all_settings_are_compared_but_those_that_choose(tmp_path: Path) -> None:
    """A setting that is added later is compared, unless somebody says that it may be another."""
    options = config(["task=reach", f"out={tmp_path}/out"])
    free = {"episodes", "attempts", "keep.fastest", "keep.smoothest"}
    assert _asked(options).keys() - _identity(options).keys() == free


DIES = """
import os, signal, sys
from robot_rl.cli.main import main
from robot_rl.data.collecting import UnfinishedCollection
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
add, number = UnfinishedCollection.add, int(sys.argv[1])
def add_and_die(self, *words):
    add(self, *words)
    if len(self.batches) == 4:
        os.kill(os.getpid(), number)
UnfinishedCollection.add = add_and_die
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_real_kill_at_a_third_and_the_same_command(tmp_path: Path, number: signal.Signals) -> None:
    """42 episodes are begun in 14 batches; the signal comes after four of these."""
    words = ["collect", "task=reach", "episodes=30", "num_envs=3", "keep.smoothest=0.7", "out=demos"]
    words += ["cameras=[front]", "image_size=[32,32]"]
    for folder in ("broken", "unbroken"):
        (tmp_path / folder).mkdir()
    program = [sys.executable, "-c", DIES, str(int(number)), *words]
    done = subprocess.run(program, cwd=tmp_path / "broken", capture_output=True, text=True, check=False)
    assert done.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert ("12 of the 12 episodes that have ended are kept in" in done.stderr) == (number == signal.SIGINT)
    assert [path.name for path in (tmp_path / "broken").iterdir()] == [".collecting-demos"]
    for folder in ("broken", "unbroken"):
        again = [sys.executable, "-m", "robot_rl.cli.main", *words]
        done = subprocess.run(again, cwd=tmp_path / folder, capture_output=True, text=True, check=True)
        assert ("goes on: 12 of the 12 episodes" in done.stderr) == (folder == "broken")
    assert files(tmp_path / "broken") == files(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("out", "message"),
    [(".", "out: '.' exists already"), ("..", "exists already"), ("/", "out: got '/', allowed")],
)
def test_a_folder_without_a_name_of_its_own_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    out: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*WORDS, f"out={out}"]) == 2
    assert message in capsys.readouterr().err


def test_slow_cameras_are_recorded_as_a_policy_sees_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = ["cameras=front", "image_size=16,24", "camera_hz=5", "state=joint"]
    assert main(["collect", "task=reach", "episodes=1", "num_envs=1", "out=demos", *seen]) == 0
    pictures = load_episodes(Path("demos")).obs["front.rgb"]
    # At 20 Hz a picture of 5 Hz is shown four times; an episode of the expert has 11 steps.
    is_new = (pictures[1:] != pictures[:-1]).any(axis=(1, 2, 3))
    assert np.flatnonzero(is_new)[:2].tolist() == [3, 7]
