"""`robot-rl replay`, how a dataset is read: episodes=, cameras=, on_damage=, rename=, fps=; odd paths."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robot_rl.cli.main import main
from robot_rl.data.example import record_example
from robot_rl.data.lerobot.reader import Dataset
from tests.data.lerobot.conftest import make_episode
from tests.data.lerobot.shapes import (
    LENGTHS,
    RENAME,
    annotated,
    change,
    change_info,
    many_tasks,
    odd,
    ours,
    plain,
    version_21,
)

MAPPING = ",".join(f"{old}:{new}" for old, new in RENAME.items())
Replay = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Runs an action with --json; returns exit code, the object (None after a mistake), and the text."""

    def run(*words: Any) -> tuple[int, Any, str]:
        code = main(["replay", *map(str, words), "--json"])
        captured = capsys.readouterr()
        found = json.loads(captured.out.splitlines()[-1]) if code != 2 else None
        return code, found, captured.out + captured.err

    return run


def _damaged(folder: Path) -> Path:
    """Takes the front video of the second of four episodes away."""
    (folder / "videos/chunk-000/observation.images.front/episode_000006.mp4").unlink()
    return folder


# --- each word, at each action that reads -----------------------------------------------------------


@pytest.mark.parametrize("action", ["merge", "filter", "split"])
def test_only_these_cameras(tmp_path: Path, replay: Replay, action: str) -> None:
    folder, new = ours(tmp_path / "set", make_episode), tmp_path / "new"
    out = f"{new}=1.0" if action == "split" else f"out={new}"
    assert replay(action, folder, out, "cameras=wrist")[0] == 0
    written = Dataset(new)
    assert (written.cameras, written.lengths().tolist()) == (("wrist.rgb",), list(LENGTHS))
    assert [path.name for path in (new / "videos").iterdir()] == ["observation.images.wrist"]
    code, _, text = replay(action, folder, f"{out}2" if action != "split" else f"{new}2=1.0", "cameras=wirst")
    assert code == 2
    assert "cameras: there is no 'wirst'. Did you mean 'wrist'?" in text
    assert not Path(f"{new}2").exists()


@pytest.mark.parametrize("action", ["merge", "filter", "split", "upgrade"])
def test_names_that_are_not_lerobots(tmp_path: Path, replay: Replay, action: str) -> None:
    folder, new = odd(tmp_path / "set", make_episode), tmp_path / "new"
    out = f"{new}=1.0" if action == "split" else f"out={new}"
    assert replay(action, folder, out, f"rename={MAPPING}")[0] == 0
    written, want = Dataset(new), Dataset(folder, rename=RENAME)
    assert sorted(written.features) == ["cam_high.rgb", "state"]
    for episode in range(4):
        np.testing.assert_array_equal(written.read(episode).action, want.read(episode).action)


@pytest.mark.parametrize("action", ["merge", "filter", "split", "upgrade"])
def test_damaged_episodes_are_left_out(tmp_path: Path, replay: Replay, action: str) -> None:
    folder, new = _damaged(version_21(tmp_path / "set", make_episode)), tmp_path / "new"
    out = f"{new}=1.0" if action == "split" else f"out={new}"
    code, found, text = replay(action, folder, out, "on_damage=skip")
    assert (code, found["written"][0]["steps"]) == (0, 7 + 9 + 4)
    assert "left out: episode 6: " in text
    assert Dataset(new).lengths().tolist() == [7, 9, 4]


@pytest.mark.parametrize("action", ["merge", "filter", "split", "upgrade"])
def test_only_these_episodes(tmp_path: Path, replay: Replay, action: str) -> None:
    """The damaged one is not among them, so nobody needs to know of it."""
    folder, new = _damaged(version_21(tmp_path / "set", make_episode)), tmp_path / "new"
    out = f"{new}=1.0" if action == "split" else f"out={new}"
    assert replay(action, folder, out, "episodes=0,2-3")[0] == 0
    assert Dataset(new).lengths().tolist() == [7, 9, 4]
    code, _, text = replay(action, folder, f"{out}2", "episodes=0,4")
    assert code == 2
    assert "allowed 0 to 3" in text


def test_episodes_are_those_of_the_dataset_whatever_is_left_out(tmp_path: Path, replay: Replay) -> None:
    """The second of four is damaged; number 2 is the one with 9 steps all the same."""
    folder = _damaged(version_21(tmp_path / "set", make_episode))
    assert replay("filter", folder, f"out={tmp_path / 'new'}", "on_damage=skip", "episodes=1-2")[0] == 0
    assert Dataset(tmp_path / "new").lengths().tolist() == [9]


def test_the_episodes_of_every_merged_dataset(tmp_path: Path, replay: Replay) -> None:
    folder = ours(tmp_path / "set", make_episode)
    code, found, _ = replay("merge", folder, folder, f"out={tmp_path / 'new'}", "episodes=0,3")
    assert (code, found["written"][0]["episodes"]) == (0, 4)
    assert Dataset(tmp_path / "new").lengths().tolist() == [7, 4, 7, 4]


def test_parts_are_of_what_is_read(tmp_path: Path, replay: Replay) -> None:
    folder = ours(tmp_path / "set", make_episode)
    code, _, _ = replay("split", folder, f"{tmp_path / 'a'}=0-1", f"{tmp_path / 'b'}=2", "episodes=0,2-3")
    assert code == 0
    assert Dataset(tmp_path / "a").lengths().tolist() == [7, 9]
    assert Dataset(tmp_path / "b").lengths().tolist() == [4]


def test_another_rate(tmp_path: Path, replay: Replay) -> None:
    """At 10 Hz instead of 20 every second row is shown: 7, 5, 9 and 4 rows become 4, 3, 5 and 2."""
    folder, new = plain(tmp_path / "set", make_episode), tmp_path / "new"
    code, _, text = replay("merge", folder, f"out={new}", "fps=fast")
    assert code == 2
    assert "replay merge.fps: got 'fast', allowed: a rate above 0 in Hz" in text
    assert replay("merge", folder, f"out={new}", "fps=10", "episodes=0-3")[0] == 0
    written, whole = Dataset(new), Dataset(folder)
    assert (written.meta.control_hz, written.lengths().tolist()) == (10, [4, 3, 5, 2])
    np.testing.assert_array_equal(written.read(0).action, whole.read(0).action[::2])
    code, _, text = replay("merge", ours(tmp_path / "task", make_episode), f"out={new}2", "fps=10")
    assert code == 2
    assert "Actions of robot_rl's tasks say how far to move in one control step" in text


def test_verify_looks_at_what_is_asked_for(tmp_path: Path, replay: Replay) -> None:
    folder = _damaged(version_21(tmp_path / "set", make_episode))
    code, found, _ = replay("verify", folder)
    assert (code, len(found["problems"])) == (1, 1)
    code, _, text = replay("verify", folder, "episodes=0,2-3")
    assert code == 0
    assert "3 videos decoded, 0 problems" in text
    assert replay("verify", folder, "episodes=1")[0] == 1
    assert replay("verify", odd(tmp_path / "odd", make_episode))[0] == 1
    assert replay("verify", tmp_path / "odd", f"rename={MAPPING}")[0] == 0
    code, _, text = replay("verify", folder, "cameras=frnt")
    assert code == 2
    assert "cameras: there is no 'frnt'. Did you mean 'front'?" in text


def test_a_camera_that_is_not_asked_for_may_be_damaged(tmp_path: Path, replay: Replay) -> None:
    folder = ours(tmp_path / "set", make_episode)
    video = next((folder / "videos/observation.images.front").rglob("*.mp4"))
    video.write_bytes(video.read_bytes()[:-50])
    assert replay("verify", folder, "cameras=front")[0] == 1
    assert replay("verify", folder, "cameras=wrist")[0] == 0


def test_instructions_of_what_is_read(tmp_path: Path, replay: Replay) -> None:
    """Row r has instruction (r // 3) % 3: of the last 4 rows 3 have number 0 and one has number 1."""
    folder = many_tasks(tmp_path / "set", make_episode)
    code, found, _ = replay("tasks", folder, "episodes=3")
    assert code == 0
    assert [row["steps"] for row in found["tasks"]] == [3, 1, 0]
    before = (folder / "meta/tasks.parquet").read_bytes()
    code, _, text = replay("tasks", folder, "episodes=3", "0=raise it")
    assert code == 2
    assert "replay tasks: episodes= has no meaning here: a text is changed in all episodes" in text
    assert (folder / "meta/tasks.parquet").read_bytes() == before


def test_an_instruction_under_other_names(tmp_path: Path, replay: Replay) -> None:
    folder = odd(tmp_path / "set", make_episode)
    code, found, _ = replay("tasks", folder, "1=raise it", f"rename={MAPPING}")
    assert (code, found["tasks"][1]["task"]) == (0, "raise it")


@pytest.mark.parametrize("action", ["repair", "seal", "checksum", "compact", "stats", "rename"])
def test_what_takes_the_whole_says_why(tmp_path: Path, replay: Replay, action: str) -> None:
    folder = plain(tmp_path / "set", make_episode)
    names = (f"out={tmp_path / 'new'}", "observation.state=state") if action == "rename" else ()
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    code, _, text = replay(action, folder, *names, "cameras=front")
    assert code == 2
    assert f"replay {action}: cameras= has no meaning here: " in text
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*")) == before
    assert not (tmp_path / "new").exists()


def test_verify_does_not_skip_what_it_looks_for(tmp_path: Path, replay: Replay) -> None:
    code, _, text = replay("verify", plain(tmp_path / "set", make_episode), "on_damage=skip")
    assert code == 2
    assert "on_damage= has no meaning here: verify finds damage, and leaves none out" in text
    code, _, text = replay("verify", tmp_path / "set", "episode=1")
    assert "replay verify: no setting 'episode'. Did you mean 'episodes'?" in text


def test_a_column_may_be_called_like_a_word(tmp_path: Path, replay: Replay) -> None:
    folder, new = annotated(tmp_path / "set", make_episode), tmp_path / "new"
    change_info(folder, lambda f: {{"quality": "episodes"}.get(n, n): entry for n, entry in f.items()})
    change(
        next((folder / "data").rglob("*.parquet")),
        lambda t: t.rename_columns([{"quality": "episodes"}.get(n, n) for n in t.column_names]),
    )
    assert replay("rename", folder, f"out={new}", "episodes=grade")[0] == 0
    assert "grade" in Dataset(new).info["features"]


def test_help_says_who_reads_how(capsys: pytest.CaptureFixture[str]) -> None:
    for action, is_reader in (("merge", True), ("verify", True), ("upgrade", True), ("compact", False)):
        with pytest.raises(SystemExit):
            main(["replay", action, "--help"])
        text = capsys.readouterr().out
        assert ("cameras=front,wrist" in text) == is_reader
        assert (
            "No episodes=, cameras=, on_damage= and rename=: compact joins all files" in text
        ) != is_reader


# --- paths as people type them ----------------------------------------------------------------------

ODD = "J\xf6rgs Aufnahmen (neu), a=b"


def test_paths_with_umlauts_brackets_and_signs(tmp_path: Path, replay: Replay) -> None:
    folder = plain(tmp_path / ODD, make_episode)
    code, found, _ = replay("info", folder)
    assert (code, found["path"]) == (0, str(folder))
    new = tmp_path / "neu, (2)=\xfc"
    code, found, _ = replay("filter", folder, f"out={new}")
    assert (code, found["written"][0]["path"]) == (0, str(new))
    assert replay("verify", new)[0] == 0


def test_a_part_may_have_a_sign_in_its_name(
    tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain(tmp_path / "set", make_episode)
    code, found, _ = replay("split", "set", "a=b=0.5", "c (d), e=0.5")
    assert code == 0
    assert [row["path"] for row in found["written"]] == ["a=b", "c (d), e"]
    assert sorted(os.listdir()) == ["a=b", "c (d), e", "set"]


def test_a_tilde_is_the_home_folder(tmp_path: Path, replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every shell says so: `out=~/x` made a folder named `~`."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    plain(tmp_path / "set", make_episode)
    assert replay("merge", "~/set", "out=~/new")[0] == 0
    assert replay("split", "~/new", "~/a=0.5", "~/b=c=0.5")[0] == 0
    assert (len(Dataset(tmp_path / "a")), len(Dataset(tmp_path / "b=c"))) == (2, 2)
    assert replay("rename", "~/a", "out=~/even", "observation.state=observation.joints")[0] == 0
    assert os.listdir() == []


# --- what must not be taken for sound, or for something else ----------------------------------------


def test_a_store_that_lost_what_describes_its_dataset_is_not_sound(tmp_path: Path, replay: Replay) -> None:
    folder = record_example(tmp_path / "store")
    assert replay("seal", folder, "images=png")[0] == 0
    (folder / "meta/info.json").unlink()
    code, found, text = replay("verify", folder)
    assert (code, found["sound"]) == (1, False)
    assert "meta/info.json: it is missing, and data/ holds episodes" in text
    assert replay("info", folder)[0] == 2


def test_a_folder_named_journal_of_others_is_no_store(tmp_path: Path, replay: Replay) -> None:
    folder = plain(tmp_path / "set", make_episode)
    (folder / "journal").mkdir()
    (folder / "journal/monday.txt").write_text("a long day")
    assert replay("verify", folder)[0] == 0


def test_info_of_no_episode_is_not_that_of_all(tmp_path: Path, replay: Replay) -> None:
    folder = version_21(tmp_path / "set", make_episode)
    for video in folder.glob("videos/**/*.mp4"):
        video.unlink()
    code, found, text = replay("info", folder, "on_damage=skip")
    assert (code, found["episodes"]) == (0, 0)
    assert text.count("left out:") == 1


def test_what_concerns_all_episodes_is_not_skipped(tmp_path: Path, replay: Replay) -> None:
    folder = ours(tmp_path / "set", make_episode)
    content = bytearray((folder / "meta/stats.json").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "meta/stats.json").write_bytes(content)
    code, _, text = replay("info", folder, "on_damage=skip")
    assert code == 2
    assert "on_damage=skip leaves out episodes, and this concerns all" in text


@pytest.mark.parametrize(
    "typed", [["split", "A=0", "A=1"], ["filter", "out=x", "min_steps=9", "min_steps=1"]]
)
def test_a_word_that_is_given_twice_is_refused(tmp_path: Path, replay: Replay, typed: list[str]) -> None:
    folder = plain(tmp_path / "set", make_episode)
    action, *words = typed
    code, _, text = replay(action, folder, *words)
    assert code == 2
    assert "= twice, allowed: once" in text
