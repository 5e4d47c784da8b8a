"""What stays of a run: no folder of one that was refused, and the commit that made its numbers."""

import shutil
from pathlib import Path

import pytest

from robot_rl.core.errors import LeaseError
from robot_rl.train import record
from robot_rl.train.record import commit, identity_of, new_folder, removed_if_refused, versions
from robot_rl.train.session import saying_how_to_resume


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    folder = new_folder(str(tmp_path / "runs"), "smoke-seed0")
    (folder / "config.yaml").touch()
    (folder / "metrics.jsonl").touch()  # opened before the demonstrations turn out to be of another task
    (folder / "checkpoints").mkdir()
    with pytest.raises(LeaseError), removed_if_refused(folder):
        raise LeaseError("cpu is taken")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_that_has_done_something_keeps_its_folder(tmp_path: Path) -> None:
    folder = new_folder(str(tmp_path), "smoke-seed0")
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(LeaseError), removed_if_refused(folder):
        raise LeaseError("the lease was lost")
    assert folder.is_dir()


def test_ctrl_c_before_anything_was_done_offers_nothing_to_resume(tmp_path: Path) -> None:
    folder = new_folder(str(tmp_path), "smoke-seed0")
    (folder / "config.yaml").touch()
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        removed_if_refused(folder),
        saying_how_to_resume(folder, "train"),
    ):
        raise KeyboardInterrupt
    assert not folder.exists()
    assert caught.value.__notes__ == []


def test_ctrl_c_notes_the_folder_of_this_run() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, saying_how_to_resume(Path("runs/a b"), "finetune"):
        raise KeyboardInterrupt
    assert caught.value.__notes__ == ["Continue with: robot-rl finetune resume='runs/a b'"]


def test_the_commit_is_kept_beside_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "0123abcd", "status": " M robot_rl/x.py"}
    monkeypatch.setattr(record, "_git", lambda root, *words: answers[words[0]])
    assert commit() == "0123abcd+changes"
    assert versions([])["robot_rl_commit"] == "0123abcd+changes"
    answers["status"] = ""
    assert commit() == "0123abcd"
    monkeypatch.setattr(record, "_git", lambda root, *words: None)  # no git here
    assert commit() is None
    assert "robot_rl_commit" not in versions([])


def test_a_run_keeps_its_identity_and_a_copy_has_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    own = identity_of(run)
    assert identity_of(run) == own, "in each of its lives"
    copied = Path(shutil.copytree(run, tmp_path / "copy"))
    assert identity_of(copied) != own
    assert identity_of(copied) == identity_of(copied)
    moved = run.rename(tmp_path / "moved")
    assert identity_of(moved) == own
    (moved / "identity").write_text("")  # a power cut took its content
    assert len(identity_of(moved)) == 8
