"""`robot-rl replay` on datasets of others: what is copied, left out by request, upgraded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robot_rl.cli.main import main
from robot_rl.data.lerobot.reader import Dataset
from tests.data.lerobot.conftest import make_episode
from tests.data.lerobot.shapes import (
    RENAME,
    annotated,
    assert_same,
    contents,
    many_tasks,
    odd,
    ours,
    version_21,
)

Replay = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Runs an action with --json; returns exit code, the object (None after a mistake), and the text."""

    def run(*words: Any) -> tuple[int, Any, str]:
        code = main(["replay", *map(str, words), "--json"])
        captured = capsys.readouterr()
        return (
            code,
            json.loads(captured.out.splitlines()[-1]) if not code else None,
            captured.out + captured.err,
        )

    return run


def test_upgrade_of_numbers_that_do_not_begin_at_0(tmp_path: Path, replay: Replay) -> None:
    folder = version_21(tmp_path / "old", make_episode)
    code, found, text = replay("upgrade", folder, f"out={tmp_path / 'new'}")
    assert (code, found["written"][0]["episodes"], found["written"][0]["steps"]) == (0, 4, 25)
    assert_same(contents(tmp_path / "new"), contents(folder))
    assert replay("verify", tmp_path / "new")[0] == 0
    assert replay("upgrade", tmp_path / "new", f"out={tmp_path / 'newer'}")[0] == 2
    code, _, text = replay("compact", folder)
    assert code == 2
    assert f"robot-rl replay upgrade {folder} out=NEW" in text


def test_what_is_left_out_is_said(tmp_path: Path, replay: Replay) -> None:
    folder = annotated(tmp_path / "set", make_episode)
    code, _, text = replay("filter", folder, f"out={tmp_path / 'new'}", "images=png", "episodes=0")
    assert code == 2
    assert "column 'subtask_index', column 'note'" in text
    drop = text.strip().rpartition("drop=")[2]
    code, found, text = replay("filter", folder, f"out={tmp_path / 'new'}", "images=png", f"drop={drop}")
    assert (code, found["left_out"]) == (0, drop.split(","))
    assert f"left out: {', '.join(drop.split(','))}" in text
    assert len(Dataset(tmp_path / "new")) == 4


def test_odd_names_are_one_line_in_verify_and_renamed(tmp_path: Path, replay: Replay) -> None:
    folder = odd(tmp_path / "set", make_episode)
    assert main(["replay", "verify", str(folder), "--json"]) == 1
    code, _, text = replay("info", folder)
    assert code == 2
    command = (
        text.strip().splitlines()[-1].partition("robot-rl replay ")[2].replace("NEW", f"{tmp_path / 'new'}")
    )
    assert replay(*command.split())[0] == 0
    assert replay("verify", tmp_path / "new")[0] == 0
    code, found, _ = replay("info", folder, "rename=" + ",".join(f"{a}:{b}" for a, b in RENAME.items()))
    assert (code, found["episodes"], sorted(found["features"])) == (0, 4, ["cam_high.rgb", "state"])


@pytest.mark.parametrize("old", ["observation.images.front", "observation.state"])
def test_what_robot_rl_recorded_keeps_its_names(tmp_path: Path, replay: Replay, old: str) -> None:
    """Only the files of LeRobot got the new name: the new dataset could not be read."""
    folder = ours(tmp_path / "set", make_episode)
    code, _, text = replay("rename", folder, f"{old}={old}_2", f"out={tmp_path / 'new'}")
    assert code == 2
    assert f"rename: {old!r} cannot get another name: robot_rl recorded this dataset" in text
    code, _, text = replay("filter", folder, f"rename={old}:{old}_2", f"out={tmp_path / 'new'}")
    assert code == 2
    assert not (tmp_path / "new").exists()


def test_damaged_episodes_are_left_out_and_named(tmp_path: Path, replay: Replay) -> None:
    folder = version_21(tmp_path / "set", make_episode)
    (folder / "videos/chunk-000/observation.images.front/episode_000006.mp4").unlink()
    code, found, text = replay("merge", folder, f"out={tmp_path / 'new'}", "on_damage=skip")
    assert (code, found["written"][0]["episodes"]) == (0, 3)
    assert "left out: " in text
    assert "episode_000006.mp4: this video file is missing" in text


def test_statistics_and_tasks(tmp_path: Path, replay: Replay) -> None:
    folder = version_21(tmp_path / "set", make_episode)
    assert replay("stats", folder)[1]["episodes"] == 4
    code, found, text = replay("tasks", folder, "1=raise it")
    assert (code, found["tasks"][1]) == (0, {"number": 1, "task": "raise it", "episodes": 4, "steps": 9})
    assert "1  raise it  (4 episodes, 9 steps)" in text


def test_an_instruction_of_a_damaged_dataset_keeps_its_text(tmp_path: Path, replay: Replay) -> None:
    """The text was changed, then the rows could not be counted: an error, and no word that it was done."""
    folder = version_21(tmp_path / "set", make_episode)
    (folder / "data/chunk-000/episode_000007.parquet").unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, _, text = replay("tasks", folder, "1=raise it")
    assert code == 2
    assert "episode_000007.parquet" in text
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_text_longer_than_a_file_name(tmp_path: Path, replay: Replay) -> None:
    folder, text = many_tasks(tmp_path / "set", make_episode), "lift " * 80 + "it"
    code, found, _ = replay("tasks", folder, f"0={text}")
    assert (code, found["tasks"][0]["task"]) == (0, text)


@pytest.mark.parametrize(
    ("version", "tool"),
    [
        ("v2.0", "convert_dataset_v20_to_v21"),
        ("v1.6", "convert_dataset_v1_to_v2"),
        ("v4.0", "LeRobot of that version"),
    ],
)
def test_another_version_names_the_tool_that_reads_it(
    tmp_path: Path, replay: Replay, version: str, tool: str
) -> None:
    folder = version_21(tmp_path / "old", make_episode)
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "codebase_version": version}))
    code, _, text = replay("info", folder)
    assert code == 2
    assert tool in text
    assert len(text.strip().splitlines()) == 2  # the object of --json, and one line for people
