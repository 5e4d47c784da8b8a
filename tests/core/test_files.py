"""Files and folders that change places: nothing of either is lost."""

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robot_rl.core import files


def two(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("new", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    return tmp_path / "new", tmp_path / "folder"


@pytest.mark.parametrize("flag", [2, 1 << 30], ids=["in one step", "EINVAL, as elsewhere"])
def test_an_exchange_keeps_both_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int) -> None:
    monkeypatch.setattr(files, "_RENAME_EXCHANGE", flag)
    new, folder = two(tmp_path)
    files.exchange_folder(new, folder)
    assert (folder / "content").read_text() == "new"
    assert (new / "content").read_text() == "folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]


def test_an_exchange_with_nothing_leaves_the_folder(tmp_path: Path) -> None:
    _, folder = two(tmp_path)
    with pytest.raises(FileNotFoundError):
        files.exchange_folder(tmp_path / "none", folder)
    assert (folder / "content").read_text() == "folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]


def test_an_exchange_that_the_disk_refuses_is_no_reason_for_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two renames have an instant without the folder; they are for systems that cannot do better."""

    def full(*_: Any) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=full))
    new, folder = two(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        files.exchange_folder(new, folder)
    assert (folder / "content").read_text() == "folder"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]


def test_a_replaced_file_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, {"a": 1})
    assert path.read_text() == '{\n  "a": 1\n}\n'

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.replace_file(path, "another")
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]  # half a file takes room


def test_every_folder_that_is_made_is_in_one_that_is_synced(tmp_path: Path, synced: list[str]) -> None:
    files.make_folder(tmp_path / "runs/one/meta")
    assert sorted(synced) == [str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs/one")]
    synced.clear()
    files.make_folder(tmp_path / "runs/one/meta")  # whoever made it may have failed to sync it
    assert synced == [str(tmp_path / "runs/one")]


def test_folders_that_cannot_be_synced_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next attempt would find them there, and sync nothing."""

    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "sync_folder", refuse)
    with pytest.raises(OSError, match="Input/output"):
        files.make_folder(tmp_path / "runs/one")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.glob` would: a writer of datasets then took its own files for those of a torn commit."""
    for path in ("data/chunk-000/file-000.parquet", "data/chunk-001/file-000.part", "data/other"):
        files.make_folder((tmp_path / path).parent)
        (tmp_path / path).write_text("")

    def names(*pattern: str) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in files.listed(tmp_path, *pattern)]

    assert names("data/*/*") == ["data/chunk-000/file-000.parquet", "data/chunk-001/file-000.part"]
    assert names("data/chunk-*/*.parquet") == ["data/chunk-000/file-000.parquet"]
    assert names("none/*") == names("data/other/*") == []
    assert names() == sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    scandir = os.scandir

    def refuse(folder: Path) -> Any:
        if Path(folder).name == "chunk-001":
            raise OSError(errno.EIO, "Input/output error")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    assert len(list(tmp_path.glob("data/*/*"))) == 1  # pathlib's way
    for pattern in ("data/*/*", "**"):
        with pytest.raises(OSError, match="Input/output"):
            files.listed(tmp_path, pattern)


def test_a_new_folder_is_nobody_elses(tmp_path: Path) -> None:
    files.make_folder(tmp_path / "runs/one", is_new=True)
    with pytest.raises(FileExistsError):
        files.make_folder(tmp_path / "runs/one", is_new=True)
    assert (tmp_path / "runs/one").is_dir()


def test_a_swapped_folder_is_synced_before_it_has_its_name(tmp_path: Path, synced: list[str]) -> None:
    new, folder = two(tmp_path)
    files.swap_folder(new, folder)
    assert synced == [str(new), str(tmp_path)]
    assert (folder / "content").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
