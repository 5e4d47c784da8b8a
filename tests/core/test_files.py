"""Files and folders that change places: nothing of either is lost."""

import ctypes
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robot_rl.core import files
from robot_rl.core.errors import StorageError


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


CONTENT: dict[str, Any] = {
    "bins": 256,
    "rate": 0.1,
    "names": ["a\u00e9", ""],
    "none": None,
    "deep": {"x": {}},
}


def flips(content: bytes) -> list[bytes]:
    """Returns a file with every single bit turned over."""
    number = int.from_bytes(content)
    return [(number ^ 1 << bit).to_bytes(len(content)) for bit in range(8 * len(content))]


def test_a_checked_file_is_what_was_written_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, CONTENT, is_checked=True)
    assert files.read_json(path, StorageError, "") == CONTENT
    refused = 0
    damaged = [*flips(path.read_bytes()), *(path.read_bytes()[:end] for end in range(path.stat().st_size))]
    for content in damaged:
        path.write_bytes(content)
        try:
            found = files.read_json(path, StorageError, "Copy it again.")
        except StorageError:
            refused += 1
        else:
            assert found == CONTENT, content
    assert refused > 0.95 * len(damaged)


def test_the_checksum_of_json_is_that_of_its_content(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, {"a": 1}, is_checked=True)
    # zlib.crc32(b'{"a":1}')
    assert path.read_text() == '{\n  "a": 1,\n  "checksum": 1444654255\n}\n'
    path.write_text('{"a":1,   "checksum":1444654255}')  # laid out by another program
    assert files.read_json(path, StorageError, "") == {"a": 1}
    for older in ("{}", '{"a": 2}'):
        path.write_text(older)
        assert files.read_json(path, StorageError, "") == json.loads(older)
    for damage in ('{"a": 2, "checksum": 1444654255}', '{"a": 1, "chEcksum": 1444654255}'):
        path.write_text(damage)
        with pytest.raises(StorageError, match=r"delete that entry if you changed .* Copy it"):
            files.read_json(path, StorageError, "Copy it again.")
    path.unlink()
    with pytest.raises(StorageError, match=r"file.json: there is no such file. Copy it again."):
        files.read_json(path, StorageError, "Copy it again.")


def test_a_checked_text_is_what_was_written_or_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "config.yaml", "seed: 3\nout: runs\n"
    whole = files.with_checksum_line(text)
    assert whole.endswith(f"\n{text}")
    for content in (*flips(whole.encode()), *(whole[:end].encode() for end in range(len(whole)))):
        path.write_bytes(content)
        try:
            read = files.read_checked_text(path, StorageError, "")
        except StorageError:
            continue
        lines = [line for line in read.splitlines(keepends=True) if not line.startswith("#")]
        # A flip in the comment, or a cut before the settings: what is left is no other setting.
        assert "".join(lines).endswith(text) or "seed" not in read, content
    path.write_text(text.replace("3", "4"))  # by a person, who deleted the first line
    assert files.read_checked_text(path, StorageError, "") == "seed: 4\nout: runs\n"
