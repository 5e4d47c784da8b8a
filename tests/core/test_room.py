"""Whether something can be written is asked before the work, and asking leaves nothing behind."""

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from robot_rl.core.errors import StorageError
from robot_rl.core.room import check_room


class Usage(NamedTuple):
    free: int


def test_asking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_room(tmp_path / "a" / "b" / "demos", at="out")
    assert list(tmp_path.iterdir()) == []


def test_those_who_ask_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def another_asks(*given: Any, **how: Any) -> Any:
        monkeypatch.setattr(os, "stat", real)
        check_room(tmp_path / "runs" / "b", at="out")  # between any two looks of the first
        monkeypatch.setattr(os, "stat", another_asks)
        return real(*given, **how)

    monkeypatch.setattr(os, "stat", another_asks)
    check_room(tmp_path / "runs" / "a", at="out")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"^out: '.*/file/a/demos' cannot be written: another file than"):
        check_room(tmp_path / "file" / "a" / "demos", at="out")


def test_a_disk_that_refuses_the_probe_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**how: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with pytest.raises(StorageError, match="cannot be written: the disk is full"):
        check_room(tmp_path / "a" / "demos", at="out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_next_to_nothing_left_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=2**20))
    with pytest.raises(StorageError, match=r"^out: 1\.0 MB are free for .*, allowed: 16 or more\. Make room"):
        check_room(tmp_path / "demos", at="out")
